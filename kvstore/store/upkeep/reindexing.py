"""Reindex: rebuild a catalog from a walk over the records of a tier."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar, cast

from kvstore.catalog.base import TOMBSTONES_MAX, Addition, Catalog, LeaveReason, Removal
from kvstore.catalog.entry import BoundaryEntry, EntryShape, EntryTable, Level
from kvstore.errors import Unavailable
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.runtime.clock import Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.retries import retry
from kvstore.store.namespaces import read_description
from kvstore.store.presence import slices_of
from kvstore.tiers.base import Entry, Tier

_log = logging.getLogger(__name__)

T = TypeVar("T")

LOST_MORE = "the catalog lost more during its rebuild, as when a Redis is restarted: start another reindex"
_BATCH, _SHORT_BATCH = 2048, 256
_CALL_S = 30.0
_CHECK_S, _CHECKED_MAX = 5.0, 4096
"""How often the latest removals are read, and how many boundaries may be added in between."""


@dataclass(slots=True)
class ReindexReport:
    """What a reindex of one level did."""

    num_records: int = 0
    """Records that were listed."""
    num_bytes: int = 0
    num_skipped: int = 0
    """Records that were in the catalog already."""
    num_stale: int = 0
    """Records in the catalog that are not stored: removed from it."""
    num_resized: int = 0
    """Groups of a boundary whose size in the catalog was corrected, since a record had been replaced."""
    num_unknown: int = 0
    """Records that the catalog cannot hold: of namespaces without a readable manifest, or of a group or slice that a
    namespace does not have."""
    namespaces: list[str] = field(default_factory=list)
    """Namespaces found, in hex."""
    unknown_namespaces: list[str] = field(default_factory=list)
    """Those without a manifest."""

    @property
    def num_added(self) -> int:
        """Records that the catalog lacked."""
        return self.num_records - self.num_skipped - self.num_unknown


Reports = dict[Level, ReindexReport]
Progress = Callable[[Level, ReindexReport], None]
"""Called now and then with the report on a level so far."""

Seen = dict[tuple[NamespaceId, PrefixHash], dict[int, list[int]]]
"""For each boundary and group a bit per slice, and the bytes of these slices."""


async def reindex_level(
    catalog: Catalog,
    tier: Tier,
    level: Level,
    *,
    clock: Clock,
    manifests: Sequence[Tier] = (),
    progress: Callable[[ReindexReport], None] = lambda report: None,
    only_adds: bool = False,
) -> ReindexReport:
    """Add every record of a tier that the catalog lacks, and remove what is not stored. Services may keep running: they
    report what they store and delete, and the walk checks the tier again before it removes an entry. It compares no
    times, so the clocks of the services and of this process need not agree.

    Interrupted and called again, it lists everything again but adds only what the catalog still lacks. Every boundary
    that was listed is remembered until the end (docs/catalog.md gives the memory that this takes). Positions and
    parents are learnt when the records are read.

    Args:
        manifests: Further tiers to ask for a manifest that this one lacks, e.g. a Redis after FLUSHALL.
        progress: Called with the report so far, after each batch.
        only_adds: Remove nothing from the catalog, so that what was listed need not be remembered. An entry of what is
            not stored any more stays until a lookup finds that. Calls of the catalog are short, and a pause as long as
            the call follows each: requests use the catalog too.

    Raises:
        Unavailable: The tier or the catalog failed several times in a row; call it again to continue.
    """
    walk = _Walk(catalog, level, [tier, *manifests], clock=clock, only_adds=only_adds)
    async for entry in tier.scan():
        if await walk.see(entry):
            started_s = clock.monotonic_s()
            await walk.flush()
            progress(walk.report)
            if only_adds:  # beside requests, whose lookups the catalog answers too
                await asyncio.sleep(clock.monotonic_s() - started_s)
    await walk.flush()
    await walk.check_removed()
    if not only_adds:
        await walk.sweep()
    progress(walk.report)
    return walk.report


async def reindex_store(
    catalog: Catalog,
    tiers: Mapping[Level, Tier],
    *,
    clock: Clock,
    progress: Progress = lambda level, report: None,
    only_adds: bool = False,
) -> Reports:
    """Reindex every level, count the totals again, and mark the catalog complete.

    Args:
        progress: Called after each batch.
        only_adds: As of `reindex_level`.

    Raises:
        Unavailable: As of `reindex_level`; or the catalog was marked incomplete, or lost its data, during the walk.
            What was added stays.
    """
    epoch = await _retry(lambda deadline: catalog.epoch(deadline=deadline), clock)
    reports = {}
    for level, tier in tiers.items():
        others = [other for other in tiers.values() if other is not tier]
        reports[level] = await reindex_level(
            catalog, tier, level, clock=clock, manifests=others, progress=partial(progress, level), only_adds=only_adds
        )
    if num_wrong := await retry(catalog.recount):
        _log.warning("totals of the catalog differed from its entries, and were corrected num_totals=%d", num_wrong)
    if not await _retry(lambda deadline: catalog.mark_complete(epoch, deadline=deadline), clock):
        raise Unavailable(LOST_MORE)
    return reports


async def mark_if_empty(catalog: Catalog, tiers: list[Tier], *, deadline: Deadline) -> bool:
    """Mark the catalog complete when nothing is stored at all, as at the first start. Returns whether it is complete.

    Raises:
        Unavailable: A tier or the catalog does not answer.
    """
    if await catalog.is_complete(deadline=deadline):
        return True
    epoch = await catalog.epoch(deadline=deadline)
    for tier in tiers:
        scan = cast(AsyncGenerator[Entry, None], tier.scan())
        async with deadline.scope("checking whether anything is stored"), aclosing(scan) as entries:
            async for _ in entries:
                return False
    return await catalog.mark_complete(epoch, deadline=deadline)


class _Walk:
    """A reindex of one level while it runs."""

    def __init__(
        self, catalog: Catalog, level: Level, manifests: Sequence[Tier], *, clock: Clock, only_adds: bool = False
    ) -> None:
        self.report = ReindexReport()
        self._known: dict[NamespaceId, EntryShape | None] = {}
        self._catalog = catalog
        self._manifests = manifests
        self._tier = manifests[0]
        self._level = level
        self._clock = clock
        self._seen: Seen | None = None if only_adds else {}
        self._batch: list[Addition] = []
        self._added: dict[NamespaceId, set[PrefixHash]] = {}
        """The boundaries of what was added since the last `check_removed`."""
        self._checked_s = clock.monotonic_s()

    async def see(self, entry: Entry) -> bool:
        """Take one record; true once there are enough for a `flush`."""
        key, report = entry.key, self.report
        report.num_records += 1
        report.num_bytes += entry.num_bytes
        if key.namespace not in self._known:
            report.namespaces.append(key.namespace.hex())
            if not await self._shape_of(key.namespace):
                report.unknown_namespaces.append(key.namespace.hex())
        shape = self._known[key.namespace]
        if shape is None or not shape.holds(key.group, key.slice):
            report.num_unknown += 1
            return False
        if self._seen is not None and not self._note(self._seen, entry):
            return False  # listed twice
        self._batch.append(Addition(key, self._level, entry.num_bytes, 0))
        return len(self._batch) >= (_BATCH if self._seen is not None else _SHORT_BATCH)

    @staticmethod
    def _note(seen: Seen, entry: Entry) -> bool:
        """False: it was noted before."""
        key = entry.key
        bits = seen.setdefault((key.namespace, key.prefix), {}).setdefault(key.group, [0, 0])
        if bits[0] >> key.slice & 1:
            return False
        bits[0] |= 1 << key.slice
        bits[1] += entry.num_bytes
        return True

    def _seen_of(self, entry: BoundaryEntry) -> dict[int, list[int]]:
        return self._seen.get((entry.namespace, entry.prefix), {}) if self._seen is not None else {}

    async def flush(self) -> None:
        batch, self._batch = self._batch, []
        lacking = await self._lacking(batch)
        self.report.num_skipped += len(batch) - len(lacking)
        if lacking:
            await self._retry(lambda deadline: self._catalog.add(lacking, deadline=deadline))
            for one in lacking:
                self._added.setdefault(one.key.namespace, set()).add(one.key.prefix)
        is_full = sum(map(len, self._added.values())) >= _CHECKED_MAX
        if is_full or self._clock.monotonic_s() - self._checked_s >= _CHECK_S:
            await self.check_removed()
            self._checked_s = self._clock.monotonic_s()

    async def check_removed(self) -> None:
        """Correct the entries of what was evicted or deleted after it was listed, and before it was added here: the
        catalog's latest removals say which these may be.
        """
        added, self._added = self._added, {}
        removed = await self._retry(lambda deadline: self._catalog.tombstones(limit=TOMBSTONES_MAX, deadline=deadline))
        suspects: dict[NamespaceId, set[PrefixHash]] = {}
        for one in removed:
            if one.level is self._level and one.prefix in added.get(one.namespace, ()):
                suspects.setdefault(one.namespace, set()).add(one.prefix)
        for namespace, prefixes in suspects.items():
            listed = list(prefixes)
            for start in range(0, len(listed), _SHORT_BATCH):
                await self._correct(await self._entries(namespace, listed[start : start + _SHORT_BATCH]))

    async def _entries(self, namespace: NamespaceId, prefixes: list[PrefixHash]) -> list[BoundaryEntry]:
        """The entries of boundaries that are not leaving the level."""
        entries = await self._retry(lambda deadline: self._catalog.entries(namespace, prefixes, deadline=deadline))
        return [entry for entry in entries if self._level not in entry.leaving]

    async def _lacking(self, batch: list[Addition]) -> list[Addition]:
        """Those that the catalog does not have."""
        prefixes: dict[NamespaceId, dict[PrefixHash, int]] = {}
        for one in batch:
            rows = prefixes.setdefault(one.key.namespace, {})
            rows.setdefault(one.key.prefix, len(rows))
        tables = {namespace: await self._look_up(namespace, list(rows)) for namespace, rows in prefixes.items()}
        return [
            one
            for one in batch
            if not tables[one.key.namespace].has(
                prefixes[one.key.namespace][one.key.prefix], self._level, one.key.group, one.key.slice
            )
        ]

    async def _look_up(self, namespace: NamespaceId, prefixes: list[PrefixHash]) -> EntryTable:
        return await self._retry(lambda deadline: self._catalog.lookup(namespace, prefixes, deadline=deadline))

    async def sweep(self) -> None:
        """Remove what the catalog has at the level and is not stored, and correct byte counts: of the namespaces that
        the walk found, and of those that only the catalog has.
        """
        listed = await self._retry(lambda deadline: self._catalog.namespaces(deadline=deadline))
        namespaces = [one for one in dict.fromkeys([*self._known, *listed]) if await self._shape_of(one)]
        suspects: list[BoundaryEntry] = []
        num_records = 0
        async for entry in self._catalog.iterate(*namespaces):
            found = _Corrections()
            if self._level not in entry.leaving:
                found.note(entry, self._level, self._seen_of(entry))
            if found.removals:
                suspects.append(entry)
                num_records += entry.num_records(self._level)
            if num_records >= _BATCH:
                await self._correct(suspects)
                suspects, num_records = [], 0
        await self._correct(suspects)

    async def _correct(self, suspects: list[BoundaryEntry]) -> None:
        """Check the records of entries that differ from what the walk saw: they may have changed since."""
        sizes = await self._sizes([key for entry in suspects for key in entry.keys(self._level)])
        found = _Corrections()
        for entry in suspects:
            found.note(entry, self._level, self._there(entry, sizes))
        if found.removals:
            await self._retry(lambda deadline: self._catalog.remove(found.removals, deadline=deadline))
        # a record that was put since the check may have been reported before our removal
        replaced = {one.key for one in found.additions}
        gone = [one.key for one in found.removals if one.key not in replaced]
        for key, size in (await self._sizes(gone)).items():
            if size is not None and (num_bytes := size or await self._read_bytes(key)):
                found.additions.append(Addition(key, self._level, num_bytes, 0))
        if found.additions:
            await self._retry(lambda deadline: self._catalog.add(found.additions, deadline=deadline))
        self.report.num_stale += len(found.removals) - len(found.additions)
        self.report.num_resized += len(replaced)

    async def _sizes(self, keys: list[RecordKey]) -> dict[RecordKey, int | None]:
        """As `Tier.head`."""
        sizes = await self._retry(lambda deadline: self._tier.head(keys, deadline=deadline))
        return dict(zip(keys, sizes, strict=True))

    async def _read_bytes(self, key: RecordKey) -> int:
        """Bytes of a record whose size `head` does not know; 0: it is not there."""
        record = await self._retry(lambda deadline: self._tier.get(key, deadline=deadline))
        return record.num_bytes if record is not None else 0

    def _there(self, entry: BoundaryEntry, sizes: dict[RecordKey, int | None]) -> dict[int, list[int]]:
        """What is stored of an entry, in the form of `_seen`. Where `head` tells no size, the bytes are those that the
        walk saw, if it saw the same slices, or else those of the entry.
        """
        seen = self._seen_of(entry)
        there: dict[int, list[int]] = {}
        unknown: set[int] = set()
        for key in entry.keys(self._level):
            size = sizes[key]
            if size is not None:
                sums = there.setdefault(key.group, [0, 0])
                sums[0] |= 1 << key.slice
                sums[1] += size
                unknown.update([key.group] if size == 0 else [])
        for group in unknown:
            bits, entry_bytes = there[group][0], entry.group_bytes[self._level][group]
            seen_bits, seen_bytes = seen.get(group, (0, 0))
            there[group][1] = seen_bytes if bits == seen_bits else entry_bytes
        return there

    async def _shape_of(self, namespace: NamespaceId) -> EntryShape | None:
        """The shape of the namespace's entries, which the catalog knows too; `None`: no manifest could be read."""
        if namespace not in self._known:
            described = await self._retry(
                lambda deadline: read_description(namespace, self._manifests, deadline=deadline)
            )
            if described is not None:
                layout, tenant = described.layout(), described.tenant
                await self._retry(lambda deadline: self._catalog.register(namespace, layout, tenant, deadline=deadline))
            self._known[namespace] = None if described is None else EntryShape.of(described.layout())
        return self._known[namespace]

    async def _retry(self, call: Callable[[Deadline], Awaitable[T]]) -> T:
        return await _retry(call, self._clock)


async def _retry(call: Callable[[Deadline], Awaitable[T]], clock: Clock) -> T:
    return await retry(lambda: call(Deadline.after(_CALL_S, clock)))


class _Corrections:
    """The changes that make catalog entries match what was seen; removals go first."""

    def __init__(self) -> None:
        self.removals: list[Removal] = []
        self.additions: list[Addition] = []

    def note(self, entry: BoundaryEntry, level: Level, seen: dict[int, list[int]]) -> None:
        """Compare an entry with what the walk saw of it: the changes together leave exactly the bytes that it saw."""
        for group, held in enumerate(entry.slices[level]):
            bits, num_bytes = seen.get(group, (0, 0))
            entry_bytes = entry.group_bytes[level][group]
            for slice_ in slices_of(held & ~bits):
                key = RecordKey(entry.namespace, entry.prefix, group, slice_)
                too_many = max(0, entry_bytes - num_bytes)
                self.removals.append(Removal(key, level, too_many, LeaveReason.LOST))
                entry_bytes -= too_many
            if held & bits and entry_bytes != num_bytes:  # one was replaced; only a group's sum is kept
                key = RecordKey(entry.namespace, entry.prefix, group, slices_of(held & bits)[0])
                self.removals.append(Removal(key, level, entry_bytes, LeaveReason.LOST))
                self.additions.append(Addition(key, level, num_bytes, 0))
