"""Weights that change while the engine runs: detached at a reset, attached by a new id, and never a page of both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from connector.identity import describe_namespace
from kvstore.model.keys import NamespaceId
from kvstore.testing.waiting import eventually
from tests.unit.connector.scheduler_harness import SchedulerHarness, harness
from tests.unit.connector.support import WEIGHTS


@pytest.fixture
def id_file(tmp_path: Path) -> Path:
    return tmp_path / "weights-id"


@pytest.fixture
def at(tmp_path: Path, id_file: Path) -> Iterator[SchedulerHarness]:
    with harness(tmp_path, weights_may_change=True, weights_id_file=str(id_file)) as made:
        yield made


def write(path: Path, weights_id: str) -> None:
    """As an operator should: another file, renamed."""
    new = path.with_suffix(".new")
    new.write_text(weights_id + "\n")
    os.replace(new, path)


def namespace(at: SchedulerHarness, weights_id: str) -> NamespaceId:
    return describe_namespace(at.facts, at.shape, weights_id).id


def nothing_is_cached(at: SchedulerHarness, request_id: str) -> None:
    """A request whose pages are stored gets no hit at once, is not looked up and saves nothing."""
    at.keep("stored", 170)
    asked = dict(at.store.calls)
    at.new(request_id, 170, "stored")
    assert at.side.matched_tokens(request_id, 0) == 0
    assert at.step({request_id: 170}).saves == ()
    at.side.on_finished(request_id, 169, [tuple(range(100, 164))])
    assert at.step().saves == ()
    assert [name for name in ("lookup", "stage") if at.store.calls[name] != asked.get(name, 0)] == []


def test_a_reset_changes_nothing_where_weights_stay(tmp_path: Path) -> None:
    """Without `weights_may_change` a reset of vLLM's cache is none of ours: names say what pages are."""
    with harness(tmp_path) as at:
        at.keep("a", 170)
        at.side.reset_cache(is_empty=True)
        at.new("a", 170)
        assert at.ask("a") == 160


def test_detached_until_a_new_id(at: SchedulerHarness, id_file: Path) -> None:
    """Between the reset and the reset with the new id there are neither hits nor saves; then both, under that id."""
    at.keep("a", 170)
    at.new("before", 170, "a")
    assert at.ask("before") == 160
    at.side.on_finished("before")
    at.side.reset_cache(is_empty=True)
    assert not at.side.is_ready
    nothing_is_cached(at, "between")
    write(id_file, "step-2")
    nothing_is_cached(at, "still between")
    at.side.reset_cache(is_empty=True)
    at.become_ready()
    assert at.side.namespace.id == namespace(at, "step-2") != namespace(at, WEIGHTS)
    at.new("after", 170, "a")
    assert at.ask("after") == 0  # what the old weights made is another namespace's
    at.hashed("after")
    saves = at.step({"after": 170}).saves
    assert {job.namespace for job in saves} == {namespace(at, "step-2")}
    assert len(saves) == 3


def test_requests_across_the_change_are_closed(at: SchedulerHarness, id_file: Path) -> None:
    """One that runs on through both resets saves nothing any more, not at its end nor after a preemption."""
    at.new("across", 170)
    at.hashed("across")
    assert len(at.step({"across": 64}).saves) == 1
    write(id_file, "step-2")
    at.side.reset_cache(is_empty=True)
    at.become_ready()
    assert at.step({"across": 128}).saves == ()
    at.step(preempted=("across",))
    assert at.side.matched_tokens("across", 0) == 0
    assert at.step({"across": 170}).saves == ()
    at.side.on_finished("across", 170, [tuple(range(100, 164))])
    assert at.step().saves == ()


def test_saves_under_way_keep_their_id(at: SchedulerHarness, id_file: Path) -> None:
    """Pages of a request that ended before the reset are saved with the next step, as the old weights'."""
    pinned: list[int] = []
    at.side.bind_pins(Pins(pinned))
    at.new("a", 170)
    at.hashed("a")
    at.side.on_finished("a", 169, [tuple(range(100, 164))])
    write(id_file, "step-2")
    at.side.reset_cache(is_empty=True)
    at.become_ready()
    saves = at.step().saves
    assert len(saves) == 3
    assert {job.namespace for job in saves} == {namespace(at, WEIGHTS)}
    at.ranks_done(*(job.job_id for job in saves))
    assert pinned == []


class Pins:
    """Counts blocks that are held."""

    def __init__(self, held: list[int]) -> None:
        self.held = held

    def pin(self, block_ids: tuple[int, ...]) -> None:
        self.held += block_ids

    def unpin(self, block_ids: tuple[int, ...]) -> None:
        for block_id in block_ids:
            self.held.remove(block_id)


def test_hits_on_their_way_are_given_up(at: SchedulerHarness) -> None:
    """What is staged, promised or allocated at the reset is not loaded: its request computes, its lease ends."""
    at.keep("a", 170)
    at.new("staged", 170, "a")
    at.ask("staged")
    at.side.reset_cache(is_empty=False)
    assert at.side.matched_tokens("staged", 0) == 0
    at.no_leases()


def test_loads_that_no_rank_has_begun_fail(at: SchedulerHarness) -> None:
    """vLLM waits for a load that it allocated blocks for: the ranks report it as failed."""
    at.keep("a", 170)
    at.new("a", 170)
    assert at.ask("a") == 160
    at.side.on_allocated("a", [list(range(1, 13))], 160)
    at.side.reset_cache(is_empty=False)
    (job,) = at.step().loads
    assert (job.request_id, job.pieces) == ("a", None)
    at.finished("a", failed=True)
    assert at.side.matched_tokens("a", 0) == 0


def test_an_engine_that_holds_blocks_stays_detached(at: SchedulerHarness, id_file: Path) -> None:
    """Blocks of older weights could be taken for new ones: the id waits for a reset that finds the engine empty."""
    at.side.reset_cache(is_empty=True)
    write(id_file, "step-2")
    at.side.reset_cache(is_empty=False)
    nothing_is_cached(at, "a")
    at.side.reset_cache(is_empty=True)
    at.become_ready()
    assert at.side.namespace.id == namespace(at, "step-2")


def test_each_id_is_taken_once(at: SchedulerHarness, id_file: Path) -> None:
    """The reset before the next change detaches again, though the file still holds an id."""
    write(id_file, "step-2")
    at.side.reset_cache(is_empty=True)
    at.become_ready()
    at.side.reset_cache(is_empty=True)
    assert not at.side.is_ready
    write(id_file, "step-2")  # said again: nothing has changed after all
    at.side.reset_cache(is_empty=True)
    at.become_ready()
    assert at.side.namespace.id == namespace(at, "step-2")


def test_a_file_of_an_earlier_run_is_not_read(tmp_path: Path, id_file: Path) -> None:
    """The engine has the weights of the model's files when it starts, even if a trainer wrote an id last week."""
    write(id_file, "step-400")
    with harness(tmp_path, weights_may_change=True, weights_id_file=str(id_file)) as at:
        assert at.side.namespace.id == namespace(at, WEIGHTS)
        at.side.reset_cache(is_empty=True)
        nothing_is_cached(at, "a")


@pytest.mark.parametrize("written", ["", "   ", "two\nlines", "x" * 257, "töpfe"])
def test_what_is_no_id(at: SchedulerHarness, id_file: Path, written: str, caplog: pytest.LogCaptureFixture) -> None:
    """Anything but one printable line leaves the engine detached, and says why."""
    write(id_file, written)
    at.side.reset_cache(is_empty=True)
    nothing_is_cached(at, "a")
    assert "the new weights id cannot be read" in caplog.text


def test_without_a_file_a_reset_is_for_good(tmp_path: Path) -> None:
    """An engine without a file for new ids is not cached after its first reset."""
    with harness(tmp_path, weights_may_change=True) as at:
        at.side.reset_cache(is_empty=True)
        nothing_is_cached(at, "a")
        at.side.reset_cache(is_empty=True)
        nothing_is_cached(at, "b")


def test_a_change_while_the_first_id_is_opened(tmp_path: Path, id_file: Path) -> None:
    """A namespace that is still being opened at the reset never becomes this engine's."""
    with harness(tmp_path, weights_may_change=True, weights_id_file=str(id_file)) as at:
        at.store.held.add("open_namespace")
        write(id_file, "step-2")
        at.side.reset_cache(is_empty=True)
        eventually(lambda: at.store.calls["open_namespace"] == 2)
        at.side.reset_cache(is_empty=True)
        at.store.held.clear()
        write(id_file, "step-3")
        at.side.reset_cache(is_empty=True)
        at.become_ready()
        assert at.side.namespace.id == namespace(at, "step-3")
