"""A semaphore that is fair among tenants and connections, and tasks and long computations that run in such turns."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from kvstore.errors import Unavailable
from kvstore.runtime.background import Background, Work
from kvstore.runtime.pauses import age_objects, collector_paused
from kvstore.runtime.tracing import request_context

Who = tuple[Hashable, Hashable]
"""Whose turn it is: a tenant, and one of its connections."""

_NOBODY: Who = ("", 0)


class Turns:
    """Lets at most `limit` blocks run. Turns go round among the tenants that wait, and among the connections of each
    tenant. Blocks of one connection, and blocks without tenant and connection, run in FIFO order.

    Attributes:
        limit: May be changed at any time; when it shrinks, running blocks continue and the next ones wait longer.
        num_running: Blocks that run now.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_running = 0
        self._waiting: dict[Hashable, dict[Hashable, deque[asyncio.Future[None]]]] = {}  # who is next is first

    def try_begin(self) -> bool:
        """Begin if that needs no waiting and no other block waits. If true, the caller must call `end`."""
        if self.num_running >= self.limit or self._waiting:
            return False
        self.num_running += 1
        return True

    async def begin(self, who: Who = _NOBODY) -> None:
        """Wait for the turn; the caller must then call `end`. If cancelled, the place in the queue is given up."""
        if self.try_begin():
            return
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


class TenantTasks:
    """Tasks for which no call waits: few run at a time, in turns of the tenants, and few of each tenant wait.
    Belongs to one event loop.

    Args:
        background: Owns them.
        limit: How many run at a time.
        of_tenant: How many of a tenant may wait or run.
    """

    def __init__(self, background: Background, limit: int, *, of_tenant: int) -> None:
        self._background = background
        self._turns = Turns(limit)
        self._of_tenant = of_tenant
        self._num: Counter[str] = Counter()

    def start(self, tenant: str, work: Work[None], name: str) -> bool:
        """Have `work` done when it is the tenant's turn. Never waits. False: too many of the tenant wait or run."""
        if self._num[tenant] >= self._of_tenant:
            return False
        self._num[tenant] += 1
        self._background.spawn(self._run(tenant, work), name, is_shared=True)
        return True

    async def _run(self, tenant: str, work: Work[None]) -> None:
        try:
            async with self._turns.turn((tenant, 0)):
                await work()
        finally:
            self._num[tenant] -= 1
            if not self._num[tenant]:
                del self._num[tenant]


T = TypeVar("T")
Item = TypeVar("Item")


async def with_pauses(items: Iterable[Item], every: int) -> AsyncIterator[Item]:
    """The items, for a loop on the event loop that must not hold it for long: after each `every` of them other tasks
    run.
    """
    for number, item in enumerate(items, 1):
        yield item
        if number % every == 0:
            await asyncio.sleep(0)


PIECE = 1024
"""Items, of some microseconds each, that may be worked on in one go on the event loop. Of a request with more the other
clients wait for one such piece, a few milliseconds, at each of their own steps."""

_SHORT = 256
"""Up to this number of items need no turn: the request of a short prompt never waits."""

_AT_ONCE = 1
"""Pieces at a time. Threads share one interpreter, so more of them would only delay the event loop."""

_REPORT_S = 0.05

still_working: ContextVar[Callable[[], None] | None] = ContextVar("kvstore_still_working", default=None)
"""Called now and then while the service computes for the current request, so that its client does not give up."""


def who_asks() -> Who:
    """The tenant and the connection of the current request."""
    context = request_context.get()
    return context.tenant, context.session


class TenantTurns:
    """Lets few requests run at a time, fewer of one tenant, and lets few of a tenant wait. So a tenant with many large
    requests delays its own, and another tenant's by what runs already. Belongs to one event loop.

    Args:
        limit: Requests that run at a time; turns go round among the tenants that wait.
        of_tenant: The same of one tenant. Less than `limit`, or one tenant's requests keep out all others.
        waiting_max: Requests of a tenant that may wait.
    """

    def __init__(self, limit: int, *, of_tenant: int, waiting_max: int) -> None:
        self._turns = Turns(limit)
        self._of_tenant, self._waiting_max = of_tenant, waiting_max
        self._of: dict[Hashable, Turns] = {}  # those of tenants that have requests
        self._num: Counter[Hashable] = Counter()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Run a block of the current request when it is its tenant's turn.

        Raises:
            Unavailable: Too many requests of the tenant wait already.

        If cancelled while waiting, the place in the queue is given up.
        """
        who = who_asks()
        tenant = who[0]
        if self._num[tenant] >= self._of_tenant + self._waiting_max:
            raise Unavailable("too many requests of this kind wait already: retry later", waiting=self._waiting_max)
        self._num[tenant] += 1
        own = self._of.setdefault(tenant, Turns(self._of_tenant))
        try:
            async with own.turn(who), self._turns.turn(who):
                yield
        finally:
            self._num[tenant] -= 1
            if not self._num[tenant]:
                del self._num[tenant], self._of[tenant]


class LongWork:
    """Runs pieces of computations, few at a time, in turns that go round among tenants and connections. So a client
    with a large request delays others by a piece or two. Belongs to one event loop.
    """

    def __init__(self, name: str) -> None:
        self._turns = Turns(_AT_ONCE)
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix=f"kvstore-{name}")

    async def run(self, num_items: int, function: Callable[..., T], *args: Any) -> T:
        """Call a function, which must not touch what belongs to the event loop: in a thread if it is long.

        Args:
            num_items: Items that it works on, some microseconds each.

        If cancelled, a call in a thread continues and its result is dropped.
        """
        async with self.turn(num_items):
            if num_items <= PIECE:
                return function(*args)
            with collector_paused():
                result = await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)
                age_objects()
                return result

    @asynccontextmanager
    async def turn(self, num_items: int) -> AsyncIterator[None]:
        """Run a block of at most `PIECE` items on the event loop when it is its turn.

        If cancelled while waiting, the block does not run.
        """
        if num_items <= _SHORT:
            yield
            return
        with reporting():
            async with self._turns.turn(who_asks()):
                yield
            await asyncio.sleep(0)  # else the next piece of the only client would follow at once

    async def in_pieces(self, items: Sequence[Item], function: Callable[[Sequence[Item]], T]) -> list[T]:
        """Call a function on the event loop with at most `PIECE` items at a time, each time when it is its turn.

        If cancelled, it is not called again.
        """
        results: list[T] = []
        for start in range(0, len(items), PIECE):
            async with self.turn(len(items)):
                results.append(function(items[start : start + PIECE]))
        return results

    def close(self) -> None:
        """Start no further call in a thread. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def reporting() -> Iterator[None]:
    """Report to the client of the current request that the service works on it: at once, and then again and again."""
    report = still_working.get()
    if report is None:
        yield
        return
    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = []

    def tick() -> None:
        report()
        timers[:] = [loop.call_later(_REPORT_S, tick)]

    tick()
    try:
        yield
    finally:
        timers[0].cancel()
