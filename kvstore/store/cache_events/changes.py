"""What subscribers learn of blocks: that the first page with one came to a medium, and that the last one left."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from kvstore.model.media import Medium
from kvstore.model.page_blocks import BlockGroup, PageBlocks
from kvstore.store.cache_events.encoding import Event, EventHash, event_bytes, event_hashes, removed, stored
from kvstore.store.cache_events.pages import Page

BATCH_BYTES = 64 << 10
"""About the size of a batch at most. Only an event of one block can be larger."""
_BATCH_EVENTS = 128
_EVENT_TOKENS, _EVENT_HASHES = 8_192, 1_024
"""Of one event, unless it has one block."""
_CHANGE_BYTES = 256


class BlockCounts:
    """How many pages have a block, on each medium and in each of an engine's groups.

    Subscribers do not count: a block that one page loses is gone for them. But a page and its tail have blocks in
    common, and so have pages of different namespaces and tenants: an engine's hashes depend on the prompt alone.
    """

    def __init__(self) -> None:
        # by model, since a tenant may name any number of them
        self._counts: dict[str, dict[tuple[Medium, int], _Counts]] = {}

    def add(self, model: str, hashes: Sequence[EventHash], medium: Medium, group: int) -> Sequence[int]:
        """Count a page with these blocks that came; returns the indexes of those that no page there had before."""
        of_model = self._counts.setdefault(model, {})
        if (medium, group) not in of_model:
            of_model[medium, group] = _Counts()
        return of_model[medium, group].add(hashes)

    def has(self, model: str, block: EventHash) -> bool:
        """Whether a page with this block is on any medium."""
        return any(block in counts.blocks for counts in self._counts.get(model, {}).values())

    def removals(self) -> Iterator[tuple[str, Medium, Iterator[Event]]]:
        """The events that take all blocks back, by model and medium."""
        for model, of_model in self._counts.items():
            for (medium, group), counts in of_model.items():
                yield model, medium, _removals(list(counts.blocks), group, medium)

    def remove(self, model: str, hashes: Sequence[EventHash], medium: Medium, group: int) -> Sequence[EventHash]:
        """Count a page with these blocks that left; returns those that no page there has any more."""
        of_model = self._counts[model]
        counts = of_model[medium, group]
        last = counts.remove(hashes)
        if not counts.blocks:
            del of_model[medium, group]
            if not of_model:
                del self._counts[model]
        return last


class _Counts:
    """How many pages have each block. Most pages share none with others, and count without a step for each block.

    Attributes:
        blocks: Those that any page has.
    """

    def __init__(self) -> None:
        self.blocks: set[EventHash] = set()
        self._further: dict[EventHash, int] = {}  # of blocks that several pages have: how many beside one

    def add(self, blocks: Sequence[EventHash]) -> Sequence[int]:
        """Count a page; returns the indexes of its blocks that no page had."""
        if self.blocks.isdisjoint(blocks):
            before = len(self.blocks)
            self.blocks.update(blocks)
            if len(self.blocks) - before == len(blocks):
                return range(len(blocks))
            return [index for index, _ in _distinct(blocks)]
        first = list[int]()
        for index, block in _distinct(blocks):
            if block in self.blocks:
                self._further[block] = self._further.get(block, 0) + 1
            else:
                self.blocks.add(block)
                first.append(index)
        return first

    def remove(self, blocks: Sequence[EventHash]) -> Sequence[EventHash]:
        """Count a page no longer; returns its blocks that no page has any more."""
        if not self._further or self._further.keys().isdisjoint(blocks):
            before = len(self.blocks)
            self.blocks.difference_update(blocks)
            return blocks if before - len(self.blocks) == len(blocks) else [block for _, block in _distinct(blocks)]
        last = list[EventHash]()
        for _, block in _distinct(blocks):
            if block not in self._further:
                self.blocks.remove(block)
                last.append(block)
            elif self._further[block] > 1:
                self._further[block] -= 1
            else:
                del self._further[block]
        return last


def _distinct(blocks: Sequence[EventHash]) -> Iterable[tuple[int, EventHash]]:
    """A page's blocks with their indexes. One that a page has twice, which no engine does, counts once."""
    distinct: dict[EventHash, int] = {}
    for index, block in enumerate(blocks):
        distinct.setdefault(block, index)
    return ((index, block) for block, index in distinct.items())


class _Came(NamedTuple):
    """Blocks that came to a medium: an event that is made when it is published, since it may have many tokens."""

    blocks: PageBlocks
    run: range
    group: BlockGroup
    medium: Medium

    def event(self) -> Event:
        return stored(self.blocks, self.run, self.group, self.medium)


_Topics = tuple[str, ...]


class Changes:
    """Collects what changed in a round, and makes batches of events of it, by topic. Hashes that leave one medium and
    group are one event.

    Args:
        topics: Returns the topics of a medium and a model. Two media have the same topics, or none in common: pages of
            one topic are published in the order in which they came.
        block_counts: Of all that was published before; kept up to date.

    Attributes:
        num_bytes: Of the hashes and tokens of what has changed, and something for each page.
    """

    def __init__(self, topics: Callable[[Medium, str], Iterable[str]], block_counts: BlockCounts) -> None:
        self._topics = topics
        self._block_counts = block_counts
        self._topics_of: dict[tuple[Medium, str], _Topics] = {}
        self._there: defaultdict[_Topics, list[_Came]] = defaultdict(list)
        self._gone: defaultdict[_Topics, dict[tuple[Medium, int], list[EventHash]]] = defaultdict(dict)
        self.num_bytes = 0

    def there(self, page: Page, medium: Medium) -> None:
        """Note that a page can be read from a medium."""
        blocks = page.blocks
        hashes, came = event_hashes(blocks), self._there[self._its_topics(medium, blocks.model)]
        for group in blocks.groups:
            new = self._block_counts.add(blocks.model, hashes, medium, group.index)
            for run in _runs(new, _EVENT_TOKENS // blocks.block_tokens):
                came.append(_Came(blocks, run, group, medium))
        self._count(blocks)

    def gone(self, page: Page, medium: Medium) -> None:
        """Note that it no longer can."""
        blocks = page.blocks
        hashes, gone = event_hashes(blocks), self._gone[self._its_topics(medium, blocks.model)]
        for group in blocks.groups:
            if last := self._block_counts.remove(blocks.model, hashes, medium, group.index):
                gone.setdefault((medium, group.index), []).extend(last)
        self._count(blocks)

    def _its_topics(self, medium: Medium, model: str) -> _Topics:
        """As `topics`, which is called once for each medium and model."""
        topics = self._topics_of.get((medium, model))
        if topics is None:
            topics = self._topics_of[medium, model] = tuple(self._topics(medium, model))
        return topics

    def _count(self, blocks: PageBlocks) -> None:
        self.num_bytes += _CHANGE_BYTES + (len(blocks.hashes) + len(blocks.tokens)) * len(blocks.groups)

    def batches(self) -> Iterable[tuple[str, list[Event]]]:
        """Removals first: blocks that one page loses and another one gains in the same round are there at its end.

        Each batch is made when it is asked for, so that others can run before the next one.
        """
        for topics in {**self._gone, **self._there}:
            for batch in self._batches(topics):
                for topic in topics:
                    yield topic, batch

    def _batches(self, topics: _Topics) -> Iterator[list[Event]]:
        batch, num_bytes = list[Event](), 0
        for event in self._events(topics):
            num_bytes += event_bytes(event)
            if batch and (num_bytes > BATCH_BYTES or len(batch) == _BATCH_EVENTS):
                yield batch
                batch, num_bytes = [], event_bytes(event)
            batch.append(event)
        if batch:  # none, if other pages have all blocks of those that came
            yield batch

    def _events(self, topics: _Topics) -> Iterator[Event]:
        for (medium, group), hashes in self._gone[topics].items():
            for start in range(0, len(hashes), _EVENT_HASHES):
                yield removed(hashes[start : start + _EVENT_HASHES], group, medium)
        for came in self._there[topics]:
            yield came.event()


def _removals(blocks: Sequence[EventHash], group: int, medium: Medium) -> Iterator[Event]:
    for start in range(0, len(blocks), _EVENT_HASHES):
        yield removed(blocks[start : start + _EVENT_HASHES], group, medium)


def _runs(indexes: Sequence[int], most: int) -> Iterator[range]:
    """Ascending indexes as runs of consecutive ones, of at most `most` or one."""
    if isinstance(indexes, range) and 0 < len(indexes) <= min(most, _EVENT_HASHES):
        yield indexes
        return
    run: range | None = None
    for index in indexes:
        if run is not None and index == run.stop and len(run) < min(most, _EVENT_HASHES):
            run = range(run.start, index + 1)
            continue
        if run is not None:
            yield run
        run = range(index, index + 1)
    if run is not None:
        yield run
