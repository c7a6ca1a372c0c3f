"""Which records to look for in which tier, where each was found, and how far what was found restores a prompt. Pure: no
tier is called here.

A *probe* is one group's record at one boundary of the query. A prompt of 131,072 tokens has 512 pages but 8,192
boundaries. So pages are looked for first, tails only in the first cell that has no page, and states only as far as the
pages reach. In the cold tier each answer costs a request: there one slice stands for all of a record's slices, and only
some of many pages are queried. The pages between two equal answers are taken to be alike. `stage` verifies these
guesses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.api import Offer, PrefixQuery
from kvstore.catalog.entry import EntryShape
from kvstore.model.coverage import Numbers, ends_to_resume, longest_resumable
from kvstore.model.keys import RecordKey
from kvstore.model.layout import Layout, cell_of

UNKNOWN_BYTES = 4 << 20
"""Assumed for a record whose size no tier knows: encoded records aim at 2 to 4 MiB."""
_CELLS_OF_ITEM = 16
"""Cells that NumPy works on in the time of one probe."""

Probe = tuple[int, int]
"""Index of a boundary in the query, index of a group in the layout."""

SliceMap = MutableMapping[Probe, int]
"""For each probe a bit per slice that is there; probes without any are left out."""


@dataclass(slots=True)
class Presence:
    """What was found of a query's records, tier by tier."""

    layout: Layout
    query: PrefixQuery
    memory: SliceMap = field(default_factory=dict)
    """Slices in this node's memory."""
    hot: SliceMap = field(default_factory=dict)
    cold: SliceMap = field(default_factory=dict)
    """Slices in the cold tier; partly guessed."""
    num_bytes: dict[int, int] = field(default_factory=dict)
    """For each group the sum of the record sizes that tiers reported."""
    num_sized: dict[int, int] = field(default_factory=dict)
    """For each group the number of those records."""
    silent: set[str] = field(default_factory=set)
    """Names of the tiers that did not answer."""
    _tokens: npt.NDArray[np.int64] | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """[boundaries], int64: where each boundary is."""
        if self._tokens is None:
            self._tokens = tokens_of(self.query)
        return self._tokens

    @property
    def num_cells(self) -> int:
        """Boundaries times groups: the items of a pass over all probes."""
        return len(self.query.boundaries) * len(self.layout.groups)

    @property
    def num_items(self) -> int:
        """The items of a pass over what was found, as `LongWork` counts them: answers of the catalog are arrays."""
        found = sum(len(one) for one in (self.memory, self.hot, self.cold) if not isinstance(one, PackedSlices))
        return found + self.num_cells // _CELLS_OF_ITEM

    def key(self, probe: Probe, slice_: int) -> RecordKey:
        """The key of one slice."""
        index, group = probe
        return RecordKey(self.query.namespace, self.query.boundaries[index].prefix, group, slice_)

    def missing_bits(self, probe: Probe) -> int:
        """A bit for each slice that is not in memory."""
        return (1 << self.layout.groups[probe[1]].num_slices) - 1 & ~self.memory.get(probe, 0)

    def missing(self, probe: Probe) -> list[int]:
        """Slices that are not in memory."""
        return slices_of(self.missing_bits(probe))

    def first_missing(self, probe: Probe) -> int:
        """The first slice that is not in memory, of a probe that memory does not have whole."""
        bits = self.missing_bits(probe)
        return (bits & -bits).bit_length() - 1

    def complete(self, probe: Probe) -> bool:
        """Whether every slice is in some tier."""
        held = self.memory.get(probe, 0) | self.hot.get(probe, 0) | self.cold.get(probe, 0)
        return held == (1 << self.layout.groups[probe[1]].num_slices) - 1

    def groups_present(self) -> npt.NDArray[Any]:
        """[boundaries]: for each a bit per group all of whose slices are in some tier."""
        return groups_present(self.layout, len(self.query.boundaries), (self.memory, self.hot, self.cold))

    def resume_tokens(self, bits: Numbers | None = None) -> int:
        """The longest resume point that looks usable, or the local tokens.

        Args:
            bits: `groups_present`, where the caller has it.
        """
        return resume_of(self.layout, self.query, self.tokens, self.groups_present() if bits is None else bits)

    def note_size(self, group: int, num_bytes: int) -> None:
        """Remember the size of one record; zero means that the tier did not know it."""
        if num_bytes > 0:
            self.num_bytes[group] = self.num_bytes.get(group, 0) + num_bytes
            self.num_sized[group] = self.num_sized.get(group, 0) + 1

    def mean_bytes(self, group: int, unknown_bytes: int) -> int:
        """Mean size of one slice of a group's records."""
        return self.num_bytes[group] // self.num_sized[group] if self.num_sized.get(group) else unknown_bytes


@dataclass(frozen=True, slots=True)
class Reach:
    """How far a prompt can be resumed, by where its records are.

    Attributes:
        memory_tokens: From this node's memory alone.
        resume_tokens: From memory and the slower tiers together: what a lookup answers.
        silent: Names of the tiers that did not answer in time, and may hold more.
    """

    memory_tokens: int
    resume_tokens: int
    silent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ResumePoints:
    """Where an engine can resume a prompt: at multiples of `step_tokens` up to `cap_tokens`."""

    step_tokens: int
    cap_tokens: int


def in_memory_and_in_all(presence: Presence) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """For each boundary a bit per group that is whole in memory, and the same of all tiers together."""
    in_memory = groups_present(presence.layout, len(presence.query.boundaries), (presence.memory,))
    return in_memory, presence.groups_present()


def reach_of(presence: Presence, in_memory: npt.NDArray[Any], in_all: npt.NDArray[Any], points: ResumePoints) -> Reach:
    """How far what was found restores a prompt on an engine that names boundaries at its own steps only.

    Args:
        in_memory: The first part of `in_memory_and_in_all`.
        in_all: The second part.
    """
    is_named = presence.tokens % points.step_tokens == 0
    tokens = presence.tokens[is_named]

    def resume(bits: npt.NDArray[Any]) -> int:
        return longest_resumable(
            presence.layout,
            tokens,
            bits[is_named],
            local_tokens=presence.query.local_tokens,
            cap_tokens=points.cap_tokens,
            step_tokens=points.step_tokens,
        )

    memory_tokens = resume(in_memory) if in_memory[is_named].any() else presence.query.local_tokens
    return Reach(memory_tokens, resume(in_all), tuple(sorted(presence.silent)))


def tokens_of(query: PrefixQuery) -> npt.NDArray[np.int64]:
    """[boundaries], int64: where each boundary of a query is."""
    return np.array([tokens for tokens, _ in query.boundaries], dtype=np.int64)


def resume_of(layout: Layout, query: PrefixQuery, tokens: Numbers, bits: Numbers, cap_tokens: int | None = None) -> int:
    """The longest resume point of a query that the present groups serve, or the local tokens.

    Args:
        tokens: Where each boundary is, as `tokens_of` returns it.
        bits: For each boundary a bit per group that is present.
        cap_tokens: No resume point is beyond this; `None`: as the query says.
    """
    return longest_resumable(
        layout,
        tokens,
        bits,
        local_tokens=query.local_tokens,
        cap_tokens=query.cap_tokens if cap_tokens is None else cap_tokens,
        step_tokens=query.step_tokens,
    )


# which records to look for


def page_probes(layout: Layout, query: PrefixQuery) -> list[Probe]:
    """Every group's pages (not states), ascending."""
    groups = [index for index, group in enumerate(layout.groups) if not group.is_state]
    return [(index, group) for index in _page_ends(layout, query).values() for group in groups]


def inner_probes(layout: Layout, query: PrefixQuery, complete: Callable[[Probe], bool]) -> list[Probe]:
    """The tails and states that can still matter once it is known which pages are there, ascending.

    Args:
        complete: Whether a probe was found whole.
    """
    page_tokens = layout.page_tokens
    last_cell = min(_first_open_cell(layout, query, complete), cell_of(max(1, query.cap_tokens), page_tokens))
    pages = _page_ends(layout, query)
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


def _page_ends(layout: Layout, query: PrefixQuery) -> dict[int, int]:
    """By cell, ascending, the index of the boundary that ends its page."""
    page_tokens = layout.page_tokens
    return {
        cell_of(boundary.tokens, page_tokens): index
        for index, boundary in enumerate(query.boundaries)
        if boundary.tokens % page_tokens == 0
    }


def _first_open_cell(layout: Layout, query: PrefixQuery, complete: Callable[[Probe], bool]) -> int:
    """The first cell behind the local tokens for which a page is missing in a group that reads every earlier token.

    Groups that read a window have holes by nature and do not end the search, unless there are no others.
    """
    if not query.boundaries:
        return 0
    paged = [(index, group.kind) for index, group in enumerate(layout.groups) if not group.is_state]
    last_cell = cell_of(query.boundaries[-1].tokens, layout.page_tokens)
    furthest = query.boundaries[-1].tokens
    whole = [index for index, kind in paged if kind.needed_from(furthest) == 0]
    first_cell = query.local_tokens // layout.page_tokens
    pages = _page_ends(layout, query)
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
    """Up to `limit` indexes to query next, spread over each gap between two answers that differ, lowest gap first."""
    chosen: list[int] = []
    for low, high in pairwise(sorted(answers)):
        if answers[low] != answers[high]:
            num = min(high - low - 1, limit - len(chosen))
            chosen += [low + (i + 1) * (high - low) // (num + 1) for i in range(num)]
    return chosen


def fill(answers: Mapping[int, bool], num_items: int) -> list[bool]:
    """An answer for every item: its own, or that of both neighbours where they agree, else no."""
    filled = [False] * num_items
    queried = sorted(answers)
    for i in queried:
        filled[i] = answers[i]
    for low, high in pairwise(queried):
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


# how far what was found restores a prompt


def affordable_resume(
    layout: Layout,
    query: PrefixQuery,
    bits: Numbers,
    *,
    group_bytes: Sequence[int],
    budget_bytes: int,
) -> int:
    """The longest usable resume point whose records fit a budget; `local_tokens` when none does.

    Where a longer prefix needs fewer bytes (windows and states only) the search may overlook a point that fits; it
    never returns one that does not.

    Args:
        bits: For each boundary a bit per group that is present.
        group_bytes: For each group the bytes of one of its records, all slices together.
    """
    tokens = tokens_of(query)

    def fits(resume_tokens: int) -> bool:
        if resume_tokens <= query.local_tokens:
            return True
        needed = ends_to_resume(layout, tokens, bits, resume_tokens=resume_tokens, local_tokens=query.local_tokens)
        return sum(len(ends) * group_bytes[group] for group, ends in enumerate(needed)) <= budget_bytes

    best = resume_of(layout, query, tokens, bits)
    if fits(best):
        return best
    low, high = query.local_tokens // query.step_tokens, best // query.step_tokens  # `low` fits, `high` does not
    found = query.local_tokens
    while high - low > 1:
        middle = (low + high) // 2
        resume_tokens = resume_of(layout, query, tokens, bits, middle * query.step_tokens)
        if fits(resume_tokens):
            low, found = middle, max(found, resume_tokens)
        else:
            high = middle
    return found


def offers_of(
    presence: Presence, resume_tokens: int, names: Sequence[str], bits: npt.NDArray[Any]
) -> tuple[Offer, ...]:
    """What each tier can restore: the resume points that memory alone, memory and the hot tier, and all tiers together
    serve, ascending. Each record counts for the first tier that has it, with the mean of the known sizes of its group.

    Args:
        resume_tokens: The longest resume point of all tiers together.
        names: Names of the memory, the hot and the cold tier.
        bits: `presence.groups_present()`.
    """
    query = presence.query
    if resume_tokens <= query.local_tokens:
        return ()
    places: list[SliceMap] = [presence.memory, presence.hot, presence.cold]
    if any(isinstance(one, PackedSlices) for one in places):  # pack each one once, not for each group
        rows = [_packed(presence.layout, len(query.boundaries), one) for one in places]
        places = [PackedSlices(presence.layout, one) for one in rows]
    used = [index for index, found in enumerate(places) if found]
    offers: list[Offer] = []
    for index in used:
        some = places[: index + 1]
        reached = resume_tokens
        if index == used[-1]:
            present = bits
        else:
            present = groups_present(presence.layout, len(query.boundaries), some)
            reached = resume_of(presence.layout, query, presence.tokens, present, resume_tokens)
        if reached > (offers[-1].resume_tokens if offers else query.local_tokens):
            offers.append(Offer(reached, _tier_bytes(presence, present, reached, places=some, names=names)))
        if reached == resume_tokens:
            break
    return tuple(offers)


def _tier_bytes(
    presence: Presence,
    present: npt.NDArray[Any],
    resume_tokens: int,
    *,
    places: Sequence[SliceMap],
    names: Sequence[str],
) -> dict[str, int]:
    """Bytes to read from each place for a resume point."""
    layout, tokens, local_tokens = presence.layout, presence.tokens, presence.query.local_tokens
    ends = ends_to_resume(layout, tokens, present, resume_tokens=resume_tokens, local_tokens=local_tokens)
    num_bytes: Counter[str] = Counter()
    for group, chosen in enumerate(ends):
        counts = count_first(layout, group, np.searchsorted(tokens, chosen), places)
        for name, count in zip(names, counts, strict=False):
            if count:
                num_bytes[name] += count * presence.mean_bytes(group, 0)
    return dict(num_bytes)


# slices of all boundaries of a query at once


class PackedSlices(SliceMap):
    """A map of slices as one array: a catalog's answer for a prompt's boundaries, without an object for each.

    Args:
        layout: Each of its groups has bytes of its own in a row, as in the catalog's entries.
        rows: [boundaries, bytes], uint8; kept, and changed in place unless it is read-only.
    """

    def __init__(self, layout: Layout, rows: npt.NDArray[np.uint8]) -> None:
        self._at = EntryShape.of(layout).group_at
        self.rows = rows

    def __getitem__(self, probe: Probe) -> int:
        if bits := self._bits(probe):
            return bits
        raise KeyError(probe)

    def get(self, probe: Probe, default: int = 0) -> int:  # type: ignore[override]
        """The bits of a probe."""
        return self._bits(probe) or default

    def __setitem__(self, probe: Probe, bits: int) -> None:
        if not self.rows.flags.writeable:
            self.rows = self.rows.copy()
        index, group = probe
        start, stop = self._at[group], self._at[group + 1]
        self.rows[index, start:stop] = np.frombuffer(bits.to_bytes(stop - start, "little"), dtype=np.uint8)

    def __delitem__(self, probe: Probe) -> None:
        self[probe] = 0

    def __iter__(self) -> Iterator[Probe]:
        for group, (start, stop) in enumerate(pairwise(self._at)):
            for index in np.flatnonzero(self.rows[:, start:stop].any(axis=1)):
                yield int(index), group

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return bool(self.rows.any())

    def _bits(self, probe: Probe) -> int:
        index, group = probe
        return int.from_bytes(self.rows[index, self._at[group] : self._at[group + 1]].tobytes(), "little")


def slices_of(bits: int) -> list[int]:
    """The slices whose bits are set, ascending."""
    slices = []
    while bits:
        lowest = bits & -bits
        slices.append(lowest.bit_length() - 1)
        bits ^= lowest
    return slices


def boundaries_of(found: Mapping[Probe, int]) -> set[int]:
    """Indexes of the boundaries with any slice."""
    if isinstance(found, PackedSlices):
        return set(np.flatnonzero(found.rows.any(axis=1)).tolist())
    return {index for index, _ in found}


def boundaries_beyond(found: Mapping[Probe, int], other: Mapping[Probe, int]) -> set[int]:
    """Indexes of the boundaries with slices that another map, of the same query, does not have."""
    if not other:
        return boundaries_of(found)
    if isinstance(found, PackedSlices) and isinstance(other, PackedSlices):
        return set(np.flatnonzero((found.rows & ~other.rows).any(axis=1)).tolist())
    return {probe[0] for probe, bits in found.items() if bits & ~other.get(probe, 0)}


def groups_present(layout: Layout, num_boundaries: int, maps: Sequence[Mapping[Probe, int]]) -> npt.NDArray[Any]:
    """For each boundary a bit per group all of whose slices are in one or other of `maps`: [boundaries], int64, or
    Python integers for more than 62 groups.
    """
    if not any(maps):
        return np.zeros(num_boundaries, dtype=_bits_type(layout))
    if not any(isinstance(one, PackedSlices) for one in maps):
        return _groups_in_dicts(layout, num_boundaries, maps)
    shape = EntryShape.of(layout)
    together = _packed(layout, num_boundaries, maps[0])
    for one in maps[1:]:
        together = together | _packed(layout, num_boundaries, one)
    bits_of = np.zeros(num_boundaries, dtype=_bits_type(layout))
    for group, count in enumerate(shape.num_slices):
        width = shape.group_at[group + 1] - shape.group_at[group]
        full = np.frombuffer(((1 << count) - 1).to_bytes(width, "little"), dtype=np.uint8)
        whole = (together[:, shape.group_at[group] : shape.group_at[group + 1]] == full).all(axis=1)
        bits_of |= whole.astype(bits_of.dtype) * (1 << group)
    return bits_of


def _bits_type(layout: Layout) -> npt.DTypeLike:
    return object if len(layout.groups) > 62 else np.int64


def _groups_in_dicts(layout: Layout, num_boundaries: int, maps: Sequence[Mapping[Probe, int]]) -> npt.NDArray[Any]:
    bits = [0] * num_boundaries
    full = [(1 << group.num_slices) - 1 for group in layout.groups]
    for probe in set().union(*maps):
        held = 0
        for one in maps:
            held |= one.get(probe, 0)
        if held == full[probe[1]]:
            bits[probe[0]] |= 1 << probe[1]
    return np.array(bits, dtype=_bits_type(layout))


def count_first(
    layout: Layout, group: int, indexes: npt.NDArray[np.intp], maps: Sequence[Mapping[Probe, int]]
) -> list[int]:
    """For each of `maps` the number of slices of a group at these boundaries that it has and no map before it has."""
    counts = []
    if any(isinstance(one, PackedSlices) for one in maps):
        start, stop = EntryShape.of(layout).group_at[group : group + 2]
        seen = np.zeros((len(indexes), stop - start), dtype=np.uint8)
        num_rows = int(indexes.max(initial=-1)) + 1
        for one in maps:
            rows = _packed(layout, num_rows, one)[indexes, start:stop] & ~seen
            counts.append(int(np.bitwise_count(rows).sum()))
            seen |= rows
        return counts
    held: dict[int, int] = dict.fromkeys(indexes.tolist(), 0)
    for one in maps:
        count = 0
        for index, before in held.items():
            new = one.get((index, group), 0) & ~before
            held[index] = before | new
            count += new.bit_count()
        counts.append(count)
    return counts


def _packed(layout: Layout, num_rows: int, one: Mapping[Probe, int]) -> npt.NDArray[np.uint8]:
    """A map as a read-only array of at least `num_rows` rows."""
    if isinstance(one, PackedSlices):
        return one.rows
    num_rows = max(num_rows, 1 + max((index for index, _ in one), default=-1))
    packed = PackedSlices(layout, np.zeros((num_rows, EntryShape.of(layout).row_bytes), dtype=np.uint8))
    for probe, bits in one.items():
        packed[probe] = bits
    return packed.rows
