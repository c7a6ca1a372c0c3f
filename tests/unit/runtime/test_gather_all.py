"""Several coroutines at once, ended together."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.runtime.background import gather_all

pytestmark = pytest.mark.virtual_time


async def test_results_in_order() -> None:
    """Results come in the order of the work, not of its end."""

    async def wait(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    assert await gather_all(wait(seconds) for seconds in (0.02, 0.0, 0.01)) == [0.02, 0.0, 0.01]
    assert await gather_all([]) == []


async def test_first_error_ends_the_others() -> None:
    """When one fails, the others have ended before the error is raised, and the caller is not left half cancelled."""
    ended: list[int] = []

    async def linger(number: int) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append(number)

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        await gather_all([linger(1), fail(), linger(2)])
    assert sorted(ended) == [1, 2]
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
