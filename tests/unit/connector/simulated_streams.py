"""A device whose streams run late and in any order that events allow, and an engine that overwrites what it may.

`SimulatedStreams` really does the work on tensors in host memory, but each piece of it at a moment that a seed chooses:
an order that the code does not enforce comes out wrong in some seed, as bytes that differ. `Engine` plays vLLM.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.gpu.order import BLOCK_BYTES, NUM_LAYERS, PAGE_BLOCKS, WrongBytes
from benchmarks.gpu.order import Engine as AnyEngine
from connector.device.base import PageScatter, SharedRecord, no_check
from connector.device.lanes import Placement, PlannedPage
from connector.device.rows import plan_rows
from connector.device.streams import Event, Piece, copy_pieces

__all__ = ["PAGE_BYTES", "Engine", "SimulatedEvent", "SimulatedStreams", "WrongBytes"]

PAGE_BYTES = NUM_LAYERS * PAGE_BLOCKS * BLOCK_BYTES


@dataclass
class SimulatedEvent:
    streams: SimulatedStreams
    happened: bool = False

    def is_done(self) -> bool:
        self.streams.let_run()
        return self.happened

    def wait(self) -> None:
        while True:
            with self.streams.lock:
                if self.happened:
                    return
                assert self.streams.run_one(), "the device waits for itself"


@dataclass
class SimulatedStream:
    streams: SimulatedStreams
    work: deque[Callable[[], bool]] = field(default_factory=deque)

    def run(self, work: Callable[[], None]) -> None:
        self._order(lambda: (work(), True)[1])

    def record(self) -> Event:
        event = SimulatedEvent(self.streams)

        def happen() -> bool:
            event.happened = True
            return True

        self._order(happen)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, SimulatedEvent)
        self._order(lambda: event.happened)

    def settle(self) -> None:
        self.record().wait()

    def _order(self, work: Callable[[], bool]) -> None:
        with self.streams.lock:
            self.work.append(work)
        self.streams.let_run()


class SimulatedStreams:
    """`Streams` on the host: what was ordered runs later, interleaved as the seed says."""

    def __init__(self, seed: int) -> None:
        self.device = torch.device("cpu")
        self.random = random.Random(seed)
        self.eagerness = self.random.choice([0.0, 0.1, 0.5, 0.9])
        self.lock = threading.RLock()  # the engine's, the waiting and the loading threads order work
        self.computing = SimulatedStream(self)
        self.all: list[SimulatedStream] = [self.computing]

    def compute(self) -> SimulatedStream:
        return self.computing

    def side(self) -> SimulatedStream:
        self.all.append(SimulatedStream(self))
        return self.all[-1]

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xDD, dtype=torch.uint8)

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xAA, dtype=torch.uint8)

    host_arena = host_memory

    def copy_in(self, memory: torch.Tensor, pieces: Sequence[Piece]) -> None:
        copy_pieces(memory, pieces)

    def register(self, address: int, num_bytes: int) -> None:
        """Nothing: it is host memory that is read."""

    def release(self, address: int) -> None:
        """Nothing."""

    def run_one(self) -> bool:
        """Run the next piece of a stream that is not waiting; `False` when there is none."""
        with self.lock:
            for stream in self.random.sample(self.all, len(self.all)):
                if stream.work and stream.work[0]():
                    stream.work.popleft()
                    return True
            return False

    def let_run(self) -> None:
        while self.random.random() < self.eagerness and self.run_one():
            pass

    def run_all(self) -> None:
        while self.run_one():
            pass
        assert not any(stream.work for stream in self.all), "a stream waits for ever"


class Engine(AnyEngine):
    """Random steps on simulated streams; the same engine runs on a GPU in `benchmarks.gpu`."""

    def __init__(self, seed: int, streams: SimulatedStreams | None = None, *, element_bytes: int = 2) -> None:
        self.streams = streams or SimulatedStreams(seed)
        super().__init__(seed, self.streams, self.streams.run_all, element_bytes=element_bytes)

    def placement(
        self, blocks: list[int], source: torch.Tensor, check: Callable[[], None] = no_check, after: Event | None = None
    ) -> Placement:
        """A canonical page on its way to blocks."""
        page = PageScatter(self.runs, [blocks], SharedRecord((source,), source.numel()), check=check)
        plans = plan_rows(self.copier.geometry, self.runs, source.numel())
        return Placement([PlannedPage(self.copier, page, plans)], after or self.device.fence())
