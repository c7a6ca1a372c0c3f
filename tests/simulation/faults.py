"""What goes wrong, and when."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from tests.simulation.redis_catalog import Loss
from tests.simulation.servers import Server

if TYPE_CHECKING:
    from tests.simulation.cluster import SimulatedCluster


class Faults:
    """Brings one fault after the other over a cluster, several at a time, until it is told to stop.

    Args:
        cluster: Where.
        numbers: Decides which and when.
        often_s: Mean time from one to the next.
    """

    def __init__(self, cluster: SimulatedCluster, numbers: random.Random, often_s: float) -> None:
        self._cluster = cluster
        self._numbers = numbers
        self._often_s = often_s
        self._running: set[asyncio.Task[None]] = set()
        deeds: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (3, self._down),
            (3, self._frozen),
            (3, self._slow),
            (4, self._failing),
            (3, self._mangling),
            (1, self._full),
            (3, self._cut),
            (3, self._evicting),
            (2, self._damage),
            (4, self._kill),
            (1, self._restart),
        ]
        if cluster.plan.may_lose:
            deeds.append((2, self._lose))
        self._weights = [weight for weight, _ in deeds]
        self._deeds = [deed for _, deed in deeds]

    async def rage(self, until_s: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < until_s:
            await asyncio.sleep(self._numbers.expovariate(1 / self._often_s))
            deed = self._numbers.choices(self._deeds, self._weights)[0]
            task = loop.create_task(deed())  # type: ignore[arg-type]
            self._running.add(task)
            task.add_done_callback(self._ended)
        if self._running:
            await asyncio.wait(self._running)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.result()

    def _server(self) -> Server:
        return self._numbers.choice((self._cluster.deployment.redis, self._cluster.deployment.s3))

    async def _last(self) -> None:
        await asyncio.sleep(self._numbers.expovariate(1 / 1.5))

    def _say(self, what: str) -> None:
        self._cluster.trace.add("FAULT", what)

    async def _down(self) -> None:
        server = self._server()
        self._say(f"{server.name} is down")
        server.weather.is_down = True
        await self._last()
        server.weather.is_down = False
        self._say(f"{server.name} is up")

    async def _frozen(self) -> None:
        server = self._server()
        self._say(f"{server.name} is frozen")
        server.weather.is_frozen = True
        await self._last()
        server.thaw()
        self._say(f"{server.name} goes on")

    async def _slow(self) -> None:
        server = self._server()
        server.weather.slowness = self._numbers.choice((5.0, 30.0, 200.0))
        self._say(f"{server.name} is slow, {server.weather.slowness} times")
        await self._last()
        server.weather.slowness = 1.0

    async def _failing(self) -> None:
        server = self._server()
        server.weather.failing = self._numbers.choice((0.05, 0.2, 0.6))
        self._say(f"{server.name} fails {server.weather.failing:.0%} of calls")
        await self._last()
        server.weather.failing = self._cluster.plan.failing

    async def _mangling(self) -> None:
        server = self._server()
        server.weather.mangling = self._numbers.choice((0.05, 0.5))
        self._say(f"reads from {server.name} are damaged, {server.weather.mangling:.0%}")
        await self._last()
        server.weather.mangling = 0.0

    async def _full(self) -> None:
        medium = self._numbers.choice((self._cluster.deployment.hot, self._cluster.deployment.cold))
        self._say(f"{medium.name} is full")
        medium.is_full = True
        await self._last()
        medium.is_full = False

    async def _cut(self) -> None:
        link = self._numbers.choice(self._numbers.choice(self._cluster.services).links)
        self._say(f"{link.process.name} is cut off from {link.server.name}")
        link.is_cut = True
        await self._last()
        link.is_cut = False

    async def _evicting(self) -> None:
        medium = self._cluster.deployment.hot
        count = medium.evict_some(self._numbers, self._numbers.choice((0.2, 1.0)))
        self._say(f"{medium.name} evicted {count}")

    async def _damage(self) -> None:
        medium = self._numbers.choice((self._cluster.deployment.hot, self._cluster.deployment.cold))
        if medium.records:
            key = self._numbers.choice(list(medium.records))
            self._say(f"a record in {medium.name} is damaged")
            medium.damage(key, self._numbers)

    async def _lose(self) -> None:
        loss = self._numbers.choice(list(Loss))
        self._say(f"redis loses {loss.value}")
        self._cluster.lose(loss)

    async def _kill(self) -> None:
        await self._cluster.kill_one(self._numbers)

    async def _restart(self) -> None:
        await self._cluster.restart_one(self._numbers)
