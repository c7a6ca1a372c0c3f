"""The servers of the simulated cluster, which outlive every process, and connections to them, with all their faults."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from kvstore.errors import Unavailable
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.verify import check_deadline
from tests.simulation.process import Process

T = TypeVar("T")


class Fate(Enum):
    """What becomes of one call."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """Not carried out, and the caller is told."""
    ANSWER_LOST = "answer lost"
    """Carried out, and the caller is told that it failed."""
    SWALLOWED = "swallowed"
    """Not carried out; the caller waits in vain."""
    ANSWER_SWALLOWED = "answer swallowed"
    """Carried out; the caller waits in vain."""


@dataclass
class Weather:
    """How a server and the way to it are at the moment.

    Attributes:
        latency_s: Mean of one way.
        slowness: Factor on it.
        failing: Share of calls that are not just answered.
        mangling: Share of reads whose bytes are damaged on the way.
        is_down: Every call is refused.
        is_frozen: Calls reach it and wait; they are carried out when it goes on, in order.
        is_full: It takes no new records.
    """

    latency_s: float
    slowness: float = 1.0
    failing: float = 0.0
    mangling: float = 0.0
    is_down: bool = False
    is_frozen: bool = False
    is_full: bool = False


class Server:
    """One server.

    Args:
        name: For traces.
        latency_s: As in `Weather`.
        numbers: Decides the fate of calls.
    """

    def __init__(self, name: str, latency_s: float, numbers: random.Random) -> None:
        self.name = name
        self.weather = Weather(latency_s)
        self.numbers = numbers
        self._waiting: list[Callable[[], None]] = []

    def draw_fate(self) -> Fate:
        if self.numbers.random() >= self.weather.failing:
            return Fate.ANSWERED
        return self.numbers.choice([fate for fate in Fate if fate is not Fate.ANSWERED])

    def draw_latency_s(self) -> float:
        return self.numbers.expovariate(1 / (self.weather.latency_s * self.weather.slowness))

    def thaw(self) -> None:
        """Go on, with what came meanwhile: whoever sent it may be long gone."""
        self.weather.is_frozen = False
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            work()

    async def carry_out(self, work: Callable[[], T]) -> T:
        """Do what a call asks for, now or after the thaw."""
        if not self.weather.is_frozen:
            return work()
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def at_thaw() -> None:
            answer = work()
            if not done.done():
                done.set_result(answer)

        self._waiting.append(at_thaw)
        return await done


class Link:
    """A process's connection to a server.

    Attributes:
        is_cut: The network between these two is away: every call is refused.
    """

    def __init__(self, process: Process, server: Server) -> None:
        self.process = process
        self.server = server
        self.is_cut = False

    async def __call__(self, what: str, work: Callable[[], T], deadline: Deadline) -> T:
        """Have `work` done by the server: at once where it does it, and wholly or not at all.

        Raises:
            Unavailable: Refused, or no answer before the deadline. The work may have been done.
            ProcessDied: In a dead process, always.
        """
        self.process.check()
        check_deadline(deadline, self.server.name)
        async with deadline.scope(f"{what} at {self.server.name}"):
            return await self._call(what, work)

    async def _call(self, what: str, work: Callable[[], T]) -> T:
        server, fate = self.server, self.server.draw_fate()
        await self._travel()
        if self.is_cut or server.weather.is_down or fate is Fate.REFUSED:
            raise Unavailable(f"{what} was refused", server=server.name)
        if fate is Fate.SWALLOWED:
            await asyncio.Event().wait()
        answer = await server.carry_out(work)
        if fate is Fate.ANSWER_LOST:
            raise Unavailable(f"{what}: the connection broke before the answer", server=server.name)
        if fate is Fate.ANSWER_SWALLOWED:
            await asyncio.Event().wait()
        await self._travel()
        return answer

    async def _travel(self) -> None:
        await asyncio.sleep(self.server.draw_latency_s())
        self.process.check()
