"""The pure parts of the store: what to ask, how to fill gaps, what fits, how windows and pauses change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.api import PrefixQuery
from kvstore.catalog.entry import EntryShape
from kvstore.errors import CorruptRecord, InvalidRequest
from kvstore.model.coverage import longest_resumable, records_to_resume
from kvstore.model.keys import Boundary, NamespaceId, PrefixHash
from kvstore.model.kinds import ChunkedLocal, FullAttention, Recurrent
from kvstore.model.layout import GroupLayout, Layout, Span
from kvstore.runtime.retries import backoff_s
from kvstore.runtime.turns import PIECE
from kvstore.store.limits import StoreLimits
from kvstore.store.namespaces import check_header
from kvstore.store.presence import (
    PackedSlices,
    Presence,
    Probe,
    ResumePoints,
    SliceMap,
    affordable_resume,
    boundaries_beyond,
    boundaries_of,
    count_first,
    gaps,
    groups_present,
    in_memory_and_in_all,
    inner_probes,
    page_probes,
    reach_of,
    spread,
)
from kvstore.store.presence import fill as fill_gaps
from kvstore.store.staging import next_window
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, HYBRID, WINDOWED, Prompt
from kvstore.tiers.memory import MemoryTier


@given(st.integers(0, 600), st.integers(2, 64))
def test_a_spread_holds_both_ends_and_keeps_its_limit(num_items: int, limit: int) -> None:
    """Whatever is asked for, the chosen indexes ascend, are bounded, and span the whole range."""
    chosen = spread(num_items, limit)
    assert chosen == sorted(set(chosen))
    assert len(chosen) <= limit
    assert all(0 <= i < num_items for i in chosen)
    if num_items:
        assert chosen[0] == 0
        assert chosen[-1] == num_items - 1


@given(st.integers(1, 2000), st.integers(2, 20), st.data())
def test_questions_find_the_end_of_an_unbroken_run(num_items: int, limit: int, data: st.DataObject) -> None:
    """Pages up to some point are there: spread and gaps find that point exactly, in logarithmic rounds."""
    num_there = data.draw(st.integers(0, num_items))
    answers = {i: i < num_there for i in spread(num_items, limit)}
    rounds = 1
    while chosen := gaps(answers, limit):
        assert len(chosen) <= limit
        answers |= {i: i < num_there for i in chosen}
        rounds += 1
    assert fill_gaps(answers, num_items) == [i < num_there for i in range(num_items)]
    assert rounds <= 2 + num_items.bit_length()


@given(st.lists(st.booleans(), max_size=80), st.integers(2, 90))
def test_what_was_answered_is_never_overruled(there: list[bool], limit: int) -> None:
    """With arbitrary holes a filled answer agrees with every answer that was given."""
    answers = {i: there[i] for i in spread(len(there), limit)}
    filled = fill_gaps(answers, len(there))
    assert all(filled[i] == answer for i, answer in answers.items())
    if limit >= len(there):
        assert filled == there


def test_pages_are_asked_for_before_tails() -> None:
    """The first question of a prompt names its pages only; states are no pages."""
    query = Prompt(HYBRID, "a", 250).query()
    probes = page_probes(HYBRID, query)
    assert [(query.boundaries[i].tokens, group) for i, group in probes] == [(64, 0), (128, 0), (192, 0)]


@pytest.mark.parametrize(("held", "expected"), [(0, [16, 32, 48]), (2, [144, 160, 176]), (3, [208, 224, 240])])
def test_tails_are_asked_for_in_the_first_open_cell_only(held: int, expected: list[int]) -> None:
    """With the first pages there, only boundaries inside the next cell can still lengthen the hit."""
    query = Prompt(ATTENTION, "a", 250).query()
    there = set(page_probes(ATTENTION, query)[:held])
    assert [query.boundaries[i].tokens for i, _ in inner_probes(ATTENTION, query, there.__contains__)] == expected


def test_states_are_asked_for_as_far_as_the_pages_reach() -> None:
    """A state beyond the last page or tail that could be there is of no use; nor is one that the engine has."""
    query = replace(Prompt(HYBRID, "a", 512).query(local_tokens=64), step_tokens=64)
    there = set(page_probes(HYBRID, query)[:4])  # up to 256
    probes = inner_probes(HYBRID, query, there.__contains__)
    states = [query.boundaries[i].tokens for i, group in probes if group == 1]
    assert states == [128, 192, 256, 320]


@pytest.mark.parametrize("layout", [ATTENTION, HYBRID])
@given(data=st.data())
def test_nothing_that_matters_is_left_unasked(layout, data: st.DataObject) -> None:
    """For random tails and states over an unbroken run of pages, what the two questions see leads to the same resume
    point as seeing everything.
    """
    prompt = Prompt(layout, "a", 320)
    query = prompt.query(local_tokens=data.draw(st.integers(0, 20)) * 16, cap_tokens=data.draw(st.integers(0, 20)) * 16)
    run = data.draw(st.integers(0, 5))
    tokens = [boundary.tokens for boundary in query.boundaries]
    bits = []
    for boundary_tokens in tokens:
        drawn = data.draw(st.integers(0, (1 << len(layout.groups)) - 1))
        if boundary_tokens % 64 == 0:
            drawn = (drawn & ~1) | (boundary_tokens <= run * 64)
        bits.append(drawn)

    def complete(probe: tuple[int, int]) -> bool:
        return bool(bits[probe[0]] >> probe[1] & 1)

    asked = [*page_probes(layout, query), *inner_probes(layout, query, complete)]
    seen = [0] * len(tokens)
    for probe in asked:
        seen[probe[0]] |= complete(probe) << probe[1]
    arguments = {"local_tokens": query.local_tokens, "cap_tokens": query.cap_tokens, "step_tokens": query.step_tokens}
    full = longest_resumable(layout, tokens, bits, **arguments)
    assert longest_resumable(layout, tokens, seen, **arguments) == full


@given(st.integers(0, 40), st.integers(1, 20))
def test_an_affordable_hit_fits_and_is_the_longest_that_does(pages: int, num_pages: int) -> None:
    """With equal pages the cut is exact: as many as the budget holds."""
    query = Prompt(ATTENTION, "a", 64 * num_pages, step_tokens=64).query()
    present = [1] * num_pages
    resume = affordable_resume(ATTENTION, query, present, group_bytes=[100], budget_bytes=100 * pages + 50)
    assert resume == 64 * min(pages, num_pages)


@given(st.data())
def test_an_affordable_hit_never_exceeds_its_budget(data: st.DataObject) -> None:
    """Windows and states make the need uneven: whatever is chosen is usable and fits."""
    query = Prompt(WINDOWED, "a", 640).query()
    tokens = [boundary.tokens for boundary in query.boundaries]
    present = [data.draw(st.integers(0, 3)) for _ in tokens]
    budget_bytes = data.draw(st.integers(0, 3000))
    resume = affordable_resume(WINDOWED, query, present, group_bytes=[100, 150], budget_bytes=budget_bytes)
    if resume:
        needed = records_to_resume(WINDOWED, tokens, present, resume_tokens=resume, local_tokens=0)
        assert sum([100, 150][record.group] for record in needed) <= budget_bytes


def test_a_header_must_be_what_its_group_has_at_its_boundary() -> None:
    """Right headers pass; a wrong span, kind or boundary does not."""
    header = Prompt(ATTENTION, "a", 250).record(240).header
    check_header(header, ATTENTION)
    check_header(header, ATTENTION, 240)
    with pytest.raises(CorruptRecord, match="expected=PAGE 192-256 seen=TAIL 192-240"):
        check_header(header, ATTENTION, 256)
    with pytest.raises(CorruptRecord):
        check_header(replace(header, span=Span(191, 240)), ATTENTION)
    with pytest.raises(CorruptRecord, match="at least one token"):
        check_header(replace(Prompt(HYBRID, "a", 64).record(64, 1).header, span=Span(0, 0)), HYBRID)


def test_staging_must_leave_room_for_saves() -> None:
    """Three quarters of memory may be staged, not more."""
    TieredStore(MemoryTier(1000), limits=StoreLimits(stage_bytes=750))
    with pytest.raises(InvalidRequest, match="three quarters"):
        TieredStore(MemoryTier(1000), limits=StoreLimits(stage_bytes=751))


def test_the_window_follows_the_time_of_single_reads() -> None:
    """Quick reads widen it to its limit, slow ones narrow it to one, middling ones leave it."""
    assert next_window(4, 0.01, quick_s=0.05, limit=16) == 5
    assert next_window(16, 0.01, quick_s=0.05, limit=16) == 16
    assert next_window(4, 0.07, quick_s=0.05, limit=16) == 4
    assert next_window(4, 0.2, quick_s=0.05, limit=16) == 3
    assert next_window(1, 0.2, quick_s=0.05, limit=16) == 1


def test_pauses_double_up_to_a_limit() -> None:
    """The first is the shortest; a very long outage does not overflow."""
    assert [backoff_s(n, shortest_s=0.1, longest_s=1.0) for n in (1, 2, 3, 4, 5)] == [0.1, 0.2, 0.4, 0.8, 1.0]
    assert backoff_s(10_000, shortest_s=0.1, longest_s=30.0) == 30.0


def test_an_empty_query_asks_nothing() -> None:
    """A prompt shorter than a block has no boundaries."""
    query = PrefixQuery(Prompt(ATTENTION, "a", 64).namespace, (), 0, 0, 16)
    assert page_probes(ATTENTION, query) == inner_probes(ATTENTION, query, lambda _: False) == []


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
    assert np.array_equal(groups_present(LAYOUT, BOUNDARIES, mixed), groups_present(LAYOUT, BOUNDARIES, maps))
    for group in range(3):
        for indexes in (np.array(listed, dtype=np.intp) for listed in ([], [0, 2], range(BOUNDARIES))):
            assert count_first(LAYOUT, group, indexes, mixed) == count_first(LAYOUT, group, indexes, maps)


def test_an_answer_of_the_catalog_is_less_work_than_records_one_by_one() -> None:
    """A prompt of 2,048 boundaries and 4 groups is evaluated on the event loop if the catalog answered."""
    layout = Layout(64, tuple(GroupLayout(FullAttention(), 8) for _ in range(4)))
    boundaries = tuple(Boundary(64 * (1 + index), PrefixHash(bytes(32))) for index in range(2048))
    query = PrefixQuery(NamespaceId(bytes(16)), boundaries, local_tokens=0, cap_tokens=64 * 2048, step_tokens=64)
    array = PackedSlices(layout, np.ones((2048, EntryShape.of(layout).row_bytes), dtype=np.uint8))
    held: SliceMap = {(0, 0): 1, (2047, 3): 3}
    assert 2 * Presence(layout, query, hot=array).num_items <= PIECE
    assert Presence(layout, query, held, array).num_items == Presence(layout, query, hot=array).num_items + len(held)
    assert Presence(layout, query, hot=dict(array)).num_items > 4 * 2048 > PIECE


@settings(deadline=None)
@given(slice_maps(), slice_maps())
def test_boundaries_that_one_map_has_beyond_another(found: dict[Probe, int], other: dict[Probe, int]) -> None:
    """Of which boundaries there is anything, and of which there is what another place lacks."""
    expected = {index for (index, group), bits in found.items() if bits & ~other.get((index, group), 0)}
    for one in (found, packed(found)):
        assert boundaries_of(one) == {index for index, _ in found}
        for two in (other, packed(other)):
            assert boundaries_beyond(one, two) == expected


def test_memory_counts_at_the_steps_of_an_engine_alone() -> None:
    """A page in memory that an engine cannot name is no hit of its: at a chunk's start nothing would be needed."""
    layout = Layout(16, (GroupLayout(ChunkedLocal(64), 1),))
    prompt = Prompt(layout, "chunks", 192)
    presence = Presence(layout, prompt.query(), memory={(0, 0): 1})
    in_memory, in_all = in_memory_and_in_all(presence)
    reach = reach_of(presence, in_memory, in_all, ResumePoints(64, 192))
    assert (reach.memory_tokens, reach.resume_tokens) == (0, 192)
    assert reach_of(presence, in_memory, in_all, ResumePoints(16, 192)).memory_tokens == 192
