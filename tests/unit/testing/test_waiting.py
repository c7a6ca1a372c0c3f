"""How tests wait: a wait that ends too early would leave what follows it untested."""

from __future__ import annotations

from itertools import count

import pytest

from kvstore.errors import Unavailable
from kvstore.testing.waiting import until


async def test_a_value_is_waited_for() -> None:
    """Of a function and of a coroutine: the first value that holds is returned."""
    numbers, awaited = count(), count()

    async def read() -> int:
        return next(awaited)

    assert await until(lambda: next(numbers)) == 1
    assert await until(read, holds=lambda number: number == 3) == 3
    with pytest.raises(TimeoutError):
        await until(read, 0.05, holds=lambda number: number < 0)


async def test_errors_that_mean_not_yet() -> None:
    """These alone are waited through."""
    answers = iter([Unavailable("not now"), ValueError("a bug")])

    async def ask() -> None:
        raise next(answers)

    with pytest.raises(ValueError, match="a bug"):
        await until(ask, despite=Unavailable)
