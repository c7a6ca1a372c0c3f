"""`/v1/query` of a service beside a real engine: its answer is the hit that the engine then gets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from kvstore.testing.checkpoints import write_checkpoint
from kvstore.testing.engine import EngineProcess, EngineSpec, Request, seeded_prompt
from kvstore.testing.servers.ports import free_address
from kvstore.testing.waiting import eventually
from tests.connector.support.runs import forget_own_cache
from tests.connector.support.service import DirectoryService
from tests.connector.support.stores import PATIENCE_S, PATIENT

pytestmark = pytest.mark.engine

LENGTHS = (2500, 1300, 2560)
QUESTIONS = 20
OURS = 3
"""Connections of the test's own client."""


def ask(url: str, tokens: list[int]) -> dict[str, Any]:
    """The answer for the engine, once it is connected."""

    def answered() -> Any:
        answer = httpx.post(f"{url}/v1/query", json={"model": "chat", "token_ids": tokens}, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return answer.json()

    found = eventually(answered, PATIENCE_S, why="the engine is not connected")
    assert list(found) == ["default"] and list(found["default"]) == ["node-7"]
    match: dict[str, Any] = found["default"]["node-7"]
    return match


def connections(service: DirectoryService) -> int:
    """Of the engine."""
    return int(service.status()["service"]["sessions_of_engines"]) - OURS


@pytest.mark.parametrize("model", ["llama", pytest.param("qwen3next", marks=pytest.mark.full)])
def test_an_engine_gets_what_was_said(
    model: str, engine: Callable[..., EngineProcess], work: Path, tmp_path: Path
) -> None:
    """Prompts that begin as stored ones do: the tokens are those that the engine then resumes, from memory, and after a
    restart of the service from its directory, where the engine has described itself again.
    """
    address = free_address()
    url = f"http://{address}"
    prompts = [seeded_prompt(700 + number, length) for number, length in enumerate(LENGTHS)]
    numbers = np.random.default_rng(7)
    with DirectoryService(tmp_path, {"admin_listen": address, "stall_timeout_ms": "10000"}) as service:
        own = {"url": service.url, "instance_id": "node-7", "instance_address": "10.0.0.7:8000", **PATIENT}
        running = engine(
            EngineSpec(
                checkpoint=write_checkpoint(model, work / "checkpoints"),
                connector=own,
                multiprocess=True,  # an EngineCore of its own also steps between prompts, so that saves end
                arguments={"served_model_name": ["chat", "alias"]},
            )
        )
        for prompt in prompts:
            match = ask(url, list(prompt))
            assert (match["longest_matched"], match["address"], match["DP"]) == (0, "10.0.0.7:8000", {"0": 0})
            running.generate([Request(prompt)])
        service.settle()
        num_connections = connections(service)
        media = set()
        for number in range(QUESTIONS):
            if number == QUESTIONS // 2:
                service.stop()
                service.start()
                eventually(lambda: connections(service) >= num_connections)
            prompt = prompts[numbers.integers(len(prompts))]
            kept = int(numbers.integers(len(prompt))) if number % 2 else len(prompt)
            asked = [*prompt[:kept], *seeded_prompt(800 + number, int(numbers.integers(1, 300)))]
            forget_own_cache(running)
            match = ask(url, asked)
            (answer,) = running.generate([Request(tuple(asked))])
            assert answer.num_cached_tokens == match["longest_matched"] == match["STORAGE"], (number, kept, match)
            media.add((match["CPU"] > 0, match["longest_matched"] > match["CPU"]))
            service.settle()
        assert {(True, False), (False, True)} <= media
