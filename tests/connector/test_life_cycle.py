"""Requests that end at any moment, engines that end with work under way, engines that idle: nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.testing.engine import EngineProcess, EngineSpec, Request, seeded_prompt
from kvstore.testing.engine.spec import TrafficRequest
from kvstore.testing.waiting import eventually
from tests.connector.support.service import DirectoryService
from tests.connector.support.soak import errors_in

pytestmark = pytest.mark.engine

LENGTH, RESTORED = 2500, 2432
RESTORING = ("asking", "staging", "loading")
COMPUTING = ("queued", "prefilling", "decoding")
CERTAIN = {*RESTORING, "prefilling", "decoding"}
"""Only a slow machine keeps a request in vLLM's queue for a whole step."""

ROUNDS, PATIENCE_S = 8, 60.0


def test_aborts_in_every_state(engine: Callable[..., EngineProcess], llama: Path, tmp_path: Path) -> None:
    """Aborted while asking, staging, loading, computing and generating: blocks and leases are back.

    What was not aborted is answered as before.
    """
    stored = [seeded_prompt(seed, LENGTH) for seed in range(200, 206)]
    with DirectoryService(tmp_path) as service:
        connector = {"url": service.url, "audit_rate": 0.5}
        running = engine(EngineSpec(checkpoint=llama, connector=connector, max_num_batched_tokens=512))
        first = running.generate([Request(prompt, max_tokens=16) for prompt in stored])  # as many as traffic asks for
        running.traffic([], in_flight=1)  # only this test steps an idle engine in this process
        seen: set[str] = set()
        for number in range(ROUNDS):
            assert running.reset_prefix_cache()
            requests = [TrafficRequest(prompt, abort_state=state) for state in RESTORING for prompt in stored[:3]]
            requests += [TrafficRequest(prompt) for prompt in stored[3:]]
            requests += [
                TrafficRequest(seeded_prompt(1000 + 10 * number + place, 1300), abort_state=state)
                for place, state in enumerate(COMPUTING)
            ]
            report = running.traffic(requests, in_flight=len(requests))
            seen |= set(report.aborted.values())
            for index, answer in enumerate(report.answers):
                if answer is not None and requests[index].prompt in stored:
                    assert answer.tokens == first[stored.index(requests[index].prompt)].tokens
            if seen >= CERTAIN:
                break
        assert seen >= CERTAIN
        expect_nothing_held(running, service)
        assert errors_in(running.log_text()) == []


def test_an_engine_ends_with_saves_and_requests_under_way(
    engine: Callable[..., EngineProcess], llama: Path, tmp_path: Path
) -> None:
    """It ends by itself and in order, leaves no lease, and the next one resumes from what it has saved."""
    prompts = [seeded_prompt(seed, LENGTH) for seed in range(300, 308)]
    with DirectoryService(tmp_path) as service:
        spec = EngineSpec(checkpoint=llama, connector={"url": service.url})
        ending = engine(spec)
        requests = [TrafficRequest(prompt, 400) for prompt in prompts]
        requests[0] = TrafficRequest(prompts[0], 400, abort_state="decoding")
        ending.traffic(requests, in_flight=len(requests), stop_after_aborts=True)
        ending.stop()
        assert ending.exit_status == 0
        assert errors_in(ending.log_text()) == []
        assert service.leases_end()
        service.settle()
        resuming = engine(spec)
        answers = resuming.generate([Request(prompt) for prompt in prompts])
        assert any(answer.num_cached_tokens > 0 for answer in answers)


@pytest.mark.parametrize("multiprocess", [False, True])
def test_an_idle_engine_gives_its_blocks_back(
    engine: Callable[..., EngineProcess], llama: Path, tmp_path: Path, multiprocess: bool
) -> None:
    """After the last request its last pages are still to be saved, from blocks that are held: the engine steps on.

    Held blocks keep vLLM from forgetting its cache; once they are back, what was generated is in the store.
    """
    with DirectoryService(tmp_path) as service:
        running = engine(EngineSpec(checkpoint=llama, connector={"url": service.url}, multiprocess=multiprocess))
        (answer,) = running.generate([Request(seeded_prompt(401, LENGTH), 200)])
        if multiprocess:
            eventually(running.reset_prefix_cache, PATIENCE_S, why="blocks are held for ever")
        else:
            running.traffic([], in_flight=1)  # only this test steps an engine in this process
            assert running.reset_prefix_cache()
            expect_nothing_held(running, service)
        (again,) = running.generate([Request(seeded_prompt(401, LENGTH) + answer.tokens)])
        assert again.num_cached_tokens == (LENGTH + 199) // 128 * 128


def expect_nothing_held(running: EngineProcess, service: DirectoryService) -> None:
    census = running.census()
    assert census["free_blocks"] == census["blocks"]
    assert not census["requests"] and not census["remembered_requests"]
    assert not census["saves_in_flight"]
    assert service.leases_end()
