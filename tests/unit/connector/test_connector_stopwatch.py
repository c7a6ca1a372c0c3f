"""The engine's steps: timed for what prefill costs, and never made to wait when they compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from connector.request_parameters import RequestFlags
from connector.scheduler.costs import Costs
from connector.scheduler.hook_facts import StepFacts
from connector.scheduler.stopwatch import Stopwatch
from tests.unit.connector.scheduler_harness import SchedulerHarness, harness
from tests.virtual_time import ManualClock


class Timed:
    """A stopwatch on a clock that a test sets, for requests whose prompts have 2,000 tokens."""

    def __init__(self) -> None:
        costs, self._clock = Costs(), ManualClock()
        self._learned: list[tuple[list[tuple[int, int]], float]] = []
        costs.prefill.observe = lambda chunks, seconds: self._learned.append((list(chunks), seconds))  # type: ignore[method-assign]
        self.stopwatch = Stopwatch(costs, lambda _: 2000, self._clock)

    def planned(self, *chunks: tuple[int, int], now_s: float) -> None:
        self._clock.now_s = now_s
        named = {str(number): chunk for number, chunk in enumerate(chunks)}
        starts = {name: start for name, (start, _) in named.items()}
        self.stopwatch.on_step_planned(starts, {name: stop for name, (_, stop) in named.items()}, is_shared=False)

    def reported(self, *, now_s: float) -> tuple[list[tuple[int, int]], float] | None:
        """What is learned from the step."""
        self._clock.now_s = now_s
        self.stopwatch.on_step_reported()
        return self._learned.pop() if self._learned else None


class TestSteps:
    def test_one_after_the_other(self) -> None:
        """The time from plan to report; steps that decode or compute nothing tell nothing."""
        timed = Timed()
        timed.planned((0, 512), now_s=1.0)
        assert timed.stopwatch.is_computing
        assert timed.reported(now_s=1.5) == ([(0, 512)], 0.5)
        timed.planned(now_s=2.0)
        assert not timed.stopwatch.is_computing
        assert timed.reported(now_s=2.1) is None
        timed.planned((512, 1024), (2060, 2061), now_s=3.0)
        assert timed.reported(now_s=3.25) == ([(512, 1024), (2060, 2061)], 0.25)
        timed.planned((2060, 2061), now_s=4.0)
        assert timed.reported(now_s=4.1) is None
        timed.planned((0, 100), *[(2009, 2010)] * 30, now_s=5.0)
        assert timed.reported(now_s=5.1) is None, "a quarter of it was decoding"
        assert timed.reported(now_s=6.0) is None, "nothing was planned"

    def test_planned_ahead(self) -> None:
        """A step that was planned while the one before ran counts from that one's end."""
        timed = Timed()
        timed.planned((0, 512), now_s=1.0)
        timed.planned((512, 1024), now_s=1.01)
        timed.planned(now_s=1.02)
        assert timed.reported(now_s=2.0) == ([(0, 512)], 1.0)
        assert timed.reported(now_s=3.2) == ([(512, 1024)], pytest.approx(1.2))
        assert not timed.stopwatch.is_computing
        assert timed.reported(now_s=3.3) is None

    def test_the_engine_teaches_what_prefill_costs(self, at: SchedulerHarness) -> None:
        """Reported steps of prompts are learned from; those of generated tokens are not."""
        at.new("a", 2000, flags=RequestFlags(save=False))
        for turn in range(5):
            at.side.plan_step(StepFacts({"a": 300 * turn + 300}, {}, computed_tokens={"a": 300 * turn}))
            at.side.on_step_reported()
        assert at.side.costs.prefill.seconds(0, 1500) is not None
        before = at.side.costs.prefill.seconds(0, 1500)
        at.side.plan_step(StepFacts({"a": 2300}, {}, computed_tokens={"a": 2000}))
        at.side.on_step_reported()
        assert at.side.costs.prefill.seconds(0, 1500) == before

    def test_steps_that_also_blend_tell_nothing(self, at: SchedulerHarness) -> None:
        """Else computing would seem slow, and other requests would wait for pages that are quicker to compute."""
        at.new("a", 2000, flags=RequestFlags(save=False))
        for turn in range(5):
            computed, final = {"a": 300 * turn}, {"a": 300 * turn + 300}
            at.side.plan_step(StepFacts(final, {}, computed_tokens=computed, is_shared=True))
            at.side.on_step_reported()
        assert at.side.costs.prefill.seconds(0, 1500) is None


class TestNeverSlow:
    @pytest.fixture
    def waits(self, at: SchedulerHarness, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """Every wait of the engine's thread."""
        seen: list[float] = []

        def wait(timeout: float | None = None) -> bool:
            seen.append(timeout or -1.0)
            return False

        monkeypatch.setattr(at.side.hits.answered, "wait", wait)
        return seen

    def test_decoding_is_not_delayed_by_requests_that_ask(self, at: SchedulerHarness, waits: list[float]) -> None:
        """Of 32 requests 16 decode and 16 ask a service that hangs: no step waits, planned ahead or not."""
        for name in range(32):
            at.new(f"r{name}", 170)
        decoding = [f"r{name}" for name in range(16)]
        at.hashed(*decoding)
        at.store.held.add("lookup")
        for name in range(16, 32):
            at.new(f"late{name}", 170)
        for tokens in range(170, 200):
            for name in range(16, 32):
                assert at.side.matched_tokens(f"late{name}", 0) is None
            final = dict.fromkeys(decoding, tokens + 1)
            tables = {name: [tuple(range(100, 164))] for name in decoding}
            at.side.plan_step(StepFacts(final, tables, computed_tokens=dict.fromkeys(decoding, tokens)))
            # vLLM plans a further step, with nothing to compute, before it has this one's results
            assert not at.side.plan_step(StepFacts({}, {})).may_wait
            at.side.on_step_reported()
            at.side.on_step_reported()
        assert at.side.plan_step(StepFacts({}, {})).may_wait
        at.side.wait_for_answers()
        assert waits == [0.005], "with nothing to compute it lets others run, for a moment"

    def test_engines_that_step_together_never_wait(self, tmp_path: Path) -> None:
        """A data-parallel engine without work takes part in the others' steps: they would wait with it."""
        with harness(tmp_path, facts={"steps_together": True}) as at:
            assert not at.side.plan_step(StepFacts({}, {})).may_wait

    def test_no_wait_for_requests_that_do_not_ask(self, at: SchedulerHarness, waits: list[float]) -> None:
        """Requests that have their answer, run or load do not make an empty step wait."""
        at.keep("a", 170)
        at.new("a", 170)
        at.new("none", 170)
        assert at.ask("none") == 0
        at.admit("a", at.ask("a"))
        at.side.wait_for_answers()
        assert waits == []
        at.finished("a")
        at.admit("a", 0)
        at.side.wait_for_answers()
        assert waits == []
