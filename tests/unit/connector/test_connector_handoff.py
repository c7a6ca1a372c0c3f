"""Disaggregated prefill: the receipt of a prefill engine, and a decode engine that waits for what it promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from connector.request_parameters import Handoff, read_handoff, wants_receipt, write_receipt
from connector.scheduler.facts import StateOffer
from tests.unit.connector.scheduler_harness import SchedulerHarness, harness
from tests.unit.connector.support import BLOCK, eventually
from tests.unit.connector.test_connector_group_saves import FULL, STATES, SavesHarness


def test_a_receipt_is_read_as_it_was_written() -> None:
    """What a prefill engine writes, a decode engine reads, beside keys of others and after a way through JSON."""
    import json

    params = json.loads(json.dumps({"do_remote_prefill": True, **write_receipt(2432)}))
    assert read_handoff(params, most_s=10.0) == Handoff(2432)


def test_a_proxy_may_set_the_time() -> None:
    """`wait_ms` beside the tokens is how long to wait, up to what the operator allows."""
    assert read_handoff({"kvstore_handoff": {"tokens": 128, "wait_ms": 500}}, most_s=10.0) == Handoff(128, 0.5)
    assert read_handoff({"kvstore_handoff": {"tokens": 128, "wait_ms": 10**9}}, most_s=10.0) == Handoff(128, 10.0)


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"kvstore_handoff": None},
        {"kvstore_handoff": 2432},
        {"kvstore_handoff": {"tokens": 0}},
        {"kvstore_handoff": {"tokens": -1}},
        {"kvstore_handoff": {"tokens": "2432"}},
        {"kvstore_handoff": {"tokens": True}},
        {"kvstore_handoff": {"tokens": 128, "wait_ms": "soon"}},
    ],
)
def test_nonsense_is_no_receipt(params: Any) -> None:
    """A receipt comes from outside the engine: what is not one is ignored."""
    assert read_handoff(params, most_s=10.0) is None


def test_who_wants_a_receipt() -> None:
    """vLLM's proxies say to a prefill engine that somebody else will decode."""
    assert wants_receipt({"do_remote_decode": True})
    assert not any(wants_receipt(params) for params in (None, {}, {"do_remote_decode": False}, {"do_remote_decode": 1}))


def lookups_begun(made: SchedulerHarness) -> float:
    return made.side.meters.get("connector_lookup_seconds_count")


def test_a_decode_engine_waits_for_what_is_promised(tmp_path: Path) -> None:
    """A third of a promised prompt is there: the engine asks again, and when the rest has come takes all of it."""
    with harness(tmp_path, max_wait_ms=20_000) as made:
        made.keep("prompt", 6 * BLOCK, ends=[2 * BLOCK])
        made.new("r", 6 * BLOCK + 1, "prompt", handoff=Handoff(6 * BLOCK, wait_s=20.0))
        eventually(lambda: made.side.matched_tokens("r", 0) is not None or lookups_begun(made) >= 3)
        assert made.state("r").fetch is None
        made.keep("prompt", 6 * BLOCK)
        assert made.ask("r") == 6 * BLOCK
        assert made.side.meters.get("connector_handoffs", outcome="arrived") == 1


def test_a_promise_that_is_not_kept_costs_its_time(tmp_path: Path) -> None:
    """The rest never comes: when the time is over, the engine takes what is there."""
    with harness(tmp_path) as made:
        made.keep("prompt", 2 * BLOCK)
        made.new("r", 6 * BLOCK + 1, "prompt", handoff=Handoff(6 * BLOCK, wait_s=0.1))
        assert made.ask("r") == 2 * BLOCK
        assert made.side.meters.get("connector_handoffs", outcome="late") == 1


def test_a_promise_of_which_nothing_comes(tmp_path: Path) -> None:
    """Nothing is ever stored: the request is computed when the time is over."""
    with harness(tmp_path) as made:
        made.new("r", 6 * BLOCK + 1, handoff=Handoff(6 * BLOCK, wait_s=0.1))
        assert made.ask("r") == 0
        assert made.side.meters.get("connector_misses", reason="nothing_stored") == 1


def test_what_the_engine_holds_itself_is_not_waited_for(tmp_path: Path) -> None:
    """A promise that vLLM's own cache covers is kept already, as is one beyond what a hit may cover."""
    with harness(tmp_path) as made:
        made.new("r", 4 * BLOCK, handoff=Handoff(4 * BLOCK, wait_s=20.0))
        assert made.ask("r", local_tokens=3 * BLOCK) == 0
        assert made.side.meters.get("connector_handoffs", outcome="arrived") == 1


def test_a_prefill_engine_promises_what_it_saves(tmp_path: Path) -> None:
    """Pages that are stored, being saved or planned at the request's end count, up to the last block; no more."""
    with harness(tmp_path) as made:
        state = made.new("r", 5 * BLOCK + 7)
        made.hashed("r")
        made.step({"r": 3 * BLOCK + 1})
        assert made.side.saves.promised_tokens(state) <= 3 * BLOCK
        made.step({"r": 5 * BLOCK + 7})
        assert made.side.saves.promised_tokens(state) == 5 * BLOCK


def test_a_hole_is_not_promised(tmp_path: Path) -> None:
    """Without room for a page nothing is promised beyond it."""
    with harness(tmp_path, pinned_bytes=1) as made:
        made.new("first", 8 * BLOCK)
        state = made.new("r", 5 * BLOCK)
        made.hashed("first", "r")
        made.step({"first": 8 * BLOCK})  # takes all the room there is
        made.step({"r": 5 * BLOCK})
        assert made.side.saves.promised_tokens(state) == 0


def test_a_hybrid_promises_a_boundary_with_a_state() -> None:
    """Attention is saved further, but a prompt resumes where there is a state too; without one nowhere."""
    at = SavesHarness(STATES, FULL, prompt=100)
    at.step(100, [], list(range(1, 8)), [])
    assert at.saves.promised_tokens(at.state) == 0
    at = SavesHarness(STATES, FULL, prompt=100)
    at.step(64, [], list(range(1, 5)), [], offers=[StateOffer(0, 21, 64), StateOffer(2, 22, 64)])
    at.step(100, [], list(range(1, 8)), [])
    assert at.saves.promised_tokens(at.state) == 64
