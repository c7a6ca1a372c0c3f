"""Computations that would hold the event loop for long: in pieces, by turns, the longest ones in threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from kvstore.runtime.collector import collector_paused
from kvstore.runtime.log_context import request_context
from kvstore.runtime.turns import Turns, Who

__all__ = ["PIECE", "LongWork", "still_working", "who_asks"]

T = TypeVar("T")

PIECE = 4096
"""Items, of some microseconds each, that may be worked on in one go on the event loop."""

_SHORT = 256
"""So few items need no turn: what a client asks for a short prompt waits for nobody."""

_AT_ONCE = 1
"""Pieces at a time. Threads share one interpreter, so more of them would only delay the event loop."""

_TELL_S = 0.05

still_working: ContextVar[Callable[[], None] | None] = ContextVar("kvstore_still_working", default=None)
"""Called now and then while something long is done for the current request, so that its client does not give up."""


def who_asks() -> Who:
    """The tenant and the connection of the current request."""
    context = request_context.get()
    return context.tenant, context.session


class LongWork:
    """Runs pieces of computations, few at a time, in turns that go round among tenants and connections. So a client
    that asks for much at once delays others by a piece or two. Belongs to one event loop.

    Args:
        name: Of its threads.
    """

    def __init__(self, name: str) -> None:
        self._turns = Turns(_AT_ONCE)
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix=f"kvstore-{name}")

    async def run(self, num_items: int, function: Callable[..., T], *args: Any) -> T:
        """Call a function, which must not touch what belongs to the event loop: in a thread if it is long.

        Args:
            num_items: What it works on, some microseconds each.
            function: What to call.
            args: Its arguments.

        If cancelled, a call in a thread goes on and its result is dropped.
        """
        async with self.turn(num_items):
            if num_items <= PIECE:
                return function(*args)
            with collector_paused():
                return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    @asynccontextmanager
    async def turn(self, num_items: int) -> AsyncIterator[None]:
        """Run a block of at most `PIECE` items on the event loop when it is its turn.

        If cancelled while waiting, the block does not run.
        """
        if num_items <= _SHORT:
            yield
            return
        with _telling():
            async with self._turns.turn(who_asks()):
                yield
            await asyncio.sleep(0)  # the next piece of a lonely client would follow at once

    def close(self) -> None:
        """Start no further call in a thread. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _telling() -> Iterator[None]:
    """Tell the client of the current request that it is worked on: now and then, and in the end."""
    tell = still_working.get()
    if tell is None:
        yield
        return
    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = []

    def tick() -> None:
        tell()
        timers[:] = [loop.call_later(_TELL_S, tick)]

    tick()
    try:
        yield
    finally:
        timers[0].cancel()
