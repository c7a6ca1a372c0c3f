"""A process of the simulated cluster: tasks that end together, without a word, when it is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

from tests.virtual_time import NumberedTask

T = TypeVar("T")

_CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)
_REAP_S = 0.01
_REAPS_MAX = 500


class ProcessDied(BaseException):
    """Raised wherever a dead process touches the cluster: what it still does reaches nothing."""


class Process:
    """Owns every task that is started from one of its own.

    A kill cancels them all. Their cleanup does run, which a real SIGKILL would not let it do, but it reaches nothing:
    each connection of the process raises `ProcessDied` from then on.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self._tasks: set[NumberedTask] = set()
        self._context = copy_context()
        self._context.run(_CURRENT.set, self)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task of this process, from wherever."""
        return asyncio.get_running_loop().create_task(work, context=self._context.copy())

    def run(self, work: Callable[[], T]) -> T:
        """Call something as this process."""
        return self._context.copy().run(work)

    def adopt(self, task: NumberedTask) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard, context=Context())
        if not self.is_alive:
            task.cancel()

    def task_names(self) -> list[str]:
        """Of tasks that have not ended."""
        return [task.get_name() for task in self._tasks]

    def check(self) -> None:
        """Raise in a dead process."""
        if not self.is_alive:
            raise ProcessDied(self.name)

    async def kill(self) -> None:
        """End it now; returns when the last of its tasks is gone."""
        self.is_alive = False
        for _ in range(_REAPS_MAX):
            if not self._tasks:
                return
            for task in list(self._tasks):
                task.cancel()
            await asyncio.sleep(_REAP_S)
        raise AssertionError(f"tasks of {self.name} do not end: {[task.get_name() for task in self._tasks]}")


def current_process() -> Process | None:
    """Whose task runs now; `None`: the simulator's."""
    return _CURRENT.get()


def adopt(task: NumberedTask, context: Context) -> None:
    """Give a task that is being made to the process that it was started from."""
    process = context.get(_CURRENT)
    if process is not None:
        process.adopt(task)
