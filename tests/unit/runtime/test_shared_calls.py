"""Calls that several callers share: equal keys share one task, and items that arrive during a call go together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from kvstore.errors import Closed, InternalError, Unavailable
from kvstore.runtime.background import Background
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.shared_calls import Batches, SingleFlight


class Work:
    """Work that counts its starts and cancels and ends when its gate opens."""

    def __init__(self, error: Exception | None = None) -> None:
        self.starts = 0
        self.cancels = 0
        self.gate = asyncio.Event()
        self._error = error

    async def __call__(self) -> int:
        self.starts += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancels += 1
            raise
        if self._error:
            raise self._error
        return self.starts


@pytest.fixture
async def background(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Background]:
    background = Background("tests")
    yield background
    await background.aclose()
    assert caplog.get_records("call") == []  # no task failed


async def asked(flights: SingleFlight[str, int], work: Work, *keys: str) -> list[asyncio.Task[int]]:
    tasks = [asyncio.ensure_future(flights.run(key, work)) for key in keys]
    await asyncio.sleep(0.005)
    return tasks


async def test_many_askers_share_one_flight(background: Background) -> None:
    """Three askers of one key start the work once and get its one result; afterwards the key is free again."""
    flights: SingleFlight[str, int] = SingleFlight(background)
    work = Work()
    tasks = await asked(flights, work, "a", "a", "a")
    assert (work.starts, len(flights)) == (1, 1)
    work.gate.set()
    assert await asyncio.gather(*tasks) == [1, 1, 1]
    await asyncio.sleep(0)
    assert len(flights) == 0
    assert await flights.run("a", work) == 2


async def test_keys_fly_apart(background: Background) -> None:
    """Two keys are two pieces of work."""
    flights: SingleFlight[str, int] = SingleFlight(background)
    work = Work()
    tasks = await asked(flights, work, "a", "b")
    assert (work.starts, len(flights)) == (2, 2)
    work.gate.set()
    await asyncio.gather(*tasks)


async def test_all_askers_get_the_error(background: Background) -> None:
    """What the work raises reaches every asker, is no background failure, and is not kept for the next asker."""
    flights: SingleFlight[str, int] = SingleFlight(background)
    work = Work(Unavailable("on purpose"))
    tasks = await asked(flights, work, "a", "a")
    work.gate.set()
    assert all(isinstance(e, Unavailable) for e in await asyncio.gather(*tasks, return_exceptions=True))
    await asyncio.sleep(0)
    assert len(flights) == 0


async def test_one_asker_leaves_and_the_others_stay(background: Background) -> None:
    """A cancelled asker, even the one who started the flight, takes nothing from the others."""
    flights: SingleFlight[str, int] = SingleFlight(background)
    work = Work()
    first, second = await asked(flights, work, "a", "a")
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert work.cancels == 0
    work.gate.set()
    assert await second == 1


async def test_the_last_asker_ends_the_flight(background: Background) -> None:
    """When all callers have left, the work is cancelled, and the next caller starts it again."""
    flights: SingleFlight[str, int] = SingleFlight(background)
    work = Work()
    tasks = await asked(flights, work, "a", "a")
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert len(flights) == 0
    (again,) = await asked(flights, work, "a")
    assert (work.starts, work.cancels) == (2, 1)
    work.gate.set()
    assert await again == 2


async def test_askers_of_a_closed_owner_are_told_so() -> None:
    """When the owner closes, askers get `Closed`: they were not cancelled themselves."""
    background = Background("tests")
    flights: SingleFlight[str, int] = SingleFlight(background)
    tasks = await asked(flights, Work(), "a", "a")
    await background.aclose()
    assert all(isinstance(e, Closed) for e in await asyncio.gather(*tasks, return_exceptions=True))
    with pytest.raises(Closed):
        await flights.run("b", Work())
    assert len(flights) == 0


class Calls:
    """A call that waits for its gate and remembers what it carried."""

    def __init__(self) -> None:
        self.carried: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None

    async def __call__(self, items: Sequence[int]) -> int:
        self.carried.append(list(items))
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return len(items)


async def test_what_comes_during_a_call_goes_with_the_next() -> None:
    """One call carries the first item, the next one all that came during it, within the limit of a call."""
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


async def test_an_error_is_everybodys_and_the_next_call_is_made(caplog: pytest.LogCaptureFixture) -> None:
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
    assert caplog.text == ""
    await owner.aclose()


async def test_a_bug_in_a_call_is_no_closing(caplog: pytest.LogCaptureFixture) -> None:
    """A call ends with what is no error of ours: all callers get `InternalError`, and the log has it."""
    call, owner = Calls(), Background("test")
    batches = Batches(call, owner, items_max=1)
    call.error = RuntimeError("broken")
    results = await asyncio.gather(*(batches.run(number, None) for number in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [InternalError] * 3
    call.error = None
    assert await batches.run(9, Deadline.after(5.0)) == 1
    assert "broken" in caplog.text
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
    """The owner ends while a call is under way and others wait: every caller gets `Closed`."""
    call, owner = Calls(), Background("test")
    batches = Batches(call, owner, items_max=1)
    call.gate.clear()
    runs = [asyncio.ensure_future(batches.run(number, Deadline.after(5.0))) for number in range(3)]
    await asyncio.sleep(0.01)
    await owner.aclose()
    assert [type(end) for end in await asyncio.gather(*runs, return_exceptions=True)] == [Closed] * 3
    with pytest.raises(Closed):
        await batches.run(9, Deadline.after(5.0))


async def test_closing_the_owner_before_the_call_begins_answers_all() -> None:
    """The owner ends right after an item came: its task never begins, and its caller, who has no deadline, would wait
    for ever."""
    owner = Background("test")
    batches = Batches(Calls(), owner)
    run = asyncio.ensure_future(batches.run(1, None))
    await asyncio.sleep(0)
    await owner.aclose()
    async with asyncio.timeout(5.0):
        with pytest.raises(Closed):
            await run
