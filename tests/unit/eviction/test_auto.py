"""`auto` and the sample that it draws."""

from __future__ import annotations

import random

from kvstore.eviction.auto import Auto, PrefixSample
from kvstore.eviction.prefixes import spread


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


def test_auto_follows_whoever_hits() -> None:
    """Most prompts never return and evict the few that do: a candidate that resists one-time prompts is followed."""
    rng = random.Random(5)
    auto = Auto(budget_bytes=60, boundary_bytes=1)
    assert auto.current.name == "lru"
    for now in range(3000):
        talk = rng.randrange(6) if rng.random() < 0.2 else 1000 + now
        path = [talk * 10 + index for index in range(8)]
        auto.observe(path, [10 * (index + 1) for index in range(8)], [1] * 8, float(now))
    assert auto.current.name != "lru"
