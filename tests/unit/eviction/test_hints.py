"""Hints: the order of eviction that follows from them, and when they are not followed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.eviction.auto import save_prompt
from kvstore.eviction.hint_trial import HintTrial, Marks
from kvstore.eviction.hints import RELEASED, RETAINED, Hint, Hinted
from kvstore.eviction.holdings import Holdings
from kvstore.eviction.policies import FlopsPerByte, Lru
from kvstore.eviction.prefixes import NORMAL
from kvstore.eviction.trace import RANDOM, TRACE, TracedPrompt, conversation_hints, hints_of, read_trace

CUT = Path(__file__).resolve().parents[2] / "traces" / "conversation-cut.jsonl.gz"
DAY_S = 86_400.0


def hinted(budget: int) -> Holdings:
    return Holdings(budget, lambda: Hinted(Lru()))


def play(holdings: Holdings, path: Sequence[int], now: float, owner: str = "") -> int:
    """Look a prompt up and save it, boundaries of one byte; returns how many were held."""
    held = holdings.leading(path)
    holdings.use(path[:held], now)
    save_prompt(holdings, path, range(1, len(path) + 1), [1] * len(path), now=now, owner=owner)
    return held


def keys(holdings: Holdings) -> set[object]:
    return {node.key for node in holdings.nodes()}


def mark(holdings: Holdings, key: int, priority: int) -> None:
    node = holdings.get(key)
    assert node is not None
    holdings.mark(node, priority)


def test_a_released_prompt_leaves_first() -> None:
    """All of it but the start that another prompt shares, though it was used last."""
    holdings = hinted(6)
    play(holdings, [1, 2], 1.0)
    play(holdings, [7, 8], 2.0)
    play(holdings, [1, 4, 5], 30.0)
    mark(holdings, 5, RELEASED)
    assert [node.key for node in holdings.evict(2)] == [5, 4]
    assert keys(holdings) == {1, 2, 7, 8}


def test_a_start_that_other_prompts_used_is_not_released() -> None:
    """The prompts that shared it have left, and it may well be asked for again."""
    holdings = hinted(10)
    for number in range(3):
        play(holdings, [1, 10 + number], float(number))
        mark(holdings, 10 + number, RELEASED)
    play(holdings, [7], 3.0)
    assert [node.key for node in holdings.evict(8)] == [10, 11, 12]
    assert keys(holdings) == {1, 7}


def test_a_retained_prompt_stays_until_its_time_or_its_use() -> None:
    """While the owner has anything else; then it is a prompt like all others."""
    holdings = hinted(6)
    marks = Marks(holdings)
    play(holdings, [1, 2], 1.0)
    marks.set(2, Hint(RETAINED, 60.0), 1.0)
    play(holdings, [3, 4], 2.0)
    play(holdings, [5, 6], 3.0)
    assert [node.key for node in holdings.evict(2)] == [4, 3]
    marks.expire(60.0)
    play(holdings, [8, 9], 60.0)
    marks.expire(61.0)
    assert [node.key for node in holdings.evict(2)] == [2, 1]
    other = hinted(4)
    play(other, [1, 2], 1.0)
    mark(other, 2, RETAINED)
    play(other, [1, 2], 2.0)
    play(other, [3, 4], 3.0)
    assert [node.key for node in other.evict(2)] == [2, 1]


def test_priorities_order_what_one_owner_loses() -> None:
    """From the lowest to the highest; boundaries without a hint have one between."""
    holdings = hinted(4)
    for key, priority in ((1, 80), (2, NORMAL), (3, 20), (4, RETAINED)):
        play(holdings, [key], float(key))
        mark(holdings, key, priority)
    assert [node.key for node in holdings.evict(4)] == [3, 2, 1, 4]


@given(seed=st.integers(0, 2**32), budget=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_no_prefix_gets_a_hole_whatever_is_said(seed: int, budget: int) -> None:
    """With two owners and random hints the budget holds, every boundary's parent is held, and each can be evicted."""
    rng = random.Random(seed)
    holdings = hinted(budget)
    marks = Marks(holdings)
    for now in range(120):
        owner = rng.choice("ab")
        path = [rng.randrange(3) + 1000 * (owner == "b")]
        for _ in range(rng.randrange(8)):
            path.append(path[-1] * 4 + 10_003 + rng.randrange(3))
        marks.expire(float(now))
        play(holdings, path, float(now), owner)
        marks.set(rng.choice(path), Hint(rng.choice([RELEASED, 20, 80, RETAINED]), rng.choice([1.0, 50.0])), float(now))
        assert holdings.used_bytes == len(holdings) <= budget
        assert all(node.parent is None or node.parent.is_held for node in holdings.nodes())
        if rng.random() < 0.05:
            holdings.use_policy(lambda: Hinted(rng.choice([Lru, FlopsPerByte])()))
    assert len(holdings.evict(budget)) > 0 == len(holdings)


@pytest.mark.parametrize("priority", [RELEASED, RETAINED])
def test_hints_exchange_places_of_one_owner_alone(priority: int) -> None:
    """Whatever one owner says, the other loses the same boundaries at the same time; also where sizes differ."""
    left = []
    for marked in (NORMAL, priority):
        holdings = hinted(10_000)
        for number in range(60):
            owner = "ab"[number % 2]
            num_bytes = 100 if number % 4 < 2 else 3
            holdings.add(number, None, tokens=1, num_bytes=num_bytes, now=float(number), owner=owner)
            if owner == "a" and (num_bytes == 100) == (priority == RETAINED):
                mark(holdings, number, marked)
        holdings.budget_bytes = holdings.used_bytes // 2
        holdings.evict(0)
        left.append({node.key for node in holdings.nodes() if node.owner == "b"})
    plain, with_hints = left
    assert len(plain ^ with_hints) <= 2  # where the last boundary fits or does not
    assert 0 < len(plain) < 30


def hostile(told: Sequence[Hint | None]) -> list[Hint | None]:
    """The opposite of what the trace's clients know."""
    return [hint and Hint(RETAINED if hint.priority == RELEASED else RELEASED, DAY_S) for hint in told]


def all_of(hint: Hint) -> Callable[[Sequence[Hint | None]], list[Hint | None]]:
    return lambda told: [hint] * len(told)


def hits_of_two(prompts: Sequence[TracedPrompt], budget: int, hints: Sequence[Hint | None] | None) -> dict[str, int]:
    """Hit blocks of two owners with the same prompts, of whom `a` gives hints."""
    trial = HintTrial(budget_bytes=budget, boundary_bytes=1)
    holdings = Holdings(budget, Lru if hints is None else lambda: Hinted(Lru(), trial.follows))
    marks = Marks(holdings)
    hits = {"a": 0, "b": 0}
    for index, prompt in enumerate(prompts):
        for owner, offset in (("a", 0), ("b", 1 << 40)):
            path = [offset + block for block in prompt.blocks]
            marks.expire(prompt.at_s)
            hits[owner] += play(holdings, path, prompt.at_s, owner)
            tokens, sizes = range(1, len(path) + 1), [1] * len(path)
            trial.observe(path, tokens, sizes, prompt.at_s, owner=owner)
            if hints is not None and owner == "a" and (hint := hints[index]) is not None:
                trial.hint(path[-1], hint, prompt.at_s)
                marks.set(path[-1], hint, prompt.at_s)
    return hits


@pytest.mark.parametrize(
    "say",
    [hostile, all_of(Hint(RELEASED, DAY_S)), all_of(Hint(RETAINED, DAY_S))],
    ids=["opposite", "release all", "retain all"],
)
def test_a_hostile_stream_of_hints_costs_others_nothing(
    say: Callable[[Sequence[Hint | None]], list[Hint | None]],
) -> None:
    """On the cut of a real trace, at most 2% of the other tenant's hits; and of its own little."""
    prompts = read_trace(CUT, block_tokens=512)[:600]
    hints = say(conversation_hints(prompts, block_tokens=512))
    plain = hits_of_two(prompts, 1200, None)
    with_hints = hits_of_two(prompts, 1200, hints)
    assert plain["a"] > 100 and plain["b"] > 100, plain
    assert with_hints["b"] >= 0.98 * plain["b"], (plain, with_hints)
    assert with_hints["a"] >= 0.9 * plain["a"], (plain, with_hints)


@pytest.mark.parametrize("own_bytes", [1, 3])
def test_a_retained_end_is_paid_for_with_all_that_it_keeps(own_bytes: int) -> None:
    """The end of a long prompt that is the oldest: its owner gives for the whole prompt, in small boundaries or large
    ones, and another's younger pages stay. Where the start is used by another prompt, it is not paid for.
    """
    holdings = hinted(1000)
    play(holdings, range(100), 0.0, "a")
    for number in range(1000, 1200):
        play(holdings, [number], 1.0, "b")
    for number in range(2000, 2150):
        holdings.add(number, None, tokens=1, num_bytes=own_bytes, now=2.0, owner="a")
    play(holdings, [*range(20), 3000], 3.0, "a")
    mark(holdings, 99, RETAINED)
    holdings.budget_bytes = holdings.used_bytes - 80
    gone = holdings.evict(0)
    assert {node.owner for node in gone} == {"a"}
    assert not {node.key for node in gone} & {*range(100), 3000}
    holdings.budget_bytes = holdings.used_bytes - 30
    assert {node.owner for node in holdings.evict(0)} == {"b"}


def test_right_hints_gain_and_cost_others_nothing() -> None:
    """The tenant that knows its conversations has more hits than before, and the other no fewer."""
    prompts = read_trace(CUT, block_tokens=512)[:600]
    plain = hits_of_two(prompts, 1200, None)
    told = hits_of_two(prompts, 1200, conversation_hints(prompts, block_tokens=512))
    assert told["a"] > 1.1 * plain["a"] and told["b"] >= 0.98 * plain["b"], (plain, told)


def test_hints_of_a_trace_are_what_its_clients_know() -> None:
    """The last turn releases, the others say when they come back, and what belongs to no conversation says nothing."""
    turns = [
        TracedPrompt(0.0, 1600, (1, 7, 8, 5)),
        TracedPrompt(5.0, 1600, (1, 3, 4, 2)),
        TracedPrompt(10.0, 2100, (1, 7, 8, 6, 9)),
        TracedPrompt(20.0, 900, (1, 33)),
    ]
    first, second, third, fourth = conversation_hints(turns, block_tokens=512)
    assert first == Hint(RETAINED, 16.0) and fourth is None
    assert second is not None and second.priority == RELEASED
    assert third is not None and third.priority == RELEASED
    random_ones = hints_of(turns, RANDOM, block_tokens=512)
    assert random_ones == hints_of(turns, RANDOM, block_tokens=512) != hints_of(turns, TRACE, block_tokens=512)
