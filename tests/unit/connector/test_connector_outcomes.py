"""The reports to the store on each request, so that `kvstore explain` can say why it was a miss."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from connector.request_parameters import RequestFlags
from connector.scheduler.hook_facts import PromptFacts
from connector.scheduler.outcomes import stop_of
from kvstore.api import LeaseId, Staged
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.model.keys import Boundary, PrefixHash
from kvstore.model.kinds import FullAttention, Recurrent, SlidingWindow
from kvstore.model.layout import GroupLayout, Layout
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.testing.prompts import ATTENTION, WINDOWED
from kvstore.testing.waiting import eventually, soon
from tests.unit.connector.scheduler_harness import SchedulerHarness, harness, unready_harness
from tests.unit.connector.support import tokens_of


def explained(at: SchedulerHarness, request_id: str) -> Mapping[str, Any]:
    """The store's explanation of a request, once it was reported."""
    told: Mapping[str, Any] = eventually(
        lambda: at.bridge.run(lambda store: store.explain(request_id, deadline=soon(), tenant=None)),
        despite=InvalidRequest,
    )
    return told


def test_a_whole_hit(at: SchedulerHarness) -> None:
    """Resumed from the furthest point: nothing is left to explain, and where it came from is said."""
    at.keep("a", 170)
    at.new("a", 170)
    at.admit("a", at.ask("a"))
    told = explained(at, "a")
    assert (told["result"], told["reason"], told["resume_tokens"], told["cap_tokens"]) == ("hit", "", 160, 160)
    assert told["detail"]["records_from_memory"] == 6
    assert told["prompt_tokens"] == 170
    at.finished("a")


def test_a_part_names_the_page_that_is_missing(at: SchedulerHarness) -> None:
    """Two pages of three are there: it stopped where the third begins, at that page's end."""
    at.keep("a", 200, ends=[64, 128])
    at.new("a", 200)
    at.admit("a", at.ask("a"))
    told = explained(at, "a")
    assert (told["result"], told["resume_tokens"], told["stopped_at_tokens"]) == ("part", 128, 192)
    assert told["reason"] == "nothing_stored", "a store without a catalog does not know whether it ever was"
    at.finished("a")


def test_nothing_there_and_the_same_tokens_under_a_salt(at: SchedulerHarness) -> None:
    """The explanation of a miss names an earlier request with the same tokens and another salt."""
    at.new("a", 170)
    assert at.ask("a") == 0
    assert explained(at, "a")["reason"] == "nothing_stored"
    at.new("b", 170, name="a", cache_salt="blue")
    assert at.ask("b") == 0
    told = explained(at, "b")
    assert (told["result"], told["reason"], told["detail"]) == ("miss", "other_salt", {"other_request": "a"})
    assert explained(at, "a")["reason"] == "nothing_stored", "who came first was not kept apart from anybody"


def test_held_by_the_engine(at: SchedulerHarness) -> None:
    """No miss: vLLM has as much itself."""
    at.keep("a", 170)
    at.new("a", 170)
    assert at.ask("a", 160) == 0
    told = explained(at, "a")
    assert (told["result"], told["reason"], told["local_tokens"]) == ("local", "held_by_engine", 160)


def test_held_by_the_engine_alone(at: SchedulerHarness) -> None:
    """As after a restart of the service without its pages: all that can be resumed is there, so nothing was missed."""
    at.new("a", 170)
    assert at.ask("a", 160) == 0
    told = explained(at, "a")
    assert (told["result"], told["reason"], told["resume_tokens"]) == ("local", "held_by_engine", told["cap_tokens"])


@pytest.mark.parametrize(
    ("settings", "prompt", "reason"),
    [
        ({"mode": "save"}, {}, "mode"),
        ({}, {"flags": RequestFlags(load=False)}, "opted_out"),
        ({}, {"uncacheable": "a modality"}, "uncacheable"),
    ],
)
def test_never_looked_up(tmp_path: Path, settings: dict[str, Any], prompt: dict[str, Any], reason: str) -> None:
    """What is stored does not matter then, and is not looked into. What the engine has itself counts all the same."""
    with harness(tmp_path, **settings) as at:
        at.new("a", 170, **prompt)
        assert at.ask("a", 128) == 0
        told = explained(at, "a")
        assert (told["reason"], told["namespace"], told["stopped_at_tokens"]) == (reason, "", None)
        assert (told["result"], told["local_tokens"], told["resume_tokens"]) == ("miss", 128, 128)
        assert told["cap_tokens"] >= 128, "more than could be resumed was not resumed"


def test_a_short_prompt(at: SchedulerHarness) -> None:
    """Shorter than a block."""
    at.new("a", 12)
    assert at.ask("a") == 0
    assert explained(at, "a")["reason"] == "too_short"


def test_an_engine_without_cache(tmp_path: Path) -> None:
    """The rank's refusal is reported with each request."""
    with unready_harness(tmp_path, {0: "a layout nobody knows"}) as at:
        at.new("a", 170)
        assert at.ask("a") == 0
        told = explained(at, "a")
        assert told["reason"] == "engine_not_cached"
        assert "a layout nobody knows" in told["detail"]["because"]


def test_an_engine_that_is_not_ready(tmp_path: Path) -> None:
    """The namespace does not open in time."""
    with unready_harness(tmp_path, lookup_timeout_ms=50) as at:
        at.new("a", 170)
        assert at.ask("a", 128) == 0
        told = explained(at, "a")
        assert told["local_tokens"] == 128
        assert told["reason"] == "not_ready" and told["detail"] == {"because": "the namespace is being opened"}


def test_a_slow_and_a_failing_lookup(tmp_path: Path) -> None:
    """It is not known what was stored, and the explanation says so."""
    with harness(tmp_path, lookup_timeout_ms=50) as at:
        at.store.held.add("lookup")
        at.new("a", 170)
        assert at.ask("a") == 0
        assert explained(at, "a")["reason"] in ("lookup_timeout", "lookup_failed")
        at.store.held.clear()
        at.store.errors["lookup"] = Unavailable("no service is there")
        at.new("b", 170)
        assert at.ask("b") == 0
        found = explained(at, "b")
        assert found["reason"] == "lookup_failed" and found["detail"] == {"error": "no service is there"}


def test_a_failing_fetch_and_a_failing_load(at: SchedulerHarness) -> None:
    """What was found did not come, or did not get into the blocks."""
    at.keep("a", 170)
    at.store.errors["stage"] = Unavailable("gone")
    at.new("a", 170)
    assert at.ask("a") == 0
    assert explained(at, "a")["reason"] == "stage_failed" and explained(at, "a")["detail"] == {"error": "gone"}
    del at.store.errors["stage"]
    at.new("b", 170, name="a")
    at.admit("b", at.ask("b"))
    at.finished("b", failed=True)
    eventually(lambda: explained(at, "b")["reason"] == "load_failed")
    assert explained(at, "b")["result"] == "miss"


def test_cheaper_to_compute_has_its_numbers(at: SchedulerHarness) -> None:
    """Both times are reported, and how much was stored."""
    at.keep("a", 170)
    at.side.costs.prefill.observe([(0, 128)], 0.0001)
    for size in (128, 256, 384, 512) * 4:
        at.side.costs.prefill.observe([(0, size)], size * 1e-6)
    for num_bytes in (1000, 10_000, 100_000) * 3:
        staged = Staged(LeaseId(bytes(16)), 64, sources={"memory": 1}, num_bytes=num_bytes)
        at.side.costs.on_staged(staged, 5.0, now_s=SYSTEM_CLOCK.monotonic_s())
    at.new("a", 170)
    assert at.ask("a") == 0
    told = explained(at, "a")
    assert told["reason"] == "cheaper_to_compute"
    assert told["detail"]["stored_tokens"] == 160
    assert told["detail"]["fetch_s"] > 1.0
    assert 0 < told["detail"]["compute_s"] < 0.1


def test_what_vllm_asks_again_is_told_once(at: SchedulerHarness) -> None:
    """However often it asks, also after the answer."""
    at.new("a", 170)
    assert at.ask("a") == 0
    explained(at, "a")
    for _ in range(20):
        assert at.side.matched_tokens("a", 0) == 0
    assert at.store.calls["tell"] == 1


def test_the_latest_requests_are_listed(at: SchedulerHarness) -> None:
    """Newest first; an id may be given by its start, if it is the only one."""
    for name in ("first", "second"):
        at.side.on_new_request(PromptFacts(f"chatcmpl-{name}", tokens_of(name, 170)))
        assert at.ask(f"chatcmpl-{name}") == 0
        explained(at, f"chatcmpl-{name}")
    listed: Any = at.bridge.run(lambda store: store.explain("", deadline=soon(), tenant=None))
    assert [one["request"] for one in listed["requests"]] == ["chatcmpl-second", "chatcmpl-first"]
    assert explained(at, "chatcmpl-f")["request"] == "chatcmpl-first"
    with pytest.raises(InvalidRequest, match=r"several requests start like that.*chatcmpl-first, chatcmpl-second"):
        at.bridge.run(lambda store: store.explain("chatcmpl", deadline=soon(), tenant=None))
    with pytest.raises(InvalidRequest, match=r"unknown request.*nobody"):
        at.bridge.run(lambda store: store.explain("nobody", deadline=soon(), tenant=None))


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
    """Pages and state end together: the next page is what is missing, with anything or nothing behind the gap."""
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
