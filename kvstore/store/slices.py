"""Which slices of which groups are where, for all boundaries of a query at once. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.catalog.entry import EntryShape
from kvstore.errors import InvalidRequest
from kvstore.model.layout import Layout

__all__ = [
    "PackedSlices",
    "Probe",
    "SliceMap",
    "boundaries_beyond",
    "boundaries_of",
    "count_first",
    "groups_present",
    "slices_of",
]

Probe = tuple[int, int]
"""Index of a boundary in the query, index of a group in the layout."""

SliceMap = MutableMapping[Probe, int]
"""For each probe a bit per slice that is there; probes without any are left out."""

_TABLE_BYTES_MAX = 256 << 20


class PackedSlices(SliceMap):
    """A map of slices as one array: what a catalog knows of a prompt's boundaries, without an object for each.

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
        for group, (start, stop) in enumerate(zip(self._at, self._at[1:], strict=False)):
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


def groups_present(layout: Layout, num_boundaries: int, maps: Sequence[Mapping[Probe, int]]) -> list[int]:
    """For each boundary a bit per group all of whose slices are in one or other of `maps`."""
    if not any(isinstance(one, PackedSlices) for one in maps):
        return _one_by_one(layout, num_boundaries, maps)
    shape = EntryShape.of(layout)
    if num_boundaries * shape.row_bytes > _TABLE_BYTES_MAX:
        raise InvalidRequest("the prompt has too many boundaries for a layout of so many slices", seen=num_boundaries)
    together = _packed(layout, num_boundaries, maps[0])
    for one in maps[1:]:
        together = together | _packed(layout, num_boundaries, one)
    bits_of = np.zeros(num_boundaries, dtype=object if len(layout.groups) > 62 else np.int64)
    for group, count in enumerate(shape.num_slices):
        width = shape.group_at[group + 1] - shape.group_at[group]
        full = np.frombuffer(((1 << count) - 1).to_bytes(width, "little"), dtype=np.uint8)
        whole = (together[:, shape.group_at[group] : shape.group_at[group + 1]] == full).all(axis=1)
        bits_of |= whole.astype(bits_of.dtype) * (1 << group)
    present: list[int] = bits_of.tolist()
    return present


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
    """A map as an array of at least `num_rows` rows, not to be changed."""
    if isinstance(one, PackedSlices):
        return one.rows
    num_rows = max(num_rows, 1 + max((index for index, _ in one), default=-1))
    packed = PackedSlices(layout, np.zeros((num_rows, EntryShape.of(layout).row_bytes), dtype=np.uint8))
    for probe, bits in one.items():
        packed[probe] = bits
    return packed.rows


def _one_by_one(layout: Layout, num_boundaries: int, maps: Sequence[Mapping[Probe, int]]) -> list[int]:
    bits = [0] * num_boundaries
    full = [(1 << group.num_slices) - 1 for group in layout.groups]
    for probe in set().union(*maps):
        held = 0
        for one in maps:
            held |= one.get(probe, 0)
        if held == full[probe[1]]:
            bits[probe[0]] |= 1 << probe[1]
    return bits
