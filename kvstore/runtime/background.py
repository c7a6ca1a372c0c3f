"""Tasks: in the background with an owner that none outlives, several at once, or run to their end without a caller."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import socket
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from kvstore.errors import Closed, KVStoreError, Unavailable
from kvstore.runtime.deadline import Deadline

_log = logging.getLogger(__name__)

_CANCEL_AGAIN_S = 5.0
_RESTART_S, _RESTART_S_MAX = 1.0, 60.0
"""Until a task that failed is started again. Each failure doubles it, until a run lasts longer than the maximum."""

T = TypeVar("T")

Work = Callable[[], Coroutine[Any, Any, T]]


class Background:
    """A set of named tasks that end with their owner.

    A task that raises is logged with its traceback, unless it is awaited. It never ends its siblings.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def spawn(
        self, work: Coroutine[Any, Any, Any], name: str, *, is_awaited: bool = False, is_shared: bool = False
    ) -> asyncio.Task[Any]:
        """Start `work` now.

        Args:
            is_awaited: The caller awaits the task and gets its exception, which is then not logged.
            is_shared: It works for several callers, and inherits neither this one's request context nor its trace.

        Raises:
            Closed: The owner is closed; `work` was not started.
        """
        if self._closed:
            work.close()
            raise Closed("the owner of background tasks is closed", owner=self._owner, task=name)
        context = contextvars.Context() if is_shared else None
        task = asyncio.get_running_loop().create_task(work, name=f"{self._owner}:{name}", context=context)
        self._tasks.add(task)
        task.add_done_callback(self._ended_awaited if is_awaited else self._ended)
        return task

    def keep_running(self, work: Work[None], name: str) -> None:
        """Start `work` now, and start it again after a pause each time it raises.

        For work that the owner cannot do without. Each failure is logged with its traceback. The task ends when `work`
        returns or raises `Closed`, or with its owner.

        Raises:
            Closed: The owner is closed.
        """
        self.spawn(self._restart_after_failures(work, name), name, is_shared=True)

    def repeat(self, work: Work[object], name: str, *, every_s: float) -> None:
        """Run `work` again and again, each time after a pause of `every_s`; if it raises, as `keep_running`.

        Raises:
            Closed: The owner is closed.
        """

        async def run() -> None:
            while True:
                await asyncio.sleep(every_s)
                await work()

        self.keep_running(run, name)

    async def _restart_after_failures(self, work: Work[None], name: str) -> None:
        loop = asyncio.get_running_loop()
        pause_s = _RESTART_S
        while True:
            started_s = loop.time()
            try:
                return await work()
            except Closed:
                return None
            except Exception as error:  # noqa: BLE001 - a task's top
                if loop.time() - started_s > _RESTART_S_MAX:
                    pause_s = _RESTART_S
                text = "a bug, please report it: background task failed, starting it again in %g s task=%s:%s"
                _log.error(text, pause_s, self._owner, name, exc_info=error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _RESTART_S_MAX)

    async def run_to_end(self, work: Work[T], what: str, deadline: Deadline) -> T:
        """Run `work` as a task and return its result.

        Raises:
            Unavailable: The deadline came first. The work continues.
            Closed: The owner was closed during the work.

        If cancelled, the work continues: its steps need limits of their own.
        """

        async def captured() -> T | KVStoreError:
            # an expected error is a result here: if the caller is gone, it is not logged as a bug
            try:
                return await work()
            except KVStoreError as error:
                return error

        task: asyncio.Task[T | KVStoreError] = self.spawn(captured(), what)
        outcome = await outcome_of(task, what, deadline)
        if isinstance(outcome, KVStoreError):
            raise outcome
        return outcome

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background task failed task=%s", task.get_name(), exc_info=error)

    def _ended_awaited(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, since its awaiter may have been cancelled

    def __len__(self) -> int:
        return len(self._tasks)

    async def aclose(self) -> None:
        """Cancel every task and wait until all have ended. Idempotent.

        A task that closes its own owner is not cancelled: it ends when it returns.
        """
        self._closed = True
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        while tasks:
            for task in tasks:
                task.cancel()
            # cancel again after a while: a library may have swallowed it (`asyncio.wait_for` does before Python 3.12)
            _, left = await asyncio.wait(tasks, timeout=_CANCEL_AGAIN_S)
            tasks = list(left)


def on_loose_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A loop's exception handler: the default one, except for host names that were not resolved in time.

    The caller that wanted to connect gave up at its deadline and reported that. The resolver's answer comes later, and
    the default handler would log it as an error for each attempt.
    """
    if not isinstance(context.get("exception"), socket.gaierror):
        loop.default_exception_handler(context)


async def outcome_of(future: asyncio.Future[T], what: str, deadline: Deadline) -> T:
    """Wait for a future that others may also wait for, without ever cancelling it; errors as `run_to_end`."""
    await asyncio.wait({future}, timeout=deadline.remaining_s)
    if not future.done():
        raise Unavailable(f"could not {what} before the deadline")
    if future.cancelled():
        raise Closed(f"closed before it could {what}")
    return future.result()


async def gather_all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. If one fails, the others are cancelled, and its error is raised once they have ended.

    Not `asyncio.TaskGroup`: when a child fails while its parent waits, Python 3.11 leaves the parent with
    `cancelling() == 1`, and a library that checks it (aiohttp) mistakes its own inner cancellation for its caller's.

    If cancelled, all are cancelled.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        tasks.clear()  # they have the error, whose traceback has this frame: such a cycle would keep what calls hold
        raise
