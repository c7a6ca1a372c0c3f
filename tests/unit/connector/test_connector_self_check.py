"""The round trip at start-up: it leaves no trace, and a device that does not copy what it should is found out."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from benchmarks.gpu.kit import InlineStreams
from connector.device import cpu, gpu, lanes
from connector.device.gpu import StreamDevice
from connector.device.host_memory import HostPages
from connector.worker.groups import check_round_trip, prove_group
from kvstore.errors import InvalidRequest
from tests.unit.connector.device_contract import LAYOUTS, Cache, storage
from tests.unit.connector.rank_harness import Make, ranks_on
from tests.unit.connector.support import bridge_to_memory

HOST = HostPages(torch.empty(1 << 20, dtype=torch.uint8))


@pytest.fixture
def rank() -> Iterator[Make]:
    with bridge_to_memory() as bridge, ranks_on(bridge) as make:
        yield make


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_trace(rank: Make, layout: str) -> None:
    """After the check every byte of the cache is what it was."""
    one = rank(layout=layout)
    untouched = Cache(layout, 2, one.facts.num_blocks, one.heads, 16, 6, 4, 1, "cpu").tensors()
    assert torch.equal(storage(one.layers[0]), storage(untouched[0]))


def nothing(*_: Any) -> None:
    """A kernel that does nothing."""


def swapped(source: torch.Tensor, num_pages: int, width: int, target: torch.Tensor) -> None:
    """Planes joined the wrong way round."""
    target.view(num_pages, -1, width).copy_(source.view(num_pages, width, -1).transpose(1, 2))


@pytest.mark.parametrize(
    ("name", "broken"),
    [("gather_rows", nothing), ("scatter_rows", nothing), ("split_planes", nothing), ("join_planes", swapped)],
)
def test_kernels_that_do_not_copy(rank: Make, monkeypatch: pytest.MonkeyPatch, name: str, broken: Callable) -> None:  # type: ignore[type-arg]
    """Whichever step of the copies is wrong, the group is refused and its old content put back."""
    one = rank(element_bytes=2)
    device = StreamDevice(InlineStreams(), ring_bytes=1 << 16, page_bytes_max=1 << 16, unit_bytes_min=1)
    group = prove_group(one.shape.groups[0], one.shape.layout.groups[0], one.layers, one.facts, device)
    check_round_trip(group, one.layers, device, HOST, page_tokens=one.shape.layout.page_tokens)
    before = storage(one.layers[0])
    monkeypatch.setattr(gpu if hasattr(gpu, name) else lanes, name, broken)
    with pytest.raises(InvalidRequest, match="changes bytes"):
        check_round_trip(group, one.layers, device, HOST, page_tokens=one.shape.layout.page_tokens)
    assert torch.equal(storage(one.layers[0]), before)


def test_a_rank_that_fails_it_is_refused(rank: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose device does not copy takes no part: its refusal names the layer, and its memory is free."""
    one = rank()
    opened: list[weakref.ref[cpu.CpuDevice]] = []

    def open_device(*_: object, **__: object) -> cpu.CpuDevice:
        device = cpu.CpuDevice()
        opened.append(weakref.ref(device))
        return device

    monkeypatch.setattr("connector.worker.side.open_device", open_device)

    def scatter_all(*_: object) -> None:
        return

    monkeypatch.setattr(cpu.CpuCopier, "scatter_all", scatter_all)
    one.side.register(lambda _: one.layers)
    assert one.side.refusal is not None
    assert "changes bytes" in one.side.refusal
    gc.collect()
    assert [device() for device in opened] == [None]


def test_an_error_of_the_device_is_the_refusal(rank: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA fails while the cache is registered: the guard sees it, and the rank's refusal is its first line."""
    one = rank()

    def gather_all(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported")

    monkeypatch.setattr(cpu.CpuCopier, "gather_all", gather_all)
    with pytest.raises(RuntimeError):
        one.side.register(lambda _: one.layers)
    assert one.side.refusal == (
        "its cache could not be registered: RuntimeError: CUDA error: an illegal memory access was encountered"
    )


def test_a_cache_of_a_few_blocks(rank: Make) -> None:
    """A cache with too few blocks for the check is refused, in words."""
    one = rank()
    device = cpu.CpuDevice()
    few: Sequence[torch.Tensor] = [layer[:4] for layer in one.layers]
    group = prove_group(one.shape.groups[0], one.shape.layout.groups[0], one.layers, one.facts, device)
    with pytest.raises(InvalidRequest, match="too small"):
        check_round_trip(group, few, device, HOST, page_tokens=one.shape.layout.page_tokens)
