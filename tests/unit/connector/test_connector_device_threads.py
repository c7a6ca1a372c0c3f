"""What `CudaStreams` asks of CUDA from which thread, on a stand-in that keeps each thread's device as CUDA does."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from connector.canonical.runs import BlockRun
from connector.device.base import PageGather, PageScatter
from connector.device.gpu import StreamDevice
from connector.device.streams import CudaStreams, Piece
from kvstore.errors import InvalidRequest

OURS = 3
"""The GPU of the rank under test; the engine has chosen it on its own thread alone."""


class CudaCode(Enum):
    """As torch's, no number itself."""

    SUCCESS = 0
    OUT_OF_MEMORY = 2

    def __int__(self) -> int:
        return self.value


class FakeCuda:
    """`torch.cuda` as far as `CudaStreams` uses it; work is done at once, on host memory.

    Attributes:
        contexts: GPUs on which something was asked that makes a context.
        priorities: Of the streams that were made.
    """

    OutOfMemoryError = torch.OutOfMemoryError

    def __init__(self) -> None:
        self.contexts: set[int] = set()
        self.priorities: list[int] = []
        self.registered: dict[int, int] = {}
        self.refuses = False
        self._threads = threading.local()
        fake = self

        class Stream:
            def __init__(self, device: torch.device | int, priority: int = 0) -> None:
                self.index = device if isinstance(device, int) else device.index
                fake.priorities.append(priority)

            @staticmethod
            def priority_range() -> tuple[int, int]:
                return 2, -5

            def wait_event(self, event: Event) -> None:
                fake.touch(self.index)

        class Event:
            def __init__(self, *, blocking: bool) -> None:
                assert blocking

            def record(self, stream: Stream) -> None:
                fake.touch(stream.index)

            def query(self) -> bool:
                fake.touch(fake.current_device())  # it names no device: CUDA takes the thread's
                return True

            def synchronize(self) -> None:
                fake.touch(fake.current_device())

        self.Stream, self.Event = Stream, Event

    def touch(self, index: int) -> None:
        self.contexts.add(index)

    def current_device(self) -> int:
        return getattr(self._threads, "index", 0)

    def set_device(self, device: torch.device | int) -> None:
        self._threads.index = device if isinstance(device, int) else device.index
        self.touch(self._threads.index)

    def current_stream(self, device: torch.device | None = None) -> Any:
        stream = self.Stream.__new__(self.Stream)
        stream.index = self.current_device() if device is None else device.index
        return stream

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> CudaCode:
        self.touch(self.current_device())
        if self.refuses:
            return CudaCode.OUT_OF_MEMORY
        self.registered[address] = num_bytes
        return CudaCode.SUCCESS

    def cudaHostUnregister(self, address: int) -> None:
        self.touch(self.current_device())
        del self.registered[address]

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before = self.current_device()
        self.set_device(stream.index)
        yield
        self.set_device(before)  # as torch's does, whatever device that was


def copy_each(memory: torch.Tensor, pieces: Sequence[Piece]) -> None:
    for start, source in pieces:
        memory[start : start + source.numel()].copy_(source)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr("connector.device.streams._thread", threading.local())  # what earlier tests' devices left
    monkeypatch.setattr("connector.device.streams.torch", SimpleNamespace(cuda=fake, device=torch.device))
    monkeypatch.setattr("connector.device.streams.copy_pieces", copy_each)
    monkeypatch.setattr("connector.device.streams.batching_runtime", lambda: None)
    return fake


def make_device(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> StreamDevice:
    """A rank's device whose memory is the host's."""

    def memory(self: CudaStreams, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    for name in ("device_memory", "host_memory"):
        monkeypatch.setattr(CudaStreams, name, memory)
    return StreamDevice(CudaStreams(torch.device("cuda", OURS)), ring_bytes=512, page_bytes_max=512, unit_bytes_min=1)


def test_no_thread_touches_another_gpu(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves and loads of rank 3, whose events other threads wait for and query, make no context on GPU 0."""
    cuda.set_device(OURS)
    device = make_device(cuda, monkeypatch)
    layer = torch.arange(8 * 64, dtype=torch.int16).view(torch.uint8).view(8, 128)
    copier = device.copier([layer], [0], 2)
    runs = [BlockRun(0, 0, 128, 0, 128)]
    page = device.host_memory(128)
    [ticket] = copier.gather_all([PageGather(runs, [[3]], page)])
    assert ticket is not None
    fence = device.fence()
    for work in (
        ticket.is_done,  # the loop's thread
        ticket.wait,  # the one that waits for arrivals
        lambda: copier.scatter_all([PageScatter(runs, [[5]], page)], fence),  # a codec thread
    ):
        with ThreadPoolExecutor(1) as fresh:
            fresh.submit(work).result()
    assert torch.equal(layer[5], layer[3])
    assert cuda.contexts == {OURS}


def test_a_thread_that_serves_two_gpus(cuda: FakeCuda) -> None:
    """What asks no device goes to the one whose event it is, also after the thread worked for another."""
    events = [CudaStreams(torch.device("cuda", index)).compute().record() for index in (OURS, 5)]
    seen = []
    for event in (events[0], events[1], events[0]):
        assert event.is_done()
        seen.append(cuda.current_device())
    assert seen == [OURS, 5, OURS]


def test_side_streams_have_the_lowest_priority(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies never go before what the engine computes: the drain and each lane."""
    make_device(cuda, monkeypatch)
    assert cuda.priorities == [2, 2, 2]


def test_one_piece_is_pinned_for_its_gpu(cuda: FakeCuda) -> None:
    """As many bytes as asked for are registered, by a thread on that GPU, and released when nobody refers to them."""
    streams = CudaStreams(torch.device("cuda", OURS))
    piece = streams.host_arena(100_001)
    assert cuda.registered == {piece.data_ptr(): 100_001}
    del piece
    assert cuda.registered == {}
    cuda.refuses = True
    with pytest.raises(InvalidRequest, match=r"no memory could be pinned.* num_bytes=7"):
        streams.host_arena(7)
    assert cuda.contexts == {OURS}
