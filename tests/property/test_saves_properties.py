"""`Saves` against a model of vLLM's block pool and of ranks: host memory, pins and jobs always add up, and the
blocks of a job hold what its name says."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from connector.canonical.attention import may_lose_blocks
from connector.identity import CacheShape
from connector.jobs import RankReport, SaveJob
from connector.losses import LossReason
from connector.prefix_hash import PrefixChain
from connector.scheduler.hook_facts import StateOffer
from connector.scheduler.requests import RequestState
from connector.scheduler.save_jobs import SaveJobs
from connector.scheduler.saves import RunningRequest, Saves
from kvstore.model.keys import NamespaceId
from kvstore.model.kinds import SlidingWindow
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.meters import Meters
from tests.unit.connector.support import BLOCK, FULL, STATES, WINDOW, make_facts, make_shape, tokens_of
from tests.virtual_time import ManualClock

NAMESPACE = NamespaceId(bytes(16))
NUM_BLOCKS = 90
NUM_FEEDS = 3
WAIT_S = 5.0
TURN_OF_FULL = 3

Content = tuple[str, int, int]
"""What a block holds: of which request, in which of vLLM's groups, up to which token."""


class Pool:
    """vLLM's block pool: a block is reused once it has no references, the longest free first."""

    def __init__(self) -> None:
        self.refs: Counter[int] = Counter()
        self.pinned: Counter[int] = Counter()
        self.content: dict[int, Content] = {}
        self.free = list(range(1, NUM_BLOCKS))
        self.fails_in: int | None = None

    def take(self, content: Content) -> int:
        block_id = self.free.pop(0)
        self.refs[block_id] += 1
        self.content[block_id] = content
        return block_id

    def give(self, block_id: int) -> None:
        assert self.refs[block_id] > 0
        self.refs[block_id] -= 1
        if not self.refs[block_id]:
            self.free.append(block_id)

    def pin(self, block_ids: Sequence[int]) -> None:
        if self.fails_in is not None:
            self.fails_in -= 1
            if self.fails_in < 0:
                self.fails_in = None
                raise MemoryError("no pins today")
        for block_id in block_ids:
            assert self.refs[block_id] > 0, "a block that may be another's was pinned"
            self.refs[block_id] += 1
            self.pinned[block_id] += 1

    def unpin(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.pinned[block_id] -= 1
            self.give(block_id)


class Request:
    """A running request: its blocks in each of vLLM's groups, and its recurrent states of this step."""

    def __init__(self, name: str, prompt_tokens: int) -> None:
        self.tokens = tokens_of(name, prompt_tokens + 40)
        hashed: Future[None] = Future()
        hashed.set_result(None)
        chain = PrefixChain(BLOCK)
        chain.extend(self.tokens[:prompt_tokens])
        self.known = list(self.tokens[:prompt_tokens])
        self.state = RequestState(name, tuple(self.known), chain, self.known, hashed=hashed)
        self.final_tokens = 0
        self.tables: list[list[int]] = [[] for _ in range(NUM_FEEDS)]
        self.offered: list[int] = []


class SavesMachine(RuleBasedStateMachine):
    """One engine."""

    @initialize(
        groups=st.sampled_from(((FULL,), (WINDOW, FULL), (STATES, FULL), (STATES, WINDOW, FULL))),
        limit_share=st.integers(1, 6),
        num_ranks=st.integers(1, 2),
        has_pins=st.sampled_from((True, True, True, False)),
    )
    def start(self, groups: tuple[Any, ...], limit_share: int, num_ranks: int, has_pins: bool) -> None:
        self.shape: CacheShape = make_shape(make_facts(groups=groups, num_blocks=NUM_BLOCKS))
        self.page_tokens = self.shape.layout.page_tokens
        largest = max(
            group.facts.rank_block_bytes * (1 if group.is_state else self.page_tokens // BLOCK)
            for group in self.shape.groups
        )
        self.limit_bytes = limit_share * largest
        self.pool, self.clock = Pool(), ManualClock()
        self.states: dict[str, RequestState] = {}
        self.requests: dict[str, Request] = {}
        self.num_requests = 0
        self.losses: list[dict[str, Any]] = []
        self.jobs = SaveJobs(
            self.shape,
            num_ranks=num_ranks,
            limit_bytes=self.limit_bytes,
            num_blocks=NUM_BLOCKS,
            requests=self.states,
            losses=SimpleNamespace(report=lambda **loss: self.losses.append(loss)),  # type: ignore[arg-type]
            instruments=Instruments(self.clock),
        )
        self.saves = Saves(self.shape, self.jobs, Meters())
        if has_pins:
            self.jobs.pins = self.pool
        self.sent: dict[int, SaveJob] = {}  # not answered by all ranks
        self.ranks: list[list[int]] = [[] for _ in range(num_ranks)]
        self.failed: set[int] = set()
        self.saved: set[tuple[str, int, int]] = set()

    # ---- the engine

    @rule(prompt_tokens=st.integers(10, 200))
    def new_request(self, prompt_tokens: int) -> None:
        if len(self.requests) >= 4:
            return
        self.num_requests += 1
        request = Request(f"r{self.num_requests}", prompt_tokens)
        self.requests[request.state.request_id] = request
        self.states[request.state.request_id] = request.state

    def _compute(self, request: Request, num_tokens: int) -> list[StateOffer]:
        """vLLM's scheduler: drop what is out of windows, take blocks, and have the forward write them."""
        name, final = request.state.request_id, request.final_tokens
        for block_id in request.offered:
            self.pool.give(block_id)
        request.offered = []
        for group in self.shape.groups:
            if isinstance(group.facts.kind, SlidingWindow):
                for feed in group.facts.feed_groups:
                    for index in range(min(len(request.tables[feed]), max(0, final - 2 * BLOCK + 1) // BLOCK)):
                        if block_id := request.tables[feed][index]:
                            self.pool.give(block_id)
                            request.tables[feed][index] = 0
        target = final + num_tokens
        feeds = [feed for group in self.shape.groups if not group.is_state for feed in group.facts.feed_groups]
        state_feeds = [feed for group in self.shape.groups if group.is_state for feed in group.facts.feed_groups]
        feeds = [feed for feed in range(NUM_FEEDS) if feed in feeds]
        while final < target and len(self.pool.free) < (-(-(target - final) // BLOCK) + 2) * len(feeds) + len(
            state_feeds
        ):
            target -= 1
        while len(request.known) < target:
            request.known.append(request.tokens[len(request.known)])
        for feed in feeds:
            table = request.tables[feed]
            while len(table) * BLOCK < target:
                table.append(self.pool.take((name, feed, (len(table) + 1) * BLOCK)))
        request.final_tokens = target
        offers = []
        boundary = target // BLOCK * BLOCK
        if boundary > final:
            for feed in state_feeds:
                block_id = self.pool.take((name, -1 - feed, boundary))
                request.offered.append(block_id)
                offers.append(StateOffer(feed, block_id, boundary))
        return offers

    @rule(
        amounts=st.lists(st.integers(0, 90), min_size=4, max_size=4),
        raises=st.sampled_from((None, None, None, None, 0, 1, 2, 3)),
        pin_fails=st.sampled_from((None, None, None, None, None, 0, 1, 2)),
        withdraws=st.sampled_from((False, False, False, False, False, True)),
    )
    def step(self, amounts: list[int], raises: int | None, pin_fails: int | None, withdraws: bool) -> None:
        running = []
        for number, (request, amount) in enumerate(zip(self.requests.values(), amounts, strict=False)):
            most = len(request.tokens) - request.final_tokens
            offers = self._compute(request, min(amount, most))

            def tables(request: Request = request, fails: bool = number == raises) -> list[list[int]]:
                if fails:
                    raise RuntimeError("no tables today")
                return request.tables

            running.append(RunningRequest(request.state, NAMESPACE, request.final_tokens, tables, offers))
        self.pool.fails_in = pin_fails
        waiting_before = {job_id for _, job_id in self.jobs._waiting}
        delayed = {each.state.request_id for each in running if each.state.pages_delayed}
        try:
            planned = self.saves.plan_step(running)
        except (RuntimeError, MemoryError):
            for request_id in delayed:
                state = self.requests[request_id].state
                assert state.pages_delayed or state.save_stopped, "a delayed page was forgotten"
            return
        finally:
            self.pool.fails_in = None
        now_s = self.clock.monotonic_s()
        for _, job_id in self.jobs._waiting:
            assert now_s - self.jobs._jobs[job_id].waits_since_s <= WAIT_S
        self._check_turns(planned, waiting_before)
        for job in planned:
            self._check_content(job)
        if withdraws:
            self.jobs.withdraw(planned)
            return
        for job in planned:
            self.sent[job.job_id] = job
            for rank in self.ranks:
                rank.append(job.job_id)

    def _check_turns(self, planned: list[SaveJob], waiting_before: set[int]) -> None:
        """What goes first did not wait for what goes last."""
        first_waiting = min((turn for turn, _ in self.jobs._waiting), default=TURN_OF_FULL)
        for job in planned:
            group = self.shape.groups[job.group]
            turn = 0 if group.is_state else 1 if may_lose_blocks(group.facts.kind) else 3
            if job.job_id in waiting_before:
                turn = self.jobs._jobs[job.job_id].priority
            assert turn <= first_waiting

    def _check_content(self, job: SaveJob) -> None:
        """The job's blocks hold what its name says, until this step's copies."""
        name = job.request_id
        number = int(name[1:])
        chain = PrefixChain(BLOCK)
        chain.extend(tokens_of(f"r{number}", job.stop_tokens))
        assert chain.boundaries[-1].prefix == job.prefix
        group = self.shape.groups[job.group]
        for feed, ids in zip(group.facts.feed_groups, job.block_ids, strict=True):
            if group.is_state:
                expected: list[Content] = [(name, -1 - feed, job.stop_tokens)]
            else:
                ends = range(job.start_tokens + BLOCK, job.stop_tokens + 1, BLOCK)
                expected = [(name, feed, end) for end in ends]
            assert [self.pool.content[block_id] for block_id in ids] == expected
            assert all(self.pool.refs[block_id] > 0 for block_id in ids)
            request = self.requests.get(name)
            holds = set() if request is None else {*request.offered, *(b for table in request.tables for b in table)}
            pinned = set(self.jobs._jobs[job.job_id].pinned)
            assert set(ids) <= holds | pinned

    def _drop_blocks(self, request: Request) -> None:
        for block_id in [*request.offered, *(block for table in request.tables for block in table if block)]:
            self.pool.give(block_id)
        request.offered, request.tables, request.final_tokens = [], [[] for _ in range(NUM_FEEDS)], 0

    @rule(index=st.integers(0, 3), ends_well=st.booleans(), pin_fails=st.sampled_from((None, None, None, 0, 1)))
    def end(self, index: int, ends_well: bool, pin_fails: int | None) -> None:
        if index >= len(self.requests):
            return
        request = list(self.requests.values())[index]
        state = request.state
        del self.requests[state.request_id]
        del self.states[state.request_id]
        self.pool.fails_in = pin_fails
        num_losses = len(self.losses)
        fails = False
        # a request that was preempted ends well only once it has computed as much again
        ends_well = ends_well and request.final_tokens >= max([0, *state.cursors.values()])
        if ends_well:
            try:
                self.saves.plan_end(state, NAMESPACE, request.final_tokens, request.tables)
            except MemoryError:
                fails = True
        self.pool.fails_in = None
        if ends_well and not fails and self.jobs.pins is not None and not state.save_stopped:
            is_lost = len(self.losses) > num_losses
            for group_index, group in enumerate(self.shape.groups):
                if group.is_state or may_lose_blocks(group.facts.kind):
                    continue
                last = request.final_tokens // BLOCK * BLOCK
                for stop in {*range(self.page_tokens, last + 1, self.page_tokens), last} - {0}:
                    assert self._is_safe(state, group_index, stop) or is_lost
        self._drop_blocks(request)

    @rule(index=st.integers(0, 3))
    def preempt(self, index: int) -> None:
        if index < len(self.requests):
            request = list(self.requests.values())[index]
            self._drop_blocks(request)
            request.state.preempt()
            if request.state.hashed is None:
                chain = request.state.chain
                assert chain is not None
                chain.extend(request.known[: len(request.known) // BLOCK * BLOCK])
                request.state.hashed = Future()
                request.state.hashed.set_result(None)

    # ---- the ranks

    @rule(rank=st.integers(0, 1), count=st.integers(1, 6), fails=st.sampled_from((False, False, False, True)))
    def answer(self, rank: int, count: int, fails: bool) -> None:
        mine = self.ranks[rank % len(self.ranks)]
        job_ids = [mine.pop(0) for _ in range(min(count, len(mine)))]
        report = RankReport(dict.fromkeys(job_ids, 1), set(job_ids[:1]) if fails else set())
        self.failed |= report.saves_failed
        self.jobs.on_rank_report(report)
        for job_id in job_ids:
            if job_id in self.sent and not any(job_id in rank for rank in self.ranks):
                job = self.sent.pop(job_id)
                if job_id not in self.failed:
                    self.saved.add((job.request_id, job.group, job.stop_tokens))

    @rule(job_id=st.integers(1000, 2000))
    def answer_of_an_unknown_job(self, job_id: int) -> None:
        self.jobs.on_rank_report(RankReport({job_id + 10_000: 1}, {job_id + 10_000}))

    @rule(seconds=st.sampled_from((0.1, 3.0, 5.1)))
    def time_passes(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule(often=st.integers(0, 9))
    def abandon(self, often: int) -> None:
        if often:
            return
        count = len(self.jobs)
        num_losses = len(self.losses)
        assert self.jobs.abandon(LossReason.UNANSWERED) == count == len(self.losses) - num_losses
        self.sent.clear()

    @rule(often=st.integers(0, 5))
    def drop_the_engine_s_cache(self, often: int) -> None:
        if not often:
            self.jobs.give_blocks_back()
            assert not +self.pool.pinned

    @rule(often=st.integers(0, 5))
    def close(self, often: int) -> None:
        if not often:
            self.jobs.close()
            assert not self.jobs._waiting

    # ---- what always holds

    def _is_safe(self, state: RequestState, group: int, stop: int) -> bool:
        name = state.request_id
        on_its_way = any(
            (one.job.request_id, one.job.group, one.job.stop_tokens) == (name, group, stop)
            for one in self.jobs._jobs.values()
        )
        return on_its_way or (name, group, stop) in self.saved or state.is_stored(stop, group)

    @invariant()
    @precondition(lambda self: hasattr(self, "saves"))
    def room_adds_up(self) -> None:
        saving, waiting = self.jobs._jobs, {job_id for _, job_id in self.jobs._waiting}
        assert set(saving) == waiting | set(self.sent) and not waiting & set(self.sent)
        assert self.jobs._in_flight_bytes == sum(saving[job_id].num_bytes for job_id in self.sent)
        assert 0 <= self.jobs._in_flight_bytes <= self.limit_bytes

    @invariant()
    @precondition(lambda self: hasattr(self, "saves"))
    def pins_add_up(self) -> None:
        saving, waiting = self.jobs._jobs, [job_id for _, job_id in self.jobs._waiting]
        pinned = Counter(block_id for one in saving.values() for block_id in one.pinned)
        assert pinned == +self.pool.pinned
        assert self.jobs._waiting_blocks == sum(len(saving[job_id].pinned) for job_id in waiting)
        assert all(saving[job_id].pinned for job_id in waiting)
        assert self.jobs._waiting_blocks <= NUM_BLOCKS // 2

    @invariant()
    @precondition(lambda self: hasattr(self, "saves"))
    def nothing_is_skipped(self) -> None:
        for request in self.requests.values():
            state = request.state
            for index, group in enumerate(self.shape.groups):
                if group.is_state or may_lose_blocks(group.facts.kind) or state.save_stopped:
                    continue
                for stop in range(self.page_tokens, state.cursors.get(index, 0) + 1, self.page_tokens):
                    assert self._is_safe(state, index, stop), (state.request_id, index, stop)

    def teardown(self) -> None:
        if not hasattr(self, "saves"):
            return
        for _ in range(len(self.requests)):
            self.end(0, True, None)
        for _ in range(1000):
            if not len(self.jobs):
                break
            self.step([], None, None, False)
            for rank in range(len(self.ranks)):
                self.answer(rank, 100, False)
        assert len(self.jobs) == 0 and self.jobs._in_flight_bytes == 0 and self.jobs._waiting_blocks == 0
        assert not +self.pool.pinned
        assert len(self.pool.free) == NUM_BLOCKS - 1
        assert not any(self.pool.refs[block] for block in range(1, NUM_BLOCKS))


TestSaves = SavesMachine.TestCase
FULL = os.environ.get("KVSTORE_TEST_FULL") == "1"
TestSaves.settings = settings(
    max_examples=1500 if FULL else 60,
    derandomize=not FULL,  # the full run looks for what is new
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
