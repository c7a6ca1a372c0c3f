"""A small interface to a device's streams and events, as copies need them.

Besides the command `python -m connector.device` this is the only file that names `torch.cuda`. A stream runs its work
in order, after the call that ordered it. Streams are synchronised by events only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from connector.device.host_memory import near_processors, pin_near
from connector.logs import LOG
from kvstore.errors import InvalidRequest

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every GPU of the process."""
_READ_ONLY = 8
"""cudaHostRegisterReadOnly: memory that this process may not write."""
_BATCHING_VERSION = 13_000
"""From this version of CUDA on `cudaMemcpyBatchAsync` has the arguments that are used here."""


Piece: TypeAlias = tuple[int, torch.Tensor]
"""The first byte of a copy in its target, and its source: uint8, pinned or registered."""


class Event(Protocol):
    """A point in a stream. Safe from any thread."""

    def is_done(self) -> bool:
        """Whether all work before it is done; never waits."""
        ...

    def wait(self) -> None:
        """Return when all work before it is done. Never called on the engine's thread."""
        ...


class Stream(Protocol):
    """Work that is done in order."""

    def run(self, work: Callable[[], None]) -> None:
        """Order `work`: calls that launch on the stream, and that depend on no value on the device."""
        ...

    def record(self) -> Event:
        """The point after everything that was ordered so far."""
        ...

    def wait(self, event: Event) -> None:
        """Have what is ordered from now on start after `event`; the caller does not wait."""
        ...

    def settle(self) -> None:
        """Return when everything that was ordered so far is done. Never called on the engine's thread."""
        ...


class Streams(Protocol):
    """One device."""

    device: torch.device

    def compute(self) -> Stream:
        """The calling thread's current stream; on the engine's thread the one that its kernels run on."""
        ...

    def side(self) -> Stream:
        """A new stream of our own."""
        ...

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        """uint8 `[num_bytes]` on the device, content undefined.

        Raises:
            InvalidRequest: There is not enough memory.
        """
        ...

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """uint8 `[num_bytes]` that the device copies to and from without the processor's help, content undefined.

        Raises:
            InvalidRequest: There is not enough memory.
        """
        ...

    def host_arena(self, num_bytes: int) -> torch.Tensor:
        """The same in one large piece, for good: as near the device as it can be, and not a byte more than asked for.

        Takes some tenths of a second for each GiB.

        Raises:
            InvalidRequest: There is not enough memory.
        """
        ...

    def copy_in(self, memory: torch.Tensor, pieces: Sequence[Piece]) -> None:
        """Order the copies of pieces of host memory to the device's `memory`, on the current stream, in any order."""
        ...

    def register(self, address: int, num_bytes: int) -> None:
        """Have the device copy from memory that this process may only read, without the processor's help.

        The memory becomes resident, which takes about .1 s for each GiB.

        Raises:
            InvalidRequest: The device cannot.
        """
        ...

    def release(self, address: int) -> None:
        """Undo that, when nothing is copied from there any more.

        Raises:
            InvalidRequest: The device does not, and the memory must stay mapped.
        """
        ...


_thread = threading.local()


def _use(device: torch.device) -> None:
    """Make a GPU the calling thread's own; called before anything else a thread does with CUDA.

    A thread begins with GPU 0. What asks no device, as a query of an event or the end of `torch.cuda.stream`, would
    make a context there: some 500 MiB of GPU 0 for each rank of another GPU.
    """
    if getattr(_thread, "device", None) != device:
        torch.cuda.set_device(device)
        _thread.device = device


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event = event
        self._device = device

    def is_done(self) -> bool:
        _use(self._device)
        return bool(self.event.query())

    def wait(self) -> None:
        _use(self._device)
        self.event.synchronize()


class _CudaStream:
    def __init__(self, stream: torch.cuda.Stream, device: torch.device) -> None:
        self._stream = stream
        self._device = device

    def run(self, work: Callable[[], None]) -> None:
        _use(self._device)
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> Event:
        _use(self._device)
        # "blocking": a waiting thread sleeps; by default it would spin on a core that the engine needs
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return _CudaEvent(event, self._device)

    def wait(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        _use(self._device)
        self._stream.wait_event(event.event)

    def settle(self) -> None:
        try:
            event = self.record()
        except RuntimeError:  # there is no memory for an event, and what was ordered may still be done
            self._stream.synchronize()
            raise
        event.wait()


class CudaStreams:
    """`Streams` of one GPU, for any thread."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._runtime = batching_runtime()

    def compute(self) -> Stream:
        _use(self.device)
        return _CudaStream(torch.cuda.current_stream(self.device), self.device)

    def side(self) -> Stream:
        _use(self.device)
        # The lowest, so that the engine's kernels go before our copies. It is torch's default as well, but an engine
        # with streams of higher priority relies on it.
        lowest, _ = torch.cuda.Stream.priority_range()
        return _CudaStream(torch.cuda.Stream(self.device, priority=lowest), self.device)

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        _use(self.device)
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise InvalidRequest(
                "the GPU has no room for the connector; lower pinned_bytes or gpu_memory_utilization",
                num_bytes=num_bytes,
            ) from error

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        _use(self.device)
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:  # what torch makes of a refused cudaHostAlloc
            raise InvalidRequest(
                "no memory could be pinned; lower pinned_bytes or raise the memlock limit", num_bytes=num_bytes
            ) from error

    def host_arena(self, num_bytes: int) -> torch.Tensor:
        try:
            return pin_near(num_bytes, self._near_processors(), register=self._pin, release=self.release)
        except (RuntimeError, OSError) as error:  # CUDA's, and that of a mapping
            raise InvalidRequest(
                "no memory could be pinned; lower pinned_bytes or raise the memlock limit", num_bytes=num_bytes
            ) from error

    def _near_processors(self) -> frozenset[int]:
        found = torch.cuda.get_device_properties(self.device)
        return near_processors(f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0")

    def copy_in(self, memory: torch.Tensor, pieces: Sequence[Piece]) -> None:
        runtime = self._runtime  # another thread may find that it fails
        if runtime is not None:
            try:
                self._copy_in_one_call(runtime, memory.data_ptr(), pieces)
            except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # its arguments differ by version
                self._runtime = None
                LOG.warning("kvstore: cudaMemcpyBatchAsync is not used again: %s: %s", type(error).__name__, error)
            else:
                return
        copy_pieces(memory, pieces)

    def _copy_in_one_call(self, runtime: Any, address: int, pieces: Sequence[Piece]) -> None:
        """torch takes some four microseconds for each piece, one call of CUDA one (`benchmarks/results`).

        Raises:
            RuntimeError: CUDA's error. Some of the copies may be ordered; they may be ordered again.
        """
        attributes = runtime.cudaMemcpyAttributes()
        attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        (code,) = runtime.cudaMemcpyBatchAsync(
            [address + start for start, _ in pieces],
            [source.data_ptr() for _, source in pieces],
            [source.nbytes for _, source in pieces],
            len(pieces),
            [attributes],
            [0],
            1,
            torch.cuda.current_stream(self.device).cuda_stream,
        )
        if code := int(code):
            runtime.cudaGetLastError()  # or torch would raise it again, for a call that did not fail
            raise RuntimeError(f"error {code} of CUDA")

    def register(self, address: int, num_bytes: int) -> None:
        try:
            self._pin(address, num_bytes, _PORTABLE | _READ_ONLY)
        except RuntimeError as error:
            raise InvalidRequest("the GPU cannot read memory of the service", reason=error) from error

    def _pin(self, address: int, num_bytes: int, flags: int = _PORTABLE) -> None:
        _use(self.device)
        # as a number: an enum of another kind is never equal to torch's own
        if code := int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, flags)):
            raise RuntimeError(f"cudaHostRegister failed with error {code} of CUDA")

    def release(self, address: int) -> None:
        try:
            _use(self.device)
            code = int(torch.cuda.cudart().cudaHostUnregister(address))
        except RuntimeError as error:  # an error of earlier work
            raise InvalidRequest("the GPU does not release memory", reason=error) from error
        if code:
            raise InvalidRequest("the GPU does not release memory", reason=f"error {code} of CUDA")


def batching_runtime() -> Any:
    """`cuda.bindings.runtime`, on which torch depends; `None`: it or the driver cannot copy many pieces in one call."""
    try:
        from cuda.bindings import runtime  # type: ignore[import-not-found, unused-ignore]

        error, driver = runtime.cudaDriverGetVersion()
        if not int(error) and min(driver, runtime.CUDART_VERSION) >= _BATCHING_VERSION:
            return runtime
        LOG.info("kvstore: CUDA %s with driver %s copies pieces one by one", runtime.CUDART_VERSION, driver)
    except (ImportError, AttributeError, RuntimeError, ValueError) as error:  # the last two: it finds no library
        LOG.info("kvstore: the GPU is asked for each piece by itself: %s", error)
    return None


def copy_pieces(memory: torch.Tensor, pieces: Sequence[Piece]) -> None:
    """`Streams.copy_in` by torch."""
    targets = [memory[start : start + source.numel()] for start, source in pieces]
    torch._foreach_copy_(targets, [source for _, source in pieces], non_blocking=True)


class _Done:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        return


DONE: Event = _Done()
"""The event of work that was done in the call that ordered it."""
