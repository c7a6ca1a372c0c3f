"""What every stage has: the device, sizes for it, clocks, and a way to report results as they come."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from connector.device.streams import DONE, CudaStreams, Event, Piece, Stream, Streams, copy_pieces
from kvstore.errors import InvalidRequest

if TYPE_CHECKING:  # it needs Triton
    from connector.device.kernels import DeviceKernels

__all__ = ["GB", "WORD", "InlineStream", "InlineStreams", "Kit"]

GB = 1e9
WORD = "GPU-KIT"
"""The first word of each line on stdout that is for the process that started the stage."""

Value = TypeVar("Value")


class Kit:
    """One stage's run, on GPU 0, or on host memory so that the kit can be tried anywhere.

    Attributes:
        is_gpu: Whether there is one.
        streams: Its streams; on host memory they do all work at once.
    """

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self.is_gpu = torch.cuda.is_available()
        if not self.is_gpu:
            torch.set_num_threads(1)  # its team of threads costs more than copies of these sizes
        self.streams: Streams = CudaStreams(torch.device("cuda", 0)) if self.is_gpu else InlineStreams()

    @property
    def device(self) -> torch.device:
        return self.streams.device

    @cached_property
    def kernels(self) -> type[DeviceKernels] | None:
        """What an engine lets the GPU do itself; `None` on host memory, and where a package for it is missing."""
        if not self.is_gpu:
            return None
        try:
            from connector.device.kernels import DeviceKernels, check_kernels
        except ImportError as missing:
            self.progress(f"without kernels: {missing}")
            return None
        check_kernels(self.streams)
        return DeviceKernels

    def sized(self, gpu: Value, host: Value) -> Value:
        """The size for a GPU, or a small one."""
        return gpu if self.is_gpu else host

    def tell(self, name: str, **values: Any) -> None:
        """Report a result at once, so that a stage that is cut short has reported what it found."""
        print(WORD, json.dumps({"name": name, **values}), flush=True)
        said = " ".join(
            f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()
        )
        self.progress(f"{name} {said}")

    def progress(self, text: str) -> None:
        """Print a line of progress."""
        print(f"gpu kit: {self._stage}: {text}", file=sys.stderr, flush=True)

    def machine(self) -> dict[str, Any]:
        """The machine that was measured."""
        found: dict[str, Any] = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "kernel": platform.release(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30,
            "gpu": None,
        }
        if self.is_gpu:
            properties = torch.cuda.get_device_properties(self.device)
            found |= {
                "gpu": properties.name,
                "gpu_memory_gib": properties.total_memory >> 30,
                "gpu_memory_free_gib": torch.cuda.mem_get_info(self.device)[0] >> 30,
                "num_gpus": torch.cuda.device_count(),
                "cuda": torch.version.cuda,
                "multiprocessors": properties.multi_processor_count,
            }
        return found

    def settle(self) -> None:
        """Wait for all work on the device."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def sleep(self, microseconds: float) -> None:
        """Keep the current stream busy; on host memory nothing sleeps."""
        if self.is_gpu:
            torch.cuda._sleep(int(microseconds * 1500))  # in cycles, of some 1.5 GHz

    def seconds(self, work: Callable[[], object]) -> float:
        """The median time of `work` and all that it ordered; it runs once before."""
        times = []
        for _ in range(1 + self.sized(5, 1)):
            self.settle()
            started_s = time.perf_counter()
            work()
            self.settle()
            times.append(time.perf_counter() - started_s)
        return statistics.median(times[1:])

    @contextmanager
    def clock(self) -> Iterator[list[float]]:
        """Seconds of the block, once, as the only element after it."""
        taken: list[float] = []
        started_s = time.perf_counter()
        yield taken
        taken.append(time.perf_counter() - started_s)

    def noise(self, num_bytes: int, seed: int = 1) -> torch.Tensor:
        """uint8 `[num_bytes]` on the device, the same each time."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator).to(self.device)


class InlineStream:
    """A stream whose work is done when it is ordered."""

    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> Event:
        return DONE

    def wait(self, event: Event) -> None:
        return

    def settle(self) -> None:
        return


class InlineStreams:
    """`Streams` on tensors in host memory, where work is done when it is ordered."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def compute(self) -> Stream:
        return InlineStream()

    def side(self) -> Stream:
        return InlineStream()

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8)
        except (RuntimeError, MemoryError) as error:
            raise InvalidRequest(
                "this machine has no such memory for pages; lower pinned_bytes", num_bytes=num_bytes
            ) from error

    host_arena = host_memory

    def copy_in(self, memory: torch.Tensor, pieces: Sequence[Piece]) -> None:
        copy_pieces(memory, pieces)

    def register(self, address: int, num_bytes: int) -> None:
        """Nothing: it is host memory that is read."""

    def release(self, address: int) -> None:
        """Nothing."""
