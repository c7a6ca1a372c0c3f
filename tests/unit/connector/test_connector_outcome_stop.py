"""At which boundary a prompt stopped, for each kind of model."""

from __future__ import annotations

from connector.scheduler.outcomes import stop_of
from kvstore.model.keys import Boundary, PrefixHash
from kvstore.model.kinds import FullAttention, Recurrent, SlidingWindow
from kvstore.model.layout import GroupLayout, Layout
from kvstore.testing.prompts import ATTENTION, WINDOWED

HYBRID = Layout(16, (GroupLayout(FullAttention(), 2), GroupLayout(Recurrent(), 3)))
PURE = Layout(16, (GroupLayout(Recurrent(), 1),))
ALL = Layout(64, (*WINDOWED.groups, GroupLayout(Recurrent(), 1)))


def stop(layout: Layout, groups: dict[int, int], *, cap: int, resumed: int = 0) -> tuple[int, int] | None:
    """The stop's tokens and groups, of boundaries every 16 tokens, where `groups` were complete and no others."""
    seen = [
        (Boundary(tokens, PrefixHash(tokens.to_bytes(32, "little"))), groups.get(tokens, 0))
        for tokens in range(16, cap + 33, 16)
    ]
    found = stop_of(layout, seen, resume_tokens=resumed, cap_tokens=cap)
    return (found[0].tokens, found[1]) if found is not None else None


def test_attention_stops_at_the_next_page() -> None:
    """The first page that is not there; without one the last boundary."""
    assert stop(ATTENTION, {64: 1}, cap=192, resumed=64) == (128, 0)
    assert stop(ATTENTION, {}, cap=192) == (64, 0)
    assert stop(ATTENTION, {}, cap=48) == (48, 0)
    assert stop(ATTENTION, {64: 1, 128: 1, 192: 1}, cap=192, resumed=192) is None


def test_a_hybrid_stops_where_its_state_is_missing() -> None:
    """Pages reach token 96, and no boundary has a state: the one at 96 would have helped most, not the one at
    16, which no engine saves.
    """
    pages = dict.fromkeys(range(16, 97, 16), 0b01)
    assert stop(HYBRID, pages, cap=160) == (96, 0b01)
    assert stop(HYBRID, {**pages, 64: 0b11}, cap=160, resumed=64) == (96, 0b01)
    assert stop(HYBRID, dict.fromkeys(range(16, 193, 16), 0b01), cap=160) == (160, 0b01), "not beyond what is useful"


def test_a_hybrid_stops_at_the_next_page_where_pages_end() -> None:
    """Pages and state end together: the next page is what is missing, whatever lies behind the gap."""
    pages = dict.fromkeys(range(16, 65, 16), 0b01) | {64: 0b11}
    assert stop(HYBRID, pages, cap=160, resumed=64) == (80, 0)
    assert stop(HYBRID, {**pages, 96: 0b01, 112: 0b01}, cap=160, resumed=64) == (80, 0)
    assert stop(HYBRID, {}, cap=160) == (16, 0)
    assert stop(HYBRID, {32: 0b10}, cap=160) == (16, 0), "a state without pages"


def test_states_alone() -> None:
    """Nothing but states: the furthest one is missing."""
    assert stop(PURE, {}, cap=160) == (160, 0)
    assert stop(PURE, {64: 1}, cap=160, resumed=64) == (160, 0)


def test_a_window_stops_at_its_own_missing_page() -> None:
    """Attention reaches token 256; of the window's pages only those that its end needs could be missing: not the first
    page, which left the window long before, but the one before the last.
    """
    window = SlidingWindow(100)
    assert window.needed_from(256) == 157
    full = dict.fromkeys((64, 128, 192, 256), 0b01)
    assert stop(WINDOWED, {**full, 256: 0b11}, cap=256) == (192, 0b01)
    assert stop(WINDOWED, {**full, 192: 0b11}, cap=256) == (256, 0b01)
    assert stop(WINDOWED, {64: 0b01, 128: 0b01}, cap=256) == (64, 0b01), "resuming at 128 needs tokens from 29 on"
    assert stop(WINDOWED, {}, cap=256) == (64, 0)


def test_all_kinds_together() -> None:
    """The window has what it needs, the state is missing."""
    there = dict.fromkeys((64, 128, 192), 0b011)
    assert stop(ALL, there, cap=256) == (192, 0b011)
    assert stop(ALL, {**there, 128: 0b001}, cap=256) == (128, 0b001)
