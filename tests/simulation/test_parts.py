"""The simulator itself: time jumps, waiting for nobody is told, equal seeds are equal runs, its tier is a tier."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import Unavailable
from kvstore.model.keys import RecordKey
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.testing.tier_contract import LastingTierContract, RawMedium
from kvstore.tiers.base import Tier
from tests.simulation.cluster import simulate
from tests.simulation.media import Gone, Medium
from tests.simulation.process import Process, ProcessDied, adopt
from tests.simulation.servers import Link, Server
from tests.simulation.tiers import SimulatedTier
from tests.virtual_time import Deadlock, VirtualClock, VirtualLoop

ROOT = Path(__file__).resolve().parents[2]


class Deaf:
    """Watches nothing."""

    def stored(self, medium: Medium, key: RecordKey) -> None: ...

    def allowed(self, medium: Medium, key: RecordKey) -> None: ...

    def gone(self, medium: Medium, key: RecordKey, why: Gone) -> None: ...


class SimulatedMedium(RawMedium):
    """The server in good weather."""

    def __init__(self) -> None:
        self.medium = Medium("server", None, Deaf())
        self.server = Server("server", 1e-5, random.Random(1))

    async def open_tier(self) -> Tier:
        link = Link(Process("tests"), self.server)
        return SimulatedTier("server", self.medium, link, SYSTEM_CLOCK, lambda key: None)

    async def read(self, key: RecordKey) -> bytes | None:
        return self.medium.records.get(key)

    async def write(self, key: RecordKey, data: bytes) -> None:
        self.medium.records[key] = data


class TestSimulatedTier(LastingTierContract):
    """It does what every tier does, so that what is found on it is the store's."""

    @pytest.fixture
    async def medium(self) -> RawMedium:
        return SimulatedMedium()


def run(main: Callable[[VirtualLoop], Coroutine[Any, Any, None]]) -> VirtualLoop:
    loop = VirtualLoop()
    loop.on_task = adopt
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main(loop))
    return loop


def test_time_jumps() -> None:
    """A year of sleep takes no time, timers come in order, and the store's clock is the loop's."""
    woken: list[float] = []

    async def main(loop: VirtualLoop) -> None:
        async def sleeper(seconds: float) -> None:
            await asyncio.sleep(seconds)
            woken.append(loop.time())

        await asyncio.gather(*(sleeper(seconds) for seconds in (3e7, 5.0, 0.0)))
        deadline = Deadline.after(2.0, VirtualClock(loop))
        with pytest.raises(Unavailable):
            async with deadline.scope("a test"):
                await asyncio.Event().wait()
        assert deadline.expired
        assert await asyncio.to_thread(lambda: 7) == 7

    run(main)
    assert woken == [0.0, 5.0, 3e7]


def test_waiting_for_nobody_is_an_error() -> None:
    """Nothing is ready and nothing is scheduled: the run fails at once, where a real loop would hang."""

    async def main(loop: VirtualLoop) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="every task waits"):
        run(main)


def test_a_killed_process_reaches_nothing() -> None:
    """Its tasks end, those of tasks too; what their cleanup tries to send raises; what was carried out stays so."""

    async def main(loop: VirtualLoop) -> None:
        server, process, done = Server("server", 0.1, random.Random(1)), Process("service"), []
        link = Link(process, server)
        clock = VirtualClock(loop)

        async def work() -> None:
            try:
                await asyncio.gather(*(asyncio.ensure_future(asyncio.sleep(1e9)) for _ in range(3)))
            finally:
                with pytest.raises(ProcessDied):
                    await link("a put", lambda: done.append(2), Deadline.after(9.0, clock))
                done.append(1)

        task = process.spawn(work())
        await asyncio.sleep(1.0)
        await process.kill()
        assert task.done() and process.task_names() == [] and done == [1]

    run(main)


def test_a_frozen_server_does_late_what_it_was_sent() -> None:
    """The caller gave up at its deadline; the work is done when the server goes on."""

    async def main(loop: VirtualLoop) -> None:
        server, done = Server("server", 0.001, random.Random(1)), []
        server.weather.is_frozen = True
        with pytest.raises(Unavailable):
            await Link(Process("service"), server)(
                "a put", lambda: done.append(1), Deadline.after(1.0, VirtualClock(loop))
            )
        assert done == []
        server.thaw()
        assert done == [1]

    run(main)


def test_one_seed_is_one_run() -> None:
    """The same events at the same times, here and in a process with another hash seed; another seed is another run."""
    here = simulate(5)
    assert simulate(5) == here
    assert simulate(6).digest != here.digest
    command = [sys.executable, "-c", "from tests.simulation.cluster import simulate; print(simulate(5).digest)"]
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == here.digest
