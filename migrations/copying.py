"""The copy phase of a migration: each record that is not current gets a new one, which is read back and compared."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from kvstore.catalog.base import Addition
from kvstore.catalog.entry import PINNED_AT, Level
from kvstore.format.record import Record
from kvstore.model.keys import RecordKey
from kvstore.model.namespace import NamespaceDescription
from kvstore.runtime.background import gather_all
from kvstore.runtime.retries import retry
from kvstore.store.upkeep.verification import ByteRate
from kvstore.tiers.base import PutOutcome
from migrations.journal import Journal, Sheet, State, num_sheets, sheet_of, sheets_name
from migrations.steps import Step, Verdict
from migrations.store import Listed, Store, soon

T = TypeVar("T")

NOT_MIGRATED = ("foreign", "refused", "failed", "full", "busy", "unknown", "kept")
"""Outcomes of records that were not migrated and still exist under their old names."""

_IN_FLIGHT = 32
_OFF_LOOP_BYTES = 256 << 10
_COPIED_TOGETHER = 128
"""Records that are reported to the catalog and recorded on a sheet together: the most work that a kill can lose."""


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
        listener: Called every few records.
        on_step: Called with a word at each point where a run might be killed; for tests.
        totals: Records by outcome in this run. The outcomes are the values of `Verdict`, `copied_before`, `gone`,
            `full`, `removed`, and four more: `failed` was not read back as written. `busy` has a boundary that is being
            deleted. `unknown` has no manifest. `kept` was not removed, since the lasting tier has no new record.
        num_bytes: Bytes of the records that were processed.
        num_expected: Records that were listed.
    """

    listener: Callable[[Progress], None] = lambda progress: None
    on_step: Callable[[str], None] = lambda word: None
    totals: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    num_expected: int = 0

    def report(self) -> None:
        self.listener(self)


@dataclass
class Walk:
    """One level of one namespace during one run, with all of its sheets in order."""

    level: Level
    description: NamespaceDescription
    sheets: list[Sheet]
    made: set[RecordKey] = field(default_factory=set)
    """The new records on the sheets, which must not be processed as old ones."""


class Copier:
    """Copies namespace by namespace.

    Args:
        journal: Where copies are recorded.
        rate: Limits how fast records are read; `None`: no limit.
    """

    def __init__(self, step: Step, store: Store, journal: Journal, progress: Progress, rate: ByteRate | None) -> None:
        self._step = step
        self._store = store
        self._journal = journal
        self._progress = progress
        self._rate = rate

    async def copy_namespace(
        self, state: State, level: Level, description: NamespaceDescription, everything: Mapping[Level, Listed]
    ) -> None:
        """Copy the records of a namespace at a level, sheet by sheet. `everything` is the listing of each level at the
        start of this run, so that no record is queried singly.
        """
        namespace = description.id
        held = everything[level][namespace]
        lasting = everything[self._store.lasting_level].get(namespace, {})
        await self._store.catalog.register(namespace, description.layout(), description.tenant, deadline=soon())
        walk = await self.walk(level, description, state, len(held), is_new=True)
        shares: list[list[RecordKey]] = [[] for _ in walk.sheets]
        for key in held:
            shares[sheet_of(key, len(walk.sheets))].append(key)
        for number, (sheet, keys) in enumerate(zip(walk.sheets, shares, strict=True)):
            lost = [old for old, new in sheet.items() if new not in held and new not in lasting]
            for old in lost:  # copied again, if it still exists
                walk.made.discard(sheet.pop(old))
            todo = [key for key in keys if key not in sheet and key not in walk.made]
            self._progress.totals["copied_before"] += sum(key in sheet for key in keys)
            for start in range(0, len(todo), _COPIED_TOGETHER):
                copies = await self._copy_some(walk, todo[start : start + _COPIED_TOGETHER], held)
                for old, new in await self._report(walk.level, copies):
                    sheet[old] = new
                    walk.made.add(new)
                await self._write_sheet(walk, number)
            if lost and not todo:
                await self._write_sheet(walk, number)

    async def _write_sheet(self, walk: Walk, number: int) -> None:
        sheet = walk.sheets[number]
        await retry(lambda: self._journal.write_sheet(walk.level, walk.description.id, number, sheet))
        self._progress.on_step("sheet")

    async def _copy_some(
        self, walk: Walk, keys: Sequence[RecordKey], held: Mapping[RecordKey, int]
    ) -> list[tuple[RecordKey, Record]]:
        """Copy records, several at a time; returns those that were copied, with their new records."""
        copies: list[tuple[RecordKey, Record]] = []
        waiting = iter(keys)

        async def work() -> None:
            for key in waiting:
                if self._rate is not None:
                    await self._rate.take(held[key])
                new = await self._copy_one(walk, key)
                if new is not None:
                    copies.append((key, new))
                self._progress.num_bytes += held[key]

        await gather_all(work() for _ in range(min(_IN_FLIGHT, len(keys))))
        self._progress.report()
        return copies

    async def _copy_one(self, walk: Walk, key: RecordKey) -> Record | None:
        """Copy one record and read the copy back; returns it, or `None` where there is no verified copy."""
        tier, tenant = self._store.tiers[walk.level], walk.description.tenant
        old = await retry(lambda: tier.get(key, deadline=soon()))
        self._progress.on_step("read")
        if old is None:  # evicted since the listing, or corrupt: then the tier has quarantined it
            self._progress.totals["gone"] += 1
            return None
        rewrite = await _off_loop(old.num_bytes, lambda: self._step.rewrite(old, tenant))
        if rewrite.verdict is not Verdict.REWRITTEN or rewrite.record is None:
            self._progress.totals[rewrite.verdict.value] += 1
            return None
        new = rewrite.record
        cold = self._store.tiers.get(Level.COLD)
        if walk.level is Level.HOT and cold is not None:  # the same bytes in both tiers
            name = new.key
            there = await retry(lambda: cold.get(name, deadline=soon()))
            new = there or new
        if not await self._put(walk.level, new):
            self._progress.totals["full"] += 1
            return None
        self._progress.on_step("put")
        back = await retry(lambda: tier.get(new.key, deadline=soon()))
        if back is None or not await _off_loop(old.num_bytes, lambda: self._step.is_same(old, back, tenant)):
            self._progress.totals["failed"] += 1
            return None
        self._progress.on_step("verified")
        return back

    async def _put(self, level: Level, record: Record) -> bool:
        """Put a copy; false: no room. In the hot tier it may be evicted, since the old record keeps the guarantee."""
        tier = self._store.tiers[level]
        put = tier.put_evictable if level is Level.HOT and Level.COLD in self._store.tiers else tier.put
        return await retry(lambda: put(record, deadline=soon())) is not PutOutcome.FULL

    async def _report(
        self, level: Level, copies: Sequence[tuple[RecordKey, Record]]
    ) -> list[tuple[RecordKey, RecordKey]]:
        """Report new records to the catalog, and copy pins; returns the old and new keys of those that it accepted.

        Parents stay unknown until the records are read: they may not have their new names yet.
        """
        if not copies:
            return []
        catalog, namespace = self._store.catalog, copies[0][0].namespace
        additions = [Addition(new.key, level, new.num_bytes, new.header.span.stop) for _, new in copies]
        taken = await retry(lambda: catalog.add(additions, deadline=soon()))
        self._progress.on_step("catalog added")
        olds = [old.prefix for old, _ in copies]
        table = await retry(lambda: catalog.lookup(namespace, olds, deadline=soon()))
        pinned_until_s = table.numbers(PINNED_AT).tolist()
        for (_, new), until_s in zip(copies, pinned_until_s, strict=True):
            if until_s:
                await retry(partial(self._pin, new.key, until_s))
        self._progress.totals[Verdict.REWRITTEN.value] += taken.count(True)
        self._progress.totals["busy"] += taken.count(False)
        return [(old, new.key) for (old, new), is_taken in zip(copies, taken, strict=True) if is_taken]

    async def _pin(self, key: RecordKey, until_s: int) -> None:
        await self._store.catalog.pin(key.namespace, [key.prefix], until_s, deadline=soon())

    async def walk(
        self, level: Level, description: NamespaceDescription, state: State | None, num_records: int, *, is_new: bool
    ) -> Walk:
        """Read the sheets of a level of a namespace. The first run that copies it (`is_new`) fixes their number, and
        empties those that an earlier migration has left.
        """
        name = sheets_name(level, description.id)
        if state is None or not state.is_open or (name not in state.sheets and not is_new):
            return Walk(level, description, [])
        number = state.sheets.get(name) or num_sheets(num_records)
        places = [(level, description.id, index) for index in range(number)]
        sheets = await gather_all(retry(partial(self._journal.sheet, *where)) for where in places)
        if name not in state.sheets:
            for where, sheet in zip(places, sheets, strict=True):
                if sheet:  # of an earlier migration, by a run that was frozen until another one had ended it
                    sheet.clear()
                    await retry(partial(self._journal.write_sheet, *where, sheet))
            state.sheets[name] = number
            await retry(lambda: self._journal.write(state))
            self._progress.on_step("sheets planned")
        return Walk(level, description, sheets, {new for sheet in sheets for new in sheet.values()})


async def _off_loop(num_bytes: int, call: Callable[[], T]) -> T:
    return await asyncio.to_thread(call) if num_bytes > _OFF_LOOP_BYTES else call()
