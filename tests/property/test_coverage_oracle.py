"""Coverage against brute force: sets of tokens, written from the words of the design and not from the algorithm."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest
from kvstore.model.coverage import NeededRecord, longest_resumable, records_to_resume
from kvstore.model.kinds import ChunkedLocal, FullAttention, GroupKind, Latent, Recurrent, SlidingWindow
from kvstore.model.layout import GroupLayout, Layout

LENGTH_MAX = 26


@dataclass(frozen=True, slots=True)
class Situation:
    """A prompt, what is stored of it, and what the engine asks."""

    layout: Layout
    boundaries: tuple[int, ...]
    stored: frozenset[NeededRecord]
    local: int
    cap: int
    step: int

    @property
    def present(self) -> list[int]:
        return [
            sum(1 << group for group in range(len(self.layout.groups)) if NeededRecord(tokens, group) in self.stored)
            for tokens in self.boundaries
        ]


def tokens_read(kind: GroupKind, resume: int) -> set[int]:
    """The earlier tokens whose keys and values an engine still reads when it continues at token `resume`."""
    earlier = set(range(resume))
    match kind:
        case FullAttention() | Latent():
            return earlier
        case SlidingWindow(window_tokens=window, extra_tokens=extra):
            # the query at `resume` sees itself and window - 1 before it; the engine retains `extra` more
            return {token for token in earlier if resume - token <= window - 1 + extra}
        case ChunkedLocal(chunk_tokens=chunk):
            return {token for token in earlier if token // chunk == resume // chunk}
    raise AssertionError(kind)


def tokens_held(record: NeededRecord, page_tokens: int) -> set[int]:
    """The tokens in the page or tail that ends at a boundary: all of the last token's cell up to it."""
    last = record.tokens - 1
    return {token for token in range(record.tokens) if token // page_tokens == last // page_tokens}


def tokens_wanted(situation: Situation, group: int, resume: int) -> set[int]:
    kind = situation.layout.groups[group].kind
    return {token for token in tokens_read(kind, resume) if token >= situation.local}


def usable(situation: Situation, resume: int) -> bool:
    """Whether every group can go on at `resume` with what is stored and what the engine holds itself."""
    for group, layout in enumerate(situation.layout.groups):
        if isinstance(layout.kind, Recurrent):
            if NeededRecord(resume, group) not in situation.stored:
                return False
            continue
        held: set[int] = set()
        for record in situation.stored:
            if record.group == group:
                held |= tokens_held(record, situation.layout.page_tokens)
        if not tokens_wanted(situation, group, resume) <= held:
            return False
    return True


def brute_force(situation: Situation) -> int:
    last = max(situation.boundaries, default=0)
    points = (n for n in range(situation.local + 1, min(situation.cap, last) + 1) if n % situation.step == 0)
    return max((n for n in points if usable(situation, n)), default=situation.local)


KINDS = st.one_of(
    st.just(FullAttention()),
    st.just(Latent()),
    st.builds(SlidingWindow, window_tokens=st.integers(1, 12), extra_tokens=st.integers(0, 4)),
    st.builds(ChunkedLocal, chunk_tokens=st.integers(1, 12)),
    st.just(Recurrent()),
)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    groups = draw(st.lists(st.builds(GroupLayout, KINDS, st.just(1)), min_size=1, max_size=4))
    layout = Layout(draw(st.integers(1, 8)), tuple(groups))
    every = st.just(frozenset(range(1, LENGTH_MAX + 1)))
    some = st.frozensets(st.integers(1, LENGTH_MAX))
    boundaries = tuple(sorted(draw(st.one_of(every, some, some.map(lambda few: frozenset(range(1, 27)) - few)))))
    records = [NeededRecord(tokens, group) for tokens in boundaries for group in range(len(groups))]
    # mostly there, or mostly not: with a coin per record a long prefix would hardly ever be usable
    chosen = draw(st.frozensets(st.sampled_from(records), max_size=12)) if records else frozenset()
    stored = chosen if draw(st.booleans()) else frozenset(records) - chosen
    return Situation(
        layout,
        boundaries,
        stored,
        local=draw(st.one_of(st.just(0), st.integers(0, LENGTH_MAX))),
        cap=draw(st.one_of(st.just(LENGTH_MAX), st.integers(0, LENGTH_MAX + 4))),
        step=draw(st.integers(1, 6)),
    )


def ask(situation: Situation) -> int:
    return longest_resumable(
        situation.layout,
        situation.boundaries,
        situation.present,
        local_tokens=situation.local,
        cap_tokens=situation.cap,
        step_tokens=situation.step,
    )


def plan(situation: Situation, resume: int) -> tuple[NeededRecord, ...]:
    return records_to_resume(
        situation.layout,
        situation.boundaries,
        situation.present,
        resume_tokens=resume,
        local_tokens=situation.local,
    )


@settings(max_examples=600)
@given(situations())
def test_longest_resumable_equals_brute_force(situation: Situation) -> None:
    """For any layout, presence and question the answer is the longest point that brute force finds usable."""
    expected = brute_force(situation)
    event("usable" if expected > situation.local else "nothing usable")
    assert ask(situation) == expected


@settings(max_examples=400)
@given(situations(), st.data())
def test_records_to_resume_are_sufficient_and_none_is_too_much(situation: Situation, data: st.DataObject) -> None:
    """For any usable point the records hold every wanted token, and neither fewer nor shorter ones would."""
    points = [n for n in range(situation.local + 1, max(situation.boundaries, default=0) + 1) if usable(situation, n)]
    if not points:
        return
    resume = data.draw(st.sampled_from(points))
    records = plan(situation, resume)
    assert list(records) == sorted(set(records))
    assert set(records) <= situation.stored
    page_tokens = situation.layout.page_tokens
    for group, layout in enumerate(situation.layout.groups):
        mine = {record for record in records if record.group == group}
        if isinstance(layout.kind, Recurrent):
            assert mine == {NeededRecord(resume, group)}
            continue
        wanted = tokens_wanted(situation, group, resume)
        assert wanted <= set().union(*(tokens_held(record, page_tokens) for record in mine))
        for record in mine:
            rest = wanted - set().union(*(tokens_held(other, page_tokens) for other in mine - {record}))
            assert rest, "a record that holds no wanted token"
            shorter = [r for r in situation.stored if r.group == group and r.tokens < record.tokens]
            assert not any(rest <= tokens_held(r, page_tokens) for r in shorter), "a shorter record would do"


@given(situations(), st.integers(1, LENGTH_MAX))
def test_records_to_resume_refuses_a_point_that_is_not_usable(situation: Situation, resume: int) -> None:
    """For a point that brute force finds unusable there is no list of records, not a wrong one."""
    if resume <= situation.local:
        assert plan(situation, resume) == ()
    elif resume <= max(situation.boundaries, default=0) and usable(situation, resume):
        plan(situation, resume)
    else:
        with pytest.raises(InvalidRequest):
            plan(situation, resume)


@given(situations(), st.data())
def test_more_records_never_shorten_the_hit(situation: Situation, data: st.DataObject) -> None:
    """A record that arrives can only lengthen what is usable; one that is lost can only shorten it."""
    records = [NeededRecord(t, g) for t in situation.boundaries for g in range(len(situation.layout.groups))]
    if not records:
        return
    record = data.draw(st.sampled_from(records))
    before, after = situation.stored - {record}, situation.stored | {record}
    fewer, more = (
        ask(Situation(situation.layout, situation.boundaries, s, situation.local, situation.cap, situation.step))
        for s in (before, after)
    )
    assert fewer <= more
