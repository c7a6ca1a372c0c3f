"""Single flight: one piece of work for any number of askers, each of whom may leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvstore.errors import Closed, Unavailable
from kvstore.runtime.background import Background
from kvstore.runtime.shared_calls import SingleFlight


class Work:
    """Work that counts its starts and cancels and ends when it is let go."""

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
async def background() -> AsyncIterator[Background]:
    background = Background("tests")
    yield background
    await background.aclose()
    assert background.failures == 0


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
    """When everybody has left the work is cancelled, and whoever asks next starts anew."""
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
