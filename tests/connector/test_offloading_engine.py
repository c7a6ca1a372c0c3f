"""Real vLLM engines with vLLM's own `OffloadingConnector` and our secondary tier, on a CPU.

vLLM's workers copy blocks on GPUs only, so here a worker of the test copies them (`support/offloading_on_cpu.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import BlockingStore
from kvstore.runtime.deadline import Deadline
from kvstore.testing.engine import Answer, EngineFailed, EngineProcess, EngineSpec, Request, seeded_prompt
from tests.connector.support.releases import IS_SUITES_OWN
from tests.connector.support.runs import ask_each
from tests.connector.support.service import DirectoryService

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not IS_SUITES_OWN, reason="the tier was tested with vLLM 0.32 alone"),
]

SCHEDULER = "llm.llm_engine.engine_core.engine_core.scheduler.connector.connector_scheduler"
TIER = f"{SCHEDULER}.manager.secondary_tiers[0]"


def offloads(url: str, **spec: str) -> dict[str, Any]:
    """The `kv_transfer_config` of docs/engines.md, with a worker for CPUs."""
    names = spec or {"spec_name": "TieringOnCPU", "spec_module_path": "tests.connector.support.offloading_on_cpu"}
    tier = {"type": "KVStoreTier", "module_path": "connector.offloading", "url": url, "lookup_timeout_ms": 20_000}
    extra = {**names, "cpu_bytes_to_use": 256 << 20, "secondary_tiers": [tier]}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def ready(engine: EngineProcess) -> None:
    assert engine.evaluate(f"{TIER}.identified.wait(120) and {TIER}.refusal") == ""


def stored(engine: EngineProcess) -> None:
    """Step the engine with small requests until none of its chunks waits to be stored."""
    ends_s = time.monotonic() + 120
    number = 0
    while engine.evaluate(f"{SCHEDULER}.manager.has_pending_work()") or number < 3:
        assert time.monotonic() < ends_s
        engine.generate([Request(seeded_prompt(9000 + number, 20))])
        number += 1


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_fresh_engine_restores_what_another_saved(
    kind: str, work: Path, prompts: list[tuple[int, ...]], engine: Callable[[EngineSpec], EngineProcess], tmp_path: Path
) -> None:
    """Tokens and logprobs are those of an engine that resumes from its own cache, bit for bit; with a window too.
    Prompts end inside a block: of one that ends with a block vLLM's offloading restores the last block too."""
    from kvstore.testing.checkpoints import write_checkpoint

    checkpoint, prompts = write_checkpoint(kind, work / "checkpoints"), prompts[:2]
    with DirectoryService(tmp_path) as service:
        plain = engine(EngineSpec(checkpoint=checkpoint))
        ask_each(plain, prompts)
        reference = ask_each(plain, prompts)
        plain.stop()
        saving = engine(EngineSpec(checkpoint=checkpoint, kv_transfer=offloads(service.url)))
        ready(saving)
        assert [answer.num_cached_tokens for answer in ask_each(saving, prompts)] == [0, 0]
        stored(saving)
        saving.stop()
        service.settle()
        fresh = engine(EngineSpec(checkpoint=checkpoint, kv_transfer=offloads(service.url)))
        ready(fresh)
        restored = ask_each(fresh, prompts)
        expected = [answer.num_cached_tokens for answer in reference]
        assert [answer.num_cached_tokens for answer in restored] == expected
        assert differences(restored, reference) == [0.0, 0.0]
        assert fresh.evaluate(f"{TIER}.guarded_errors") == 0
        with BlockingStore(service.url) as store:
            listed = store.explain("", deadline=Deadline.after(10))["requests"]
        assert sum(one["result"] == "hit" for one in listed) >= 2, listed  # type: ignore[attr-defined]


def test_vllm_offloads_on_gpus_only(llama: Path, engine: Callable[[EngineSpec], EngineProcess], tmp_path: Path) -> None:
    """Why the engines above have a worker of the test: with vLLM's own spec an engine on a CPU does not start."""
    config = offloads(f"unix:{tmp_path}/none", spec_name="TieringOffloadingSpec")
    with pytest.raises(EngineFailed, match="only supported on CUDA-alike"):
        engine(EngineSpec(checkpoint=llama, kv_transfer=config))


def differences(answers: list[Answer], references: list[Answer]) -> list[float]:
    return [mine.difference(other) for mine, other in zip(answers, references, strict=True)]
