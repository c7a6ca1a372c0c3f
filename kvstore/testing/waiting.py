"""How long tests and benchmarks wait: for calls, and for what happens by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from inspect import isawaitable
from typing import Any, TypeVar

from kvstore.runtime.deadline import Deadline

T = TypeVar("T")

_PATIENCE_S = 60.0
"""Time enough for anything, also on a busy machine."""


def soon(seconds: float = _PATIENCE_S) -> Deadline:
    """The deadline of a call that is to succeed."""
    return Deadline.after(seconds)


def eventually(
    condition: Callable[[], T],
    seconds: float = _PATIENCE_S,
    *,
    holds: Callable[[T], object] = bool,
    despite: type[Exception] | tuple[type[Exception], ...] = (),
    why: str | Callable[[], object] = "",
) -> T:
    """Wait for a condition to become true, and return its value.

    Args:
        holds: Whether that value is the one that is waited for.
        despite: Errors of the condition that mean: not yet.
        why: What to say if it has not in time, such as the log of a process.

    Raises:
        AssertionError: It has not in time; or the last one of those errors.
    """
    ends_s, pause_s = time.monotonic() + seconds, 0.001
    while True:
        is_late = time.monotonic() >= ends_s
        try:
            if holds(value := condition()):
                return value
        except despite:
            if is_late:
                raise
        assert not is_late, f"it did not happen within {seconds} s: {why() if callable(why) else why}"
        time.sleep(pause_s)
        pause_s = min(0.05, 1.2 * pause_s)


async def until(
    condition: Callable[[], Any],
    seconds: float = _PATIENCE_S,
    *,
    holds: Callable[[Any], object] = bool,
    despite: type[Exception] | tuple[type[Exception], ...] = (),
) -> Any:
    """Wait for a condition to become true, on the event loop, and return its value.

    Args:
        condition: May also return an awaitable of its value.
        holds: Whether that value is the one that is waited for.
        despite: Errors of the condition that mean: not yet.

    Raises:
        TimeoutError: It has not in time.
    """
    async with asyncio.timeout(seconds):
        while True:
            pause_s = 0.002
            try:
                value = condition()
                if isawaitable(value):
                    pause_s = 0.02  # it makes calls
                    value = await value
                if holds(value):
                    return value
            except despite:
                pass
            await asyncio.sleep(pause_s)
