"""Whole deployments in virtual time, each from one seed, with everything failing that may: see README.md."""

from __future__ import annotations

import gc
import os

import pytest

from tests.simulation.cluster import Outcome, simulate
from tests.simulation.oracle import Violation

SEED_VARIABLE = "KVSTORE_TEST_SIM_SEED"
_TOGETHER = 20
FOUND = {
    239: "less is served than was promised: a longer hit, which lacked a record, held the staging budget",
    315: "a record may go from Redis: a copy of what the cold tier had until then, on which another service relies",
    433: "a record may go from Redis: the cold tier had it, until retention deleted it while its entry was being ended",
    708: "a record may never go from Redis: of two that wrote it one ended the entry of both, the other died",
    734: "the catalog tells of what Redis let go: nobody had written the namespace's manifest there again",
    814: "a record may never go from Redis: the end of its entry failed, and a later write that failed took it away",
    819: "a record may go from Redis: it was discarded while the catalog did not answer for its put into the cold tier",
    929: "a record may go from Redis: a finisher heard late that the cold tier had it, and it was saved again since",
    962: "a record waits for the cold tier for ever: who could have ended the deletion of its boundary held no lease",
    1068: "a record may go from Redis: it was discarded everywhere and saved again, while the end of its entry waited",
}
"""Seeds beyond the first that something was found with, and what. Their worlds change with what the store does: the
tests of its parts bring the same about for sure."""


def replay_command(seed: int) -> str:
    """What runs one seed again, with its trace."""
    return f"{SEED_VARIABLE}={seed} python -m pytest tests/simulation -k replay -s"


def run(seeds: range) -> list[Outcome]:
    """Simulate; a seed that fails is named, with the command that replays it, and ends the run."""
    outcomes = []
    for seed in seeds:
        try:
            outcomes.append(simulate(seed))
        except Violation as violation:
            pytest.fail(f"seed {seed}: replay it with\n    {replay_command(seed)}\n{violation}", pytrace=False)
    gc.collect()  # worlds are full of cycles, and nothing else makes Python look for them in time
    return outcomes


def _chunks(start: int, stop: int) -> list[range]:
    return [range(first, min(first + _TOGETHER, stop)) for first in range(start, stop, _TOGETHER)]


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found_stays_mended(seed: int) -> None:
    """See `FOUND`."""
    run(range(seed, seed + 1))


@pytest.mark.parametrize(
    "seeds",
    [*_chunks(0, 100), *(pytest.param(seeds, marks=pytest.mark.full) for seeds in _chunks(100, 2000))],
    ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}",
)
def test_invariants_hold(seeds: range) -> None:
    """Services are killed, servers fail, lie and forget: no wrong byte is returned, acknowledged records survive what
    they promise to survive, budgets hold, leases end, calls end in time, and everything comes to rest.
    """
    outcomes = run(seeds)
    # the simulation did what it is there for
    assert sum(outcome.num_promised for outcome in outcomes) > 20 * len(outcomes)
    assert sum(outcome.num_served for outcome in outcomes) > 50 * len(outcomes)
    assert sum(outcome.num_kills for outcome in outcomes) > len(outcomes) // 4


if SEED_VARIABLE in os.environ:

    def test_replay() -> None:
        """One seed, with its trace when it fails."""
        (outcome,) = run(range(int(os.environ[SEED_VARIABLE]), int(os.environ[SEED_VARIABLE]) + 1))
        print(outcome)
