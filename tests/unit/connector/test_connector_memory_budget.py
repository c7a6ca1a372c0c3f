"""How much host memory a rank takes: from the engine's own numbers, within what its machine has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from connector.facts import CellFacts, EngineFacts, GroupFacts, StateFacts
from connector.identity import CacheShape, read_shape
from connector.memory_budget import HostMemoryBudget, default_pinned_bytes, host_memory_budget
from connector.settings import ConnectorSettings
from kvstore.model.kinds import FullAttention, Recurrent
from tests.unit.connector.support import make_facts

MIB, GIB = 1 << 20, 1 << 30
BLOCK = 784
STATE_BYTES = 3_207_168
ATTENTION = GroupFacts(
    FullAttention(),
    (tuple(f"a{index}" for index in range(16)),),
    (0,) * 16,
    (0,),
    BLOCK,
    CellFacts(8, 8, 128, 128, 2, "bfloat16"),
)
STATES = GroupFacts(
    Recurrent(),
    (tuple(f"m{index}" for index in range(48)),),
    (1,) * 48,
    (1,),
    BLOCK,
    StateFacts(((STATE_BYTES // 4,),), ("float32",), (STATE_BYTES,), replicated=False),
)
TOKEN_BYTES = 64 << 10
ALL_STATES = 48 * STATE_BYTES


def engine(**changes: Any) -> EngineFacts:
    """A hybrid of 27 billion parameters on one rank."""
    facts = make_facts(groups=(ATTENTION, STATES), scheduler_block_tokens=BLOCK)
    return replace(facts, **{"step_tokens": 16_384, "machine_bytes": 128 * GIB, **changes})


def room(pinned_bytes: int | None = None, **changes: Any) -> HostMemoryBudget:
    facts = engine(**changes)
    shape = read_shape(facts)
    assert isinstance(shape, CacheShape), shape
    return host_memory_budget(ConnectorSettings(pinned_bytes=pinned_bytes), facts, shape)


def test_twice_what_a_step_makes() -> None:
    """Half of it is for saves: all pages of a step and one state of every recurrent group, at once."""
    made = room()
    assert made.pinned_bytes == 2 * (16_384 * TOKEN_BYTES + ALL_STATES)
    assert made.in_flight_bytes == 16_384 * TOKEN_BYTES + ALL_STATES
    assert made.reason == "twice 16384 tokens of a step x 64KiB and 146.8MiB of states"
    assert made.fits_all


@pytest.mark.parametrize("changes", [{}, {"step_tokens": 512}, {"device": "cuda"}, {"pinned_bytes": GIB}])
def test_the_log_has_the_bytes_of_a_token(changes: dict[str, Any]) -> None:
    """The quick start sizes `memory_bytes` by it, whatever decided: a step, the least, a GPU's limit, the user."""
    assert room(**changes).text.endswith("; a token takes 64KiB there")


@pytest.mark.parametrize(
    ("changes", "pinned_bytes", "reason"),
    [
        ({"step_tokens": 512}, 512 * MIB, "the least"),
        ({"machine_bytes": 8 * GIB}, GIB, "an eighth of this machine's memory"),
        ({"machine_ranks": 8}, 2 * GIB, "an eighth of this machine's memory for each of 8 ranks"),
        ({"machine_bytes": 0}, 2 * (16_384 * TOKEN_BYTES + ALL_STATES), "twice 16384 tokens"),
        ({"device": "cuda"}, GIB, "limit on a GPU"),
    ],
)
def test_its_bounds(changes: dict[str, Any], pinned_bytes: int, reason: str) -> None:
    """Never too little for short steps, never more than the machine, or a GPU, can spare."""
    made = room(**changes)
    assert made.pinned_bytes == pinned_bytes
    assert reason in made.reason


@pytest.mark.parametrize(
    ("changes", "pinned_bytes", "reason"),
    [
        ({}, 768 * MIB, "twice 3072 tokens of a step x 128KiB"),
        ({"step_tokens": 8}, 512 * MIB, "the least"),
        ({"largest_bytes": 400 * MIB}, 800 * MIB, "twice a page"),
        ({"step_tokens": 8192}, 2 * GIB, "twice 8192 tokens of a step x 128KiB"),
        ({"step_tokens": 8192, "on_gpu": True}, GIB, "the default limit on a GPU, whose memory is used as well"),
        ({"step_tokens": 8192, "on_gpu": True, "largest_bytes": 400 * MIB}, 1600 * MIB, "the default limit on a GPU"),
        (
            {"machine_bytes": 16 * GIB, "machine_ranks": 4},
            512 * MIB,
            "an eighth of this machine's memory for each of 4",
        ),
    ],
)
def test_the_default_by_its_numbers(changes: dict[str, Any], pinned_bytes: int, reason: str) -> None:
    """The rule alone, which the plan of a node uses as well: twice a step, and which limit applies is said."""
    numbers = {"step_tokens": 3072, "token_bytes": 128 << 10, "on_gpu": False, **changes}
    made, said = default_pinned_bytes(**numbers)
    assert made == pinned_bytes and said.startswith(reason)


def test_what_the_operator_sets_counts() -> None:
    """And where it is too little for a state, the smallest value that would do is known."""
    assert room(pinned_bytes=123 * MIB).pinned_bytes == 123 * MIB
    made = room(pinned_bytes=256 * MIB)
    assert (made.fits_all, made.needed_bytes) == (False, 2 * ALL_STATES)
    assert room(pinned_bytes=made.needed_bytes).fits_all
    assert not room(pinned_bytes=made.needed_bytes - 1).fits_all


def test_a_machine_that_is_too_small() -> None:
    """The default, too, can be too little: then that is said like a setting that is."""
    assert not room(machine_bytes=GIB).fits_all
