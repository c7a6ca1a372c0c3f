"""What of a hit is fetched, for how long it is waited for, and that requests with one prefix fetch it once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import connector.scheduler.fetching
from connector.identity import describe_namespace
from connector.request_parameters import RequestFlags
from connector.scheduler.costs import Costs
from connector.scheduler.decide import HitPolicy
from connector.scheduler.fetching import common_tokens
from connector.scheduler.hook_facts import PromptFacts
from connector.scheduler.requests import RequestState
from kvstore.api import LeaseId, Lookup, Offer, Retention, Staged
from kvstore.errors import Unavailable
from kvstore.format.record import Record
from kvstore.model.keys import Boundary, PrefixHash
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.store.limits import StoreLimits
from kvstore.store.tiered import TieredStore
from kvstore.testing.faults import FaultyTier
from kvstore.testing.steered_store import SteeredStore
from kvstore.testing.waiting import eventually, soon
from kvstore.tiers.memory import MemoryTier
from tests.unit.connector.scheduler_harness import SchedulerHarness, harness
from tests.unit.connector.support import MIB, WEIGHTS, records_of, tokens_of


def misses(at: SchedulerHarness, reason: str) -> float:
    return at.side.meters.get("connector_misses", reason=reason)


def still_asked(at: SchedulerHarness, request_id: str) -> bool:
    """Whether every poll is answered with "ask again", although the lookup is answered."""
    at.hashed(request_id)
    return {at.side.matched_tokens(request_id, 0) for _ in range(20)} == {None}


def teach_prefill(at: SchedulerHarness, token_s: float) -> None:
    for size in (128, 256, 384, 512) * 4:
        at.side.costs.prefill.observe([(0, size)], size * token_s)


def teach_tier(at: SchedulerHarness, tier: str, seconds: float) -> None:
    """Each fetch from this tier takes this long, at any size."""
    sources = {tier: 1}
    for num_bytes in (1000, 10_000, 100_000) * 3:
        staged = Staged(LeaseId(bytes(16)), 64, sources=sources, num_bytes=num_bytes)
        at.side.costs.on_staged(staged, seconds, now_s=SYSTEM_CLOCK.monotonic_s())


def use_tiers(at: SchedulerHarness, memory: list[Record], cold: list[Record], **limits: int) -> None:
    """Another store behind the bridge, with these records in its memory and in its cold tier."""

    async def exchange(store: SteeredStore) -> None:
        await store.inner.aclose()
        tier = FaultyTier(MemoryTier(64 * MIB), name="s3")
        for record in cold:
            await tier.inner.put(record, deadline=soon())
        values = {"stage_bytes": 32 * MIB, **limits}
        store.inner = TieredStore(MemoryTier(64 * MIB), cold=tier, limits=StoreLimits(**values))
        await store.inner.open_namespace(describe_namespace(at.facts, at.shape, WEIGHTS), deadline=soon())
        for record in memory:
            await store.inner.save(record, deadline=soon())

    at.bridge.run(exchange)


class TestOneFetchForOnePrefix:
    def test_the_others_wait_and_hit_locally(self, at: SchedulerHarness) -> None:
        """Of 32 requests with one stored prompt one fetches and loads; the others then find it in vLLM's own cache."""
        at.keep("a", 170)
        names = [f"r{index}" for index in range(32)]
        for name in names:
            at.new(name, 170, "a")
        first, *others = names
        assert at.ask(first) == 160
        assert all(still_asked(at, name) for name in others)
        (job,) = at.admit(first, 160).loads
        assert job.request_id == first
        assert all(still_asked(at, name) for name in others)
        at.finished(first)
        assert [at.side.matched_tokens(name, 160) for name in others] == [0] * 31
        assert at.store.calls["stage"] == 1
        at.no_leases()
        assert not any(at.state(name).no_more_hits or at.state(name).is_polled for name in names), (
            "no miss, no more asking"
        )
        assert at.side.meters.get("connector_requests_followed") == 31
        assert not any(name.startswith("connector_misses") for name in at.side.meters.snapshot())

    def test_the_rest_is_fetched_afterwards(self, at: SchedulerHarness) -> None:
        """A prompt that shares most of its beginning waits for that, and fetches only what lies behind it."""
        at.keep("a", 170)
        mixed = tokens_of("a", 128) + tokens_of("b", 170)[128:]
        self.keep_tokens(at, mixed)
        at.new("a", 170)
        self.new_tokens(at, "mixed", mixed)
        at.admit("a", at.ask("a"))
        assert still_asked(at, "mixed")
        at.finished("a")
        assert at.ask("mixed", 128) == 32
        (job,) = at.admit("mixed", 32, 128).loads
        assert job.pieces is not None
        assert sorted({block for piece in job.pieces for ids in piece.block_ids for block in ids}) == [9, 10]
        at.finished("mixed")

    def test_a_short_common_beginning_is_not_waited_for(self, at: SchedulerHarness) -> None:
        """Two prompts that share their first quarter are fetched at the same time."""
        at.keep("a", 170)
        mixed = tokens_of("a", 48) + tokens_of("b", 170)[48:]
        self.keep_tokens(at, mixed)
        at.new("a", 170)
        self.new_tokens(at, "mixed", mixed)
        assert (at.ask("a"), at.ask("mixed")) == (160, 160)

    def test_a_fetch_of_another_prompt_is_passed_over_at_once(
        self, at: SchedulerHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of many prompts that come together each is compared with all fetches, in one step of the engine."""
        compared: list[int] = []

        def compare(left: Sequence[Boundary], right: Sequence[Boundary]) -> int:
            compared.append(common_tokens(left, right))
            return compared[-1]

        monkeypatch.setattr(connector.scheduler.fetching, "common_tokens", compare)
        at.keep("a", 170)
        at.keep("b", 170)
        at.new("a", 170)
        at.ask_until_staged("a")
        for request_id, name in (("b", "b"), ("same", "a")):
            at.new(request_id, 170, name)
        assert at.ask("b") == 160
        assert still_asked(at, "same")
        assert compared == [160]

    @pytest.mark.parametrize("end", ["aborted while staging", "aborted while loading", "load failed", "not taken"])
    def test_another_one_fetches_when_the_first_one_ends(self, at: SchedulerHarness, end: str) -> None:
        """However the fetching request ends, exactly one of the waiting ones takes its place."""
        at.keep("a", 170)
        for name in ("a1", "a2", "a3"):
            at.new(name, 170, "a")
        if end == "aborted while staging":
            at.store.held.add("stage")
            at.ask_until_staged("a1")
        else:
            assert at.ask("a1") == 160
        assert still_asked(at, "a2")
        if end == "not taken":
            at.admit("a1", 0)
        elif end != "aborted while staging":
            at.admit("a1", 160)
        if end.startswith("aborted"):
            at.side.on_finished("a1")
        at.store.held.clear()
        if end in ("aborted while loading", "load failed"):
            assert still_asked(at, "a2"), "the ranks have not reported yet"
            at.finished("a1", failed=end == "load failed")
        assert at.ask("a2") == 160
        assert still_asked(at, "a3")
        at.admit("a2", 160)
        at.finished("a2")
        assert at.side.matched_tokens("a3", 160) == 0

    def test_a_fetch_that_fails_fails_for_all(self, at: SchedulerHarness) -> None:
        """The store does not deliver one request's fetch: the others that waited compute at once."""
        at.keep("a", 170)
        for name in ("a1", "a2", "a3"):
            at.new(name, 170, "a")
        at.store.held.add("stage")
        at.ask_until_staged("a1")
        assert still_asked(at, "a2")
        assert still_asked(at, "a3")
        at.store.errors["stage"] = Unavailable("told to")
        at.store.held.clear()
        assert at.ask("a1") == 0
        assert (at.side.matched_tokens("a2", 0), at.side.matched_tokens("a3", 0)) == (0, 0)
        assert (misses(at, "stage_failed"), misses(at, "shared_fetch_failed")) == (1, 2)
        assert at.store.calls["stage"] == 1

    def test_waiting_has_an_end(self, tmp_path: Path) -> None:
        """A request whose leader gets no further fetches for itself after the time that it could have fetched in."""
        with harness(tmp_path, max_wait_ms=200) as at:
            at.keep("a", 170)
            at.new("a", 170)
            at.new("b", 170, "a")
            assert at.ask("a") == 160  # and vLLM has no blocks for it
            assert at.ask("b") == 160
            fetch = at.state("b").fetch
            assert fetch is not None
            assert fetch.ceiling_s == pytest.approx(0.2), "no more than for any request"

    def test_waiting_that_did_not_help_is_not_repeated(self, at: SchedulerHarness) -> None:
        """vLLM dropped what was loaded: the request that waited loads it, and waits for no other one."""
        at.keep("a", 170)
        for name in ("a1", "a2", "a3"):
            at.new(name, 170, "a")
        at.admit("a1", at.ask("a1"))
        assert still_asked(at, "a2")
        assert still_asked(at, "a3")
        at.finished("a1")
        assert (at.ask("a2"), at.ask("a3")) == (160, 160)

    @staticmethod
    def keep_tokens(at: SchedulerHarness, tokens: tuple[int, ...]) -> None:
        async def save(store: SteeredStore) -> None:
            for record in records_of(tokens, at.facts, at.shape):
                await store.inner.save(record, deadline=soon())

        at.bridge.run(save)

    @staticmethod
    def new_tokens(at: SchedulerHarness, request_id: str, tokens: tuple[int, ...]) -> RequestState:
        at.side.on_new_request(PromptFacts(request_id, tokens))
        return at.state(request_id)


def test_common_tokens() -> None:
    """As long as the hashes agree, which is up to one place."""
    left = [Boundary(16 * n, PrefixHash(bytes([n]) * 32)) for n in range(1, 20)]
    for equal in range(20):
        right = left[:equal] + [Boundary(16 * n, PrefixHash(bytes([n + 100]) * 32)) for n in range(equal + 1, 12)]
        assert common_tokens(left, right) == 16 * min(equal, len(right)) == common_tokens(right, left)
    assert common_tokens(left, []) == 0


class TestLoadOrRecompute:
    def test_nothing(self, at: SchedulerHarness) -> None:
        """Fetching would take a hundred times as long as computing: computed, and counted as what it is."""
        at.keep("a", 170)
        teach_prefill(at, 1e-5)
        teach_tier(at, "memory", 1.0)
        at.new("a", 170)
        assert at.ask("a") == 0
        assert misses(at, "cheaper_to_compute") == 1
        assert at.store.calls["stage"] == 0

    def test_everything(self, at: SchedulerHarness) -> None:
        """The same tier and a slow engine: fetched."""
        at.keep("a", 170)
        teach_prefill(at, 1e-1)
        teach_tier(at, "memory", 1.0)
        at.new("a", 170)
        assert at.ask("a") == 160

    def test_a_part(self, at: SchedulerHarness) -> None:
        """What is in memory is taken, what is in a slow tier behind it is not even fetched."""
        records = records_of(tokens_of("a", 170), at.facts, at.shape)
        use_tiers(at, [record for record in records if record.header.span.stop == 64], records)
        teach_prefill(at, 1e-4)
        teach_tier(at, "memory", 0.001)
        teach_tier(at, "s3", 2.0)
        at.new("a", 170)
        assert at.ask("a") == 64
        assert at.side.meters.get("connector_hits_cut", reason="cheaper_to_compute") == 1
        assert at.store.inner.meters.get("staged_records", tier="s3") == 0
        (job,) = at.admit("a", 64).loads
        assert job.pieces is not None
        assert {piece.key.prefix for piece in job.pieces} == {records[0].key.prefix}
        at.finished("a")

    def test_without_measurements_everything_is_fetched(self, at: SchedulerHarness) -> None:
        """Nothing is known of the cold tier: it is tried."""
        records = records_of(tokens_of("a", 170), at.facts, at.shape)
        use_tiers(at, [], records)
        teach_prefill(at, 1e-6)
        at.new("a", 170)
        assert at.ask("a") == 160
        assert at.store.inner.meters.get("staged_records", tier="s3") == len(records)


class TestCeiling:
    def test_a_fetch_is_waited_for_as_long_as_computing_takes(self, at: SchedulerHarness) -> None:
        """Records that do not come cost a prompt of 40 ms less than a second, not the ten seconds of the setting."""
        at.keep("a", 170)
        teach_prefill(at, 0.04 / 160)
        at.store.held.add("stage")
        at.new("a", 170)
        at.ask_until_staged("a")
        fetch = at.state("a").fetch
        assert fetch is not None
        assert fetch.ceiling_s == pytest.approx(0.8)
        assert at.ask("a") == 0
        assert misses(at, "stage_failed") + misses(at, "stage_timeout") == 1

    def test_of_a_slow_engine(self) -> None:
        """As long as computing takes, within the setting; the setting alone while nothing is known."""
        costs = Costs()
        policy = HitPolicy(costs, most_s=10.0)
        assert policy.ceiling_s(0, 4096) == 10.0
        for size in (512, 1024, 2048, 4096):
            costs.prefill.observe([(0, size)], size * 1e-3)
        assert policy.ceiling_s(0, 4096) == pytest.approx(4.1, rel=0.05)
        assert policy.ceiling_s(3072, 4096) == pytest.approx(1.0, rel=0.1)
        assert HitPolicy(costs, most_s=2.0).ceiling_s(0, 4096) == 2.0
        assert policy.ceiling_s(0, 16) == 0.8

    def test_of_an_engine_that_loads_always(self) -> None:
        """Neither the time nor the length of a hit depends on what computing it would cost."""
        costs = Costs()
        policy = HitPolicy(costs, most_s=10.0, always=True)
        for size in (512, 1024, 2048, 4096):
            costs.prefill.observe([(0, size)], size * 1e-6)
        costs.loads.observe(1 << 20, 100.0, now_s=0.0)
        assert policy.ceiling_s(0, 4096) == 10.0
        lookup = Lookup(4096, (), offers=(Offer(4096, {"s3": 1 << 20}),))
        assert policy.choose(lookup, 0, now_s=0.0).resume_tokens == 4096

    def test_what_has_come_at_the_deadline_is_used(self, tmp_path: Path) -> None:
        """The cold tier delivers the first pages and then hangs: the hit ends there, and the request continues."""
        with harness(tmp_path, max_wait_ms=1500) as at:
            records = records_of(tokens_of("a", 170), at.facts, at.shape)
            use_tiers(at, [], records)
            cold = at.store.inner.slower[-1]
            assert isinstance(cold, FaultyTier)
            cold.get_limit = len([record for record in records if record.header.span.stop <= 128])
            at.new("a", 170)
            assert at.ask("a") == 128
            assert at.side.meters.get("connector_hits_cut", reason="staged_less") == 1

    def test_a_hit_larger_than_the_node_may_stage(self, at: SchedulerHarness) -> None:
        """The node's budget holds two pages of the prompt: these are admitted, the rest is computed."""
        records = records_of(tokens_of("a", 170), at.facts, at.shape)
        room = sum(record.num_bytes + 1024 for record in records if record.header.span.stop <= 128)
        use_tiers(at, [], records, stage_bytes=room)
        at.new("a", 170)
        assert at.ask("a") == 128


def test_a_lease_that_the_service_lost_is_staged_anew(at: SchedulerHarness) -> None:
    """A service that was restarted knows no leases: the next renewal says so, and the records are staged again."""
    at.keep("a", 170)
    at.new("a", 170)
    assert at.ask("a") == 160
    fetch = at.state("a").fetch
    assert fetch is not None
    assert fetch.lease is not None
    lease = fetch.lease
    at.bridge.run(lambda store: store.inner.release(lease.id))
    lease.renewed_s -= 15
    assert at.side.matched_tokens("a", 0) == 160, "the renewal is on its way"
    eventually(lambda: lease.is_lost)
    assert at.ask("a") == 160
    assert at.store.calls["stage"] == 2
    assert at.store.num_leases == 1


class TestFlags:
    def test_a_request_that_must_not_be_loaded(self, at: SchedulerHarness) -> None:
        """It is computed although it is stored, saved where it is not, and counted."""
        at.keep("a", 64)
        at.new("a", 170, flags=RequestFlags(load=False))
        assert at.side.matched_tokens("a", 0) == 0
        at.step()
        at.hashed("a")
        assert {job.stop_tokens for job in at.step({"a": 170}).saves} == {128, 160}
        assert at.side.meters.get("connector_requests_opted_out", of="load") == 1

    def test_a_request_that_must_not_be_saved(self, at: SchedulerHarness) -> None:
        """It is resumed, and neither its prompt nor what it generates is stored."""
        at.keep("a", 64)
        at.new("a", 170, flags=RequestFlags(save=False))
        at.admit("a", at.ask("a"))
        at.finished("a")
        assert at.step({"a": 170}).saves == ()
        at.side.on_finished("a", 170, [tuple(range(100, 164))])
        assert at.step().saves == ()
        assert at.side.meters.get("connector_requests_opted_out", of="save") == 1

    def test_a_retention_hint_goes_with_every_page(self, at: SchedulerHarness) -> None:
        """Its pages and its tail carry it to the ranks, and those of other requests do not."""
        at.new("a", 170, flags=RequestFlags(retention=Retention.SHORT))
        at.new("b", 170)
        at.hashed("a", "b")
        assert [job.retention for job in at.step({"a": 170}).saves] == [Retention.SHORT] * 3
        assert [job.retention for job in at.step({"b": 170}).saves] == [Retention.NORMAL] * 3

    def test_a_request_that_wants_neither(self, at: SchedulerHarness) -> None:
        """It is not even hashed."""
        at.keep("a", 64)
        state = at.new("a", 170, flags=RequestFlags(load=False, save=False))
        assert at.side.matched_tokens("a", 0) == 0
        assert at.step({"a": 170}).saves == ()
        assert (state.chain, state.hashed, at.store.calls["lookup"]) == (None, None, 0)
