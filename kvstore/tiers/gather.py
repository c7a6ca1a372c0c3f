"""Runs several coroutines at once and ends them together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

__all__ = ["gather_all"]

T = TypeVar("T")


async def gather_all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. The first error is raised once all others have been cancelled and have ended.

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
        raise
