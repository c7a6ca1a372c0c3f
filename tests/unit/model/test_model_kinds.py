"""Kinds of group, spans and layouts: small rules that everything else counts on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest
from kvstore.model.coverage import MAX_POINTS, longest_resumable
from kvstore.model.kinds import (
    ChunkedLocal,
    FullAttention,
    GroupKind,
    Keyed,
    KeyedAlone,
    Latent,
    RecordKind,
    Recurrent,
    SlidingWindow,
    parse_kind,
)
from kvstore.model.layout import GroupLayout, Layout, Span, cell_of, span_ending_at


@pytest.mark.parametrize(
    ("kind", "resume", "needed_from"),
    [
        (FullAttention(), 100, 0),
        (Latent(), 100, 0),
        (SlidingWindow(16), 100, 85),  # the query at 100 sees itself and 85..99
        (SlidingWindow(16, extra_tokens=4), 100, 81),
        (SlidingWindow(16), 10, 0),
        (SlidingWindow(1), 100, 100),
        (ChunkedLocal(64), 100, 64),
        (ChunkedLocal(64), 128, 128),
        (ChunkedLocal(64), 63, 0),
        (Recurrent(), 100, None),
        (Keyed(), 100, 0),
        (KeyedAlone(), 100, 0),
    ],
)
def test_what_each_kind_still_reads(kind: GroupKind, resume: int, needed_from: int | None) -> None:
    """The first token that a resume point still reads, by kind, at and around the edges."""
    assert kind.needed_from(resume) == needed_from


@pytest.mark.parametrize(
    "kind", [FullAttention(), Latent(), SlidingWindow(8, 2), ChunkedLocal(4), Recurrent(), Keyed(), KeyedAlone()]
)
@given(resume=st.integers(1000, 1 << 24))
def test_what_a_kind_says_of_itself(kind: GroupKind, resume: int) -> None:
    """`needs_all` and `is_state` say what `needed_from` answers far into a prompt."""
    needed = kind.needed_from(resume)
    assert kind.is_state == (needed is None)
    if kind.needs_all:
        assert needed == 0
    elif needed is not None:
        assert needed > 0


@pytest.mark.parametrize(
    "kind", [FullAttention(), Latent(), SlidingWindow(8, 2), ChunkedLocal(4), Recurrent(), Keyed(), KeyedAlone()]
)
def test_a_kind_reads_back_from_its_description(kind: GroupKind) -> None:
    """Every kind survives the way through plain values."""
    assert parse_kind(kind.describe()) == kind


@pytest.mark.parametrize(
    "description",
    [
        {},
        {"kind": "unknown"},
        {"kind": "full_attention", "window_tokens": 4},
        {"kind": "sliding_window"},
        {"kind": "sliding_window", "window_tokens": 0},
        {"kind": "sliding_window", "window_tokens": -1},
        {"kind": "sliding_window", "window_tokens": True},
        {"kind": "sliding_window", "window_tokens": "8"},
        {"kind": "chunked_local", "chunk_tokens": 0},
        {"kind": "chunked_local", "chunk_tokens": 4, "extra_tokens": 1},
    ],
)
def test_wrong_kinds_are_refused(description: dict[str, int | str]) -> None:
    """Unknown kinds and missing, foreign, empty or non-numeric fields are refused."""
    with pytest.raises(InvalidRequest):
        parse_kind(description)


@given(st.integers(1, 10_000), st.integers(1, 600))
def test_a_span_follows_from_its_boundary(tokens: int, page_tokens: int) -> None:
    """Every boundary ends one span, which starts at a page's start and is no longer than a page."""
    span = span_ending_at(tokens, page_tokens)
    assert span.stop == tokens
    assert span.start % page_tokens == 0
    assert 1 <= span.num_tokens <= page_tokens
    assert cell_of(tokens, page_tokens) * page_tokens == span.start


def test_records_at_a_boundary() -> None:
    """A page where a cell ends, a tail inside it, a state of a recurrent group at either."""
    paged, recurrent = GroupLayout(FullAttention(), 1), GroupLayout(Recurrent(), 1)
    assert paged.record_at(512, 256) == (RecordKind.PAGE, Span(256, 512))
    assert paged.record_at(513, 256) == (RecordKind.TAIL, Span(512, 513))
    assert recurrent.record_at(512, 256) == (RecordKind.STATE, Span(512, 512))
    assert recurrent.record_at(513, 256) == (RecordKind.STATE, Span(513, 513))


def test_layouts_have_limits() -> None:
    """A layout without groups, pages or slices, or with too many, is refused."""
    group = GroupLayout(FullAttention(), 1)
    for page_tokens, groups, field in (
        (0, (group,), "page_tokens"),
        (1, (), "layout.groups"),
        (1, (group,) * 65, "layout.groups"),
        (1, (GroupLayout(Latent(), 0),), r"layout.groups\[0\].num_slices"),
        (1, (group, GroupLayout(Latent(), 513)), r"layout.groups\[1\].num_slices"),
        (1, (GroupLayout(Latent(), 500),) * 5, r"layout.groups\[\*\].num_slices"),
    ):
        with pytest.raises(InvalidRequest, match=field):
            Layout(page_tokens, groups)
    assert len(Layout(1, (GroupLayout(Latent(), 32),) * 64).groups) == 64


def ask(boundaries: list[int], present: list[int], *, step: int = 1, page_tokens: int = 4) -> int:
    layout = Layout(page_tokens, (GroupLayout(FullAttention(), 1),))
    return longest_resumable(layout, boundaries, present, local_tokens=0, cap_tokens=1 << 40, step_tokens=step)


def test_questions_that_make_no_sense_are_refused() -> None:
    """Unordered or unmatched boundaries, no step, and questions that would take minutes to answer."""
    assert ask([4, 8], [1, 1]) == 8
    for boundaries, present, step in (([4, 4], [1, 1], 1), ([0, 4], [1, 1], 1), ([4, 8], [1], 1), ([4], [1], 0)):
        with pytest.raises(InvalidRequest):
            ask(boundaries, present, step=step)
    with pytest.raises(InvalidRequest, match="resume points"):
        ask([MAX_POINTS + 1], [1], page_tokens=1 << 30)
    with pytest.raises(InvalidRequest, match="cells"):
        ask([4 * MAX_POINTS + 1], [1], step=1 << 30)


def test_a_long_prompt_by_hand() -> None:
    """A 1,000-token prompt in 256-token pages: the hit ends at the tail, or at the last page without it."""
    layout = Layout(256, (GroupLayout(FullAttention(), 2),))
    boundaries = [256, 512, 768, 896, 1000]

    def hit(present: list[int], **changes: int) -> int:
        asked = {"local_tokens": 0, "cap_tokens": 999, "step_tokens": 128, **changes}
        return longest_resumable(layout, boundaries, present, **asked)

    assert hit([1, 1, 1, 1, 0]) == 896
    assert hit([1, 1, 1, 0, 0]) == 768
    assert hit([1, 0, 1, 1, 1]) == 256
    assert hit([1, 0, 1, 1, 1], local_tokens=512) == 896
    assert hit([0, 0, 0, 0, 0], local_tokens=512) == 512
    assert hit([1, 1, 1, 0, 1]) == 896, "a record may reach past the resume point"
    assert hit([1, 1, 1, 1, 1], cap_tokens=700) == 640


@pytest.mark.parametrize("kind", [Keyed(), KeyedAlone()])
@pytest.mark.parametrize("tokens", [1, 64, 6400])
def test_a_page_under_a_key_has_one_span_wherever_it_is_asked_for(kind: GroupKind, tokens: int) -> None:
    """Its place in a query says nothing about it: the same record answers at every place."""
    assert GroupLayout(kind, 1).record_at(tokens, 64) == (RecordKind.PAGE, Span(0, 64))


def test_which_layouts_teach_parents() -> None:
    """Pages that are of use alone are nobody's child, also beside others."""
    assert Layout(64, (GroupLayout(Keyed(), 1), GroupLayout(Recurrent(), 1))).chained
    assert not Layout(64, (GroupLayout(Keyed(), 1), GroupLayout(KeyedAlone(), 1))).chained
