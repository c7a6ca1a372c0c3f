"""How long code holds the event loop without a turn for others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvstore.runtime.pauses import collector_paused


class LoopHeld:
    """Watches the event loop.

    Attributes:
        longest_s: The longest time that the loop's thread computed in one go, in seconds of processor time; the time
            of other processes and threads does not count.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch while a block runs, without the garbage collector: a service pauses it too."""
        ticking = asyncio.ensure_future(self._tick())
        await asyncio.sleep(0.01)
        try:
            with collector_paused():
                yield
                await asyncio.sleep(0.01)
        finally:
            ticking.cancel()

    async def _tick(self) -> None:
        while True:
            before_s = time.thread_time()
            await asyncio.sleep(0)
            self.longest_s = max(self.longest_s, time.thread_time() - before_s)
