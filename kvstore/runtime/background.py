"""Owners of background tasks: every task has one, and none outlives it."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Coroutine
from typing import Any

from kvstore.errors import Closed

__all__ = ["Background"]

_log = logging.getLogger(__name__)

_CANCEL_AGAIN_S = 5.0


class Background:
    """A set of named tasks that end with their owner.

    A task that raises is logged with its traceback and counted in `failures`, unless somebody awaits it; it never takes
    its siblings down.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self.failures = 0

    def spawn(
        self, work: Coroutine[Any, Any, Any], name: str, *, is_awaited: bool = False, is_nobodys: bool = False
    ) -> asyncio.Task[Any]:
        """Start `work` now.

        Args:
            work: What the task does.
            name: For logs.
            is_awaited: The caller awaits the task and so gets what it raises: that is no failure to log here.
            is_nobodys: It works for others too: it inherits neither the caller's request nor its trace.

        Raises:
            Closed: The owner is closed; `work` was not started.
        """
        if self._closed:
            work.close()
            raise Closed("the owner of background tasks is closed", owner=self._owner, task=name)
        context = contextvars.Context() if is_nobodys else None
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
            task.exception()  # looked at, since whoever awaited it may be gone

    def __len__(self) -> int:
        return len(self._tasks)

    async def aclose(self) -> None:
        """Cancel every task and wait until all have ended. Idempotent.

        A task that calls this on its own owner is left running: it ends when it returns.
        """
        self._closed = True
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        while tasks:
            for task in tasks:
                task.cancel()
            # again after a while: a library may have swallowed it (`asyncio.wait_for` does, before Python 3.12)
            _, left = await asyncio.wait(tasks, timeout=_CANCEL_AGAIN_S)
            tasks = list(left)
