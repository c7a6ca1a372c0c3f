"""An event loop without time of its own: when nothing is ready, its clock jumps to the next timer.

Nothing but the seed decides what happens: tasks run in the order in which they became ready, sets of tasks iterate in
the order of their making, and work for threads is done at once, on the loop, since threads run in whatever order the
system likes.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context, copy_context
from typing import Any

from kvstore.runtime.clock import SYSTEM_CLOCK

EPOCH_MS = 1_700_000_000_000
_STEPS_MAX = 3_000_000
"""Turns of the loop in one simulation; the largest ones take a tenth of it."""


class Deadlock(Exception):
    """Nothing is ready and no timer is set: whoever waits, waits for ever. Or no end is in sight: turns without end."""


class NumberedTask(asyncio.Task[Any]):
    """A task whose hash is its number: a set of tasks has the same order in every process."""

    def __init__(self, work: Coroutine[Any, Any, Any], *, number: int, loop: VirtualLoop, context: Context) -> None:
        self.number = number
        super().__init__(work, loop=loop, context=context)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]  # depends on the system
    """Never waits: the time that it was to wait for passes at once."""

    passed: Callable[[float], None]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("nothing is ready and nothing is scheduled: every task waits for another one")
        self.passed(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """See above.

    Attributes:
        on_time: Called whenever time is about to pass: nothing is ready then, so what can be seen is consistent.
        on_task: Told of every task that is made, and of its context.
    """

    def __init__(self) -> None:
        self.on_time: Callable[[], None] = lambda: None
        self.on_task: Callable[[NumberedTask, Context], None] = lambda task, context: None
        self._now_s = 0.0
        self._num_steps = 0
        self._num_tasks = 0
        selector = _JumpingSelector()
        selector.passed = self._pass
        super().__init__(selector)
        self._clock_resolution = 1e-6  # timers this close are due: a float cannot tell late times much finer
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]

    def time(self) -> float:
        return self._now_s

    def _pass(self, seconds: float) -> None:
        self._num_steps += 1
        if self._num_steps > _STEPS_MAX:
            raise Deadlock(f"no end in sight after {_STEPS_MAX} turns of the loop, at {self._now_s:.3f} s")
        if seconds > 0:
            self.on_time()
            self._now_s += seconds

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], context: Context | None = None
    ) -> NumberedTask:
        self._num_tasks += 1
        context = context if context is not None else copy_context()
        task = NumberedTask(work, number=self._num_tasks, loop=self, context=context)
        self.on_task(task, context)
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, work: Callable[..., Any], *arguments: Any
    ) -> asyncio.Future[Any]:
        """Do it now: it is over before anything else can happen, as one of the orders that threads allow."""
        future = self.create_future()
        try:
            future.set_result(work(*arguments))
        except Exception as error:  # noqa: BLE001 - travels to whoever awaits it
            future.set_exception(error)
        return future


class VirtualClock:
    """The store's clock: the loop's time, and a calendar that begins in 2023."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def monotonic_s(self) -> float:
        return self._loop.time()

    def wall_ms(self) -> int:
        return EPOCH_MS + int(self._loop.time() * 1000)


class ShiftedClock:
    """The system's clock, and its calendar, each ahead by as much as a test wants, in seconds."""

    def __init__(self, *, date_ahead_s: float = 0.0) -> None:
        self.ahead_s = 0.0
        self.date_ahead_s = date_ahead_s

    def monotonic_s(self) -> float:
        return SYSTEM_CLOCK.monotonic_s() + self.ahead_s

    def wall_ms(self) -> int:
        return SYSTEM_CLOCK.wall_ms() + round(self.date_ahead_s * 1000)


class ManualClock:
    """A store's clock that stands still until a test changes `now_s`."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_ms(self) -> int:
        return round(self.now_s * 1000)
