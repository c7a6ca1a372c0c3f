"""A FIFO semaphore whose limit may change at any time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["Turns"]


class Turns:
    """Lets at most `limit` blocks run.

    Attributes:
        limit: May be changed at any time; when it shrinks, running blocks continue and the next ones wait longer.
        num_running: Blocks that run now.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_running = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    def try_begin(self) -> bool:
        """Begin if that needs no waiting and nobody else waits. If true, the caller must call `end`."""
        if self.num_running >= self.limit or self._waiters:
            return False
        self.num_running += 1
        return True

    async def begin(self) -> None:
        """Wait for the turn; the caller must then call `end`. If cancelled, the place in the queue is given up."""
        if not self.try_begin():
            await self._wait()

    def end(self) -> None:
        """End a turn, and start those that may run now."""
        self.num_running -= 1
        while self._waiters and self.num_running < self.limit:
            turn = self._waiters.popleft()
            if not turn.done():
                self.num_running += 1
                turn.set_result(None)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Run a block when it is its turn. If cancelled while waiting, the place in the queue is given up."""
        await self.begin()
        try:
            yield
        finally:
            self.end()

    async def _wait(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(turn)
        try:
            await turn  # `end`, which sets it, has counted us as running
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.end()
            elif turn in self._waiters:
                self._waiters.remove(turn)
            raise
