"""The setting `compression`: what an engine writes, and that every other one reads it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.gpu.kit import InlineStreams
from connector.device.base import Device
from connector.device.gpu import StreamDevice
from connector.identity import describe_namespace
from kvstore.codec import CHAINS, PLANES2, PLANES4, RAW, TILES
from kvstore.format.record import Record
from tests.unit.connector.rank_harness import NUM_BLOCKS, SOURCE, TARGET, Make, fill
from tests.unit.connector.support import WEIGHTS, LoopBridge, make_facts, make_shape

ALL = tuple(range(NUM_BLOCKS))
_CHANNELS = 64
"""So that even a tail of 32 tokens fills tiles."""


@pytest.fixture(params=["processor", "streams"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What ranks copy with: a device with streams splits elements for the codec, a processor's does not."""

    def open_device(where: torch.device, **sizes: Any) -> Device:
        return StreamDevice(InlineStreams(), unit_bytes_min=1, **sizes)

    if request.param == "streams":
        monkeypatch.setattr("connector.worker.side.open_device", open_device)
    return str(request.param)


def test_releases_that_do_not_know_tiles_miss_them_on_a_gpu() -> None:
    """The name of a GPU's namespace has the highest chain in it, so they have another one. A processor's stays."""
    facts = make_facts()
    shape = make_shape(facts)
    assert b"codec_chain" not in describe_namespace(facts, shape, WEIGHTS).canonical
    on_gpu = describe_namespace(replace(facts, device="cuda"), shape, WEIGHTS)
    assert b'"codec_chain_max":4' in on_gpu.canonical


@pytest.mark.parametrize(
    ("compression", "element_bytes", "chain"),
    [
        ("auto", 2, PLANES2),
        ("planes", 2, PLANES2),
        ("planes", 4, PLANES4),
        ("none", 2, RAW),
        ("tiles", 2, TILES),
        ("tiles", 4, PLANES4),
    ],
)
@pytest.mark.parametrize("reader", ["planes", "tiles", "none"])
def test_every_engine_reads_what_any_writes(
    rank: Make, bridge: LoopBridge, device: str, compression: str, element_bytes: int, chain: int, reader: str
) -> None:
    """An engine saves with one setting, another one with any other loads the same blocks."""
    source = fill(rank(compression=compression, element_bytes=element_bytes, channels=_CHANNELS))
    if chain in (RAW, TILES):  # nothing splits the elements, so that nothing has to join them
        assert source.side.groups[0].copier.plane_width == 1
    source.save()
    written: set[int] = set()

    def note(record: Record) -> Record:
        written.add(record.header.codec_chain)
        return record

    bridge.store.on_load = note
    target = rank(compression=reader, element_bytes=element_bytes, channels=_CHANNELS, seed=2)
    wanted = target.blocks(ALL)
    wanted[:, list(TARGET)] = source.blocks(SOURCE)
    target.side.start_loads(target.load_job(target.stage()))
    assert target.result() == ({"r"}, set())
    assert torch.equal(target.blocks(ALL), wanted)
    assert written == {chain}
    assert source.description.id == target.description.id


def test_a_release_that_does_not_know_tiles_recomputes(
    rank: Make, bridge: LoopBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such an engine, sharing a namespace with one that writes tiles, fails the load; the records stay for others."""
    source = fill(rank(compression="tiles", element_bytes=2, channels=_CHANNELS))
    source.save()
    target = rank(element_bytes=2, channels=_CHANNELS, seed=2)
    untouched = target.blocks(ALL)
    with monkeypatch.context() as older:
        older.delitem(CHAINS, TILES)
        target.side.start_loads(target.load_job(target.stage()))
        assert target.result() == ({"r"}, {"r"})
    assert torch.equal(target.blocks(ALL), untouched)
    target.side.start_loads(target.load_job(target.stage()))
    assert target.result() == ({"r"}, set())
