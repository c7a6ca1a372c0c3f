"""Maps of slices as arrays say what dictionaries say."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.catalog.entry import EntryShape
from kvstore.model.kinds import FullAttention, Recurrent
from kvstore.model.layout import GroupLayout, Layout
from kvstore.store.placement import PackedSlices, Probe, boundaries_beyond, boundaries_of, count_first, groups_present

BOUNDARIES = 5
LAYOUT = Layout(64, (GroupLayout(FullAttention(), 8), GroupLayout(FullAttention(), 3), GroupLayout(Recurrent(), 17)))

probes = st.tuples(st.integers(0, BOUNDARIES - 1), st.integers(0, 2))


@st.composite
def slice_maps(draw: st.DrawFn) -> dict[Probe, int]:
    return {
        probe: bits
        for probe in draw(st.sets(probes))
        if (bits := draw(st.integers(1, (1 << LAYOUT.groups[probe[1]].num_slices) - 1) | st.just(full(probe))))
    }


def full(probe: Probe) -> int:
    return (1 << LAYOUT.groups[probe[1]].num_slices) - 1


def packed(slices: dict[Probe, int]) -> PackedSlices:
    rows = np.zeros((BOUNDARIES, EntryShape.of(LAYOUT).row_bytes), dtype=np.uint8)
    rows.flags.writeable = False  # as what comes from a catalog
    one = PackedSlices(LAYOUT, rows)
    for probe, bits in slices.items():
        one[probe] = bits
    return one


@given(slice_maps())
def test_an_array_is_a_map(slices: dict[Probe, int]) -> None:
    """Items, length, absent probes, truth."""
    one = packed(slices)
    assert dict(one) == slices and len(one) == len(slices) and bool(one) == bool(slices)
    for probe in [(index, group) for index in range(BOUNDARIES) for group in range(3)]:
        assert one.get(probe, 0) == slices.get(probe, 0)
        assert (probe in one) == (probe in slices)


@settings(max_examples=200)
@given(st.lists(slice_maps(), min_size=3, max_size=3), st.lists(st.booleans(), min_size=3, max_size=3))
def test_presence_and_counts_are_those_of_dictionaries(maps: list[dict[Probe, int]], as_array: list[bool]) -> None:
    """Any mix of dictionaries and arrays gives the answers of dictionaries alone."""
    mixed = [packed(one) if array else one for one, array in zip(maps, as_array, strict=True)]
    assert groups_present(LAYOUT, BOUNDARIES, mixed) == groups_present(LAYOUT, BOUNDARIES, maps)
    for group in range(3):
        for indexes in (np.array(listed, dtype=np.intp) for listed in ([], [0, 2], range(BOUNDARIES))):
            assert count_first(LAYOUT, group, indexes, mixed) == count_first(LAYOUT, group, indexes, maps)


@settings(deadline=None)
@given(slice_maps(), slice_maps())
def test_boundaries_that_one_map_has_beyond_another(found: dict[Probe, int], other: dict[Probe, int]) -> None:
    """Of which boundaries there is anything, and of which there is what another place lacks."""
    expected = {index for (index, group), bits in found.items() if bits & ~other.get((index, group), 0)}
    for one in (found, packed(found)):
        assert boundaries_of(one) == {index for index, _ in found}
        for two in (other, packed(other)):
            assert boundaries_beyond(one, two) == expected
