"""Work of which only so much runs at a time, first come first served; how much may change meanwhile."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["Turns"]


class Turns:
    """Lets at most `limit` blocks run.

    Attributes:
        limit: May be changed at any time; when it shrinks, what runs goes on, and the next ones wait longer.
        num_running: Blocks that run now.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_running = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    def try_begin(self) -> bool:
        """Begin without waiting, where nobody waits; whoever began calls `end`."""
        if self.num_running >= self.limit or self._waiters:
            return False
        self.num_running += 1
        return True

    async def begin(self) -> None:
        """Begin when it is one's turn; whoever began calls `end`. If cancelled, the place in the queue is given up."""
        if not self.try_begin():
            await self._wait()

    def end(self) -> None:
        """Let the next ones begin."""
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
            await turn  # whoever sets it has counted us as running
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.end()
            elif turn in self._waiters:
                self._waiters.remove(turn)
            raise
