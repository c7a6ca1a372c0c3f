"""A stage's answer is proven before vLLM is promised anything: what it restores is this prompt, and all of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.api import Staged
from kvstore.model.keys import NamespaceId, PrefixHash
from tests.unit.connector.scheduler_harness import SchedulerHarness, harness

NUM_SLICES = 2
"""Of a page of `make_facts`: a prompt of 170 tokens is staged as two pages and a tail of so many records each."""


@pytest.fixture
def at(tmp_path: Path) -> Iterator[SchedulerHarness]:
    with harness(tmp_path) as made:
        yield made


def without(staged: Staged, *dropped: int) -> Staged:
    """The answer without some of its records."""
    kept = [index for index in range(len(staged.keys)) if index not in dropped]
    return replace(
        staged,
        keys=tuple(staged.keys[index] for index in kept),
        spans=tuple(staged.spans[index] for index in kept),
    )


def first_key(staged: Staged, **changes: object) -> Staged:
    """The answer with another first key."""
    return replace(staged, keys=(replace(staged.keys[0], **changes), *staged.keys[1:]))  # type: ignore[arg-type]


WRONG: dict[str, Callable[[Staged], Staged]] = {
    "a page is missing": lambda staged: without(staged, *range(NUM_SLICES)),
    "a slice is missing": lambda staged: without(staged, 1),
    "all is missing": lambda staged: without(staged, *range(len(staged.keys))),
    "a slice in place of another": lambda staged: first_key(staged, slice=staged.keys[1].slice),
    "a slice that does not exist": lambda staged: first_key(staged, slice=NUM_SLICES),
    "a group that does not exist": lambda staged: first_key(staged, group=1),
    "another prompt's page": lambda staged: first_key(staged, prefix=PrefixHash(bytes(32))),
    "another namespace's page": lambda staged: first_key(staged, namespace=NamespaceId(bytes(16))),
    "a page under another page's span": lambda staged: replace(staged, spans=((64, 128), *staged.spans[1:])),
    "a lease that has ended": lambda staged: replace(staged, lease_s=0.0),
    "a point beyond the prompt": lambda staged: replace(staged, resume_tokens=4096),
    "a point inside a block": lambda staged: replace(staged, resume_tokens=150),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_answer_that_does_not_restore_the_prompt(
    at: SchedulerHarness, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is wrong with it: no hit is promised, the engine's hooks raise nothing, and its lease ends."""
    at.keep("a", 170)
    at.store.on_stage = WRONG[what]
    at.new("a", 170)
    with caplog.at_level(logging.ERROR, logger="vllm.kvstore"):
        assert at.ask("a") == 0
    at.no_leases()
    assert at.side.meters.get("connector_misses", reason="stage_failed") == 1
    assert "do not restore the prompt" in caplog.text


def test_an_answer_that_does(at: SchedulerHarness) -> None:
    """The same answer as it was, and one that repeats a record, are hits."""
    at.keep("a", 170)
    at.new("a", 170)
    assert at.ask("a") == 160
    at.side.on_finished("a")
    at.store.on_stage = lambda staged: replace(
        staged, keys=(*staged.keys, staged.keys[0]), spans=(*staged.spans, staged.spans[0])
    )
    at.new("b", 170, "a")
    assert at.ask("b") == 160


def test_vllm_takes_more_than_was_promised(at: SchedulerHarness) -> None:
    """Nothing is staged for the rest: the load fails and all is computed."""
    at.keep("a", 170)
    at.new("a", 170)
    assert at.ask("a") == 160
    (job,) = at.admit("a", 176).loads
    assert job.pieces is None
    at.finished("a", failed=True)
