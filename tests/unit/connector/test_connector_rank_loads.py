"""Loads that fail: nothing wrong is used, nothing is written after the report, and the report comes, once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from connector.jobs import LoadJob, StepJobs
from kvstore.api import LeaseId
from kvstore.client import trace_parent
from kvstore.errors import Unavailable
from kvstore.format.header_v1 import HEADER_BYTES
from kvstore.format.record import Record
from kvstore.testing.steered_store import SteeredStore
from kvstore.testing.waiting import eventually
from tests.unit.connector.device_contract import storage
from tests.unit.connector.rank_harness import SOURCE, TARGET, Make, Rank
from tests.unit.connector.support import LoopBridge


def flipped(record: Record) -> Record:
    data = bytearray(record.data)
    data[HEADER_BYTES] ^= 1
    return Record(record.header, memoryview(bytes(data)))


def test_a_flipped_bit(rank: Make, bridge: LoopBridge) -> None:
    """A damaged record fails the load and is quarantined, so that the next request does not meet it."""
    source = rank()
    source.save()
    staged = source.stage()
    bad = staged.keys[-1]
    bridge.store.on_load = lambda record: flipped(record) if record.key == bad else record
    source.side.start_loads(source.load_job(staged))
    assert source.result() == ({"r"}, {"r"})
    assert source.meters.get("connector_corrupt_records") == 1
    assert bridge.store.calls["discard"] == 1
    assert bad not in bridge.store.inner.memory
    assert source.stage().resume_tokens < 160


def test_verification_is_what_catches_it(rank: Make, bridge: LoopBridge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without verification would restore wrong bytes: the test above tests something."""
    source = rank()
    source.save()
    target = rank(seed=2)
    monkeypatch.setattr("connector.worker.loader.verify_payload", lambda record: None)
    bridge.store.on_load = flipped
    target.side.start_loads(target.load_job(target.stage()))
    target.result()
    assert not torch.equal(target.blocks(TARGET), source.blocks(SOURCE))


@pytest.mark.parametrize("change", [{"decoded_bytes": 64}, {"codec_chain": 99}])
def test_a_record_of_another_shape(rank: Make, bridge: LoopBridge, change: dict[str, int]) -> None:
    """A record whose size or codec is not what the plan expects writes nothing."""
    source = rank()
    source.save()
    bridge.store.on_load = lambda record: Record(replace(record.header, **change), record.data)
    before = storage(source.layers[0])
    source.side.start_loads(source.load_job(source.stage()))
    assert source.result() == ({"r"}, {"r"})
    assert torch.equal(storage(source.layers[0]), before)


def test_a_lease_that_ended(rank: Make, bridge: LoopBridge) -> None:
    """A load under a lease that is gone is reported as failed, once."""
    source = rank()
    source.save()
    staged = source.stage()
    bridge.run(lambda store: store.release(staged.lease))  # type: ignore[arg-type]
    before = storage(source.layers[0])
    source.side.start_loads(source.load_job(staged))
    assert source.result() == ({"r"}, {"r"})
    assert torch.equal(storage(source.layers[0]), before)


def test_a_load_that_was_not_planned(rank: Make) -> None:
    """The scheduler side could not plan it, but vLLM waits for a report."""
    source = rank()
    source.side.start_loads(StepJobs(loads=(LoadJob("r", b"lease", None),)))
    assert source.result() == ({"r"}, {"r"})


def test_a_load_with_nothing_for_this_rank(rank: Make) -> None:
    """A rank that none of the pieces are for reports at once: all ranks must."""
    source = rank()
    source.side.start_loads(StepJobs(loads=(LoadJob("r", b"lease", ()),)))
    assert source.result() == ({"r"}, set())


def test_nothing_is_written_after_the_report(rank: Make, bridge: LoopBridge) -> None:
    """One record is damaged while another is still on its way: what comes late is not written any more."""
    source = rank()
    source.save()
    target = rank(seed=2)
    staged = target.stage()
    late, bad = set(staged.keys[:4]), staged.keys[-1]
    bridge.store.held_keys |= late
    bridge.store.on_load = lambda record: flipped(record) if record.key == bad else record
    target.side.start_loads(target.load_job(staged))
    assert target.result() == ({"r"}, {"r"})
    reported = storage(target.layers[0])
    bridge.store.held_keys.clear()
    time.sleep(0.05)
    assert torch.equal(storage(target.layers[0]), reported)
    assert target.side.take_results() == (set(), set())


def test_a_write_that_has_begun_ends_before_the_report(rank: Make, bridge: LoopBridge) -> None:
    """A thread that is writing when the load fails is waited for: vLLM gives the blocks away after the report."""
    source = rank()
    source.save()
    target = rank(seed=2)
    staged = target.stage()
    bad = staged.keys[-1]
    writing, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        writing.set()
        assert go_on.wait(10)

    target.copier_that(wait)
    bridge.store.held_keys.add(bad)
    bridge.store.on_load = lambda record: flipped(record) if record.key == bad else record
    target.side.start_loads(target.load_job(staged))
    assert writing.wait(10)
    bridge.store.errors["load"] = Unavailable("told to")
    bridge.store.held_keys.clear()
    time.sleep(0.1)
    assert target.side.take_results() == (set(), set())
    go_on.set()
    assert target.result() == ({"r"}, {"r"})
    reported = storage(target.layers[0])
    time.sleep(0.05)
    assert torch.equal(storage(target.layers[0]), reported)


def test_a_stalled_load(rank: Make, bridge: LoopBridge) -> None:
    """When no record comes for the stall time the load fails, long before its ceiling."""
    source = rank(stall_timeout_ms=100)
    source.save()
    bridge.store.held.add("load")
    start = time.monotonic()
    source.side.start_loads(source.load_job(source.stage()))
    assert source.result() == ({"r"}, {"r"})
    assert time.monotonic() - start < 5
    assert set(bridge.store.cancelled) == {"load"}


def test_a_stalled_load_after_some_records(rank: Make, bridge: LoopBridge) -> None:
    """All but one record came: the missing one fails the load."""
    source = rank(stall_timeout_ms=100)
    source.save()
    staged = source.stage()
    bridge.store.held_keys.add(staged.keys[5])
    source.side.start_loads(source.load_job(staged))
    assert source.result() == ({"r"}, {"r"})


def test_loads_that_are_queued_behind_a_stalled_one_fail_with_it(rank: Make, bridge: LoopBridge) -> None:
    """The records of one load take all turns. The others do not wait for the stall time one after the other."""
    source = rank(stall_timeout_ms=500)
    source.save()
    bridge.store.held.add("load")
    names = {f"r{number}" for number in range(10)}
    start = time.monotonic()
    for name in names:
        source.side.start_loads(source.load_job(source.stage(), name))
    failed: set[str] = set()
    eventually(lambda: failed.update(source.side.take_results()[1]) or failed == names)
    assert time.monotonic() - start < 2.5  # one after the other: 5 s


def test_slow_threads_are_no_stall(rank: Make) -> None:
    """Records that came are decoded however long that takes: a busy processor is not a silent service."""
    source = rank()
    source.save()
    target = rank(seed=2, stall_timeout_ms=50)
    target.copier_that(lambda: time.sleep(0.2))
    target.side.start_loads(target.load_job(target.stage()))
    assert target.result() == ({"r"}, set())
    assert torch.equal(target.blocks(TARGET), source.blocks(SOURCE))


def test_loads_share_the_memory_for_records(rank: Make, bridge: LoopBridge) -> None:
    """However many requests load at a time, a dozen records are on their way: each may be of some MiB."""
    source = rank()
    source.save()
    target = rank(seed=2)
    go_on = threading.Event()
    target.copier_that(lambda: go_on.wait(10) and None)
    for name in "abc":
        target.side.start_loads(target.load_job(target.stage(), name))
    eventually(lambda: bridge.store.calls["load"] >= 12)
    bridge.run(lambda _: asyncio.sleep(0.05))
    assert bridge.store.calls["load"] == 12
    go_on.set()
    finished: set[str] = set()
    eventually(lambda: finished.update(target.side.take_results()[0]) or finished == {"a", "b", "c"})
    assert bridge.store.calls["load"] == 36


def test_a_long_load_does_not_stand_before_a_short_one(
    rank: Make, bridge: LoopBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load of four dozen records has its first dozen on their way when one of a dozen begins: that one is next, and
    not behind all of the long one."""
    source = rank()
    source.save()
    target = rank(seed=2)
    load, asked = bridge.store.load, list[LeaseId]()

    async def noted(lease: LeaseId, *args: Any, **rest: Any) -> Record:
        asked.append(lease)
        return await load(lease, *args, **rest)

    monkeypatch.setattr(bridge.store, "load", noted)
    bridge.store.held.add("load")
    (long,), (short,) = (target.load_job(target.stage(), name).loads for name in ("long", "short"))
    assert long.pieces is not None and len(long.pieces) == 12
    target.side.start_loads(StepJobs(loads=(replace(long, pieces=long.pieces * 4),)))
    eventually(lambda: len(asked) == 12)
    target.side.start_loads(StepJobs(loads=(short,)))
    loader = target.side.loader
    assert loader is not None
    eventually(lambda: len(loader._in_flight._waiters or ()) >= 12)
    bridge.store.held.remove("load")
    finished: set[str] = set()
    eventually(lambda: finished.update(target.side.take_results()[0]) or finished == {"long", "short"})
    assert Counter(asked) == {long.lease: 48, short.lease: 12}
    assert asked[12:24] == [short.lease] * 12


def test_shutdown_while_loading(bridge: LoopBridge) -> None:
    """A client that is closed under a load still reports it."""
    source = Rank(bridge)
    source.save()
    bridge.store.held.add("load")
    source.side.start_loads(source.load_job(source.stage()))
    eventually(lambda: bridge.store.calls["load"] > 0)
    source.side.shutdown()
    source.side.shutdown()

    async def cancel_all(store: SteeredStore) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    bridge.run(cancel_all)
    assert source.result() == ({"r"}, {"r"})


def test_the_trace_of_a_request_goes_with_its_pages(rank: Make, bridge: LoopBridge) -> None:
    """Saves and loads of a traced request are made in its trace; those of another one in none."""
    seen: list[tuple[str, str]] = []
    inner, load, save = bridge.store.inner, bridge.store.inner.load, bridge.store.inner.save

    def noting(what: str, call: Any) -> Any:
        async def noted(*arguments: Any, **options: Any) -> Any:
            seen.append((what, trace_parent.get()))
            return await call(*arguments, **options)

        return noted

    inner.save, inner.load = noting("save", save), noting("load", load)
    source = rank()
    traced, plain = source.jobs((64, 128)).saves
    source.side.save(StepJobs(saves=(replace(traced, trace="00-a-b-01"), plain)))
    assert source.side.saver is not None and source.side.saver.drain(10)
    (job,) = source.load_job(source.stage()).loads
    source.side.start_loads(StepJobs(loads=(replace(job, trace="00-c-d-01"),)))
    source.result()
    assert set(seen) == {("save", "00-a-b-01"), ("save", ""), ("load", "00-c-d-01")}
