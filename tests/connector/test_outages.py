"""The store is killed or frozen at each moment of one request; faults that last are in the failure table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.testing.engine import Answer, EngineProcess, EngineSpec, Request, seeded_prompt
from kvstore.testing.waiting import eventually
from tests.connector.support.service import DirectoryService

pytestmark = pytest.mark.engine

LENGTH, RESTORED = 2500, 2432
EXTRA_S = 5.0
"""Whoever waits for a store that does not answer waits longer. The failure table holds requests to a second, and knows
when a machine is too busy to tell."""

PATIENCE_S = 30.0


class Bench:
    """An engine that has saved a prompt, and what the prompt costs without a store."""

    def __init__(self, engine: EngineProcess, service: DirectoryService) -> None:
        self.engine, self.service = engine, service
        self.prompt = seeded_prompt(31, LENGTH)
        self._seed = 100
        self.ask()
        self.answer = self.ask()  # the first request of an engine compiles
        service.settle()

    def ask(self, after_send: Callable[[], None] | None = None) -> Answer:
        """Answer the prompt without the engine's own cache, and do something while it is under way."""
        assert self.engine.reset_prefix_cache()
        self.engine.send([Request(self.prompt)])
        if after_send is not None:
            after_send()
        return self.engine.receive()[0]

    def computing_s(self) -> float:
        """Time to the first token of a prompt that is stored nowhere, with the service as it is now."""
        times = []
        for _ in range(3):
            self._seed += 1
            times.append(self.engine.generate([Request(seeded_prompt(self._seed, LENGTH))])[0].ttft_s)
        return max(times)

    def expect_right_and_in_time(self, answer: Answer, computing_s: float) -> None:
        assert answer.tokens == self.answer.tokens
        assert answer.ttft_s <= computing_s + EXTRA_S, (answer.ttft_s, computing_s)

    def expect_hits_again(self) -> None:
        eventually(lambda: self.ask().num_cached_tokens == RESTORED, PATIENCE_S, why="hits do not come back")


@pytest.fixture(scope="module")
def bench(llama: Path, work: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    from kvstore.testing.engine import start_engine

    with DirectoryService(tmp_path_factory.mktemp("service")) as service:
        spec = EngineSpec(checkpoint=llama, connector={"url": service.url})
        with start_engine(spec, work=work, name="outages") as engine:
            yield Bench(engine, service)


def test_hits_while_all_is_well(bench: Bench) -> None:
    """The prompt is restored from the service, so that the faults below have something to take away."""
    bench.expect_hits_again()


@pytest.mark.parametrize("delay_ms", [0, 5, 20, 60])
@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_service_fails_during_a_request(bench: Bench, fault: str, delay_ms: int) -> None:
    """Killed or frozen between the question and the last loaded page: right output, in time, and hits again."""
    computing_s = bench.computing_s()

    def fail() -> None:
        time.sleep(delay_ms / 1000)
        getattr(bench.service, fault)()

    try:
        bench.expect_right_and_in_time(bench.ask(fail), computing_s)
    finally:
        if fault == "kill":
            bench.service.start()
        else:
            bench.service.thaw()
    bench.expect_hits_again()
