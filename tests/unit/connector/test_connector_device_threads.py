"""What `CudaStreams` asks of CUDA from which thread, on a stand-in that keeps each thread's device as CUDA does."""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from connector.canonical.runs import BlockRun
from connector.device.base import PageGather, PageScatter
from connector.device.gpu import StreamDevice
from connector.device.streams import CudaStreams, Piece, batching_runtime
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
        self.releases = True
        self._threads = threading.local()
        fake = self

        class Stream:
            cuda_stream = 0x57

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

    def cudaHostUnregister(self, address: int) -> CudaCode:
        self.touch(self.current_device())
        if not self.releases:
            return CudaCode.OUT_OF_MEMORY
        del self.registered[address]
        return CudaCode.SUCCESS

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before = self.current_device()
        self.set_device(stream.index)
        yield
        self.set_device(before)  # as torch's does, whatever device that was


class FakeRuntime(ModuleType):
    """`cuda.bindings.runtime` as far as it is used; what it copies is copied when it is called.

    Attributes:
        batches: The arguments of each call that copies.
        failure: What such a call raises, or the code that it returns.
        at_failure: Called in front of that.
        num_cleared: How often the last error was taken.
    """

    CUDART_VERSION = 13_000
    cudaMemcpySrcAccessOrder = SimpleNamespace(cudaMemcpySrcAccessOrderStream="in the stream's order")
    cudaMemcpyAttributes = SimpleNamespace

    def __init__(self, failure: Exception | CudaCode = CudaCode.SUCCESS) -> None:
        super().__init__("cuda.bindings.runtime")
        self.batches: list[tuple[Any, ...]] = []
        self.failure = failure
        self.at_failure: Callable[[], object] = lambda: None
        self.num_cleared = 0
        self.driver: Exception | int = 13_000

    def cudaDriverGetVersion(self) -> tuple[CudaCode, int]:
        if isinstance(self.driver, Exception):
            raise self.driver
        return CudaCode.SUCCESS, self.driver

    def cudaMemcpyBatchAsync(self, targets: list[int], sources: list[int], sizes: list[int], *more: Any) -> Any:
        self.batches.append((targets, sources, sizes, *more))
        if self.failure is not CudaCode.SUCCESS:
            self.at_failure()
            if isinstance(self.failure, Exception):
                raise self.failure
            return (self.failure,)
        for target, source, size in zip(targets, sources, sizes, strict=True):
            ctypes.memmove(target, source, size)
        return (CudaCode.SUCCESS,)

    def cudaGetLastError(self) -> tuple[CudaCode]:
        self.num_cleared += 1
        return (CudaCode.OUT_OF_MEMORY,)


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
    assert cuda.priorities == [2, 2, 2, 2]


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


def test_memory_that_is_not_released(cuda: FakeCuda) -> None:
    """CUDA's code is an error: the memory must stay mapped."""
    streams = CudaStreams(torch.device("cuda", OURS))
    cuda.releases = False
    address = 0xABC000
    streams.register(address, 4096)
    with pytest.raises(InvalidRequest, match="the GPU does not release memory reason=error 2 of CUDA"):
        streams.release(address)


def pieces_to_copy() -> tuple[torch.Tensor, list[Piece], torch.Tensor]:
    """Memory, pieces for it in no order and with room between them, and what it holds when they are copied."""
    memory, source = torch.zeros(300, dtype=torch.uint8), torch.arange(1, 201, dtype=torch.uint8)
    pieces: list[Piece] = [(200, source[:60]), (7, source[100:101]), (16, source[60:100]), (8, source[190:198])]
    expected = memory.clone()
    copy_each(expected, pieces)
    return memory, pieces, expected


def test_pieces_are_copied_in_one_call(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its own address and size, in the order of the thread's current stream."""
    runtime = FakeRuntime()
    monkeypatch.setattr("connector.device.streams.batching_runtime", lambda: runtime)
    monkeypatch.setattr("connector.device.streams.copy_pieces", lambda *_: pytest.fail("torch copies"))
    memory, pieces, expected = pieces_to_copy()
    CudaStreams(torch.device("cuda", OURS)).copy_in(memory, pieces)
    assert torch.equal(memory, expected)
    [(targets, sources, sizes, count, [attributes], of_pieces, num_attributes, stream)] = runtime.batches
    assert targets == [memory.data_ptr() + start for start in (200, 7, 16, 8)]
    assert sources == [source.data_ptr() for _, source in pieces]
    assert (sizes, count) == ([60, 1, 40, 8], 4)
    assert (attributes.srcAccessOrder, of_pieces, num_attributes) == ("in the stream's order", [0], 1)
    assert stream == cuda.current_stream().cuda_stream


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (CudaCode.OUT_OF_MEMORY, "RuntimeError: error 2 of CUDA"),
        (RuntimeError('Function "cudaMemcpyBatchAsync" not found'), 'RuntimeError: Function "cudaMemcpyBatchAsync"'),
        (TypeError("takes exactly 9 positional arguments"), "TypeError: takes exactly 9"),
    ],
)
def test_a_call_that_fails_is_not_tried_again(
    cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failure: Exception | CudaCode,
    reason: str,
) -> None:
    """torch copies these pieces and all that come. It is logged once, and no error is left for torch to raise."""
    runtime = FakeRuntime(failure)
    monkeypatch.setattr("connector.device.streams.batching_runtime", lambda: runtime)
    caplog.set_level(logging.WARNING, "vllm.kvstore")
    streams = CudaStreams(torch.device("cuda", OURS))
    for _ in range(2):
        memory, pieces, expected = pieces_to_copy()
        streams.copy_in(memory, pieces)
        assert torch.equal(memory, expected)
    assert len(runtime.batches) == 1
    assert runtime.num_cleared == isinstance(failure, CudaCode)
    [record] = caplog.records
    assert record.getMessage().startswith(f"kvstore: cudaMemcpyBatchAsync is not used again: {reason}")


def test_a_call_that_fails_in_two_threads(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both copies are made."""
    runtime = FakeRuntime(CudaCode.OUT_OF_MEMORY)
    runtime.at_failure = threading.Barrier(2, timeout=10).wait
    monkeypatch.setattr("connector.device.streams.batching_runtime", lambda: runtime)
    streams = CudaStreams(torch.device("cuda", OURS))
    cases = [pieces_to_copy() for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda case: streams.copy_in(case[0], case[1]), cases))
    assert all(torch.equal(memory, expected) for memory, _, expected in cases)
    assert len(runtime.batches) == 2


@pytest.mark.parametrize(
    ("driver", "is_used"),
    [(13_000, True), (12_090, False), (RuntimeError("Failed to dlopen libcudart"), False)],
)
def test_which_runtime_copies_many_pieces(
    monkeypatch: pytest.MonkeyPatch, driver: Exception | int, is_used: bool
) -> None:
    """One whose call has the arguments that are used here; one that cannot be asked is none."""
    runtime = FakeRuntime()
    runtime.driver = driver
    bindings = ModuleType("cuda.bindings")
    bindings.__dict__["runtime"] = runtime
    for name, module in (("cuda", ModuleType("cuda")), ("cuda.bindings", bindings), (runtime.__name__, runtime)):
        monkeypatch.setitem(sys.modules, name, module)
    assert batching_runtime() is (runtime if is_used else None)
