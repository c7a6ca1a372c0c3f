"""Policies, admission and budgets over forests of prefixes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.eviction.auto import PrefixCache
from kvstore.eviction.candidates import POLICIES, AdmitAll, BySize, SecondSight
from kvstore.eviction.holdings import Holdings, Quota
from kvstore.eviction.policies import FlopsPerByte, Lru, Policy, PrefillCost

MAKERS = [pytest.param(make, id=name) for name, make in POLICIES.items()]


def cache_of(budget: int, make: Callable[[], Policy] = Lru) -> PrefixCache:
    return PrefixCache(Holdings(budget, make), AdmitAll())


def play(cache: PrefixCache, path: list[int], now: float) -> int:
    """Look a prompt up and save it; boundaries of one byte and ten tokens each."""
    held = cache.holdings.leading(path)
    cache.holdings.use(path[:held], now)
    cache.save(path, [10 * (index + 1) for index in range(len(path))], [1] * len(path), now)
    return held


def holes(holdings: Holdings) -> list[object]:
    return [node.key for node in holdings.nodes() if node.parent is not None and not node.parent.is_held]


@pytest.mark.parametrize("make", MAKERS)
@given(seed=st.integers(0, 2**32), budget=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_no_prefix_ever_gets_a_hole(make: Callable[[], Policy], seed: int, budget: int) -> None:
    """Whatever comes, the budget holds, the sums are right, and every boundary's parent is held."""
    rng = random.Random(seed)
    cache = cache_of(budget, make)
    holdings = cache.holdings
    for now in range(120):
        root = rng.randrange(3)
        path = [root]
        for _ in range(rng.randrange(8)):
            path.append(path[-1] * 4 + 3 + rng.randrange(3))
        play(cache, path, float(now))
        assert holdings.used_bytes == len(holdings) <= budget
        assert holes(holdings) == []
        if rng.random() < 0.05:
            holdings.use_policy(rng.choice(list(POLICIES.values())))
        if rng.random() < 0.05:
            holdings.expire(now - 20.0)
    assert len(holdings.evict(budget)) > 0
    assert len(holdings) == 0  # nothing was lost from the policy's sight


def test_lru_takes_the_end_of_the_prompt_that_was_unused_longest() -> None:
    """Of two prompts the older one shrinks from its end."""
    cache = cache_of(6)
    play(cache, [1, 2, 3], 1.0)
    play(cache, [7, 8, 9], 2.0)
    gone = cache.holdings.evict(2)
    assert [node.key for node in gone] == [3, 2]


def test_s3fifo_lets_what_is_used_once_leave_first() -> None:
    """A prompt that is used again and again outlives a stream of others that `lru` would let push it out."""
    kept = {}
    for name in ("lru", "s3fifo"):
        cache = cache_of(20, POLICIES[name])
        for now in range(3):
            play(cache, [1, 2, 3, 4], float(now))
        for now in range(3, 60):
            play(cache, [100 * now, 100 * now + 1], float(now))
        kept[name] = cache.holdings.leading([1, 2, 3, 4])
    assert kept == {"lru": 0, "s3fifo": 4}


def test_flops_per_byte_keeps_what_costs_more_to_compute() -> None:
    """Two states of equal size: the one behind more tokens saves more."""
    holdings = Holdings(100, lambda: FlopsPerByte(PrefillCost(1.0, 0.0)))
    holdings.add(1, None, tokens=1000, num_bytes=50, now=1.0)
    holdings.add(2, None, tokens=10, num_bytes=50, now=2.0)
    assert [node.key for node in holdings.evict(1)] == [2]


def test_flops_per_byte_forgets_what_is_never_used() -> None:
    """Recency counts too: however dear, what is not used gives way to newcomers in the end."""
    holdings = Holdings(20, lambda: FlopsPerByte(PrefillCost(1.0, 0.0)))
    holdings.add(0, None, tokens=30, num_bytes=10, now=0.0)
    for now in range(1, 6):
        holdings.evict(10)
        holdings.add(now, None, tokens=10, num_bytes=10, now=float(now))
    assert 0 not in holdings


def test_a_pin_keeps_the_whole_prefix() -> None:
    """What is pinned stays with all below it, whatever room is asked for; unpinned, it goes."""
    cache = cache_of(10)
    play(cache, [1, 2, 3], 1.0)
    node = cache.holdings.get(2)
    assert node is not None
    cache.holdings.pin(node)
    assert [gone.key for gone in cache.holdings.evict(10)] == [3]
    cache.holdings.unpin(node)
    assert [gone.key for gone in cache.holdings.evict(10)] == [2, 1]


def test_a_tenant_stays_within_its_maximum_and_is_safe_within_its_guarantee() -> None:
    """A tenant over its maximum evicts its own; others' writes leave alone what is guaranteed to it, to the end."""
    holdings = Holdings(10, Lru)
    holdings.pool(1).quota = Quota(guaranteed_bytes=3, maximum_bytes=4)
    for key in range(4):
        holdings.add(key, None, tokens=10, num_bytes=1, now=float(key), pool=1)
    assert [node.key for node in holdings.evict(1, pool=1)] == [0]
    for key in range(10, 17):
        holdings.add(key, None, tokens=10, num_bytes=1, now=float(key))
    assert [node.key for node in holdings.evict(7)] == [10, 11, 12, 13, 14, 15, 16]
    assert {node.pool for node in holdings.nodes()} == {1}
    assert holdings.evict(8) == []


def test_whoever_is_over_its_maximum_leaves_first_then_whoever_is_furthest_over_its_guarantee() -> None:
    """Of three tenants: one over its maximum, one little over its guarantee, one with none."""
    holdings = Holdings(14, Lru)
    holdings.pool(1).quota = Quota(maximum_bytes=1)
    holdings.pool(2).quota = Quota(guaranteed_bytes=3)
    for key, pool in enumerate((2, 2, 2, 2, 0, 0, 0, 1, 1)):
        holdings.add(key, None, tokens=10, num_bytes=1, now=float(key), pool=pool)
    assert [node.pool for node in holdings.evict(6)] == [1]
    assert [node.pool for node in holdings.evict(8)] == [0, 0]
    holdings.pool(2).elsewhere_bytes = 5
    assert [node.pool for node in holdings.evict(10)] == [2, 2]


def test_what_is_unused_for_long_expires_ends_first() -> None:
    """A time to live takes the unused end of a prompt and leaves the start that others used since."""
    cache = cache_of(10)
    play(cache, [1, 2, 3], 1.0)
    play(cache, [1], 9.0)
    assert [node.key for node in cache.holdings.expire(5.0)] == [3, 2]
    assert len(cache.holdings) == 1


def test_second_sight_admits_what_comes_again() -> None:
    """The first time nothing, then what was seen, as long as it is remembered."""
    rule = SecondSight(1000)
    assert rule.admit([1, 2, 3], [10, 20, 30]) == 0
    assert rule.admit([1, 2, 9], [10, 20, 30]) == 2
    assert rule.admit([1, 2, 9], [10, 20, 30]) == 3
    forgetful = SecondSight(4)
    forgetful.admit([1, 2], [10, 20])
    for key in range(100, 200):
        forgetful.admit([key], [10])
    assert forgetful.admit([1, 2], [10, 20]) == 0


def test_admission_by_size() -> None:
    """A short prompt is not kept, a long one wholly."""
    rule = BySize(25)
    assert rule.admit([1, 2], [10, 20]) == 0
    assert rule.admit([1, 2, 3], [10, 20, 30]) == 3
