"""Policies, admission, budgets and `auto`, over forests of prefixes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.eviction.auto import Auto, PrefixSample, save_prompt
from kvstore.eviction.candidates import POLICIES, SecondSight
from kvstore.eviction.holdings import Holdings, Quota
from kvstore.eviction.policies import FlopsPerByte, Lru, Policy, PrefillCost
from kvstore.eviction.prefixes import Node, spread

MAKERS = [pytest.param(make, id=name) for name, make in POLICIES.items()]


def play(holdings: Holdings, path: list[int], now: float) -> None:
    """Look a prompt up and save it; boundaries of one byte and ten tokens each."""
    holdings.use(path[: holdings.leading(path)], now)
    save_prompt(holdings, path, [10 * (index + 1) for index in range(len(path))], [1] * len(path), now=now)


def holes(holdings: Holdings) -> list[object]:
    return [node.key for node in holdings.nodes() if node.parent is not None and not node.parent.is_held]


@pytest.mark.parametrize("make", MAKERS)
@given(seed=st.integers(0, 2**32), budget=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_no_prefix_ever_gets_a_hole(make: Callable[[], Policy], seed: int, budget: int) -> None:
    """After every prompt the budget holds, the sums are right, and every boundary's parent is held."""
    rng = random.Random(seed)
    holdings = Holdings(budget, make)
    for now in range(120):
        root = rng.randrange(3)
        path = [root]
        for _ in range(rng.randrange(8)):
            path.append(path[-1] * 4 + 3 + rng.randrange(3))
        play(holdings, path, float(now))
        assert holdings.used_bytes == len(holdings) <= budget
        assert holes(holdings) == []
        if rng.random() < 0.05:
            holdings.use_policy(rng.choice(list(POLICIES.values())))
        if rng.random() < 0.05:
            holdings.expire(now - 20.0)
    assert len(holdings.evict(budget)) > 0
    assert len(holdings) == 0  # the policy still offers every boundary


def test_lru_takes_the_end_of_the_prompt_that_was_unused_longest() -> None:
    """Of two prompts the older one shrinks from its end."""
    holdings = Holdings(6, Lru)
    play(holdings, [1, 2, 3], 1.0)
    play(holdings, [7, 8, 9], 2.0)
    gone = holdings.evict(2)
    assert [node.key for node in gone] == [3, 2]


def test_flops_per_byte_keeps_what_costs_more_to_compute() -> None:
    """Two states of equal size: the one behind more tokens saves more."""
    holdings = Holdings(100, lambda: FlopsPerByte(PrefillCost(1.0, 0.0)))
    holdings.add(1, None, tokens=1000, num_bytes=50, now=1.0)
    holdings.add(2, None, tokens=10, num_bytes=50, now=2.0)
    assert [node.key for node in holdings.evict(1)] == [2]


def test_flops_per_byte_forgets_what_is_never_used() -> None:
    """Recency counts too: a costly boundary that is not used is evicted after enough others were."""
    holdings = Holdings(20, lambda: FlopsPerByte(PrefillCost(1.0, 0.0)))
    holdings.add(0, None, tokens=30, num_bytes=10, now=0.0)
    for now in range(1, 6):
        holdings.evict(10)
        holdings.add(now, None, tokens=10, num_bytes=10, now=float(now))
    assert 0 not in holdings


def test_a_pin_keeps_the_whole_prefix() -> None:
    """A pinned boundary stays with all shorter prefixes, even if more room is needed; unpinned, it is evicted."""
    holdings = Holdings(10, Lru)
    play(holdings, [1, 2, 3], 1.0)
    node = holdings.get(2)
    assert node is not None
    holdings.pin(node)
    assert [gone.key for gone in holdings.evict(10)] == [3]
    holdings.unpin(node)
    assert [gone.key for gone in holdings.evict(10)] == [2, 1]


def test_a_tenant_stays_within_its_maximum_and_is_safe_within_its_guarantee() -> None:
    """A tenant over its maximum evicts its own boundaries; others' writes evict nothing within its guarantee."""
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


def test_tenants_over_their_maximum_are_evicted_first_then_the_one_furthest_over_its_guarantee() -> None:
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
    holdings = Holdings(10, Lru)
    play(holdings, [1, 2, 3], 1.0)
    play(holdings, [1], 9.0)
    assert [node.key for node in holdings.expire(5.0)] == [3, 2]
    assert len(holdings) == 1


def test_second_sight_admits_what_comes_again() -> None:
    """The first time nothing, then what was seen, as long as it is remembered."""
    rule = SecondSight(1000)
    assert rule.admit([1, 2, 3]) == 0
    assert rule.admit([1, 2, 9]) == 2
    assert rule.admit([1, 2, 9]) == 3
    forgetful = SecondSight(4)
    forgetful.admit([1, 2])
    for key in range(100, 200):
        forgetful.admit([key])
    assert forgetful.admit([1, 2]) == 0


def test_the_sample_is_drawn_behind_a_common_start() -> None:
    """All prompts share a root, yet about a tenth of the conversations is taken, and each wholly or not at all."""
    sample = PrefixSample(0.1)
    for number in range(2000):
        sample.takes([0, 1, 1000 + number])  # warm: the start is known to be common
    taken = {talk: {sample.takes([0, 1, 10_000 + talk, 500 * turn]) for turn in range(5)} for talk in range(2000)}
    assert all(len(answers) == 1 for answers in taken.values())
    assert 0.06 < sum(True in answers for answers in taken.values()) / 2000 < 0.14


def test_names_spread_alike_in_every_process() -> None:
    """Which prefixes are sampled does not depend on PYTHONHASHSEED."""
    assert spread(7) == 3418447643939069507
    assert spread(bytes(24) + (5).to_bytes(8, "little")) == 5


@given(paths=st.lists(st.lists(st.integers(0, 9), max_size=8), max_size=60), budget=st.integers(1, 12))
def test_prompts_that_no_engine_sends(paths: list[list[int]], budget: int) -> None:
    """A client names a boundary twice in a prompt, or after two different ones: the simulations hold each once."""
    auto = Auto(budget_bytes=budget, boundary_bytes=1)
    holdings = Holdings(budget, Lru)
    for now, path in enumerate(paths):
        auto.observe(path, [10 * (index + 1) for index in range(len(path))], [1] * len(path), float(now))
        play(holdings, path, float(now))
        assert holdings.used_bytes == len(holdings) <= budget
        assert holes(holdings) == []


def test_auto_follows_the_candidate_with_most_hits() -> None:
    """Most prompts never return and evict the few that do: a candidate that resists one-time prompts is followed."""
    rng = random.Random(5)
    auto = Auto(budget_bytes=60, boundary_bytes=1)
    assert auto.current.name == "lru"
    for now in range(3000):
        talk = rng.randrange(6) if rng.random() < 0.2 else 1000 + now
        path = [talk * 10 + index for index in range(8)]
        auto.observe(path, [10 * (index + 1) for index in range(8)], [1] * 8, float(now))
    assert auto.current.name != "lru"


def test_pages_under_keys_count_as_a_page_each() -> None:
    """The store does not know where in a prompt they stand: a child at its parent's position has a page's cost."""
    first = Node(b"a" * 32, None, tokens=64, num_bytes=10)
    assert Node(b"b" * 32, first, tokens=64, num_bytes=10).span_tokens == 64
    assert Node(b"c" * 32, first, tokens=192, num_bytes=10).span_tokens == 128
