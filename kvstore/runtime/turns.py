"""A semaphore whose limit may change at any time, and whose turns go round among those who wait."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

__all__ = ["Turns", "Who"]

Who = tuple[Hashable, Hashable]
"""Whose turn it is: a tenant, and one of its connections."""

_NOBODY: Who = ("", 0)


class Turns:
    """Lets at most `limit` blocks run. Turns go round among the tenants that wait, and among the connections of each;
    of one connection whoever came first is first. Blocks that say nothing of themselves are served in FIFO order.

    Attributes:
        limit: May be changed at any time; when it shrinks, running blocks continue and the next ones wait longer.
        num_running: Blocks that run now.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_running = 0
        self._waiting: dict[Hashable, dict[Hashable, deque[asyncio.Future[None]]]] = {}  # who is next is first

    def try_begin(self) -> bool:
        """Begin if that needs no waiting and nobody else waits. If true, the caller must call `end`."""
        if self.num_running >= self.limit or self._waiting:
            return False
        self.num_running += 1
        return True

    async def begin(self, who: Who = _NOBODY) -> None:
        """Wait for the turn; the caller must then call `end`. If cancelled, the place in the queue is given up."""
        if not self.try_begin():
            await self._wait(who)

    def end(self) -> None:
        """End a turn, and start those that may run now."""
        self.num_running -= 1
        while self._waiting and self.num_running < self.limit:
            turn = self._next()
            if not turn.done():
                self.num_running += 1
                turn.set_result(None)

    @asynccontextmanager
    async def turn(self, who: Who = _NOBODY) -> AsyncIterator[None]:
        """Run a block when it is its turn. If cancelled while waiting, the place in the queue is given up."""
        await self.begin(who)
        try:
            yield
        finally:
            self.end()

    def _next(self) -> asyncio.Future[None]:
        """Take the next one out; its connection and its tenant are now the last in turn."""
        tenant = next(iter(self._waiting))
        connections = self._waiting.pop(tenant)
        connection = next(iter(connections))
        queue = connections.pop(connection)
        turn = queue.popleft()
        if queue:
            connections[connection] = queue
        if connections:
            self._waiting[tenant] = connections
        return turn

    async def _wait(self, who: Who) -> None:
        tenant, connection = who
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, {}).setdefault(connection, deque()).append(turn)
        try:
            await turn  # `end`, which sets it, has counted us as running
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.end()
            else:
                self._give_up(who, turn)
            raise

    def _give_up(self, who: Who, turn: asyncio.Future[None]) -> None:
        tenant, connection = who
        connections = self._waiting.get(tenant, {})
        queue = connections.get(connection)
        if queue is None or turn not in queue:
            return
        queue.remove(turn)
        if not queue:
            del connections[connection]
        if not connections:
            del self._waiting[tenant]
