"""Blending in live engines of two tensor-parallel ranks: as one rank does, with its documents; and one that fails."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.checkpoints import write_checkpoint
from kvstore.testing.engine import Answer, EngineProcess, EngineSpec
from tests.connector.support.blending import blended, computed, difference, explained, spec_of
from tests.connector.support.runs import start_together
from tests.connector.support.service import DirectoryService
from tests.connector.support.stores import PATIENT

pytestmark = pytest.mark.engine

NOISE = 1e-3
"""Largest difference of a log probability between ranks that sum in another order (seen: some 1e-5)."""
ORDERS = [(0, 1, 2), (2, 0, 1)]


def on_ranks(spec: EngineSpec, size: int) -> EngineSpec:
    """The engine with so many ranks, each on a core of its own, also where there is one."""
    return replace(
        spec,
        multiprocess=True,
        arguments={
            "tensor_parallel_size": size,
            "worker_extension_cls": "tests.connector.support.broken_rank.WorkerExtension",
        },
        environment={"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(size)))},
    )


@contextmanager
def running(spec: EngineSpec, work: Path) -> Iterator[EngineProcess]:
    """An engine that ends with the block."""
    with start_together({"blending-ranks": spec}, work=work) as (engine,):
        yield engine
        engine.stop()


def blended_again(engine: EngineProcess, order: Sequence[int]) -> list[Answer]:
    """With the same salt, which stored documents belong to; vLLM's own cache has nothing of it."""
    assert engine.evaluate("llm.reset_prefix_cache()")
    return engine.generate([blended(order)])


def break_once(engine: EngineProcess, module: str, name: str, method: str, error: str) -> None:
    """Let a method fail on the second rank."""
    engine.evaluate(f"llm.collective_rpc('check_health', args=(1, {module!r}, {name!r}, {method!r}, {error!r}))")


def told(service: DirectoryService, *, audited: bool = False) -> dict[str, Any]:
    """What is explained of the request that was blended last, once its audit has ended."""
    ends_s = time.monotonic() + 60
    while True:
        detail = dict(explained(service, "blended")[0]["detail"])
        if not audited or "audit_kl" in detail:
            return detail
        assert time.monotonic() < ends_s, detail
        time.sleep(0.1)


def audited_answers(engine: EngineProcess, service: DirectoryService) -> tuple[list[Answer], list[dict[str, Any]]]:
    """Answers, and what is explained of them: first of documents that two ranks have stored, then with others too."""
    answers, details = [], []
    for order in [(1, 2, 0), (3, 4, 1)]:
        answers += engine.generate([blended(order)])
        details.append(told(service, audited=True))
    return answers, details


def numbers(text: str) -> list[float]:
    return [float(number) for number in text.split()]


@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("qwen2", "qwen3", "mistral"))]
)
def test_two_ranks_blend(service: DirectoryService, work: Path, kind: str) -> None:
    """At ratio 1 as a full computation; documents of each size are reused by the other, with the same tokens computed
    again; and a rank that cannot read or compute leaves right answers.
    """
    checkpoint = write_checkpoint(kind, work / "checkpoints")
    with running(on_ranks(spec_of(checkpoint, service, blend_recompute_ratio=1.0, **PATIENT), 2), work) as engine:
        full = [engine.generate([computed(order)])[0] for order in ORDERS]
        made = [engine.generate([blended(order)])[0] for order in ORDERS]
        assert [answer.num_cached_tokens for answer in made] == [512, 512]
        assert told(service)["stored_documents"] == "3 of 3"
    by_blending = max(difference(one, other) for one, other in zip(full, made, strict=True))
    print(f"{kind}: {by_blending:.2g}")
    assert by_blending < NOISE
    assert [answer.tokens for answer in made] == [answer.tokens for answer in full]
    service.settle()

    partial = spec_of(checkpoint, service, blend_audit_rate=1.0, blend_kl_max=100.0, **PATIENT)
    with running(on_ranks(partial, 1), work) as engine:
        alone, of_one = audited_answers(engine, service)
        assert [detail["stored_documents"] for detail in of_one] == ["3 of 3", "1 of 3"]
    service.settle()

    with running(on_ranks(partial, 2), work) as engine:
        shared, of_two = audited_answers(engine, service)
        assert [answer.num_cached_tokens for answer in shared] == [512, 512]
        assert [detail["stored_documents"] for detail in of_two] == ["3 of 3", "3 of 3"]  # also what one rank stored
        for one, two in zip(of_one, of_two, strict=True):
            assert two["blended"] == one["blended"]
            assert two["audit_kl"] == pytest.approx(one["audit_kl"], abs=NOISE)
            assert numbers(two["audit_keys"]) == pytest.approx(numbers(one["audit_keys"]), rel=0.1, abs=1e-4)
        assert max(difference(one, other) for one, other in zip(alone, shared, strict=True)) < NOISE

        break_once(engine, "connector.blend.documents", "DocumentStore", "read", "Unavailable")
        (answer,) = blended_again(engine, (1, 2, 0))
        assert told(service, audited=True)["stored_documents"] == "0 of 3"  # its audit would meet the next error
        assert difference(answer, shared[0]) < NOISE

        break_once(engine, "connector.vllm.blend_layers", "VllmLayers", "project", "RuntimeError")
        (answer,) = blended_again(engine, (0, 1, 2))
        assert answer.num_cached_tokens == 0
        (failed,) = explained(service, "not_blended")
        assert "another rank" in failed["detail"]["because"] and "broken by a test" in engine.log_text()
        assert difference(answer, full[0]) < NOISE

        (answer,) = blended_again(engine, (1, 2, 0))
        assert (answer.num_cached_tokens, told(service)["stored_documents"]) == (512, "3 of 3")
        assert difference(answer, shared[0]) < NOISE
