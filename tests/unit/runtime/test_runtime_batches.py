"""Many small pieces of work in few calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvstore.errors import Closed, Unavailable
from kvstore.runtime.background import Background
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.shared_calls import Batches


class Calls:
    """A call that waits for its gate and remembers what it carried."""

    def __init__(self) -> None:
        self.carried: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Unavailable | None = None

    async def __call__(self, items: Sequence[int]) -> int:
        self.carried.append(list(items))
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return len(items)


async def test_what_comes_during_a_call_goes_with_the_next() -> None:
    """One call carries the first item, the next one all that came meanwhile, within the limit of a call."""
    call, owner = Calls(), Background("test")
    batches = Batches(call, owner, items_max=5)
    call.gate.clear()
    runs = [asyncio.ensure_future(batches.run(0, Deadline.after(5.0)))]
    await asyncio.sleep(0.01)
    runs += [asyncio.ensure_future(batches.run(number, Deadline.after(5.0))) for number in range(1, 8)]
    await asyncio.sleep(0.01)
    call.gate.set()
    assert await asyncio.gather(*runs) == [1, 5, 5, 5, 5, 5, 2, 2]
    assert call.carried == [[0], [1, 2, 3, 4, 5], [6, 7]]
    await owner.aclose()


async def test_an_error_is_everybodys_and_the_next_call_is_made() -> None:
    """A call fails: all that it carried fail, later items are carried."""
    call, owner = Calls(), Background("test")
    batches = Batches(call, owner)
    call.error = Unavailable("told to fail")
    results = await asyncio.gather(
        *(batches.run(number, Deadline.after(5.0)) for number in range(3)), return_exceptions=True
    )
    assert [type(result) for result in results] == [Unavailable] * 3
    call.error = None
    assert await batches.run(9, Deadline.after(5.0)) == 1
    assert owner.failures == 0
    await owner.aclose()


async def test_a_deadline_and_a_cancel_cost_one_caller_only() -> None:
    """One caller's time is up, another is cancelled, while a call is under way: the third gets its answer."""
    call, owner = Calls(), Background("test")
    batches = Batches(call, owner)
    call.gate.clear()
    late = asyncio.ensure_future(batches.run(1, Deadline.after(0.02)))
    gone = asyncio.ensure_future(batches.run(2, Deadline.after(5.0)))
    patient = asyncio.ensure_future(batches.run(3, Deadline.after(5.0)))
    with pytest.raises(Unavailable):
        await late
    gone.cancel()
    await asyncio.sleep(0)
    call.gate.set()
    assert await patient == 3
    assert gone.cancelled()
    await owner.aclose()


async def test_closing_the_owner_answers_all() -> None:
    """The owner ends while a call is under way and others wait: every caller is told."""
    call, owner = Calls(), Background("test")
    batches = Batches(call, owner, items_max=1)
    call.gate.clear()
    runs = [asyncio.ensure_future(batches.run(number, Deadline.after(5.0))) for number in range(3)]
    await asyncio.sleep(0.01)
    await owner.aclose()
    assert [type(end) for end in await asyncio.gather(*runs, return_exceptions=True)] == [Closed] * 3
    with pytest.raises(Closed):
        await batches.run(9, Deadline.after(5.0))
