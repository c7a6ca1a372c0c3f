"""Pauses between attempts, and calls that long work repeats while what it calls is unavailable."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvstore.errors import Unavailable

T = TypeVar("T")

_ATTEMPTS = 5
PAUSE_S = 0.5
"""After the first failure; doubled after each."""


def backoff_s(failures: int, *, shortest_s: float, longest_s: float) -> float:
    """The pause after `failures` failures in a row (1 or more): each doubles it."""
    return min(longest_s, shortest_s * 2.0 ** min(failures - 1, 60))


async def retry(call: Callable[[], Awaitable[T]], kind: type[Unavailable] = Unavailable) -> T:
    """Make a call up to five times: a short outage does not end long work. Cancelled, it makes no further call.

    Args:
        call: Also gives each attempt its deadline.
        kind: Of failure after which it is made again.

    Raises:
        Unavailable: It failed five times in a row, or in another way.
    """
    for attempt in range(_ATTEMPTS - 1):
        try:
            return await call()
        except kind:
            await asyncio.sleep(PAUSE_S * 2**attempt)
    return await call()
