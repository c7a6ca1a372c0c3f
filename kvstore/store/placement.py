"""Which records to ask which tier for, and where each was found. Pure: no tier is called here.

A *probe* is one group's record at one boundary of the query. A prompt of 131,072 tokens has 512 pages but 8,192
boundaries, so pages are asked for first; tails only in the first cell that has no page, and states only as far as the
pages reach. Where each answer costs a request (the cold tier), one slice stands for all of a record's slices, and of
many pages only some are asked for: between two equal answers the pages in between are taken to be alike. Both are
guesses that `stage` verifies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvstore.api import PrefixQuery
from kvstore.model.coverage import longest_resumable
from kvstore.model.keys import RecordKey
from kvstore.model.layout import Layout, cell_of
from kvstore.store.slices import Probe, SliceMap, groups_present, slices_of

__all__ = [
    "UNKNOWN_BYTES",
    "Presence",
    "Probe",
    "SliceMap",
    "by_group",
    "fill",
    "gaps",
    "inner_probes",
    "last_of_each",
    "page_probes",
    "spread",
]

UNKNOWN_BYTES = 4 << 20
"""Assumed for a record whose size no tier knows: encoded records aim at 2 to 4 MiB."""


@dataclass(slots=True)
class Presence:
    """What is known of a query's records, tier by tier.

    Attributes:
        memory: Slices in this node's memory.
        hot: Slices in the hot tier.
        cold: Slices in the cold tier; partly guessed.
        num_bytes: For each group the sum of the record sizes that tiers reported.
        num_sized: For each group how many sizes that were.
        silent: Names of the tiers that were asked and did not answer.
    """

    layout: Layout
    query: PrefixQuery
    memory: SliceMap = field(default_factory=dict)
    hot: SliceMap = field(default_factory=dict)
    cold: SliceMap = field(default_factory=dict)
    num_bytes: dict[int, int] = field(default_factory=dict)
    num_sized: dict[int, int] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)

    @property
    def num_cells(self) -> int:
        """Boundaries times groups: what it takes to work on all of it."""
        return len(self.query.boundaries) * len(self.layout.groups)

    def key(self, probe: Probe, slice_: int) -> RecordKey:
        """The key of one slice."""
        index, group = probe
        return RecordKey(self.query.namespace, self.query.boundaries[index].prefix, group, slice_)

    def keys(self, probe: Probe) -> list[RecordKey]:
        """The keys of all slices."""
        return [self.key(probe, slice_) for slice_ in range(self.layout.groups[probe[1]].num_slices)]

    def missing_bits(self, probe: Probe) -> int:
        """A bit for each slice that is not in memory."""
        return (1 << self.layout.groups[probe[1]].num_slices) - 1 & ~self.memory.get(probe, 0)

    def missing(self, probe: Probe) -> list[int]:
        """Slices that are not in memory."""
        return slices_of(self.missing_bits(probe))

    def complete(self, probe: Probe) -> bool:
        """Whether every slice is in some tier."""
        held = self.memory.get(probe, 0) | self.hot.get(probe, 0) | self.cold.get(probe, 0)
        return held == (1 << self.layout.groups[probe[1]].num_slices) - 1

    def groups_present(self) -> list[int]:
        """For each boundary a bit per group all of whose slices are in some tier."""
        return groups_present(self.layout, len(self.query.boundaries), (self.memory, self.hot, self.cold))

    def resume_tokens(self, bits: Sequence[int] | None = None) -> int:
        """The longest resume point that looks usable, or the local tokens.

        Args:
            bits: `groups_present`, where the caller has it.
        """
        query = self.query
        return longest_resumable(
            self.layout,
            [boundary.tokens for boundary in query.boundaries],
            self.groups_present() if bits is None else bits,
            local_tokens=query.local_tokens,
            cap_tokens=query.cap_tokens,
            step_tokens=query.step_tokens,
        )

    def note_size(self, group: int, num_bytes: int) -> None:
        """Remember the size of one record; zero means that the tier did not know it."""
        if num_bytes > 0:
            self.num_bytes[group] = self.num_bytes.get(group, 0) + num_bytes
            self.num_sized[group] = self.num_sized.get(group, 0) + 1

    def mean_bytes(self, group: int, unknown_bytes: int) -> int:
        """Mean size of one slice of a group's records."""
        return self.num_bytes[group] // self.num_sized[group] if self.num_sized.get(group) else unknown_bytes


def page_probes(layout: Layout, query: PrefixQuery) -> list[Probe]:
    """Every group's pages (not states), ascending."""
    groups = [index for index, group in enumerate(layout.groups) if not group.is_state]
    if not groups:
        return []
    ends = [i for i, boundary in enumerate(query.boundaries) if boundary.tokens % layout.page_tokens == 0]
    return [(index, group) for index in ends for group in groups]


def inner_probes(layout: Layout, query: PrefixQuery, complete: Callable[[Probe], bool]) -> list[Probe]:
    """The tails and states that can still matter once it is known which pages are there, ascending.

    Args:
        complete: Whether a probe was found whole.
    """
    page_tokens = layout.page_tokens
    last_cell = min(_first_open_cell(layout, query, complete), cell_of(max(1, query.cap_tokens), page_tokens))
    pages = {cell_of(b.tokens, page_tokens): i for i, b in enumerate(query.boundaries) if b.tokens % page_tokens == 0}
    probes: list[Probe] = []
    # a group that reads a window may lack the page before, too
    first_token = max(0, last_cell - 1) * page_tokens
    for index, boundary in enumerate(query.boundaries):
        tokens, cell = boundary.tokens, cell_of(boundary.tokens, page_tokens)
        if cell > last_cell:
            break
        is_candidate = query.local_tokens < tokens <= query.cap_tokens and tokens % query.step_tokens == 0
        is_tail = tokens > first_token and tokens > query.local_tokens and tokens % page_tokens != 0
        for group, group_layout in enumerate(layout.groups):
            if group_layout.is_state:
                if is_candidate:
                    probes.append((index, group))
            elif is_tail and not (cell in pages and complete((pages[cell], group))):
                probes.append((index, group))
    return probes


def _first_open_cell(layout: Layout, query: PrefixQuery, complete: Callable[[Probe], bool]) -> int:
    """The first cell, from the local tokens on, in which a group that reads every earlier token has no page.

    Groups that read a window have holes by nature and do not end the search, unless there are no others.
    """
    paged = [(index, group.kind) for index, group in enumerate(layout.groups) if not group.is_state]
    if not query.boundaries:
        return 0
    last_cell = cell_of(query.boundaries[-1].tokens, layout.page_tokens)
    furthest = query.boundaries[-1].tokens
    whole = [index for index, kind in paged if kind.needed_from(furthest) == 0]
    first_cell = query.local_tokens // layout.page_tokens
    pages = {
        cell_of(b.tokens, layout.page_tokens): i
        for i, b in enumerate(query.boundaries)
        if b.tokens % layout.page_tokens == 0
    }
    if whole:
        for cell in range(first_cell, last_cell + 1):
            if cell not in pages or not all(complete((pages[cell], group)) for group in whole):
                return cell
        return last_cell
    held = [cell for cell, i in pages.items() if any(complete((i, group)) for group, _ in paged)]
    return min(last_cell, max(held) + 1) if held else (first_cell if paged else last_cell)


def spread(num_items: int, limit: int) -> list[int]:
    """Up to `limit` indexes of `num_items` ordered items, evenly spaced, the first and the last among them."""
    if num_items <= limit:
        return list(range(num_items))
    if limit < 2:
        return [0]
    return sorted({i * (num_items - 1) // (limit - 1) for i in range(limit)})


def gaps(answers: Mapping[int, bool], limit: int) -> list[int]:
    """Up to `limit` indexes to ask next: spread over each gap between two answers that differ, the lowest gap first."""
    chosen: list[int] = []
    for low, high in pairwise(sorted(answers)):
        if answers[low] != answers[high]:
            num = min(high - low - 1, limit - len(chosen))
            chosen += [low + (i + 1) * (high - low) // (num + 1) for i in range(num)]
    return chosen


def fill(answers: Mapping[int, bool], num_items: int) -> list[bool]:
    """An answer for every item: its own, or that of both neighbours where they agree, else no."""
    filled = [False] * num_items
    asked = sorted(answers)
    for i in asked:
        filled[i] = answers[i]
    for low, high in pairwise(asked):
        if answers[low] and answers[high]:
            filled[low:high] = [True] * (high - low)
    return filled


def by_group(probes: Iterable[Probe]) -> dict[int, list[Probe]]:
    """Probes of each group, in their order."""
    groups: dict[int, list[Probe]] = {}
    for probe in probes:
        groups.setdefault(probe[1], []).append(probe)
    return groups


def last_of_each(probes: Sequence[Probe], limit: int) -> list[Probe]:
    """For each group its last `limit` probes: the longest resume points are the ones worth a request."""
    return sorted(probe for group in by_group(probes).values() for probe in group[-limit:])
