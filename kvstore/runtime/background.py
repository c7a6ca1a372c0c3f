"""Background tasks with an owner: none outlives it."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import socket
from collections.abc import Coroutine
from typing import Any

from kvstore.errors import Closed

__all__ = ["Background", "on_loose_exception"]

_log = logging.getLogger(__name__)

_CANCEL_AGAIN_S = 5.0


class Background:
    """A set of named tasks that end with their owner.

    A task that raises is logged with its traceback and counted in `failures`, unless it is awaited. It never ends its
    siblings.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self.failures = 0

    def spawn(
        self, work: Coroutine[Any, Any, Any], name: str, *, is_awaited: bool = False, is_shared: bool = False
    ) -> asyncio.Task[Any]:
        """Start `work` now.

        Args:
            work: What the task does.
            name: For logs.
            is_awaited: The caller awaits the task and gets its exception, which is then neither logged nor counted.
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

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures += 1
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

    The caller that connected has given up and reported it once. The resolver's answer comes later and would be logged
    as an error for each attempt.
    """
    if not isinstance(context.get("exception"), socket.gaierror):
        loop.default_exception_handler(context)
