"""On which media the named pages are: compared with what subscribers were last told, in rounds."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from kvstore.catalog.base import TOMBSTONES_MAX, Catalog, Tombstone
from kvstore.catalog.entry import EntryTable, Level
from kvstore.errors import Closed, CorruptRecord, InvalidRequest, Unavailable
from kvstore.model.keys import Boundary, NamespaceId, PrefixHash, RecordKey
from kvstore.model.media import Medium
from kvstore.model.page_blocks import PageBlocks
from kvstore.runtime.background import Background
from kvstore.runtime.clock import Clock
from kvstore.runtime.deadline import Deadline
from kvstore.store.cache_events.changes import BATCH_BYTES, BlockCounts, Changes
from kvstore.store.cache_events.encoding import CLEARED, Event, EventHash, event_hashes, event_parent
from kvstore.store.cache_events.pages import Page, Pages, PagesByHash, Place
from kvstore.tiers.memory import MemoryTier

ROUND_S = 0.4
"""How long changes wait for others that are published with them. So often the catalog is read for removals that other
services made."""
_TOMBSTONES_READ = (64, 1024, TOMBSTONES_MAX)
"""How many of the latest are read: more if the fewer ones do not reach back to those of the last time."""
_ROUND = 128
"""Boundaries that are looked up at a time."""
SWEPT = 128
"""Boundaries that each round checks without a cause, if there is a catalog: one that was lost leaves no tombstones."""
PAGES_MAX, BYTES_MAX = 131_072, 256 << 20
"""Pages on some medium that are known. Of more, some are taken back from subscribers, and forgotten."""
UNPLACED_MAX, _UNPLACED_BYTES_MAX = 16_384, 64 << 20
"""Pages on no medium that are known."""
_HASHES_AT_ONCE = 512
"""Hashes that are looked up before other tasks of the loop get a turn."""
_CALL_S = 1.0
"""The catalog has this time to answer, and changes of memory wait for it. What it does not answer is asked again."""
ALL_AGAIN_S = 600.0
"""Between two times that all pages are published again."""
_IDLE_S = 2.0
"""While nothing changes, between two looks at whether a subscriber lacks something."""
_BEHIND_S = 0.1
"""Between two looks at whether the publisher is still behind."""
_NO_SLICES: Mapping[int, int] = {}


class Publisher(Protocol):
    """Sends events to routers: an `EventPublisher`, or a fake in tests."""

    @property
    def is_behind(self) -> bool:
        """Whether nothing more should be published for now."""
        ...

    @property
    def lacks_some(self) -> bool:
        """Whether a subscriber has asked for messages that are no longer kept."""
        ...

    def publish(self, topic: str, events: Sequence[Event]) -> None:
        """Send one batch. Returns at once."""
        ...

    def begin_again(self) -> None:
        """Keep nothing of what was published so far."""
        ...

    def told_all(self) -> None:
        """All pages were published since `begin_again`."""
        ...

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Topics:
    """The names under which events are published: `kv@<name>@<model>`, as llm-d reads topics. It splits them at `@`, so
    one in a model's name is written `%40`, and `%` is written `%25`.

    Attributes:
        node: Of media of this node; each gets its own copy of the events.
        pool: Of media that nodes share.
    """

    node: tuple[str, ...]
    pool: str

    def of(self, medium: Medium, model: str) -> list[str]:
        names = self.node if medium.is_local else (self.pool,)
        model = model.replace("%", "%25").replace("@", "%40")
        return [f"kv@{name}@{model}" for name in names]


class PlacementEvents:
    """Publishes, for each page that an engine named, when it becomes readable from a medium and when it no longer is.

    Changes only mark a boundary. A round reads where marked boundaries really are, in memory and in the catalog, and
    publishes the difference. So no order of changes can leave a subscriber with a page that is gone: what removed it
    marks the boundary again. If the publisher is behind, marks wait, and changes that cancel out are never sent.

    A page waits for the page before it: llm-d and Dynamo ignore blocks whose parent they do not know.

    A publisher keeps a bounded number of messages for replays. Once a subscriber asks for some that it has dropped, all
    pages are taken back and published again as after a restart: who subscribes late, or was away for long, learns of
    all of them. The others have less for that time, so it is not done for subscribers that do not ask.

    Belongs to the event loop.

    Args:
        memory: Its changes are to be passed to `changed`.
        memory_medium: The medium of it.
        levels: The medium of each shared level that exists.
        catalog: What the shared levels hold, and its tombstones what other services removed; `None`: there is none.

    Attributes:
        is_retired: Whether nothing of a namespace is served, wherever it is. Asked in each round of a service with a
            catalog: operators' rules are beside one.
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
        self._catalog = catalog if levels else None
        self._clock = clock
        self._pages: OrderedDict[Place, dict[int, Page]] = OrderedDict()
        self._placed, self._unplaced = Pages(PAGES_MAX, BYTES_MAX), Pages(UNPLACED_MAX, _UNPLACED_BYTES_MAX)
        self._block_counts = BlockCounts()
        self._by_hash = PagesByHash()
        self._orphans: dict[EventHash, dict[Place, None]] = {}  # by the hash of the block that they wait for
        self._marked: dict[Place, None] = {}  # a set that keeps its order
        self._is_marked = asyncio.Event()  # some were, since the last round
        self._unanswered: dict[Place, None] = {}  # marked again once the catalog answers
        self._is_answering = False
        self._seen = Counter[Tombstone]()  # two removals of a boundary in one second are equal
        self._newest_s = 0
        self._cleared: set[str] = set()
        self.is_retired: Callable[[NamespaceId], bool] = lambda _: False
        self._retired: set[NamespaceId] = set()
        self._again_s = float("-inf")
        self._background = Background("cache events")

    def start(self) -> None:
        """Begin the rounds."""
        self._background.keep_running(self._run, "rounds")

    def name(self, blocks: PageBlocks, num_slices: int, tenant: str) -> None:
        """Learn the blocks of a page of `num_slices` slices. The first names count. Of the pages that are on no medium
        only the latest are known.
        """
        place = (blocks.namespace, blocks.boundary.prefix)
        pages = self._pages.setdefault(place, {})
        if blocks.group not in pages:
            pages[blocks.group] = page = Page(blocks, tenant, (1 << num_slices) - 1)
            self._unplaced.add(page)
            self._by_hash.add(page)
        self._mark(place)
        self._forget_unplaced()

    def knows(self, namespace: NamespaceId) -> bool:
        """Whether any page of a namespace is named."""
        return namespace in self._by_hash

    async def boundaries(self, namespace: NamespaceId, hashes: Sequence[bytes]) -> list[Boundary]:
        """The boundaries of a prompt at which named pages of a namespace end, ascending.

        Args:
            hashes: Of the prompt's blocks, in order, as `PageBlocks` has them.
        """
        found: list[Boundary] = []
        for start in range(0, len(hashes), _HASHES_AT_ONCE):
            part = self._by_hash.boundaries(namespace, hashes[start : start + _HASHES_AT_ONCE])
            found += [one for one in part if not found or one.tokens > found[-1].tokens]
            await asyncio.sleep(0)
        return found

    def changed(self, key: RecordKey) -> None:
        """Note that a record was stored or removed somewhere. Called for every record: it must cost nothing."""
        place = (key.namespace, key.prefix)
        if place in self._pages and place not in self._marked:
            self._mark(place)

    def _mark(self, place: Place) -> None:
        if not self._marked:
            self._is_marked.set()
        self._marked[place] = None

    async def aclose(self) -> None:
        """Stop, and close the publisher. Idempotent."""
        await self._background.aclose()
        await asyncio.to_thread(self._publisher.close)

    async def _run(self) -> None:
        while True:
            is_idle = not self._marked and not self._publisher.lacks_some
            if is_idle and (self._catalog is None or not self._pages):  # memory marks each of its changes
                self._is_marked.clear()
                with suppress(TimeoutError):  # no call tells when a subscriber asks for what is no longer kept
                    await asyncio.wait_for(self._is_marked.wait(), _IDLE_S)
            await asyncio.sleep(ROUND_S)
            if self._catalog is not None:
                self._is_answering = await self._read_tombstones(self._catalog)
                self._mark_retired()
            if self._is_answering:
                self._marked |= self._unanswered
                self._unanswered.clear()
                self._sweep()
            while self._marked and not self._publisher.is_behind:
                await self._round()
            if self._publisher.lacks_some and self._clock.monotonic_s() - self._again_s >= ALL_AGAIN_S:
                await self._begin_again()

    async def _read_tombstones(self, catalog: Catalog) -> bool:
        """Mark what any service has removed from a shared level since the last call. False: the catalog does not
        answer."""
        found, counts, has_old = list[Tombstone](), Counter[Tombstone](), False
        for limit in _TOMBSTONES_READ:
            try:
                found = await catalog.tombstones(limit=limit, deadline=self._deadline())
            except (Unavailable, Closed, CorruptRecord):
                return False
            counts = Counter(found)
            has_old = not counts.keys().isdisjoint(
                self._seen
            )  # clocks of services differ, so times alone prove nothing
            # those of one second are in no order across the catalog's slots
            if len(found) < limit or (has_old and found[-1].at_s < self._newest_s):
                break
        if len(found) == TOMBSTONES_MAX and not has_old:  # some were dropped before
            self._marked.update(dict.fromkeys(self._pages))
        for tombstone, count in counts.items():
            place = (tombstone.namespace, tombstone.prefix)
            if place in self._pages and count > self._seen[tombstone]:
                self._marked[place] = None
        self._seen = counts
        self._newest_s = max((tombstone.at_s for tombstone in found), default=0)
        return True

    def _mark_retired(self) -> None:
        """Mark all pages of namespaces whose weights were retired, or are served again, since the last call."""
        retired = {namespace for namespace in self._by_hash.namespaces() if self.is_retired(namespace)}
        if changed := retired ^ self._retired:
            self._retired = retired
            self._marked.update(dict.fromkeys(place for place in self._pages if place[0] in changed))

    def _sweep(self) -> None:
        """Mark the boundaries that were checked longest ago."""
        for _ in range(min(SWEPT, len(self._pages))):
            place, pages = self._pages.popitem(last=False)
            self._pages[place] = pages
            self._marked[place] = None

    async def _round(self) -> None:
        """Publish what has changed at some marked boundaries."""
        taken = [place for place, _ in zip(self._marked, range(_ROUND), strict=False)]
        for place in taken:
            del self._marked[place]
        by_namespace: defaultdict[NamespaceId, list[PrefixHash]] = defaultdict(list)
        for namespace, prefix in taken:
            by_namespace[namespace].append(prefix)
        for namespace, prefixes in by_namespace.items():
            table = await self._look_up(namespace, prefixes)
            changes = Changes(self._topics.of, self._block_counts)
            for index, prefix in enumerate(prefixes):
                self._compare((namespace, prefix), table, index, changes)
                if changes.num_bytes >= BATCH_BYTES:  # what changes while others run marks its boundary again
                    await self._publish(changes)
                    changes = Changes(self._topics.of, self._block_counts)
            await self._publish(changes)

    async def _publish(self, changes: Changes) -> None:
        """Publish what was compared, and forget pages that are too many."""
        await self._send(changes)
        self._forget_unplaced()
        forgotten = Changes(self._topics.of, self._block_counts)
        while (oldest := self._placed.excess()) is not None:
            self._forget(oldest, forgotten)
            if forgotten.num_bytes >= BATCH_BYTES:
                await self._send(forgotten)
                forgotten = Changes(self._topics.of, self._block_counts)
        await self._send(forgotten)
        await asyncio.sleep(0)

    async def _send(self, changes: Changes) -> None:
        """Publish events, and let others run after each batch."""
        for topic, events in changes.batches():
            self._clear_once(topic)
            await self._send_batch(topic, events)

    async def _send_batch(self, topic: str, events: Sequence[Event]) -> None:
        self._publisher.publish(topic, events)
        await asyncio.sleep(0)
        while self._publisher.is_behind:
            await asyncio.sleep(_BEHIND_S)

    async def _begin_again(self) -> None:
        """Take all pages back from subscribers, and publish them again, so that a replay from the start has them."""
        self._again_s = self._clock.monotonic_s()
        known, self._block_counts = self._block_counts, BlockCounts()
        to_clear = list[str]()
        for model, medium, events in known.removals():
            topics = self._topics.of(medium, model)
            to_clear += filter(_is_node, topics)
            taken_back = [topic for topic in topics if not _is_node(topic)]
            for event in events if taken_back else ():
                for topic in taken_back:
                    await self._send_batch(topic, [event])
        self._cleared.clear()
        self._publisher.begin_again()
        for topic in to_clear:  # also if nothing follows on it: all pages of a node may wait for others
            self._clear_once(topic)
        changes = Changes(self._topics.of, self._block_counts)
        # in a thread: there may be hundreds of thousands
        for page in await asyncio.to_thread(sorted, list(self._placed), key=lambda page: page.blocks.start):
            if self._waits(page):  # what was before it is gone
                self._placed.remove(page)
                page.media = []
                self._unplaced.add(page)
                self._mark(page.place)
            for medium in page.media:
                changes.there(page, medium)
            if changes.num_bytes >= BATCH_BYTES:
                await self._send(changes)
                changes = Changes(self._topics.of, self._block_counts)
        await self._send(changes)
        self._publisher.told_all()

    async def _look_up(self, namespace: NamespaceId, prefixes: Sequence[PrefixHash]) -> EntryTable | None:
        """The catalog's entries; `None`: it does not answer, and what it said before counts. Then it is not asked again
        in this pass, since changes of memory must not wait for one answer after the other.
        """
        if self._catalog is None:
            return None
        if self._is_answering:
            try:
                return await self._catalog.lookup(namespace, prefixes, deadline=self._deadline())
            except (InvalidRequest, CorruptRecord):  # of this namespace alone
                return None
            except (Unavailable, Closed):
                self._is_answering = False
        places = ((namespace, prefix) for prefix in prefixes)
        self._unanswered |= dict.fromkeys(place for place in places if place in self._pages)
        return None

    def _compare(self, place: Place, table: EntryTable | None, index: int, changes: Changes) -> None:
        namespace, prefix = place
        pages = self._pages.get(place)
        if pages is None:
            return
        held = self._memory.boundaries(namespace).get(prefix, _NO_SLICES)
        rows = {level: _bits(table, index, level) for level in self._levels} if table is not None else {}
        is_served = namespace not in self._retired
        for group, page in pages.items():
            before = page.media
            now = [self._memory_medium] if is_served and held.get(group) == page.whole else []
            for level, medium in self._levels.items() if is_served else ():
                is_there = rows[level][group] == page.whole if level in rows else medium in before
                if is_there and medium not in now:
                    now.append(medium)
            if now == before or (not before and self._waits(page)):
                continue
            for medium in before:
                if medium not in now:
                    changes.gone(page, medium)
            for medium in now:
                if medium not in before:
                    changes.there(page, medium)
            page.media = now
            if not now:
                self._placed.remove(page)
                self._unplaced.add(page)
            elif not before:
                self._unplaced.remove(page)
                self._placed.add(page)
                self._mark_orphans(page)

    def _mark_orphans(self, page: Page) -> None:
        """Mark the boundaries whose pages waited for a block of this one."""
        if self._orphans:
            for block in event_hashes(page.blocks):
                self._marked |= self._orphans.pop(block, {})

    def _waits(self, page: Page) -> bool:
        """Whether a page is to be published after the one with the block before it, which marks it then."""
        parent = event_parent(page.blocks)
        if parent is None or self._block_counts.has(page.blocks.model, parent):
            return False
        self._orphans.setdefault(parent, {})[page.place] = None
        return True

    def _forget_unplaced(self) -> None:
        while (oldest := self._unplaced.excess()) is not None:
            self._forget(oldest)

    def _forget(self, page: Page, changes: Changes | None = None) -> None:
        """Forget a page. Subscribers forget it too, since no later removal could reach them."""
        pages, parent = self._pages[page.place], event_parent(page.blocks)
        del pages[page.blocks.group]
        if parent is not None and (orphans := self._orphans.get(parent)):
            orphans.pop(page.place, None)
            if not orphans:
                del self._orphans[parent]
        if pages:
            self._mark(page.place)  # another group's page may have waited with it
        else:
            del self._pages[page.place]
            self._marked.pop(page.place, None)
            self._unanswered.pop(page.place, None)
        (self._placed if page.media else self._unplaced).remove(page)
        self._by_hash.remove(page)
        if changes is not None:
            for medium in page.media:
                changes.gone(page, medium)

    def _clear_once(self, topic: str) -> None:
        """Have subscribers drop what an earlier run of this service published under a name of the node alone: with the
        name's first message, since some take the event for all models.

        A name that an engine has too is not cleared: the event would drop the engine's own blocks.
        """
        name = topic.split("@")[1]
        if _is_node(topic) and name not in self._cleared:
            self._cleared.add(name)
            self._publisher.publish(topic, [CLEARED])

    def _deadline(self) -> Deadline:
        return Deadline.after(_CALL_S, self._clock)


def _is_node(topic: str) -> bool:
    """Whether a topic's name is of the node alone, and of no engine."""
    return topic.startswith("kv@node:")


def _bits(table: EntryTable, index: int, level: Level) -> tuple[int, ...]:
    """For each group a bit per slice of one boundary at a level; none of them while it is leaving."""
    data = table.entry(index)
    if data is None or table.leaves(index, level):
        return (0,) * len(table.shape.num_slices)
    return table.shape.slices(data, level)
