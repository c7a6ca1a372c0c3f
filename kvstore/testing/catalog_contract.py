"""The contract of a catalog: subclass `CatalogContract` and give it a `catalog` and a second one, `other`, on the same
data (the same object, if a catalog has one owner).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.catalog import base
from kvstore.catalog.base import Addition, Catalog, LeaveReason, Leaving, LevelTotals, Removal, Step, Use
from kvstore.catalog.entry import HITS_AT, TOKENS_AT, BoundaryEntry, Level
from kvstore.errors import Closed, InvalidRequest
from kvstore.model.keys import PrefixHash, RecordKey
from kvstore.model.kinds import FullAttention, Recurrent
from kvstore.model.layout import GroupLayout, Layout
from kvstore.testing.prompts import Prompt, describe
from kvstore.testing.waiting import soon

_LAYOUT = Layout(64, (GroupLayout(FullAttention(), 8), GroupLayout(FullAttention(), 3), GroupLayout(Recurrent(), 11)))
_PROMPT = Prompt(_LAYOUT, "a", 64 * 1024, step_tokens=64, model="catalog")
_NAMESPACE = _PROMPT.namespace


def _added(
    tokens: int, group: int = 0, slice_: int = 0, *, level: Level = Level.HOT, num_bytes: int = 1000
) -> Addition:
    parent = _PROMPT.boundary(tokens - 64).prefix if tokens > 64 else None
    return Addition(_PROMPT.key(tokens, group, slice_), level, num_bytes, tokens, parent)


def _whole(tokens: int, level: Level = Level.HOT, num_bytes: int = 1000) -> list[Addition]:
    return [
        _added(tokens, index, slice_, level=level, num_bytes=num_bytes + index)
        for index, group in enumerate(_LAYOUT.groups)
        for slice_ in range(group.num_slices)
    ]


def _prefix(tokens: int) -> PrefixHash:
    return _PROMPT.boundary(tokens).prefix


class CatalogContract:
    """Behaviour of `Catalog`."""

    async def test_what_was_added_is_found(self, catalog: Catalog) -> None:
        """An entry has the slices, the bytes per group, the position and the parent that were reported."""
        await _open(catalog)
        assert await catalog.add(_whole(128), deadline=soon()) == [True] * 22
        entry = await catalog.get(_NAMESPACE, _prefix(128), deadline=soon())
        assert entry is not None
        assert (entry.tokens, entry.parent, entry.hits) == (128, _prefix(64), 0)
        assert entry.slices == ((0xFF, 0x7, 0x7FF), (0, 0, 0))
        assert entry.group_bytes[Level.HOT] == (8000, 3003, 11 * 1002)
        assert entry.num_records(Level.HOT) == 22 and entry.num_records(Level.COLD) == 0
        assert sorted(entry.keys(Level.HOT)) == sorted(one.key for one in _whole(128))
        assert await catalog.get(_NAMESPACE, _prefix(64), deadline=soon()) is None

    async def test_a_lookup_is_in_order_and_of_any_length(self, catalog: Catalog) -> None:
        """Rows come as asked for, absent ones are empty, and one group's mean size is exact."""
        await _open(catalog)
        await catalog.add([_added(64, 0, 3), _added(64, 2, 10, num_bytes=50), _added(64 * 900, 1, 2)], deadline=soon())
        tokens = list(range(64, 64 * 1025, 64))
        table = await catalog.lookup(_NAMESPACE, [_prefix(at) for at in tokens], deadline=soon())
        assert [at for at, there in zip(tokens, table.present(), strict=True) if there] == [64, 64 * 900]
        assert table.rows(Level.HOT)[0].tolist() == [8, 0, 0, 4]
        assert table.rows(Level.HOT)[899].tolist() == [0, 4, 0, 0]
        assert not table.rows(Level.COLD).any()
        assert [table.mean_bytes(Level.HOT, group) for group in range(3)] == [1000, 1000, 50]

    async def test_what_is_told_twice_counts_once(self, catalog: Catalog, other: Catalog) -> None:
        """Two services report the same record, at once and again: it counts once, and the first size stays."""
        await _open(catalog, other)
        calls = [one.add([_added(64, num_bytes=size)], deadline=soon()) for one, size in ((catalog, 7), (other, 7))]
        await asyncio.gather(*calls)
        await catalog.add([_added(64, num_bytes=9), _added(64, num_bytes=9)], deadline=soon())
        assert await _levels(catalog) == (1, LevelTotals(1, 1, 7), LevelTotals())

    async def test_levels_are_apart(self, catalog: Catalog) -> None:
        """One entry has both levels, and the records of one may be removed without the other."""
        await _open(catalog)
        await catalog.add([*_whole(64), *_whole(64, Level.COLD, 2000)], deadline=soon())
        hot, cold = LevelTotals(1, 22, 22_025), LevelTotals(1, 22, 44_025)
        assert await _levels(catalog) == (1, hot, cold)
        await catalog.remove(
            [Removal(one.key, Level.HOT, one.num_bytes, LeaveReason.LOST) for one in _whole(64)], deadline=soon()
        )
        assert await _levels(catalog) == (1, LevelTotals(), cold)
        assert await _start(catalog, 64, Level.HOT) is None

    async def test_a_removal_of_unknown_size_leaves_no_rest(self, catalog: Catalog) -> None:
        """An unknown size counts as the mean; the last record has the rest, and the entry is removed with it."""
        await _open(catalog)
        await catalog.add([_added(64, 1, s, num_bytes=n) for s, n in ((0, 10), (1, 11), (2, 13))], deadline=soon())
        for slice_, left in ((0, 23), (2, 12), (1, 0), (1, 0)):
            removal = Removal(_PROMPT.key(64, 1, slice_), Level.HOT, None, LeaveReason.CORRUPT)
            await catalog.remove([removal], deadline=soon())
            assert (await _levels(catalog))[1].num_bytes == left
        assert await _levels(catalog) == (0, LevelTotals(), LevelTotals())
        assert await catalog.get(_NAMESPACE, _prefix(64), deadline=soon()) is None

    async def test_a_boundary_leaves_in_two_steps(self, catalog: Catalog, other: Catalog) -> None:
        """While it leaves, lookups see nothing there, additions are refused, and another service may finish. Then its
        bytes are subtracted from the totals, and its tombstone has the reason.
        """
        await _open(catalog, other)
        await catalog.add([*_whole(64, Level.COLD), *_whole(128, Level.COLD)], deadline=soon())
        entry = await _start(catalog, 64, Level.COLD)
        assert entry is not None and len(entry.keys(Level.COLD)) == 22 and entry.leaving == {Level.COLD}
        table = await catalog.lookup(_NAMESPACE, [_prefix(64)], deadline=soon())
        assert not table.rows(Level.COLD).any()
        told = [_added(64, level=Level.COLD), _added(64, level=Level.HOT)]
        assert await other.add(told, deadline=soon()) == [False, True]
        again = await _start(other, 64, Level.COLD, unless_used_since_s=0)
        assert again is not None and again.keys(Level.COLD) == entry.keys(Level.COLD)
        gone = [(entry, LeaveReason.QUOTA)]
        assert await other.finish_leaving(gone, Level.COLD, deadline=soon()) == 22_025
        assert await catalog.finish_leaving(gone, Level.COLD, deadline=soon()) == 0
        assert await _levels(catalog) == (2, LevelTotals(1, 1, 1000), LevelTotals(1, 22, 22_025))
        (tombstone,) = await catalog.tombstones(limit=10, deadline=soon())
        assert (tombstone.prefix, tombstone.reason, tombstone.num_bytes) == (_prefix(64), LeaveReason.QUOTA, 22_025)
        assert (tombstone.group, tombstone.slice, tombstone.level) == (None, None, Level.COLD)

    async def test_many_boundaries_leave_ends_first(self, catalog: Catalog) -> None:
        """Of one prompt what is pinned stays, with all below it; of another, and of one that is not there, all that is
        there leaves. The totals lose exactly what is finished.
        """
        await _open(catalog)
        prompt, alone = [64, 128, 192, 256], [64 * 20, 64 * 30]
        for tokens in (*prompt, alone[0]):
            await catalog.add(_whole(tokens, Level.COLD), deadline=soon())
        await catalog.pin(_NAMESPACE, [_prefix(128)], 4_000_000_000, deadline=soon())
        order = [256, *alone, 192, 128, 64]
        below = [order.index(tokens - 64) if tokens - 64 in prompt else None for tokens in order]
        leaving = [
            Leaving(_NAMESPACE, _prefix(tokens), below=place) for tokens, place in zip(order, below, strict=True)
        ]
        hidden = await catalog.start_leaving(leaving, Level.COLD, deadline=soon())
        assert [entry.tokens if entry is not None else None for entry in hidden] == [256, 1280, None, 192, None, None]
        assert all(entry.leaving == {Level.COLD} for entry in hidden if entry is not None)
        gone = [(entry, LeaveReason.EVICTED) for entry in hidden if entry is not None]
        assert await catalog.finish_leaving(gone, Level.COLD, deadline=soon()) == 3 * 22_025
        assert await catalog.finish_leaving(gone, Level.COLD, deadline=soon()) == 0
        assert await catalog.finish_leaving([], Level.COLD, deadline=soon()) == 0
        assert await _levels(catalog) == (2, LevelTotals(), LevelTotals(2, 44, 2 * 22_025))
        assert len(await catalog.tombstones(limit=10, deadline=soon())) == 3

    async def test_who_stops_leaving_is_seen_again(self, catalog: Catalog) -> None:
        """Nothing was deleted after all."""
        await _open(catalog)
        await catalog.add([_added(64)], deadline=soon())
        await _start(catalog, 64, Level.HOT)
        await catalog.stop_leaving(_NAMESPACE, _prefix(64), Level.HOT, deadline=soon())
        table = await catalog.lookup(_NAMESPACE, [_prefix(64)], deadline=soon())
        assert table.rows(Level.HOT).any()
        assert await catalog.add([_added(64, 0, 1)], deadline=soon()) == [True]

    async def test_pins_and_use_protect(self, catalog: Catalog) -> None:
        """A boundary stays if it was used after the given time, and while it is pinned."""
        await _open(catalog)
        await catalog.add([_added(64)], deadline=soon())
        assert await _start(catalog, 64, Level.HOT, unless_used_since_s=1) is None
        assert await catalog.pin(_NAMESPACE, [_prefix(64), _prefix(128)], 4_000_000_000, deadline=soon()) == 1
        assert await _start(catalog, 64, Level.HOT) is None
        entry = await catalog.get(_NAMESPACE, _prefix(64), deadline=soon())
        assert entry is not None and entry.pinned_until_s == 4_000_000_000
        await catalog.pin(_NAMESPACE, [_prefix(64)], 0, deadline=soon())
        assert await _start(catalog, 64, Level.HOT) is not None

    async def test_what_is_being_deleted_takes_no_pin(self, catalog: Catalog) -> None:
        """It would seem to be kept, and be gone a moment later. Also if it leaves one level of two."""
        await _open(catalog)
        for level in Level:
            await catalog.add([_added(64, level=level)], deadline=soon())
        for level in Level:
            assert await _start(catalog, 64, level) is not None
            assert await catalog.pin(_NAMESPACE, [_prefix(64)], 4_000_000_000, deadline=soon()) == 0
            await catalog.stop_leaving(_NAMESPACE, _prefix(64), level, deadline=soon())
        assert await catalog.pin(_NAMESPACE, [_prefix(64)], 4_000_000_000, deadline=soon()) == 1

    async def test_use_counts_and_fills_in(self, catalog: Catalog) -> None:
        """Hits add up; position and parent, unknown after a reindex, are learnt; absent boundaries are ignored."""
        await _open(catalog)
        await catalog.add([Addition(_PROMPT.key(128), Level.COLD, 10, 0)], deadline=soon())
        uses = [Use(_prefix(128), 2, 128, _prefix(64)), Use(_prefix(640), 1, 640, None)]
        await catalog.use(_NAMESPACE, uses, deadline=soon())
        await catalog.use(_NAMESPACE, [Use(_prefix(128), 3, 999, _prefix(640))], deadline=soon())
        entry = await catalog.get(_NAMESPACE, _prefix(128), deadline=soon())
        assert entry is not None and (entry.hits, entry.tokens, entry.parent) == (5, 128, _prefix(64))
        assert entry.last_use_s >= entry.first_use_s > 1_700_000_000
        assert await _levels(catalog) == (1, LevelTotals(), LevelTotals(1, 1, 10))

    async def test_totals_are_exact_with_several_writers(self, catalog: Catalog, other: Catalog) -> None:
        """Two services add and remove at random, at once: the totals equal what a walk over all entries counts."""
        await _open(catalog, other)
        numbers = random.Random(4)

        def change(one: Catalog) -> asyncio.Future[object]:
            tokens = 64 * numbers.randrange(1, 40)
            group = numbers.randrange(3)
            slice_, level = numbers.randrange(_LAYOUT.groups[group].num_slices), numbers.choice(list(Level))
            key = _PROMPT.key(tokens, group, slice_)
            size = 100 + group + slice_
            if numbers.random() < 0.6:
                return asyncio.ensure_future(
                    one.add([_added(tokens, group, slice_, level=level, num_bytes=size)], deadline=soon())
                )
            removal = Removal(key, level, size, LeaveReason.EVICTED)
            return asyncio.ensure_future(one.remove([removal], deadline=soon()))

        for _ in range(30):
            await asyncio.gather(*(change(numbers.choice([catalog, other])) for _ in range(40)))
        counted: Counter[tuple[Level, str]] = Counter()
        num_entries = 0
        async for entry in catalog.iterate(_NAMESPACE):
            num_entries += 1
            for level in Level:
                keys = entry.keys(level)
                assert entry.num_bytes(level) == sum(100 + key.group + key.slice for key in keys)
                counted[level, "boundaries"] += bool(keys)
                counted[level, "records"] += len(keys)
                counted[level, "bytes"] += entry.num_bytes(level)
        assert num_entries > 30
        levels = [
            LevelTotals(*(counted[level, what] for what in ("boundaries", "records", "bytes"))) for level in Level
        ]
        assert await _levels(other) == (num_entries, *levels)

    async def test_a_walk_in_steps_sees_every_entry(self, catalog: Catalog) -> None:
        """Piece by piece with a cursor: all entries of the namespace as a lookup tells them, none of another one."""
        await _open(catalog)
        second = describe(_LAYOUT, "another", tenant="t")
        await catalog.register(second.id, _LAYOUT, "t", deadline=soon())
        await catalog.add([Addition(RecordKey(second.id, _prefix(64), 0, 0), Level.COLD, 5, 64)], deadline=soon())
        added = [_added(64 * i, i % 3, level=Level(i % 2), num_bytes=70_000 + i) for i in range(1, 100)]
        await catalog.add(added, deadline=soon())
        await catalog.use(_NAMESPACE, [Use(one.key.prefix, one.tokens // 64) for one in added], deadline=soon())
        seen: dict[PrefixHash, tuple[int, ...]] = {}
        cursor: str | None = ""
        while cursor is not None:
            step = await catalog.step(_NAMESPACE, cursor, count=7, deadline=soon())
            numbers = (step.table.numbers(at).tolist() for at in (TOKENS_AT, HITS_AT))
            sizes = (step.table.level_bytes(level).tolist() for level in Level)
            seen.update(zip(step.prefixes, zip(*numbers, *sizes, strict=True), strict=True))
            cursor = step.cursor
        assert seen == {
            one.key.prefix: (one.tokens, one.tokens // 64, *(one.num_bytes * (one.level is level) for level in Level))
            for one in added
        }
        table = await catalog.lookup(_NAMESPACE, [_prefix(64 * i) for i in range(1, 100)], deadline=soon())
        assert [i for i, is_it in enumerate(table.has_parent(_prefix(64 * 7)), 1) if is_it] == [8]
        for wrong in ("x", "00", "1.7.0", "9" * 90):
            with pytest.raises(InvalidRequest, match="start again"):
                await catalog.step(_NAMESPACE, wrong, count=7, deadline=soon())

    async def test_what_is_leaving_is_found_beside_requests(
        self, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Among more entries than one batch, at either level. The walk rests as long as it works."""
        await _open(catalog)
        await catalog.add([_added(64 * i, level=Level(i % 2)) for i in range(1, 1500)], deadline=soon())
        for i in (2, 700, 1301):
            await _start(catalog, 64 * i, Level(i % 2))
        step, pauses = catalog.step, list[float]()

        async def slow_step(*arguments: Any, **named: Any) -> Step:
            time.sleep(0.05)
            return await step(*arguments, **named)

        async def rest(seconds: float) -> None:
            pauses.append(seconds)

        monkeypatch.setattr(catalog, "step", slow_step)
        monkeypatch.setattr(base, "asyncio", SimpleNamespace(sleep=rest))
        found, started_s = dict[PrefixHash, frozenset[Level]](), time.monotonic()
        async for entry in catalog.leaving([_NAMESPACE]):
            found[entry.prefix] = entry.leaving
            time.sleep(0.2)  # what the caller does with an entry is not the catalog's work
        assert found == {_prefix(64 * i): {Level(i % 2)} for i in (2, 700, 1301)}
        assert len(pauses) > 2 and min(pauses) >= 0.05
        assert sum(pauses) <= time.monotonic() - started_s - 3 * 0.2

    async def test_iteration_sees_every_entry_once(self, catalog: Catalog) -> None:
        """More entries than one batch, and none of another namespace."""
        await _open(catalog)
        second = describe(_LAYOUT, "another", tenant="t")
        await catalog.register(second.id, _LAYOUT, "t", deadline=soon())
        await catalog.add([_added(64 * i) for i in range(1, 1500)], deadline=soon())
        foreign = RecordKey(second.id, _prefix(64), 0, 0)
        await catalog.add([Addition(foreign, Level.COLD, 5, 64)], deadline=soon())
        seen = [entry.prefix async for entry in catalog.iterate(_NAMESPACE)]
        assert sorted(set(seen)) == sorted(_prefix(64 * i) for i in range(1, 1500))
        assert [entry.prefix async for entry in catalog.iterate(second.id)] == [_prefix(64)]
        totals = await catalog.totals(deadline=soon())
        assert (totals[second.id].tenant, totals[second.id].levels[Level.COLD].num_bytes) == ("t", 5)
        assert totals[_NAMESPACE].tenant == ""

    async def test_a_walk_over_several_namespaces(self, catalog: Catalog) -> None:
        """Every entry of each, also where their names come mixed, and none of another namespace."""
        await _open(catalog)
        others = [describe(_LAYOUT, name, tenant="t").id for name in ("second", "third", "fourth")]
        wanted = [_NAMESPACE, *others[:2]]
        for namespace in others:
            await catalog.register(namespace, _LAYOUT, "t", deadline=soon())
        for number, namespace in enumerate([*wanted, others[2]]):
            keys = [RecordKey(namespace, _prefix(64 * i), 0, 0) for i in range(1, 300 * number + 50)]
            await catalog.add([Addition(key, Level.COLD, 5, 64) for key in keys], deadline=soon())
        found: dict[bytes, set[PrefixHash]] = {}
        async for namespace, step in catalog.walk(wanted):
            assert step.table.present().all()
            found.setdefault(namespace, set()).update(step.prefixes)
        assert found == {
            namespace: {_prefix(64 * i) for i in range(1, 300 * number + 50)} for number, namespace in enumerate(wanted)
        }

    async def test_tombstones_are_the_last_ones(self, catalog: Catalog) -> None:
        """Tombstones of single records have group and slice, the latest first."""
        await _open(catalog)
        await catalog.add(_whole(64), deadline=soon())
        for slice_ in range(3):
            removal = Removal(_PROMPT.key(64, 0, slice_), Level.HOT, 1000, LeaveReason.CORRUPT)
            await catalog.remove([removal], deadline=soon())
        told = await catalog.tombstones(limit=2, deadline=soon())
        assert [(one.group, one.slice, one.num_bytes, one.reason) for one in told] == [
            (0, 2, 1000, LeaveReason.CORRUPT),
            (0, 1, 1000, LeaveReason.CORRUPT),
        ]

    async def test_completeness(self, catalog: Catalog, other: Catalog) -> None:
        """A new catalog does not claim to know everything; any service may say whether it does."""
        await _open(catalog, other)
        assert not await catalog.is_complete(deadline=soon())
        await mark_complete(catalog)
        assert await other.is_complete(deadline=soon())
        await other.mark_incomplete(deadline=soon())
        assert not await catalog.is_complete(deadline=soon())

    async def test_what_ended_its_epoch_cannot_make_it_complete(self, catalog: Catalog, other: Catalog) -> None:
        """What was lost during the walk may lie behind it. Of two walks that saw the same, both count."""
        await _open(catalog, other)
        first = await catalog.epoch(deadline=soon())
        assert await other.epoch(deadline=soon()) == first
        assert not await catalog.is_complete(deadline=soon())
        await other.mark_incomplete(deadline=soon())
        assert not await catalog.mark_complete(first, deadline=soon())
        second = await catalog.epoch(deadline=soon())
        assert not await catalog.mark_complete(first, deadline=soon())
        assert not await other.is_complete(deadline=soon())
        assert await catalog.mark_complete(second, deadline=soon())
        assert await other.mark_complete(second, deadline=soon())
        assert await other.is_complete(deadline=soon())
        third = await catalog.epoch(deadline=soon())  # of a complete one, by hand: it stays so during that
        assert await catalog.is_complete(deadline=soon())
        assert await catalog.mark_complete(third, deadline=soon())

    async def test_bad_calls_are_refused_by_name(self, catalog: Catalog) -> None:
        """A namespace that was not registered, a slice that the layout lacks, a call after the end."""
        with pytest.raises(InvalidRequest, match="register"):
            await catalog.add([_added(64)], deadline=soon())
        await _open(catalog)
        with pytest.raises(InvalidRequest, match="no such slice"):
            await catalog.add([_added(64, 1, 3)], deadline=soon())
        await catalog.aclose()
        await catalog.aclose()
        with pytest.raises(Closed):
            await catalog.totals(deadline=soon())


async def mark_complete(catalog: Catalog) -> None:
    """Mark it complete, as after a rebuild of which it missed nothing."""
    assert await catalog.mark_complete(await catalog.epoch(deadline=soon()), deadline=soon())


async def _open(*catalogs: Catalog) -> None:
    for catalog in catalogs:
        await catalog.register(_NAMESPACE, _LAYOUT, "", deadline=soon())


async def _start(
    catalog: Catalog, tokens: int, level: Level, *, unless_used_since_s: int = 0xFFFFFFFF
) -> BoundaryEntry | None:
    leaving = Leaving(_NAMESPACE, _prefix(tokens), unless_used_since_s)
    (entry,) = await catalog.start_leaving([leaving], level, deadline=soon())
    return entry


async def _levels(catalog: Catalog) -> tuple[int, LevelTotals, LevelTotals]:
    totals = (await catalog.totals(deadline=soon()))[_NAMESPACE]
    return (totals.num_boundaries, totals.levels[Level.HOT], totals.levels[Level.COLD])
