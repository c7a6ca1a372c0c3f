"""An engine of an untested vLLM that was allowed: nothing is loaded before it computed the same; a watchdog."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from connector.identity import describe_namespace
from connector.jobs import AuditJob, RankReport
from connector.losses import LossReason
from connector.scheduler.audits import TRIAL_POINTS
from connector.scheduler.hook_facts import StepFacts
from connector.scheduler.save_jobs import Watchdog
from tests.unit.connector.scheduler_harness import SchedulerHarness, harness
from tests.unit.connector.support import make_facts, make_shape
from tests.virtual_time import ManualClock

UNTESTED = {"untested_release": "0.34.0"}


@pytest.fixture
def untested(tmp_path: Path) -> Iterator[SchedulerHarness]:
    with harness(tmp_path, facts=UNTESTED) as made:
        yield made


def compute(made: SchedulerHarness, name: str) -> tuple[AuditJob, ...]:
    """A request whose prompt of 70 tokens is stored computes it; what the ranks are to compare."""
    made.keep(name, 70)
    made.new(name, 70, name)
    assert made.ask(name) == 0
    tables = {name: [tuple(range(100, 164))]}
    jobs = made.side.plan_step(StepFacts({name: 70}, tables, computed_tokens={name: 0}))
    return jobs.audits


def answer(made: SchedulerHarness, *jobs: AuditJob, partial: bool = False, differs: bool = False) -> None:
    ids = {job.audit_id for job in jobs}
    report = RankReport(
        audits_done=dict.fromkeys(ids, 1),
        audits_partial=ids if partial else set(),
        audits_differ=ids if differs else set(),
    )
    made.side.on_rank_report(report)


def test_nothing_is_loaded_until_the_first_resume_points_were_equal(untested: SchedulerHarness) -> None:
    """Each is computed by the first request that would resume there; then hits are taken, the first ones read back."""
    for number in range(TRIAL_POINTS):
        answer(untested, *compute(untested, f"p{number}"))
    untested.new("again", 70, "p0")
    assert untested.ask("again") == 64
    (load,) = untested.admit("again", 64).loads
    assert load.read_back
    untested.finished("again")
    assert untested.side.meters.get("connector_audits") == TRIAL_POINTS


def test_what_was_not_compared_does_not_count(untested: SchedulerHarness) -> None:
    """Neither a record without a buffer to compare it in, nor what a request left before it had computed it."""
    answer(untested, *compute(untested, "p0"), partial=True)
    untested.keep("p1", 70)
    untested.new("p1", 70)
    assert untested.ask("p1") == 0
    untested.side.on_finished("p1")
    for number in range(2, TRIAL_POINTS + 1):
        answer(untested, *compute(untested, f"p{number}"))
    untested.new("again", 70, "p2")
    assert untested.ask("again") == 0
    untested.side.on_finished("again")
    answer(untested, *compute(untested, "last"))
    untested.new("third", 70, "p2")
    assert untested.ask("third") == 64


def test_a_hit_of_which_all_is_being_compared_is_not_loaded(untested: SchedulerHarness) -> None:
    """A second request of the same prompt, and one that lost its blocks, compute as well; no lease is left."""
    jobs = compute(untested, "p0")
    untested.new("second", 70, "p0")
    assert untested.ask("second") == 0
    untested.step(preempted=("p0",))
    assert untested.ask("p0") == 0
    answer(untested, *jobs)
    untested.no_leases()


def test_a_difference_ends_the_engines_caching(untested: SchedulerHarness, caplog: pytest.LogCaptureFixture) -> None:
    """Its pages are not what it computes: it neither loads nor saves any more, and says so once."""
    with caplog.at_level(logging.WARNING, logger="vllm.kvstore"):
        answer(untested, *compute(untested, "p0"), differs=True)
        answer(untested, *compute(untested, "p1"), differs=True)
    assert not untested.side.is_ready
    (said,) = [record.getMessage() for record in caplog.records if "not cached" in record.getMessage()]
    assert "0.34.0" in said
    assert untested.step({"p1": 71}).saves == ()


def test_a_tested_release_loads_at_once_whatever_an_audit_finds(tmp_path: Path) -> None:
    """There a difference costs the record, as before."""
    with harness(tmp_path, audit_rate=1.0) as made:
        made.keep("a", 70)
        made.new("r", 70, "a")
        assert made.ask("r") == 0
        (job,) = made.side.plan_step(StepFacts({"r": 70}, {"r": [range(100, 164)]}, computed_tokens={"r": 0})).audits
        answer(made, job, differs=True)
        assert made.side.is_ready


def test_an_untested_release_has_pages_of_its_own() -> None:
    """Nothing is shared with a tested one; tested ones keep the names that they had."""
    facts = make_facts()
    named = describe_namespace(replace(facts, **UNTESTED), make_shape(facts), "w")  # type: ignore[arg-type]
    assert named.id != describe_namespace(facts, make_shape(facts), "w").id
    assert "untested" not in str(describe_namespace(facts, make_shape(facts), "w"))


# ---- the watchdog


def test_saves_that_nobody_answers_end_saving(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their blocks are given back, an idle engine may rest, a late answer does no harm, hits are still found."""
    unpinned: list[int] = []
    with harness(tmp_path) as made:
        clock = ManualClock(0.0)
        made.side._watchdog = Watchdog(made.side.save_jobs, clock)
        made.side.bind_pins(SimpleNamespace(pin=lambda _: None, unpin=unpinned.extend))
        made.new("a", 64)
        made.hashed("a")
        made.side.on_finished("a", 64, [range(1, 5)])
        (job,) = made.step().saves
        for _ in range(2000):
            made.step()
        assert made.side.has_pending_saves  # steps alone are an idle engine's
        clock.now_s = 61.0
        made.step()
        assert sorted(unpinned) == [1, 2, 3, 4] and not made.side.has_pending_saves
        assert "saving has ended on this engine" in caplog.text
        made.ranks_done(job.job_id)
        made.new("b", 64)
        made.hashed("b")
        assert made.step({"b": 64}).saves == ()
        made.keep("c", 70)
        made.new("c", 70)
        assert made.ask("c") == 64


def test_saves_that_are_answered_in_time() -> None:
    """Ranks that answer one save after the other are slow, not silent. Nor is an engine that makes few steps."""
    clock, oldest, abandoned = ManualClock(0.0), [0], []  # type: ignore[var-annotated]

    class Answered:
        oldest_id = property(lambda self: oldest[0])

        def abandon(self, reason: LossReason) -> int:
            abandoned.append(oldest[0])
            return 1

    dog = Watchdog(Answered(), clock)  # type: ignore[arg-type]
    for number in range(5000):
        oldest[0], clock.now_s = number // 900, number / 10
        dog.on_step()
    oldest[0] = 100
    for _ in range(500):
        clock.now_s += 10
        dog.on_step()
    oldest[0] = None  # type: ignore[call-overload]
    for _ in range(5000):
        clock.now_s += 10
        dog.on_step()
    assert abandoned == [] and not dog.has_ended_saves
