"""Whole ranks on a device with streams: blocks to records and back, with the processor's ranks as the measure."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

from benchmarks.gpu.kit import InlineStreams
from connector.device.base import Device
from connector.device.gpu import StreamDevice
from connector.device.streams import Streams
from connector.jobs import StepJobs
from connector.vllm.connector import KVStoreConnector
from kvstore.codec import PLANES2, PLANES4
from tests.unit.connector.device_contract import LAYOUTS
from tests.unit.connector.rank_harness import NUM_BLOCKS, SOURCE, TARGET, Make, fill
from tests.unit.connector.simulated_streams import SimulatedEvent, SimulatedStreams
from tests.unit.connector.support import BLOCK, LoopBridge

ALL = tuple(range(NUM_BLOCKS))
UseStreams = Callable[[Streams], None]


@pytest.fixture
def use_streams(monkeypatch: pytest.MonkeyPatch) -> UseStreams:
    """Let ranks that are made from now on have a device with these streams."""

    def use(streams: Streams) -> None:
        def open_device(where: torch.device, **sizes: Any) -> Device:
            return StreamDevice(streams, unit_bytes_min=1, **sizes)

        monkeypatch.setattr("connector.worker.side.open_device", open_device)

    return use


def payloads(bridge: LoopBridge) -> dict[Any, tuple[int, bytes]]:
    """By key the chain and the payload of all stored records."""
    slots = bridge.store.inner.memory._slots.values()
    return {slot.record.header.key: (slot.record.header.codec_chain, bytes(slot.record.payload)) for slot in slots}


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_records_are_the_processors(
    rank: Make, bridge: LoopBridge, use_streams: UseStreams, layout: str, element_bytes: int
) -> None:
    """A device that splits elements saves the very bytes that the processor's copier saves, and loads these."""
    source = fill(rank(layout=layout, element_bytes=element_bytes))
    source.save()
    expected = payloads(bridge)
    assert {chain for chain, _ in expected.values()} == {{2: PLANES2, 4: PLANES4}[element_bytes]}

    use_streams(InlineStreams())
    target = rank(layout=layout, element_bytes=element_bytes, seed=2)
    assert target.side.groups[0].copier.plane_width == element_bytes
    wanted = target.blocks(ALL)
    wanted[:, list(TARGET)] = source.blocks(SOURCE)
    target.side.start_loads(target.load_job(target.stage()))
    assert target.result() == ({"r"}, set())
    assert torch.equal(target.blocks(ALL), wanted)

    for slot in list(bridge.store.inner.memory._slots):
        del bridge.store.inner.memory._slots[slot]
    fill(rank(layout=layout, element_bytes=element_bytes)).save()
    assert payloads(bridge) == expected


@pytest.mark.parametrize("seed", range(8))
def test_a_late_device(rank: Make, use_streams: UseStreams, seed: int) -> None:
    """With streams that run whenever they like, saved and restored bytes are right, and all is reported."""
    streams = SimulatedStreams(seed)
    use_streams(streams)
    source = fill(rank(element_bytes=2))
    kept = source.blocks(SOURCE)
    source.side.save(source.jobs())
    for layer in source.layers:
        streams.computing.run(lambda layer=layer: layer.index_fill_(0, torch.tensor(SOURCE), 0))  # type: ignore[misc]
    assert source.side.saver is not None
    assert source.side.saver.drain(10)
    report = source.side.take_report()
    assert report is not None
    assert (report.saves_done, report.saves_failed) == ({0: 1, 1: 1, 2: 1}, set())
    streams.run_all()
    assert not source.blocks(SOURCE).any()

    target = rank(element_bytes=2, seed=2)
    expected = target.blocks(ALL)
    expected[:, list(TARGET)] = kept
    target.side.start_loads(target.load_job(target.stage()))
    assert target.result() == ({"r"}, set())
    streams.run_all()
    assert torch.equal(target.blocks(ALL), expected)


def test_a_load_does_not_wait_for_its_steps_forward(rank: Make, use_streams: UseStreams) -> None:
    """Jobs are bound, then the step's forward is ordered and does not end, then the load starts: it is reported."""
    streams = SimulatedStreams(0)
    use_streams(streams)
    source = fill(rank(element_bytes=2))
    source.save()
    streams.run_all()
    target = rank(element_bytes=2, seed=2)
    jobs = target.load_job(target.stage())
    target.side.begin_step(jobs)
    streams.computing.wait(SimulatedEvent(streams))
    target.side.start_loads(jobs)
    assert target.result() == ({"r"}, set())
    assert torch.equal(target.blocks(TARGET), source.blocks(SOURCE))


@pytest.mark.parametrize("fails", [False, True])
def test_a_steps_beginning_is_where_its_jobs_are_bound(fails: bool) -> None:
    """Both runners bind a step's metadata before its forward; an error of ours there is none of the engine's."""
    transfer = SimpleNamespace(kv_connector_extra_config={"mode": "off"}, kv_role="kv_both")
    connector = KVStoreConnector(SimpleNamespace(kv_transfer_config=transfer), KVConnectorRole.WORKER, None)
    seen: list[tuple[str, StepJobs]] = []

    def begin_step(jobs: StepJobs) -> None:
        seen.append(("begins", jobs))
        if fails:
            raise ZeroDivisionError

    connector.worker_side = SimpleNamespace(  # type: ignore[assignment]
        begin_step=begin_step, start_loads=lambda jobs: seen.append(("loads", jobs))
    )
    metadata = connector.build_connector_meta(None)
    connector.bind_connector_metadata(metadata)
    connector.start_load_kv(None)
    assert seen == [("begins", metadata.jobs), ("loads", metadata.jobs)]  # type: ignore[attr-defined]
    assert connector.guarded_errors == fails


@pytest.mark.parametrize("began", ["nothing", "another step"])
def test_without_its_steps_beginning_a_load_waits_for_all(rank: Make, use_streams: UseStreams, began: str) -> None:
    """A load of whose step nobody told the beginning comes after all that was ordered before it."""
    streams = SimulatedStreams(0)
    streams.eagerness = 0.0
    use_streams(streams)
    source = fill(rank(element_bytes=2))
    source.save()
    target = rank(element_bytes=2, seed=2)
    if began == "another step":
        target.side.begin_step(target.load_job(target.stage(), "of a step whose loads never started"))
    before, read = target.blocks(TARGET), []
    streams.computing.run(lambda: read.append(target.blocks(TARGET)))
    target.side.start_loads(target.load_job(target.stage()))
    assert target.result() == ({"r"}, set())
    assert torch.equal(read[0], before)


def test_a_ring_that_is_full(rank: Make, use_streams: UseStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the device gets nothing done, saves that find no slot fail at once; the rest arrive when it goes on."""
    streams = SimulatedStreams(0)
    streams.eagerness = 0.0
    monkeypatch.setattr(
        "connector.worker.side.open_device",
        lambda where, page_bytes_max, **_: StreamDevice(
            streams, ring_bytes=2 * page_bytes_max, page_bytes_max=page_bytes_max, unit_bytes_min=1
        ),
    )
    source = fill(rank(element_bytes=2))
    source.side.save(source.jobs())
    assert source.side.saver is not None
    refused = source.meters.get("connector_saves", outcome="no_room")
    assert refused > 0
    assert source.side.saver.drain(10)
    report = source.side.take_report()
    assert report is not None
    assert set(report.saves_done) == {0, 1, 2}
    assert report.saves_failed
    assert source.meters.get("connector_saves", outcome="stored") == 12 - refused > 0


def test_pages_of_one_block(rank: Make, use_streams: UseStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large hybrid has pages of one block. The check at start copies no more, since no lane has room for it."""
    monkeypatch.setattr("tests.unit.connector.support.PAGE", BLOCK)
    use_streams(InlineStreams())
    assert rank(element_bytes=2).shape.layout.page_tokens == BLOCK
