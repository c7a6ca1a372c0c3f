"""Work that runs to its end even when its caller is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from kvstore.errors import Closed, KVStoreError, Unavailable
from kvstore.runtime.background import Background
from kvstore.runtime.deadline import Deadline

__all__ = ["Work", "outcome_of", "see_through"]

T = TypeVar("T")

Work = Callable[[], Coroutine[Any, Any, T]]


async def see_through(background: Background, work: Work[T], what: str, deadline: Deadline) -> T:
    """Run `work` as a task of `background` and wait for it, but no longer than `deadline`.

    Raises:
        Unavailable: The deadline came first. The work continues.
        Closed: The owner was closed meanwhile.

    If cancelled, the work continues: its steps need limits of their own.
    """
    task = background.spawn(_captured(work), what)
    outcome = await outcome_of(task, what, deadline)
    if outcome.error is not None:
        raise outcome.error
    return cast(T, outcome.value)


async def outcome_of(future: asyncio.Future[T], what: str, deadline: Deadline) -> T:
    """Wait for a future that others may also wait for, without ever cancelling it; errors as `see_through`."""
    await asyncio.wait({future}, timeout=deadline.remaining_s)
    if not future.done():
        raise Unavailable(f"could not {what} before the deadline")
    if future.cancelled():
        raise Closed(f"closed before it could {what}")
    return future.result()


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[T]):
    value: T | None = None
    error: KVStoreError | None = None


async def _captured(work: Work[T]) -> _Outcome[T]:
    # Expected errors are returned as values: perhaps nobody is waiting, and they are not bugs to be logged.
    try:
        return _Outcome(value=await work())
    except KVStoreError as error:
        return _Outcome(error=error)
