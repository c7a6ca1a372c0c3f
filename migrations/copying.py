"""The copying part of a migration: each record that is not current gets a new one, which is read back and compared."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvstore.catalog.base import Addition
from kvstore.catalog.entry import Level
from kvstore.format.record import Record
from kvstore.model.keys import RecordKey
from kvstore.model.namespace import NamespaceDescription
from kvstore.store.verification import ByteRate
from kvstore.tiers.base import PutOutcome
from migrations.journal import Journal, Sheet, State, num_sheets, sheet_of, sheets_name
from migrations.plan import Step, Verdict
from migrations.store import Store, soon

__all__ = ["Copier", "Progress", "Walk"]

T = TypeVar("T")

_IN_FLIGHT = 16
_OFF_LOOP_BYTES = 256 << 10
_TOLD_EVERY = 64


@dataclass
class Progress:
    """What a run has done so far.

    Attributes:
        listener: Told every few records.
        on_step: Called with a word at each point where a run might be killed; for tests.
        totals: Records by what became of them in this run: the words of `Verdict`, and `copied_before`, `gone`, `full`,
            `failed` (not read back as written), `busy` (its boundary is just leaving), `unknown` (no manifest),
            `removed`, `kept` (not removed: there is no new record to rely on).
        num_bytes: Bytes of the records that were looked at.
        num_expected: Records that were listed.
    """

    listener: Callable[[Progress], None] = lambda progress: None
    on_step: Callable[[str], None] = lambda word: None
    totals: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    num_expected: int = 0

    def tell(self) -> None:
        self.listener(self)


@dataclass
class Walk:
    """One level of one namespace during one run.

    Attributes:
        sheets: All of its sheets, in order.
        made: The new records on them, which need no second look.
    """

    level: Level
    description: NamespaceDescription
    sheets: list[Sheet]
    made: set[RecordKey] = field(default_factory=set)


class Copier:
    """Copies namespace by namespace.

    Args:
        step: What is done to each record.
        store: What it is done to.
        journal: Where it is noted.
        progress: Is told.
        rate: How fast records are read.
    """

    def __init__(self, step: Step, store: Store, journal: Journal, progress: Progress, rate: ByteRate | None) -> None:
        self._step = step
        self._store = store
        self._journal = journal
        self._progress = progress
        self._rate = rate

    async def copy_namespace(
        self, state: State, level: Level, description: NamespaceDescription, held: dict[RecordKey, int]
    ) -> None:
        """Copy the records of a namespace at a level, sheet by sheet."""
        namespace = description.id
        await self._store.catalog.register(namespace, description.layout(), description.tenant, deadline=soon())
        walk = await self.walk(level, description, state, len(held), is_new=True)
        shares: list[list[RecordKey]] = [[] for _ in walk.sheets]
        for key in held:
            shares[sheet_of(key, len(walk.sheets))].append(key)
        for number, (sheet, keys) in enumerate(zip(walk.sheets, shares, strict=True)):
            before = dict(sheet)
            there = await self._store.standing(level, list(sheet.values()))
            for old, new in before.items():
                if new not in there:  # it was lost since: it is copied again
                    del sheet[old]
                    walk.made.discard(new)
            todo = [key for key in keys if key not in sheet and key not in walk.made]
            self._progress.totals["copied_before"] += sum(key in sheet for key in keys)
            await self._copy_share(walk, sheet, todo, held)
            if sheet != before:
                await self._store.retry(lambda n=number, s=sheet: self._journal.write_sheet(level, namespace, n, s))
                self._progress.on_step("sheet")

    async def _copy_share(
        self, walk: Walk, sheet: Sheet, todo: Sequence[RecordKey], held: Mapping[RecordKey, int]
    ) -> None:
        waiting = iter(todo)

        async def work() -> None:
            for key in waiting:
                if self._rate is not None:
                    await self._rate.take(held[key])
                new = await self._copy_one(walk, key)
                if new is not None:
                    sheet[key] = new
                    walk.made.add(new)
                self._progress.num_bytes += held[key]
                if self._progress.totals.total() % _TOLD_EVERY == 0:
                    self._progress.tell()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(_IN_FLIGHT, len(todo))):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _copy_one(self, walk: Walk, key: RecordKey) -> RecordKey | None:
        """Copy one record and read the copy back; returns its name, or nothing where there is no copy to rely on."""
        tier, tenant = self._store.tiers[walk.level], walk.description.tenant
        old = await self._store.retry(lambda: tier.get(key, deadline=soon()))
        self._progress.on_step("read")
        if old is None:  # evicted meanwhile, or damaged: the tier has put it aside
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
            new = await self._store.retry(lambda: cold.get(name, deadline=soon())) or new
        if not await self._put(walk.level, new):
            self._progress.totals["full"] += 1
            return None
        self._progress.on_step("put")
        back = await self._store.retry(lambda: tier.get(new.key, deadline=soon()))
        if back is None or not await _off_loop(old.num_bytes, lambda: self._step.is_same(old, back, tenant)):
            self._progress.totals["failed"] += 1
            return None
        self._progress.on_step("verified")
        if not await self._tell_catalog(walk.level, key, back):
            self._progress.totals["busy"] += 1
            return None
        self._progress.on_step("told")
        self._progress.totals[Verdict.REWRITTEN.value] += 1
        return new.key

    async def _put(self, level: Level, record: Record) -> bool:
        """A copy in the quick tier may go when room is needed: whoever was promised the record has the old one."""
        tier = self._store.tiers[level]
        put = tier.put_evictable if level is Level.HOT and Level.COLD in self._store.tiers else tier.put
        return await self._store.retry(lambda: put(record, deadline=soon())) is not PutOutcome.FULL

    async def _tell_catalog(self, level: Level, old: RecordKey, new: Record) -> bool:
        """The parent stays unknown until the record is read: it may not be renamed yet."""
        addition = Addition(new.key, level, new.num_bytes, new.header.span.stop)
        taken = await self._store.retry(lambda: self._store.catalog.add([addition], deadline=soon()))
        entry = await self._store.retry(lambda: self._store.catalog.get(old.namespace, old.prefix, deadline=soon()))
        if entry is not None and entry.pinned_until_s:
            await self._store.retry(
                lambda: self._store.catalog.pin(old.namespace, [new.key.prefix], entry.pinned_until_s, deadline=soon())
            )
        return taken[0]

    async def walk(
        self, level: Level, description: NamespaceDescription, state: State | None, num_records: int, *, is_new: bool
    ) -> Walk:
        """The sheets as they are. The first run decides how many there are."""
        name = sheets_name(level, description.id)
        if state is None or not state.is_open or (name not in state.sheets and not is_new):
            return Walk(level, description, [])
        if name not in state.sheets:
            state.sheets[name] = num_sheets(num_records)
            await self._store.retry(lambda: self._journal.write(state))
            self._progress.on_step("sheets planned")
        sheets = [
            await self._store.retry(lambda n=number: self._journal.sheet(level, description.id, n))
            for number in range(state.sheets[name])
        ]
        return Walk(level, description, sheets, {new for sheet in sheets for new in sheet.values()})


async def _off_loop(num_bytes: int, call: Callable[[], T]) -> T:
    return await asyncio.to_thread(call) if num_bytes > _OFF_LOOP_BYTES else call()
