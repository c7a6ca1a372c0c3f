"""Under vLLM's `MultiConnector`, beside a cache in host memory: hits of both are exact, neither disturbs the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.engine import Answer, EngineProcess, EngineSpec
from tests.connector.conftest import RESTORED
from tests.connector.support.runs import ask_each
from tests.connector.support.service import DirectoryService

pytestmark = pytest.mark.engine

OURS, SHELF = "KVStoreConnector", "ShelfConnector"
CONNECTORS = "llm.llm_engine.engine_core.engine_core.scheduler.connector.sub_connectors"
WORKERS = "__import__('vllm.distributed.kv_transfer').distributed.kv_transfer.get_kv_transfer_group().sub_connectors"


def both(url: str, order: tuple[str, str]) -> dict[str, Any]:
    """The `kv_transfer_config` of a user who has both, in this order."""
    children = {
        OURS: {
            "kv_connector": OURS,
            "kv_connector_extra_config": {"url": url, "lookup_timeout_ms": 20_000},  # a busy machine is no miss
        },
        SHELF: {"kv_connector": SHELF, "kv_connector_module_path": "tests.connector.support.shelf"},
    }
    common = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    connectors = [{**common, **children[name]} for name in order]
    return {"kv_connector": "MultiConnector", **common, "kv_connector_extra_config": {"connectors": connectors}}


def shelf_hits(engine: EngineProcess) -> int:
    return int(engine.evaluate(f"sum(c.num_hits for c in {CONNECTORS} if type(c).__name__ == '{SHELF}')"))


def forget_shelf(engine: EngineProcess) -> None:
    for connectors in (CONNECTORS, WORKERS):
        engine.evaluate(f"[c.forget() for c in {connectors} if type(c).__name__ == '{SHELF}']")


def equals(answers: list[Answer], references: list[Answer]) -> bool:
    return [mine.difference(other) for mine, other in zip(answers, references, strict=True)] == [0.0] * len(references)


@pytest.mark.parametrize(
    "order",
    [
        pytest.param((SHELF, OURS), id="ours-second"),
        pytest.param((OURS, SHELF), id="ours-first", marks=pytest.mark.full),
    ],
)
def test_beside_another_cache(
    order: tuple[str, str],
    llama: Path,
    prompts: list[tuple[int, ...]],
    references: Callable[[str, bool], list[Answer]],
    engine: Callable[[EngineSpec], EngineProcess],
    tmp_path: Path,
) -> None:
    """Our pages resume a fresh engine; then both caches have them and the first one is asked; then only ours again.

    Tokens and top-20 logprobs equal a local hit's exactly each time, and vLLM's metrics show our part.
    """
    reference = references("v1", False)
    with DirectoryService(tmp_path) as service:
        saving = engine(EngineSpec(checkpoint=llama, connector={"url": service.url}))
        ask_each(saving, prompts)
        saving.stop()
        fresh = engine(EngineSpec(checkpoint=llama, kv_transfer=both(service.url, order)))

        restored = ask_each(fresh, prompts)
        assert [answer.num_cached_tokens for answer in restored] == list(RESTORED)
        assert equals(restored, reference)
        assert shelf_hits(fresh) == 0
        assert fresh.metrics()["vllm:kvstore_hits"] == len(prompts)

        assert fresh.reset_prefix_cache()
        again = ask_each(fresh, prompts)
        assert [answer.num_cached_tokens for answer in again] == list(RESTORED)
        assert equals(again, reference)
        ours_first = order[0] == OURS
        assert shelf_hits(fresh) == (0 if ours_first else len(prompts))
        assert fresh.metrics()["vllm:kvstore_hits"] == (2 if ours_first else 1) * len(prompts)

        forget_shelf(fresh)
        assert fresh.reset_prefix_cache()
        last = ask_each(fresh, prompts)
        assert [answer.num_cached_tokens for answer in last] == list(RESTORED)
        assert equals(last, reference)
        metrics = fresh.metrics()
        assert metrics["vllm:kvstore_hits"] == (3 if ours_first else 2) * len(prompts)
        assert metrics["vllm:kvstore_external_tokens"] == (3 if ours_first else 2) * sum(RESTORED)
        assert metrics["vllm:kvstore_guarded_errors"] == metrics["vllm:kvstore_failed_loads"] == 0.0
        fresh.stop()
        assert service.status()["leases"]["active"] == 0
