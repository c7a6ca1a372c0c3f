"""Which hits are computed instead, what is then compared, and that no lease outlives it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from connector.jobs import AuditJob, RankReport
from connector.prefix_hash import AdapterRequest
from connector.scheduler.audits import is_sampled
from connector.scheduler.hook_facts import StepFacts
from kvstore.model.keys import PrefixHash
from kvstore.testing.waiting import eventually
from tests.unit.connector.scheduler_harness import SchedulerHarness, harness
from tests.virtual_time import ManualClock


@pytest.fixture
def audited(tmp_path: Path) -> Iterator[SchedulerHarness]:
    with harness(tmp_path, audit_rate=1.0) as made:
        yield made


def compute(made: SchedulerHarness, request_id: str, start: int, stop: int) -> tuple[AuditJob, ...]:
    """One step that computes some of a request, whose block `i` has the id `100 + i`; the records to compare."""
    tables = {request_id: [tuple(range(100, 164))]}
    jobs = made.side.plan_step(StepFacts({request_id: stop}, tables, computed_tokens={request_id: start}))
    return jobs.audits


def done(made: SchedulerHarness, *jobs: AuditJob) -> None:
    made.side.on_rank_report(RankReport(audits_done={job.audit_id: 1 for job in jobs}))


def spans(jobs: tuple[AuditJob, ...]) -> list[tuple[int, int, tuple[int, ...]]]:
    """By piece of slice 0: blocks of the record, the first one compared, and where that and the others stand."""
    pieces = [piece for job in jobs for piece in job.pieces if piece.key.slice == 0]
    return [(piece.span_blocks, piece.first_block, piece.block_ids[0]) for piece in pieces]


def test_the_first_hit_is_computed_and_compared(audited: SchedulerHarness) -> None:
    """Two pages and a tail are stored: the request computes them, each is compared when it is final, the lease ends."""
    audited.keep("a", 170)
    audited.new("r", 170, "a")
    assert audited.ask("r") == 0
    assert audited.store.num_leases == 1
    first = compute(audited, "r", 0, 70)
    assert spans(first) == [(4, 0, (100, 101, 102, 103))]
    rest = compute(audited, "r", 70, 170)
    assert spans(rest) == [(4, 0, (104, 105, 106, 107)), (2, 0, (108, 109))]
    assert audited.store.num_leases == 1
    done(audited, *first, *rest)
    audited.no_leases()


def test_the_second_hit_is_loaded_and_read_back(audited: SchedulerHarness) -> None:
    """Once is enough: the next request resumes, and the ranks read its blocks back."""
    audited.keep("a", 170)
    audited.new("r", 170, "a")
    audited.ask("r")
    done(audited, *compute(audited, "r", 0, 170))
    audited.side.on_finished("r")
    audited.new("s", 170, "a")
    assert audited.ask("s") == 160
    (load,) = audited.admit("s", 160).loads
    assert load.read_back
    audited.finished("s")
    assert audited.step({"s": 170}).audits == ()


def test_only_the_part_from_the_first_unaudited_record_on_is_computed(audited: SchedulerHarness) -> None:
    """With the first page audited a longer prompt resumes at its end and computes the rest."""
    audited.keep("a", 70)
    audited.new("r", 70, "a")
    audited.ask("r")
    done(audited, *compute(audited, "r", 0, 70))
    audited.side.on_finished("r")
    audited.keep("a", 170)
    audited.new("s", 170, "a")
    assert audited.ask("s") == 64
    audited.admit("s", 64)
    audited.finished("s")
    jobs = compute(audited, "s", 64, 170)
    assert spans(jobs) == [(4, 0, (104, 105, 106, 107)), (2, 0, (108, 109))]
    done(audited, *jobs)


def test_what_the_engine_has_itself_is_not_compared(audited: SchedulerHarness) -> None:
    """With 96 tokens of its own only the blocks behind them are compared."""
    audited.keep("a", 170)
    audited.new("r", 170, "a")
    assert audited.ask("r", 96) == 0
    jobs = compute(audited, "r", 96, 170)
    assert spans(jobs) == [(4, 2, (106, 107)), (2, 0, (108, 109))]
    done(audited, *jobs)


def test_a_preempted_request_leaves_the_rest_to_another(audited: SchedulerHarness) -> None:
    """What it had not computed is audited by the next request; it takes its own hit and computes no second time."""
    audited.keep("a", 170)
    audited.new("r", 170, "a")
    audited.ask("r")
    done(audited, *compute(audited, "r", 0, 70))
    audited.step(preempted=("r",))
    audited.no_leases()
    assert audited.ask("r") == 160
    audited.side.on_finished("r")
    audited.new("s", 170, "a")
    assert audited.ask("s") == 64


@pytest.mark.parametrize("computes", [False, True])
def test_a_request_that_ends_before_it_has_computed(audited: SchedulerHarness, computes: bool) -> None:
    """Its lease ends with it, or with the last answer of the ranks; the engine steps on that long."""
    audited.keep("a", 170)
    audited.new("r", 170, "a")
    audited.ask("r")
    jobs = compute(audited, "r", 0, 70) if computes else ()
    audited.side.on_finished("r")
    assert audited.side.has_pending_saves == computes
    done(audited, *jobs)
    assert not audited.side.has_pending_saves
    audited.no_leases()
    audited.new("s", 170, "a")
    assert audited.ask("s") == (64 if computes else 0)


def test_a_request_whose_adapter_is_replaced_is_not_compared(audited: SchedulerHarness) -> None:
    """What it computes from now on may be of other weights, and would make the stored pages look wrong."""
    audited.keep("a", 170)
    audited.new("r", 170, "a").adapter = AdapterRequest(1, "adapter")
    audited.ask("r")
    done(audited, *compute(audited, "r", 0, 70))
    audited.side.stop_adapter(1)
    assert compute(audited, "r", 70, 170) == ()
    audited.no_leases()


def test_blocks_that_cannot_be_found_are_not_compared(audited: SchedulerHarness) -> None:
    """A table that is too short: what of the audit can be looked at is, the rest is left to another request."""
    audited.keep("a", 170)
    audited.new("r", 170, "a")
    audited.ask("r")
    jobs = audited.side.plan_step(StepFacts({"r": 170}, {"r": [tuple(range(100, 105))]}, computed_tokens={"r": 0}))
    assert spans(jobs.audits) == [(4, 0, (100, 101, 102, 103))]
    assert audited.side.meters.get("connector_audit_skipped") == 2
    audited.side.on_finished("r")
    done(audited, *jobs.audits)
    assert not audited.side.has_pending_saves
    audited.no_leases()


def test_leases_are_renewed_while_the_engine_computes(tmp_path: Path) -> None:
    """However long the pages take, their records stay readable."""
    clock = ManualClock()
    with harness(tmp_path, clock=clock, audit_rate=1.0) as made:
        made.keep("a", 170)
        made.new("r", 170, "a")
        made.ask("r")
        before = made.store.calls["renew"]
        compute(made, "r", 0, 10)
        assert made.store.calls["renew"] == before
        clock.now_s += made.store.inner.limits.lease_s / 2
        compute(made, "r", 10, 20)
        eventually(lambda: made.store.calls["renew"] == before + 1)


def test_without_a_rate_nothing_is_audited(tmp_path: Path) -> None:
    """A hit is a hit, and steps carry no audit."""
    with harness(tmp_path) as made:
        made.keep("a", 170)
        made.new("r", 170, "a")
        assert made.ask("r") == 160
        (load,) = made.admit("r", 160).loads
        assert not load.read_back


def test_the_share_is_a_share_and_grows_by_adding() -> None:
    """A tenth is about a tenth; what it takes, a half takes too; one takes all, nothing takes none."""
    prefixes = [PrefixHash(number.to_bytes(2, "big") * 16) for number in range(1, 4000)]
    tenth = {prefix for prefix in prefixes if is_sampled(prefix, 0.1)}
    half = {prefix for prefix in prefixes if is_sampled(prefix, 0.5)}
    assert tenth < half
    assert 0.05 < len(tenth) / len(prefixes) < 0.15
    assert all(is_sampled(prefix, 1.0) for prefix in prefixes)
    assert not any(is_sampled(prefix, 0.0) for prefix in prefixes)
