"""On which media the named pages are: compared with what subscribers were last told, in rounds."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvstore.catalog.base import TOMBSTONES_MAX, Catalog, Tombstone
from kvstore.catalog.entry import EntryTable, Level
from kvstore.errors import Closed, CorruptRecord, InvalidRequest, Unavailable
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.model.media import Medium
from kvstore.model.page_blocks import PageBlocks
from kvstore.runtime.background import Background
from kvstore.runtime.clock import Clock
from kvstore.runtime.deadline import Deadline
from kvstore.store.cache_events.encoding import CLEARED, Event, hashes_of, removed, stored
from kvstore.tiers.memory import MemoryTier

_ROUND_S = 0.1
_TOMBSTONES_S = 0.25
"""How often removals are read that other services made."""
_TOMBSTONES_READ = (64, 1024, TOMBSTONES_MAX)
"""How many of the latest are read: more if the fewer ones do not reach back to those of the last time."""
_BATCH = 128
"""Boundaries that are compared at a time, in some milliseconds, and events of a batch at most."""
_SWEPT = 64
"""Boundaries that each round checks without a cause: a catalog that was lost leaves no tombstones."""
_PAGES_MAX, _UNPLACED_MAX = 131_072, 16_384
"""Pages that are known. Of more, the oldest are taken back from subscribers, and forgotten."""
_CALL_S = 5.0

_Place = tuple[NamespaceId, PrefixHash]


class Publisher(Protocol):
    """Where events go; `EventPublisher` is the real one."""

    @property
    def is_behind(self) -> bool:
        """Whether nothing more should be published for now."""
        ...

    def publish(self, topic: str, events: Sequence[Event]) -> None:
        """Send one batch. Returns at once."""
        ...

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Topics:
    """Under which names events are published: `kv@<name>@<model>`, as llm-d reads topics.

    Attributes:
        node: Of media of this node; each gets its own copy of the events.
        pool: Of media that nodes share.
    """

    node: tuple[str, ...]
    pool: str

    def of(self, medium: Medium, model: str) -> list[str]:
        names = self.node if medium.is_local else (self.pool,)
        return [f"kv@{name}@{model}" for name in names]


@dataclass(slots=True)
class _Page:
    """A named page.

    Attributes:
        whole: A bit for each slice that it has.
        like: The pages that begin with the same block, itself among them: a page and its tails. They have blocks in
            common, and subscribers do not count blocks.
        media: Where subscribers believe it to be.
    """

    blocks: PageBlocks
    whole: int
    like: list[_Page]
    media: list[Medium] = field(default_factory=list)

    def alone(self, medium: Medium, hashes: Sequence[int | bytes]) -> Sequence[int]:
        """Indexes of its blocks, which have these hashes, that subscribers know from no other page on a medium."""
        others = [page for page in self.like if page is not self and medium in page.media]
        if not others:
            return range(len(hashes))
        known = {block for page in others for block in hashes_of(page.blocks)}
        return [index for index, block in enumerate(hashes) if block not in known]


class PlacementEvents:
    """Publishes, for each page that an engine named, when it becomes readable from a medium and when it no longer is.

    Changes only mark a boundary. A round reads where marked boundaries really are, in memory and in the catalog, and
    publishes the difference. So no order of changes can leave a subscriber with a page that is gone: what removed it
    marks the boundary again. If the publisher is behind, marks wait, and changes that cancel out are never sent.

    Belongs to the event loop.

    Args:
        memory: Its changes are to be passed to `changed`.
        memory_medium: The medium of it.
        levels: The medium of each shared level that exists.
        catalog: What the shared levels hold, and its tombstones what other services removed; `None`: there is none.
    """

    def __init__(
        self,
        publisher: Publisher,
        topics: Topics,
        *,
        memory: MemoryTier,
        memory_medium: Medium,
        levels: Mapping[Level, Medium],
        catalog: Catalog | None,
        clock: Clock,
    ) -> None:
        self._publisher = publisher
        self._topics = topics
        self._memory = memory
        self._memory_medium = memory_medium
        self._levels = levels if catalog is not None else {}
        self._catalog = catalog
        self._clock = clock
        self._pages: OrderedDict[_Place, dict[int, _Page]] = OrderedDict()
        self._num_pages = 0
        self._alike: dict[tuple[NamespaceId, int, bytes], list[_Page]] = {}
        self._unplaced: OrderedDict[_Place, None] = OrderedDict()
        self._marked: dict[_Place, None] = {}  # a set that keeps its order
        self._seen: set[Tombstone] = set()
        self._newest_s = 0
        self._cleared: set[str] = set()
        self._background = Background("cache events")

    def start(self) -> None:
        """Begin the rounds."""
        self._background.keep_running(self._run, "rounds")

    def name(self, blocks: PageBlocks, num_slices: int) -> None:
        """Learn the blocks of a page of `num_slices` slices. The first names count. Of the pages that are on no medium
        only the latest are known.
        """
        place = (blocks.namespace, blocks.boundary.prefix)
        pages = self._pages.get(place)
        if pages is None:
            pages = self._pages[place] = {}
            self._unplaced[place] = None
        if blocks.group not in pages:
            page = _Page(blocks, (1 << num_slices) - 1, self._alike.setdefault(_start(blocks), []))
            page.like.append(page)
            pages[blocks.group] = page
            self._num_pages += 1
        self._marked[place] = None
        while len(self._unplaced) > _UNPLACED_MAX:
            self._forget(next(iter(self._unplaced)))

    def changed(self, key: RecordKey) -> None:
        """Note that a record was stored or removed somewhere. Called for every record: it must cost nothing."""
        place = (key.namespace, key.prefix)
        if place in self._pages:
            self._marked[place] = None

    async def aclose(self) -> None:
        """Stop, and close the publisher. Idempotent."""
        await self._background.aclose()
        await asyncio.to_thread(self._publisher.close)

    async def _run(self) -> None:
        next_look_s = 0.0
        while True:
            await asyncio.sleep(_ROUND_S)
            if self._catalog is not None and self._pages and self._clock.monotonic_s() >= next_look_s:
                next_look_s = self._clock.monotonic_s() + _TOMBSTONES_S
                await self._read_tombstones(self._catalog)
            self._sweep()
            while self._marked and not self._publisher.is_behind:
                await self._round()

    async def _read_tombstones(self, catalog: Catalog) -> None:
        """Mark what any service has removed from a shared level since the last call."""
        found: list[Tombstone] = []
        for limit in _TOMBSTONES_READ:
            try:
                found = await catalog.tombstones(limit=limit, deadline=self._deadline())
            except (Unavailable, Closed, CorruptRecord):
                return
            # those of one second are in no order across the catalog's slots
            if len(found) < limit or found[-1].at_s < self._newest_s:
                break
        if len(found) == TOMBSTONES_MAX and self._seen.isdisjoint(found):  # some were dropped before they were read
            self._marked.update(dict.fromkeys(self._pages))
        for tombstone in found:
            place = (tombstone.namespace, tombstone.prefix)
            if place in self._pages and tombstone not in self._seen:
                self._marked[place] = None
        self._seen = set(found)
        self._newest_s = max((tombstone.at_s for tombstone in found), default=0)

    def _sweep(self) -> None:
        """Mark the boundaries that were checked longest ago."""
        for _ in range(min(_SWEPT, len(self._pages))):
            place, pages = self._pages.popitem(last=False)
            self._pages[place] = pages
            self._marked[place] = None

    async def _round(self) -> None:
        """Publish what has changed at some marked boundaries."""
        taken = [place for place, _ in zip(self._marked, range(_BATCH), strict=False)]
        for place in taken:
            del self._marked[place]
        by_namespace: defaultdict[NamespaceId, list[PrefixHash]] = defaultdict(list)
        for namespace, prefix in taken:
            by_namespace[namespace].append(prefix)
        for namespace, prefixes in by_namespace.items():
            table = await self._look_up(namespace, prefixes)
            told = _Told(self._topics)
            for index, prefix in enumerate(prefixes):  # from here on nothing waits: what is read is published
                self._compare((namespace, prefix), table, index, told)
            for topic, events in told.batches(_BATCH):
                self._clear_once(topic)
                self._publisher.publish(topic, events)
        await asyncio.sleep(0)

    async def _look_up(self, namespace: NamespaceId, prefixes: Sequence[PrefixHash]) -> EntryTable | None:
        """The catalog's entries; `None`: it does not answer, and what it said before counts."""
        if self._catalog is None or not self._levels:
            return None
        try:
            return await self._catalog.lookup(namespace, prefixes, deadline=self._deadline())
        except (Unavailable, Closed, InvalidRequest, CorruptRecord):
            return None

    def _compare(self, place: _Place, table: EntryTable | None, index: int, told: _Told) -> None:
        namespace, prefix = place
        pages = self._pages.get(place)
        if pages is None:
            return
        held = self._memory.boundaries(namespace).get(prefix, {})
        rows = {level: _bits(table, index, level) for level in self._levels} if table is not None else {}
        is_placed = False
        for group, page in pages.items():
            now = [self._memory_medium] if held.get(group, 0) == page.whole else []
            for level, medium in self._levels.items():
                is_there = rows[level][group] == page.whole if level in rows else medium in page.media
                if is_there and medium not in now:
                    now.append(medium)
            for medium in page.media:
                if medium not in now:
                    told.gone(page, medium)
            for medium in now:
                if medium not in page.media:
                    told.there(page, medium)
            page.media = now
            is_placed = is_placed or bool(now)
        if is_placed:
            self._unplaced.pop(place, None)
            while self._num_pages > _PAGES_MAX:
                self._forget(next(iter(self._pages)), told)
        elif place not in self._unplaced:
            self._unplaced[place] = None

    def _forget(self, place: _Place, told: _Told | None = None) -> None:
        """Forget a boundary. Subscribers forget it too, since no later removal could reach them."""
        pages = self._pages.pop(place, {})
        self._num_pages -= len(pages)
        self._unplaced.pop(place, None)
        self._marked.pop(place, None)
        for page in pages.values():
            if told is not None:
                for medium in page.media:
                    told.gone(page, medium)
            page.like.remove(page)
            if not page.like:
                del self._alike[_start(page.blocks)]

    def _clear_once(self, topic: str) -> None:
        """Have subscribers drop what an earlier run of this service published on a topic of the node alone.

        A topic that has an engine's own name is not cleared: the event would drop the engine's own blocks.
        """
        if topic not in self._cleared:
            self._cleared.add(topic)
            if topic.startswith("kv@node:"):
                self._publisher.publish(topic, [CLEARED])

    def _deadline(self) -> Deadline:
        return Deadline.after(_CALL_S, self._clock)


class _Told:
    """The events of one round, by topic. Hashes that leave one medium and group are one event."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._there: defaultdict[str, list[Event]] = defaultdict(list)
        self._gone: defaultdict[str, dict[tuple[Medium, int], list[int | bytes]]] = defaultdict(dict)

    def there(self, page: _Page, medium: Medium) -> None:
        alone = page.alone(medium, hashes_of(page.blocks))
        events = [stored(page.blocks, run, group, medium) for run in _runs(alone) for group in page.blocks.groups]
        for topic in self._topics.of(medium, page.blocks.model):
            self._there[topic] += events

    def gone(self, page: _Page, medium: Medium) -> None:
        hashes = hashes_of(page.blocks)
        gone = [hashes[index] for index in page.alone(medium, hashes)]
        for topic in self._topics.of(medium, page.blocks.model):
            for group in page.blocks.groups if gone else ():
                self._gone[topic].setdefault((medium, group.index), []).extend(gone)

    def batches(self, most: int) -> Iterable[tuple[str, list[Event]]]:
        """Removals first: blocks that one page loses and another one gains in the same round are there at its end."""
        for topic in {**self._gone, **self._there}:
            events = [removed(hashes, group, medium) for (medium, group), hashes in self._gone[topic].items()]
            events += self._there[topic]
            for start in range(0, len(events), most):
                yield topic, events[start : start + most]


def _start(blocks: PageBlocks) -> tuple[NamespaceId, int, bytes]:
    return blocks.namespace, blocks.group, blocks.hashes[: blocks.hash_bytes]


def _runs(indexes: Iterable[int]) -> Iterator[range]:
    """Ascending indexes as runs of consecutive ones."""
    run: range | None = None
    for index in indexes:
        if run is not None and index == run.stop:
            run = range(run.start, index + 1)
            continue
        if run is not None:
            yield run
        run = range(index, index + 1)
    if run is not None:
        yield run


def _bits(table: EntryTable, index: int, level: Level) -> tuple[int, ...]:
    """For each group a bit per slice of one boundary at a level; none of them while it is leaving."""
    data = table.entry(index)
    if data is None or table.leaves(index, level):
        return (0,) * len(table.shape.num_slices)
    return table.shape.slices(data, level)
