"""Finds where a query's records are: in memory, by the catalog, or by asking the tiers."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from kvstore.api import PrefixQuery
from kvstore.catalog.base import Catalog
from kvstore.catalog.entry import EntryTable, Level
from kvstore.errors import Closed, CorruptRecord, InvalidRequest, Unavailable
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.model.layout import Layout
from kvstore.runtime.background import gather_all
from kvstore.runtime.clock import Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.turns import LongWork, Turns, who_asks
from kvstore.store.catalog_outage import CatalogOutage
from kvstore.store.context import StoreContext, StorePart
from kvstore.store.presence import (
    PackedSlices,
    Presence,
    Probe,
    SliceMap,
    by_group,
    fill,
    gaps,
    inner_probes,
    last_of_each,
    page_probes,
    slices_of,
    spread,
)
from kvstore.tiers.base import Tier

NAMES_AT_ONCE = 4096
"""Names in one round trip to a tier, and boundaries in one to the catalog."""
_QUERIES_MAX = 64
"""Queries to the slower tiers at a time, of a few thousand names at most; further ones wait their turn."""
_CATALOG_QUERIES_MAX = 2
"""Queries to the catalog at a time: it answers one after the other, each in some 20 ms."""
_BYTES_OF_ITEM = 1024
"""Bytes of entries that are noted in the time of one probe."""
_ITEMS_OF_GROUP = 16
"""Probes in whose time one group's sizes are summed."""
_AWAY = "answers no lookups: the tiers are asked instead, which is slower"
_CATALOG_SHARE = 0.6
"""The catalog's share of a lookup's time: if it hangs there must be time left to ask the tiers."""
_COMPLETE_S = 5.0
"""How long the answer to "is the catalog complete?" is used."""
_CATALOG_PAUSE_S = 1.0
"""How long a catalog that did not answer in time is not used."""
_FAIR_S = 0.1
"""Five times what the catalog takes for an answer. Who waited less and had no more time says nothing of it."""
_PAGE_ROUNDS_MAX = 4
"""With 16 heads a round, three rounds narrow 4,096 pages down to one; `stage` finds holes within holes."""
_PAGES_SHARE = 0.75
"""The pages' share of a lookup's time: if a tier hangs there must be time left to ask the other one for the tails."""
_ABSENT_MAX = 65_536
_PEEKED_AT_ONCE = 1024
"""Records that are looked for in memory before the event loop gets a turn: some milliseconds."""


@dataclass(eq=False, slots=True)
class _Source:
    """One slower tier during one lookup."""

    tier: Tier
    found: SliceMap
    """Where its answers go."""
    is_exact: bool
    """Ask for every slice of every probe; otherwise guess from a few."""
    has_failed: bool = False
    """It did not answer, and is not asked again."""


class PresenceFinder(StorePart):
    """Finds where a query's records are.

    Memory answers first and costs nothing. Then the catalog is asked, if there is one, for all boundaries at once.
    Lookups trust its entries, since `stage` verifies them; they trust a missing entry only if the catalog is complete.
    Otherwise the hot and the cold tier are asked at the same time for the rest: one batch of heads for the pages, one
    for the tails and states that still matter. A tier that is down, slow or closed is skipped and counted.

    Args:
        absent: What was expected in a tier and was not there.
        work: Runs what takes long for a long prompt.
        catalog: Asked before the tiers; `None`: there is no catalog.
    """

    def __init__(
        self, context: StoreContext, absent: AbsentKeys, work: LongWork, catalog: CatalogLookup | None
    ) -> None:
        super().__init__(context)
        self._cold_probes = context.limits.cold_probes
        self._absent = absent
        self._work = work
        self._catalog = catalog
        self._turns = Turns(_QUERIES_MAX)

    async def find(self, query: PrefixQuery, layout: Layout, deadline: Deadline) -> Presence:
        """Return what is known once all tiers have answered, or at the deadline. Never raises `Unavailable`."""
        presence = Presence(layout, query)
        run, num_cells = self._work.run, presence.num_cells
        await self._find_in_memory(presence)
        if self._catalog is not None and await self._catalog.fill(presence, deadline):
            return presence
        sources = []
        if self._hot is not None:
            sources.append(_Source(self._hot, presence.hot, is_exact=True))
        if self._cold is not None:
            sources.append(_Source(self._cold, presence.cold, is_exact=False))
        if not sources:
            return presence
        if wanted := await run(num_cells, _pages_wanted, presence):
            share = deadline.earlier(deadline.remaining_s * _PAGES_SHARE) if len(sources) > 1 else deadline
            await asyncio.gather(*(self._ask_pages(presence, source, wanted, share) for source in sources))
        wanted = await run(num_cells, _inner_wanted, presence)
        await asyncio.gather(*(self._ask_inner(presence, source, wanted, deadline) for source in sources))
        return presence

    async def _find_in_memory(self, presence: Presence) -> None:
        if not self._memory.boundaries(presence.query.namespace):
            return
        num_boundaries, num_groups = len(presence.query.boundaries), len(presence.layout.groups)
        step = max(1, _PEEKED_AT_ONCE // num_groups)
        for start in range(0, num_boundaries, step):
            stop = min(start + step, num_boundaries)
            async with self._work.turn((stop - start) * num_groups):
                self._find_between(presence, start, stop)

    def _find_between(self, presence: Presence, start: int, stop: int) -> None:
        query, held = presence.query, self._memory.boundaries(presence.query.namespace)
        if not held:
            return
        for index in range(start, stop):
            groups = held.get(query.boundaries[index].prefix)
            for group, bits in groups.items() if groups is not None else ():
                probe = (index, group)
                presence.memory[probe] = bits
                if bits & 1 and (record := self._memory.peek(presence.key(probe, 0))) is not None:
                    presence.note_size(group, record.num_bytes)

    async def _ask_pages(self, presence: Presence, source: _Source, pages: Sequence[Probe], deadline: Deadline) -> None:
        """Ask for all pages, or for a spread of each group's and then, in rounds, where answers change."""
        if source.is_exact:
            await self._ask_exactly(presence, source, pages, deadline)
            return
        groups = await self._work.run(len(pages), by_group, pages)
        limit = max(2, self._cold_probes // len(groups))
        answers: dict[int, dict[int, bool]] = {group: {} for group in groups}
        for number in range(_PAGE_ROUNDS_MAX):
            chosen = [
                (group, i)
                for group in groups
                for i in (gaps(answers[group], limit) if number else spread(len(groups[group]), limit))
            ]
            if not chosen or source.has_failed:
                break
            there = await self._ask_one_slice(presence, source, [groups[group][i] for group, i in chosen], deadline)
            for (group, i), answer in zip(chosen, there, strict=True):
                answers[group][i] = answer
        await self._guess(presence, source, await self._work.run(len(pages), _filled, groups, answers))

    async def _ask_inner(
        self, presence: Presence, source: _Source, probes: Sequence[Probe], deadline: Deadline
    ) -> None:
        if source.is_exact:
            await self._ask_exactly(presence, source, probes, deadline)
            return
        chosen = await self._work.run(len(probes), last_of_each, probes, self._cold_probes)
        answers = await self._ask_one_slice(presence, source, chosen, deadline)
        await self._guess(presence, source, [probe for probe, there in zip(chosen, answers, strict=True) if there])

    async def _ask_exactly(
        self, presence: Presence, source: _Source, probes: Sequence[Probe], deadline: Deadline
    ) -> None:
        slices = ((probe, slice_) for probe in probes for slice_ in presence.missing(probe))

        def next_keys() -> tuple[list[tuple[Probe, int]], list[RecordKey]]:
            piece = list(islice(slices, NAMES_AT_ONCE))
            return piece, [presence.key(probe, slice_) for probe, slice_ in piece]

        while not source.has_failed:
            piece, keys = await self._work.run(len(probes), next_keys)
            if not keys:
                return
            sizes = await self._heads(presence, source, keys, deadline)
            await self._work.run(len(piece), _note_found, presence, source, piece, sizes)

    async def _ask_one_slice(
        self, presence: Presence, source: _Source, probes: Sequence[Probe], deadline: Deadline
    ) -> list[bool]:
        """For each probe whether the first slice that memory lacks is there."""
        keys = await self._work.run(len(probes), _first_missing_keys, presence, probes)
        sizes = await self._heads(presence, source, keys, deadline)
        for probe, num_bytes in zip(probes, sizes, strict=True):
            presence.note_size(probe[1], num_bytes or 0)
        return [num_bytes is not None for num_bytes in sizes]

    async def _guess(self, presence: Presence, source: _Source, probes: Sequence[Probe]) -> None:
        """Assume that all slices that memory lacks are there, except those that were recently found missing."""

        def assume(piece: Sequence[Probe]) -> None:
            for probe in piece:
                bits = presence.missing_bits(probe)
                if self._absent.has_any(presence.query.boundaries[probe[0]].prefix):
                    for slice_ in slices_of(bits):
                        bits &= ~(int(presence.key(probe, slice_) in self._absent) << slice_)
                if bits:
                    source.found[probe] = source.found.get(probe, 0) | bits

        await self._work.in_pieces(probes, assume)

    async def _heads(
        self, presence: Presence, source: _Source, keys: Sequence[RecordKey], deadline: Deadline
    ) -> Sequence[int | None]:
        if source.has_failed or not keys:
            return [None] * len(keys)
        try:
            async with deadline.scope("waiting to ask a tier"):
                await self._turns.begin(who_asks())
            try:
                return await source.tier.head(keys, deadline=deadline)
            finally:
                self._turns.end()
        except (Unavailable, Closed):
            source.has_failed = True
            presence.silent.add(source.tier.name)
            self._meters.add("lookup_tier_failures", tier=source.tier.name)
            return [None] * len(keys)


def _first_missing_keys(presence: Presence, probes: Sequence[Probe]) -> list[RecordKey]:
    """For each probe, the key of its first slice that memory lacks."""
    return [presence.key(probe, presence.first_missing(probe)) for probe in probes]


def _note_found(
    presence: Presence, source: _Source, slices: Sequence[tuple[Probe, int]], sizes: Sequence[int | None]
) -> None:
    for (probe, slice_), num_bytes in zip(slices, sizes, strict=True):
        if num_bytes is not None:
            source.found[probe] = source.found.get(probe, 0) | 1 << slice_
            presence.note_size(probe[1], num_bytes)


def _pages_wanted(presence: Presence) -> list[Probe]:
    """Pages that memory and the catalog do not have in full."""
    return [probe for probe in page_probes(presence.layout, presence.query) if not presence.complete(probe)]


def _filled(groups: Mapping[int, Sequence[Probe]], answers: Mapping[int, Mapping[int, bool]]) -> list[Probe]:
    """The pages of each group that are there, by the answers for some of them."""
    return [
        probe
        for group, probes in groups.items()
        for probe, is_there in zip(probes, fill(answers[group], len(probes)), strict=True)
        if is_there
    ]


def _inner_wanted(presence: Presence) -> list[Probe]:
    """Tails and states that could lengthen the hit; a record that ends below the resume point could not."""
    query, resume_tokens = presence.query, presence.resume_tokens()
    return [
        probe
        for probe in inner_probes(presence.layout, query, presence.complete)
        if query.boundaries[probe[0]].tokens > resume_tokens and not presence.complete(probe)
    ]


class CatalogLookup:
    """Fills a `Presence` from the catalog.

    Up to `NAMES_AT_ONCE` boundaries are read in one round trip. Of a longer prompt most of whose boundaries do not end
    a page, the pages are read first, then the tails and states that can still matter.

    Args:
        levels: Those at which this store has a tier.

    Attributes:
        outage: Whether it answers.
    """

    def __init__(self, catalog: Catalog, levels: Iterable[Level], instruments: Instruments, work: LongWork) -> None:
        self._catalog = catalog
        self._levels = tuple(levels)
        self._work = work
        self._turns = Turns(_CATALOG_QUERIES_MAX)
        self._meters = instruments.meters
        self._clock = instruments.clock
        self.outage = CatalogOutage(_AWAY, "answers lookups", instruments.clock)
        self._is_complete = False
        self._checked_s = float("-inf")
        self._unused_until_s = float("-inf")

    async def fill(self, presence: Presence, deadline: Deadline) -> bool:
        """Note what the catalog has of a query's boundaries. True: it is complete, so no tier need be asked.

        Raises nothing: of a catalog that does not answer in time nothing is noted, and it is not asked for a second, if
        that was a fair time.
        """
        started_s = self._clock.monotonic_s()
        if started_s < self._unused_until_s:
            return False
        deadline = deadline.earlier(deadline.remaining_s * _CATALOG_SHARE)
        try:
            await self._read_all(presence, deadline)
        except (Unavailable, Closed, CorruptRecord, InvalidRequest) as error:
            self._meters.add("catalog_failures", call="lookup")
            presence.hot, presence.cold = {}, {}
            now_s = self._clock.monotonic_s()
            if not deadline.expired or now_s - started_s >= _FAIR_S:
                self._unused_until_s = now_s + _CATALOG_PAUSE_S
                if isinstance(error, Unavailable):
                    self.outage.failed(error)
            return False
        self.outage.answered()
        self._meters.add("catalog_lookups", complete=str(self._is_complete).lower())
        return self._is_complete

    async def _read_all(self, presence: Presence, deadline: Deadline) -> None:
        query, page_tokens = presence.query, presence.layout.page_tokens
        every = list(range(len(query.boundaries)))
        ends = every
        if len(every) > NAMES_AT_ONCE:
            ends = [index for index in every if query.boundaries[index].tokens % page_tokens == 0]
        if len(every) <= max(NAMES_AT_ONCE, 2 * len(ends)):
            await self._read(presence, every, deadline)
        else:
            await self._read(presence, ends, deadline)
            inner = await self._work.run(presence.num_cells, _inner_indexes, presence)
            await self._read(presence, sorted(inner.difference(ends)), deadline)

    async def _read(self, presence: Presence, indexes: list[int], deadline: Deadline) -> None:
        """Read some boundaries, `NAMES_AT_ONCE` at a time: other clients' queries come between."""
        query = presence.query
        for start in range(0, len(indexes), NAMES_AT_ONCE):
            piece = indexes[start : start + NAMES_AT_ONCE]
            prefixes = [query.boundaries[index].prefix for index in piece]
            async with deadline.scope("waiting to ask the catalog"):
                await self._turns.begin(who_asks())
            try:
                table = await self._ask(query.namespace, prefixes, deadline)
            finally:
                self._turns.end()
            num_items = table.data.nbytes // _BYTES_OF_ITEM + _ITEMS_OF_GROUP * len(presence.layout.groups)
            await self._work.run(num_items, _note, presence, piece, self._levels, table)

    async def _ask(self, namespace: NamespaceId, prefixes: Sequence[PrefixHash], deadline: Deadline) -> EntryTable:
        """Read some boundaries and now and then, in the same round trip, whether the catalog is complete."""
        if self._clock.monotonic_s() - self._checked_s <= _COMPLETE_S:
            return await self._catalog.lookup(namespace, prefixes, deadline=deadline)
        tables: list[EntryTable] = []

        async def look_up() -> None:
            tables.append(await self._catalog.lookup(namespace, prefixes, deadline=deadline))

        async def check() -> None:
            now_s = self._clock.monotonic_s()
            self._is_complete = await self._catalog.is_complete(deadline=deadline)
            self._checked_s = now_s

        await gather_all([check(), look_up()])
        return tables[0]


def _inner_indexes(presence: Presence) -> set[int]:
    return {probe[0] for probe in inner_probes(presence.layout, presence.query, presence.complete)}


def _note(presence: Presence, indexes: list[int], levels: Sequence[Level], table: EntryTable) -> None:
    """Note a table of some boundaries; what was found of other boundaries before stays."""
    for level in levels:
        rows = table.rows(level)
        if not rows.any():
            continue
        if len(indexes) < len(presence.query.boundaries):
            before = presence.hot if level is Level.HOT else presence.cold
            if not isinstance(before, PackedSlices):
                shape = (len(presence.query.boundaries), rows.shape[1])
                before = PackedSlices(presence.layout, np.zeros(shape, dtype=np.uint8))
            before.rows[indexes] = rows
            found = before
        else:
            found = PackedSlices(presence.layout, rows)
        if level is Level.HOT:
            presence.hot = found
        else:
            presence.cold = found
        for group in range(len(presence.layout.groups)):
            presence.note_size(group, table.mean_bytes(level, group))


class AbsentKeys:
    """Negative cache: a bounded set of keys that a slower tier should have had and did not, or whose bytes are bad.

    Presence in the cold tier is partly guessed. Without this cache every lookup would repeat a wrong guess, the writer
    would learn that the record is there, and the hole would never be filled.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s: OrderedDict[RecordKey, float] = OrderedDict()
        self._num_at: Counter[PrefixHash] = Counter()

    def __len__(self) -> int:
        return len(self._until_s)

    def __contains__(self, key: RecordKey) -> bool:
        until_s = self._until_s.get(key)
        if until_s is None:
            return False
        if until_s <= self._clock.monotonic_s():
            self.remove(key)
            return False
        return True

    def has_any(self, prefix: PrefixHash) -> bool:
        """Whether any key with this prefix was added; it may have expired since."""
        return prefix in self._num_at

    def add(self, key: RecordKey, seconds: float) -> None:
        """Remember `key` for `seconds`; beyond the limit the oldest key is dropped."""
        self.remove(key)
        self._until_s[key] = self._clock.monotonic_s() + seconds
        self._num_at[key.prefix] += 1
        while len(self._until_s) > _ABSENT_MAX:
            self.remove(next(iter(self._until_s)))

    def remove(self, key: RecordKey) -> None:
        """Forget `key`: it was written again."""
        if self._until_s.pop(key, None) is not None:
            self._num_at[key.prefix] -= 1
            if not self._num_at[key.prefix]:
                del self._num_at[key.prefix]
