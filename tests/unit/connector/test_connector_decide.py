"""Load or recompute, on synthetic machines: what is measured of them, and what is chosen by it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.scheduler.costs import Costs, Fit, PrefillCosts
from connector.scheduler.decide import Choice, HitPolicy
from kvstore.api import Lookup, Offer, Staged

TOKEN_BYTES = 64 << 10
CHUNK = 2048


@dataclass(frozen=True)
class Machine:
    """What things truly cost.

    Attributes:
        token_s: Seconds per computed token.
        pair_s: Seconds per pair of a token and one that it looks back at.
        tiers: By tier latency in seconds and bytes per second.
    """

    token_s: float
    pair_s: float
    tiers: Mapping[str, tuple[float, float]]

    def prefill_s(self, start: int, stop: int) -> float:
        return 0.002 + (stop - start) * self.token_s + (stop**2 - start**2) / 2 * self.pair_s

    def fetch_s(self, tier: str, num_bytes: int) -> float:
        latency_s, bandwidth = self.tiers[tier]
        return latency_s + num_bytes / bandwidth


FAST_GPU = (50e-6, 1e-9)  # 20,000 tokens a second
SLOW_CPU = (1.5e-3, 2e-8)
REDIS, S3 = (0.002, 2e9), (0.06, 100e6)


class Measured:
    """A machine's costs as they are learned from what it did, each figure off by what `noise` gives."""

    def __init__(self, machine: Machine, *, noise: random.Random | None = None) -> None:
        self.now_s = 100.0
        self.costs = Costs()

        def blur(seconds: float) -> float:
            return seconds * (noise.uniform(1.0, 3.0) if noise is not None else 1.0)

        for turn in range(6):
            for start in range(0, 16384, CHUNK):
                self.costs.prefill.observe([(start, start + CHUNK)], blur(machine.prefill_s(start, start + CHUNK)))
            for tier in machine.tiers:
                for tokens in (512 << turn % 4, 16384):
                    num_bytes = tokens * TOKEN_BYTES
                    self.fetched(tier, num_bytes, blur(machine.fetch_s(tier, num_bytes)))

    def fetched(self, tier: str, num_bytes: int, seconds: float) -> None:
        self.costs.on_staged(Staged(None, 0, sources={tier: 1}, num_bytes=num_bytes), seconds, now_s=self.now_s)

    def choose(self, *offers: Offer, local_tokens: int = 0) -> Choice:
        lookup = Lookup(offers[-1].resume_tokens, (), offers)
        return HitPolicy(self.costs, most_s=60.0).choose(lookup, local_tokens, now_s=self.now_s)


def reach(**tokens: int) -> Offer:
    """An offer that reads these tokens from each tier."""
    return Offer(sum(tokens.values()), {tier: count * TOKEN_BYTES for tier, count in tokens.items()})


def test_everything_is_best() -> None:
    """A slow engine: even the cold tier is quicker than computing."""
    measured = Measured(Machine(*SLOW_CPU, {"redis": REDIS, "s3": S3}))
    choice = measured.choose(reach(redis=4096), reach(redis=4096, s3=12288))
    assert choice.resume_tokens == 16384
    assert choice.fetch_s == pytest.approx(0.002 + 0.134 + 0.06 + 8.05, rel=0.1)
    assert choice.compute_s == pytest.approx(24.6 + 2.7, rel=0.1)


def test_a_part_is_best() -> None:
    """A quick engine: what the hot tier has is worth loading, what lies behind in the cold one is not."""
    measured = Measured(Machine(*FAST_GPU, {"redis": REDIS, "s3": S3}))
    assert measured.choose(reach(redis=8192), reach(redis=8192, s3=8192)).resume_tokens == 8192
    assert measured.choose(reach(redis=8192)).resume_tokens == 8192


def test_a_part_that_does_not_clearly_pay_is_kept() -> None:
    """Nothing may look a little quicker than the part: the part is taken, since only clear gains make a miss."""
    measured = Measured(Machine(20e-6, 1e-9, {"redis": REDIS, "s3": S3}))
    assert measured.choose(reach(redis=8192), reach(redis=8192, s3=8192)).resume_tokens == 8192


def test_nothing_is_best() -> None:
    """A quick engine on a slow link: computing is quicker than any of it."""
    measured = Measured(Machine(*FAST_GPU, {"s3": S3}))
    assert measured.choose(reach(s3=16384)).resume_tokens == 0
    assert measured.choose(reach(s3=8192), local_tokens=1024).resume_tokens == 1024


def test_a_long_context_is_worth_fetching_where_a_short_one_is_not() -> None:
    """Every further token costs more to compute and the same to fetch: the same link pays for long prompts only."""
    link = {"s3": (0.5, 1.2e9)}
    measured = Measured(Machine(20e-6, 2e-8, link))
    assert measured.choose(reach(s3=2048)).resume_tokens == 0
    assert measured.choose(reach(s3=16384)).resume_tokens == 16384


def test_latency_alone_decides_on_small_hits() -> None:
    """A tier with much latency and much bandwidth: not worth it for few tokens."""
    measured = Measured(Machine(100e-6, 0, {"far": (0.4, 50e9)}))
    assert measured.choose(reach(far=512)).resume_tokens == 0
    assert measured.choose(reach(far=16384)).resume_tokens == 16384


def test_nothing_is_given_up_before_it_is_measured() -> None:
    """Without measurements of the engine, or of a tier, a hit is taken whole."""
    costly = Machine(*FAST_GPU, {"s3": S3})
    for forget in ("prefill", "tiers"):
        measured = Measured(costly)
        if forget == "prefill":
            measured.costs.prefill = PrefillCosts()
        else:
            prefill, measured.costs = measured.costs.prefill, Costs()
            measured.costs.prefill = prefill
        assert measured.choose(reach(s3=16384)).resume_tokens == 16384


def test_a_tier_is_tried_again() -> None:
    """A tier that was not read from for some seconds is unknown again, else it would be shunned for ever."""
    measured = Measured(Machine(*FAST_GPU, {"s3": S3}))
    assert measured.choose(reach(s3=16384)).resume_tokens == 0
    measured.now_s += 3.9
    assert measured.choose(reach(s3=16384)).resume_tokens == 0
    measured.now_s += 0.2
    assert measured.choose(reach(s3=16384)).resume_tokens == 16384
    for _ in range(20):  # it has become quick since
        measured.fetched("s3", 1 << 30, 0.02)
    assert measured.choose(reach(s3=16384)).resume_tokens == 16384


def test_what_is_far_from_anything_seen_is_not_known() -> None:
    """No guess for a context, or a size, far beyond those that were measured."""
    measured = Measured(Machine(*SLOW_CPU, {"s3": S3}))
    assert measured.costs.prefill.seconds(0, 2 * 16384) is not None
    assert measured.costs.prefill.seconds(0, 2 * 16384 + 1) is None
    assert measured.costs.fetch_s({"s3": 16384 * TOKEN_BYTES * 5}, now_s=measured.now_s) == 0.0


def test_a_step_that_stood_still_does_not_count_for_much() -> None:
    """The first steps of an engine compile for seconds: soon forgotten, and never told as the usual cost."""
    machine = Machine(*SLOW_CPU, {"s3": S3})
    measured = Measured(machine)
    before = measured.costs.prefill.seconds(0, 4096)
    measured.costs.prefill.observe([(0, CHUNK)], 60.0)
    after = measured.costs.prefill.seconds(0, 4096)
    assert before is not None
    assert after == pytest.approx(before, rel=0.3)


def test_tiny_steps_teach_nothing() -> None:
    """Steps of a few tokens show overhead; they leave the prefill unknown."""
    costs = PrefillCosts()
    for _ in range(50):
        costs.observe([(2048, 2060), (100, 120)], 0.01)
    assert costs.seconds(0, 100) is None


def test_several_chunks_in_one_step() -> None:
    """A step that computes parts of several prompts counts the tokens and contexts of all."""
    machine = Machine(1e-3, 1e-7, {})
    costs = PrefillCosts()
    for size in (100, 200, 300, 400, 500, 600, 700, 800) * 4:
        chunks = [(0, size), (4 * size, 5 * size)]
        costs.observe(chunks, sum(machine.prefill_s(*chunk) for chunk in chunks))
    assert costs.seconds(0, 1000) == pytest.approx(machine.prefill_s(0, 1000), rel=0.1)


@given(seed=st.integers(0, 10_000))
def test_a_clearly_good_hit_is_never_given_up(seed: int) -> None:
    """However disturbed the measurements, each up to three times too long: a hit that is ten times as cheap to fetch
    is taken whole."""
    noise = random.Random(seed)
    bandwidth = TOKEN_BYTES / (SLOW_CPU[0] / noise.uniform(10, 100))
    measured = Measured(Machine(*SLOW_CPU, {"redis": (0.002, bandwidth)}), noise=noise)
    for tokens in (1024, 4096, 16384):
        assert measured.choose(reach(redis=tokens)).resume_tokens == tokens


@given(seed=st.integers(0, 10_000))
def test_a_clearly_bad_hit_is_given_up(seed: int) -> None:
    """And one that costs ten times as much as computing is not, under the same noise."""
    noise = random.Random(seed)
    bandwidth = TOKEN_BYTES / (SLOW_CPU[0] * noise.uniform(10, 100))
    measured = Measured(Machine(SLOW_CPU[0], 0, {"s3": (0.06, bandwidth)}), noise=noise)
    for tokens in (1024, 4096, 16384):
        assert measured.choose(reach(s3=tokens)).resume_tokens == 0


@given(
    truth=st.tuples(st.floats(1e-4, 1e-1), st.floats(1e-9, 1e-2)),
    sizes=st.lists(st.floats(1, 1e6), min_size=8, max_size=30, unique=True),
)
def test_fit_finds_what_is_there(truth: tuple[float, float], sizes: list[float]) -> None:
    """Exact observations are predicted within a few percent, for any mixture of latency and bandwidth."""
    fit = Fit(2)
    for size in sizes:
        fit.observe((1.0, size), truth[0] + truth[1] * size)
    for size in sizes[-8:]:
        assert fit.predict((1.0, size)) == pytest.approx(truth[0] + truth[1] * size, rel=0.1)


def test_fit_before_and_without_spread() -> None:
    """Nothing seen costs nothing; equal sizes are predicted exactly and split between latency and bandwidth."""
    fit = Fit(2)
    assert fit.predict((1.0, 5.0)) == 0
    for _ in range(10):
        fit.observe((1.0, 1000.0), 2.0)
    assert fit.predict((1.0, 1000.0)) == pytest.approx(2.0, rel=0.01)
    assert 2.0 < fit.predict((1.0, 2000.0)) < 4.0


def test_fit_is_never_negative() -> None:
    """Bigger ones that happened to be quicker do not make a size free."""
    fit = Fit(2)
    for size, seconds in ((1000, 1.0), (2000, 0.5), (4000, 0.25)) * 5:
        fit.observe((1.0, size), seconds)
    assert fit.predict((1.0, 1e9)) >= fit.predict((1.0, 0.0)) > 0
