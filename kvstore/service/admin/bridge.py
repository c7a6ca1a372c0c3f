"""The way from the administration's loop to the data loop: few calls at a time, each a bounded piece of work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvstore.errors import Unavailable
from kvstore.runtime.deadline import Deadline

__all__ = ["Bridge"]

T = TypeVar("T")

_AT_ONCE = 4


class Bridge:
    """Runs pieces of work where the store lives. Belongs to the administration's loop.

    Args:
        loop: The store's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def call(self, work: Callable[[], Coroutine[Any, Any, T]], *, deadline: Deadline) -> T:
        """What `work` returns, at most four of them at a time.

        Raises:
            Unavailable: It did not end in time, or the service is stopping.

        If cancelled, the work is cancelled too.
        """
        async with deadline.scope("a piece of work in the service"), self._turns:
            coroutine = work()
            try:
                future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
            except RuntimeError as error:
                coroutine.close()
                raise Unavailable("the service is stopping") from error
            return await asyncio.wrap_future(future)
