"""Hints of a real engine's requests, and of an agent between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvstore.testing.checkpoints import write_checkpoint
from kvstore.testing.engine import EngineProcess, EngineSpec, Request, seeded_prompt
from kvstore.testing.servers.ports import free_address
from tests.connector.support.runs import forget_own_cache
from tests.connector.support.service import DirectoryService
from tests.connector.support.stores import PATIENCE_S, PATIENT

pytestmark = pytest.mark.engine

HISTORY_TOKENS = 1300


def call(url: str, route: str, **body: object) -> Any:
    answer = httpx.post(f"{url}/v1/{route}", json=body, timeout=PATIENCE_S)
    assert answer.status_code in (200, 202), answer.text
    return answer.json()


def wait_for(url: str, tokens: list[int], is_there: Callable[[int, int], bool]) -> int:
    """Wait until what memory and all tiers restore of a prompt is as wanted; returns the first."""
    ends_s = time.monotonic() + PATIENCE_S
    while True:
        match = call(url, "query", model="chat", token_ids=tokens)["default"]["node-7"]
        if is_there(match["CPU"], match["longest_matched"]):
            return int(match["CPU"])
        assert time.monotonic() < ends_s, match
        time.sleep(0.05)


@pytest.mark.parametrize("model", ["llama", pytest.param("qwen3next", marks=pytest.mark.full)])
def test_an_agents_pause(model: str, engine: Callable[..., EngineProcess], work: Path, tmp_path: Path) -> None:
    """The last turn names its session. Its history leaves memory and is prefetched; the next turn resumes as far as
    from memory, with the same tokens; and each step can be seen.
    """
    address = free_address()
    url = f"http://{address}"
    history = seeded_prompt(900, HISTORY_TOKENS)
    turn = Request((*history, *seeded_prompt(901, 40)), kv_transfer_params={"kvstore": {"save": False}})
    with DirectoryService(tmp_path, {"admin_listen": address, "stall_timeout_ms": "10000"}) as service:
        running = engine(
            EngineSpec(
                checkpoint=write_checkpoint(model, work / "checkpoints"),
                connector={"url": service.url, "instance_id": "node-7", **PATIENT},
                multiprocess=True,
                arguments={"served_model_name": ["chat"]},
            )
        )
        wishes = {"session": "agent", "retain_s": 60, "colour": 1}
        running.generate([Request(history, kv_transfer_params={"kvstore": wishes})])
        service.settle()
        reach = wait_for(url, list(history), lambda memory, all_tiers: memory == all_tiers > 0)
        forget_own_cache(running)
        (from_memory,) = running.generate([turn])
        assert from_memory.num_cached_tokens >= reach
        call(url, "hints", session="agent", demote=True)
        wait_for(url, list(history), lambda memory, all_tiers: memory == 0 and all_tiers >= reach)
        (taken,) = call(url, "prefetch", session="agent")["prompts"]
        assert taken["tokens"] >= reach
        wait_for(url, list(history), lambda memory, _: memory >= reach)
        forget_own_cache(running)
        (prefetched,) = running.generate([turn])
        assert prefetched.num_cached_tokens == from_memory.num_cached_tokens
        assert prefetched.tokens == from_memory.tokens and prefetched.difference(from_memory) == 0.0
        counters = service.status()["counters"]
        fetched = counters['prefetched_bytes{outcome="fetched"}']
        assert counters['prefetched_bytes{outcome="used"}'] == fetched > 0
        told = httpx.get(f"{url}/v1/requests/explain", params={"request": taken["request"]}, timeout=PATIENCE_S).json()
        hints = told["hints"]
        assert (hints["retain_s"], hints["session"]) == (60.0, "agent")
        assert hints["prefetch"].startswith("fetched: ") and "left memory" in hints["demote"]
        (gone,) = call(url, "hints", request=taken["request"], release=True)["prompts"]
        assert "released" in gone["hints"]["eviction"]
