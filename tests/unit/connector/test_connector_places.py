"""Loads that read records where they are in a real service's memory: right bytes, or no byte in a block."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from connector.jobs import AuditJob, LoadJob, LoadPiece, StepJobs
from connector.worker import audit, loader
from kvstore.format.header_v1 import HEADER_BYTES
from kvstore.runtime.arena import Arena
from kvstore.testing.waiting import eventually
from tests.unit.connector.device_contract import storage
from tests.unit.connector.rank_harness import SOURCE, TARGET, Make, Rank, ranks_on
from tests.unit.connector.sharing_ranks import (
    SharingBridge,
    load,
    load_prepared,
    pieces_of,
    sharing_bridge,
    use_streams,
)
from tests.unit.connector.support import BLOCK


@pytest.fixture
def bridge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharingBridge]:
    with sharing_bridge(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def rank(bridge: SharingBridge) -> Iterator[Make]:
    with ranks_on(bridge) as make:
        yield make


def test_a_load_is_one_request_and_receives_no_record(rank: Make, bridge: SharingBridge) -> None:
    """All records of a load are read where they are: one call, after which only its answer has come."""
    source = rank()
    source.save()
    target = rank(seed=2)
    lease, pieces = pieces_of(target)

    def received_bytes() -> int:
        return sum(connection.frames.received_bytes for connection in bridge.store.inner.pool.connections())

    before = received_bytes()
    assert load(target, lease, pieces)
    assert torch.equal(target.blocks(TARGET), source.blocks(SOURCE))
    assert (bridge.store.calls["load_many"], bridge.store.calls["load"]) == (1, 0)
    assert received_bytes() - before < 100 + 24 * len(pieces)


MOMENTS = ("before its checksum", "after its checksum", "after it is decoded")


@pytest.mark.parametrize("moment", MOMENTS)
def test_memory_that_is_reused_while_it_is_read_reaches_no_block(
    rank: Make, bridge: SharingBridge, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Each record in turn loses its memory at this moment: the load fails, no byte is written, no record is blamed."""
    source, target = rank(), rank(seed=2)
    verify, decode = loader.verify_payload, loader.decode_into
    overwrites: list[Callable[[], None]] = []

    def overwrite_at(now: str) -> None:
        if now == moment and overwrites:
            overwrites.pop()()

    def verified(*given: Any) -> None:
        overwrite_at(MOMENTS[0])
        verify(*given)
        overwrite_at(MOMENTS[1])

    def decoded(*given: Any, **more: Any) -> None:
        decode(*given, **more)
        overwrite_at(MOMENTS[2])

    monkeypatch.setattr(loader, "verify_payload", verified)
    monkeypatch.setattr(loader, "decode_into", decoded)
    before = [storage(layer) for layer in target.layers]
    for index in range(12):
        source.save()
        lease, pieces = pieces_of(target)
        assert len(pieces) == 12
        overwrites.append(bridge.overwrite)
        assert not load(target, lease, pieces[index : index + 1])
        assert not overwrites
        assert all(map(torch.equal, map(storage, target.layers), before))
    assert bridge.store.calls["discard"] == 0
    assert target.meters.get("connector_corrupt_records") == 0


@pytest.mark.parametrize("on_streams", [False, True])
@pytest.mark.parametrize("num_records", [720, pytest.param(100_000, marks=pytest.mark.full)])
def test_memory_that_is_reused_at_any_time_serves_no_wrong_byte(
    rank: Make,
    bridge: SharingBridge,
    monkeypatch: pytest.MonkeyPatch,
    num_records: int,
    on_streams: bool,
    tell: Callable[[str], None],
) -> None:
    """Leases end and memory is reused at random times under loads: what is written is what was saved, load by load.
    Also where a device reads the records instead of a codec thread.
    """
    if on_streams:
        use_streams(monkeypatch)
    source, target = rank(compression="none"), rank(seed=2, compression="none")
    chance = random.Random(5)
    right = source.blocks(SOURCE)
    outcomes = {True: 0, False: 0}
    source.save()
    target.side.begin_step(StepJobs())
    began_s = time.monotonic()
    assert load(target, *pieces_of(target))
    load_s = time.monotonic() - began_s
    num_read = 0
    while num_read < num_records:
        source.save()
        lease, pieces = pieces_of(target)
        num_read += len(pieces)
        old = target.blocks(TARGET).clone()
        timer = threading.Timer(chance.random() * 2 * load_s, bridge.overwrite)
        timer.start()
        loaded = load(target, lease, pieces)
        timer.join()
        now = target.blocks(TARGET)
        assert bool(((now == right) | (now == old)).all())
        assert not loaded or torch.equal(now, right)
        outcomes[loaded] += 1
        for layer in target.layers:
            layer.copy_(torch.randn_like(layer))
    assert min(outcomes.values()) > 0, outcomes
    tell(
        f"{num_read:,} records, {outcomes[False]:,} loads whose memory was reused, {outcomes[True]:,} that were in time"
    )
    assert target.meters.get("connector_corrupt_records") == 0
    assert (target.meters.get("connector_loaded_in_place_bytes") > 0) == on_streams


@pytest.mark.parametrize("on_streams", [False, True])
def test_without_the_stamp_wrong_bytes_would_be_written(
    rank: Make, bridge: SharingBridge, monkeypatch: pytest.MonkeyPatch, on_streams: bool
) -> None:
    """The same with stamps that always match, and memory reused after its checksum was verified."""
    if on_streams:
        use_streams(monkeypatch)
    load_it = load_prepared if on_streams else load
    source, target = rank(compression="none"), rank(seed=2, compression="none")
    source.save()
    lease, pieces = pieces_of(target)
    verify = loader.verify_payload

    def verified(*given: Any) -> None:
        verify(*given)
        bridge.overwrite()

    monkeypatch.setattr(loader, "verify_payload", verified)
    monkeypatch.setattr("kvstore.runtime.arena.ArenaView.holds", lambda *_: True)
    before = [storage(layer) for layer in target.layers]
    load_it(target, lease, pieces[:1])
    assert not all(map(torch.equal, map(storage, target.layers), before))


@pytest.mark.parametrize("on_streams", [False, True])
@pytest.mark.parametrize("at", [HEADER_BYTES, HEADER_BYTES + 100, 100])
def test_a_corrupt_byte_is_found_and_its_record_discarded(
    rank: Make, bridge: SharingBridge, monkeypatch: pytest.MonkeyPatch, at: int, on_streams: bool
) -> None:
    """A byte that changed in the service's memory, of payload or header: nothing is written, and no reader gets it."""
    if on_streams:
        use_streams(monkeypatch)
    load_it = load_prepared if on_streams else load
    source, target = rank(compression="none"), rank(seed=2, compression="none")
    source.save()
    lease, pieces = pieces_of(target)
    bad = pieces[3].key
    bridge.record_bytes(bad)[at] ^= 1
    before = [storage(layer) for layer in target.layers]
    assert not load_it(target, lease, pieces[3:4])
    assert all(map(torch.equal, map(storage, target.layers), before))
    assert target.meters.get("connector_corrupt_records") == 1
    assert bad not in bridge.memory


def test_a_service_that_says_nothing_of_places_fails_the_load(rank: Make, bridge: SharingBridge) -> None:
    """The request for places has the same patience as one for a record, and is cancelled."""
    source = rank(stall_timeout_ms=100)
    source.save()
    lease, pieces = pieces_of(source)
    bridge.store.held.add("load_many")
    assert not load(source, lease, pieces)
    assert bridge.store.cancelled == ["load_many"]


def test_a_client_that_is_closed_while_it_asks_reports_its_loads(bridge: SharingBridge) -> None:
    """The load is reported, as failed, and nothing of the service's memory stays mapped for it."""
    source = Rank(bridge)
    source.save()
    lease, pieces = pieces_of(source)
    bridge.store.held.add("load_many")
    source.side.start_loads(StepJobs(loads=(LoadJob("r", lease, pieces),)))
    eventually(lambda: bridge.store.calls["load_many"])
    source.side.shutdown()
    bridge.store.held.clear()
    assert source.result() == ({"r"}, {"r"})


def test_records_that_are_not_shared_are_sent(
    rank: Make, bridge: SharingBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the records have no place in the shared memory: these are received, the others are read there."""
    source = rank()
    source.save()
    target = rank(seed=2)
    lease, pieces = pieces_of(target)
    place, asked = Arena.place, []

    def some(arena: Arena, data: memoryview) -> Any:
        asked.append(data)
        return place(arena, data) if len(asked) % 2 else None

    monkeypatch.setattr(Arena, "place", some)
    assert load(target, lease, pieces)
    assert len(asked) == len(pieces)
    assert torch.equal(target.blocks(TARGET), source.blocks(SOURCE))


def test_audits_read_there_too(rank: Make, bridge: SharingBridge, monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit compares a record where it is; one whose memory is reused is skipped, and neither wrong nor corrupt."""
    source = rank(audit_rate=1.0)
    source.save()
    decode = audit.decode_into
    for number, is_lost in enumerate((False, True)):
        staged = source.stage()
        assert staged.lease is not None
        pieces = tuple(
            LoadPiece(key, (stop - start) // BLOCK, 0, (SOURCE[start // BLOCK : stop // BLOCK],))
            for key, (start, stop) in zip(staged.keys, staged.spans, strict=True)
        )

        def decoded(*given: Any, is_lost: bool = is_lost) -> None:
            decode(*given)
            if is_lost:
                bridge.overwrite()

        monkeypatch.setattr(audit, "decode_into", decoded)
        source.side.save(StepJobs(audits=(AuditJob(number, staged.lease, pieces),)))
        report = eventually(source.side.take_report)
        assert report.audits_differ == set()
        assert report.audits_partial == ({number} if is_lost else set())
    assert source.meters.get("connector_audited_pages") == 12
    assert source.meters.get("connector_audit_skipped") == 12
    assert source.meters.get("connector_corrupt_records") == 0
    assert (bridge.store.calls["load"], bridge.store.calls["discard"]) == (0, 0)
