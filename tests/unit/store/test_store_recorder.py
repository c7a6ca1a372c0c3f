"""What a store tells its catalog, one change at a time: of a record that is lost, and of a change that was refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from kvstore.catalog.base import LeaveReason, Leaving
from kvstore.catalog.entry import Level
from kvstore.catalog.sqlite.catalog import SqliteCatalog
from kvstore.errors import Unavailable
from kvstore.format.record import Record
from kvstore.model.keys import RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.store.catalogued_tier import CataloguedTier
from kvstore.store.recorder import Recorder
from kvstore.testing.catalog_contract import mark_complete
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.waiting import soon, until
from kvstore.tiers.memory import MemoryTier


@pytest.fixture
async def recorder(tmp_path: Path) -> AsyncIterator[Recorder]:
    catalog = SqliteCatalog(tmp_path / "catalog.db")
    made = Recorder(catalog, Instruments())
    yield made
    await made.aclose()
    await catalog.aclose()


class Watched(MemoryTier):
    """Calls `before_get` before each read."""

    before_get: Callable[[RecordKey], Awaitable[None]] | None = None

    async def get(
        self, key: RecordKey, *, deadline: Deadline, allocate: Callable[[int], memoryview] | None = None
    ) -> Record | None:
        if self.before_get is not None:
            await self.before_get(key)
        return await super().get(key, deadline=deadline, allocate=allocate)


async def catalogued(recorder: Recorder) -> tuple[CataloguedTier, Watched, Sequence[Record]]:
    """A tier that reports to the catalog, the one inside it, and the records that it holds."""
    inner, prompt = Watched(16 << 20, name="cold"), Prompt(ATTENTION, "a", 64)
    tier = CataloguedTier(inner, Level.COLD, recorder)
    recorder.register(prompt.namespace, prompt.layout, "")
    for record in prompt.records():
        await tier.put(record, deadline=soon())
    return tier, inner, prompt.records()


async def reported(recorder: Recorder) -> list[tuple[int, LeaveReason]]:
    """The slices that left, and why."""
    found = await recorder.catalog.tombstones(limit=10, deadline=soon())
    return [(one.slice, one.reason) for one in found]


async def test_a_lost_record_is_not_called_corrupt_for_another_one(recorder: Recorder) -> None:
    """While a tier looks for a record that it has lost, another one is found bad and quarantined."""
    tier, inner, records = await catalogued(recorder)
    lost, bad = records[0].key, records[1].key
    assert await inner.delete(lost, deadline=soon())

    async def quarantine_another(_: RecordKey) -> None:
        assert await inner.quarantine(bad, "bad", deadline=soon())

    inner.before_get = quarantine_another
    assert await tier.get(lost, deadline=soon()) is None
    assert await reported(recorder) == [(lost.slice, LeaveReason.LOST)]


async def test_a_record_that_two_reads_miss_together_is_called_corrupt(recorder: Recorder) -> None:
    """One of them quarantines it, and has yet to report that when another one begins and ends."""
    tier, inner, records = await catalogued(recorder)
    goes_on, is_first = asyncio.Event(), True

    async def quarantine(key: RecordKey) -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            assert await inner.quarantine(key, "bad", deadline=soon())
            await goes_on.wait()
        else:
            goes_on.set()

    inner.before_get = quarantine
    key = records[0].key
    assert await asyncio.gather(*(tier.get(key, deadline=soon()) for _ in range(2))) == [None, None]
    assert await reported(recorder) == [(key.slice, LeaveReason.CORRUPT)]


async def test_what_was_quarantined_before_is_not_why_a_record_is_gone(recorder: Recorder) -> None:
    """A read that failed after it had quarantined the record leaves nothing behind."""
    tier, inner, records = await catalogued(recorder)

    async def fail(key: RecordKey) -> None:
        assert await inner.quarantine(key, "bad", deadline=soon())
        raise Unavailable("not now")

    inner.before_get = fail
    key = records[0].key
    with pytest.raises(Unavailable):
        await tier.get(key, deadline=soon())
    inner.before_get = None
    assert not vars(tier)["_bad"]
    await inner.put(records[0], deadline=soon())
    assert await inner.delete(key, deadline=soon())
    assert await tier.get(key, deadline=soon()) is None
    assert await reported(recorder) == [(key.slice, LeaveReason.LOST)]


@pytest.mark.parametrize("is_away", [False, True])
async def test_a_refused_change_is_not_forgotten_at_the_end(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, is_away: bool
) -> None:
    """The service stops before it has reported a record again that the catalog refused while its boundary was being
    deleted, because its caller had no time, or did not wait for a catalog that was away. The record is stored, so a
    complete catalog would deny it: it is marked incomplete.
    """
    catalog, prompt = recorder.catalog, Prompt(ATTENTION, "a", 64)
    before, since = prompt.records()[:2]
    recorder.register(prompt.namespace, prompt.layout, "")
    await mark_complete(catalog)
    assert await recorder.added(before, Level.COLD, deadline=soon())
    leaving = Leaving(prompt.namespace, before.key.prefix)
    assert await catalog.start_leaving([leaving], Level.COLD, deadline=soon()) != [None]
    if is_away:
        with monkeypatch.context() as patched:
            patched.setattr(catalog, "remove", AsyncMock(side_effect=Unavailable("away")))
            await recorder.removed(since.key, Level.HOT, LeaveReason.LOST, None, deadline=soon())
        assert recorder.backlog.since_ms is not None
    # its caller waits for no answer, so nobody puts the record again
    assert await recorder.added(since, Level.COLD, deadline=soon() if is_away else Deadline.after(0))
    await until(lambda: recorder.num_refused)
    assert await catalog.is_complete(deadline=soon())
    await recorder.aclose()
    assert not await catalog.is_complete(deadline=soon())
