"""A device whose streams run late and in any order that events allow, and an engine that overwrites what it may.

`SimulatedStreams` really does the work on tensors in host memory, but each piece of it at a moment that a seed chooses:
an order that the code does not enforce comes out wrong in some seed, as bytes that differ. `Engine` plays vLLM: kernels
on the compute stream that write and read blocks, saves, loads, host pages that are overwritten as soon as they may be.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from connector.canonical.runs import BlockRun
from connector.device.base import Fence, PageGather, Ticket
from connector.device.copy import StreamCopier, StreamDevice
from connector.device.streams import Event

NUM_BLOCKS = 9
NUM_LAYERS = 2
BLOCK_BYTES = 24
PAGE_BLOCKS = 2
PAGE_BYTES = NUM_LAYERS * PAGE_BLOCKS * BLOCK_BYTES


class WrongBytes(AssertionError):
    """The simulation found bytes that nobody may see."""


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


@dataclass
class Save:
    ticket: Ticket
    page: torch.Tensor
    expected: bytes


@dataclass
class Load:
    fence: Fence
    blocks: list[int]
    content: bytes


class Engine:
    """Random steps of an engine on a simulated device, checked against what a device without delay would do.

    Attributes:
        num_saved: Pages that arrived right.
        num_refused: Saves for which the ring had no room.
        num_loaded: Loads that were done.
    """

    def __init__(self, seed: int, streams: SimulatedStreams | None = None, *, element_bytes: int = 2) -> None:
        self.streams = streams or SimulatedStreams(seed)
        self.random = random.Random(f"engine {seed}")
        memory = torch.zeros(NUM_LAYERS * NUM_BLOCKS * BLOCK_BYTES, dtype=torch.uint8)
        self.layers = list(memory.view(NUM_LAYERS, NUM_BLOCKS, BLOCK_BYTES))
        self.device = StreamDevice(
            self.streams, ring_bytes=2 * PAGE_BYTES, page_bytes_max=PAGE_BYTES, num_lanes=2, unit_bytes_min=1
        )
        self.copier: StreamCopier = self.device.copier(self.layers, [0] * NUM_LAYERS, element_bytes)
        self.width = self.copier.plane_width
        self.runs = [
            BlockRun(layer, 0, BLOCK_BYTES, layer * PAGE_BLOCKS * BLOCK_BYTES, BLOCK_BYTES)
            for layer in range(NUM_LAYERS)
        ]
        self.content = [bytes(NUM_LAYERS * BLOCK_BYTES)] * NUM_BLOCKS  # in the order of the compute stream
        self.saves: list[Save] = []
        self.loads: list[Load] = []
        self.free_pages = [self.device.host_memory(PAGE_BYTES) for _ in range(4)]
        self.num_saved = self.num_refused = self.num_loaded = 0

    def run(self, num_steps: int) -> None:
        """Take random steps, then let everything end and compare all blocks."""
        steps = [self.write, self.read, self.save, self.finish_save, self.start_load, self.finish_load]
        for _ in range(num_steps):
            self.random.choice(steps)()
        while self.saves:
            self.finish_save()
        while self.loads:
            self.finish_load()
        self.streams.run_all()
        for block in range(1, NUM_BLOCKS):
            self.expect(self.seen(block), self.content[block], f"block {block} at the end")

    def write(self) -> None:
        """A forward that fills some blocks."""
        for block in self.idle_blocks(2):
            content = self.random.randbytes(NUM_LAYERS * BLOCK_BYTES)
            self.content[block] = content
            self.streams.computing.run(lambda block=block, content=content: self.put(block, content))  # type: ignore[misc]

    def read(self) -> None:
        """A forward that attends to a block: it must see what was there in the order of the compute stream."""
        for block in self.idle_blocks(1):
            expected = self.content[block]
            self.streams.computing.run(
                lambda block=block, expected=expected: self.expect(self.seen(block), expected, f"a kernel on {block}")  # type: ignore[misc]
            )

    def save(self) -> None:
        blocks = self.idle_blocks(PAGE_BLOCKS)
        if len(blocks) < PAGE_BLOCKS or not self.free_pages:
            return
        page = self.free_pages.pop()
        [ticket] = self.copier.gather_all([PageGather(self.runs, [blocks], page)])
        if ticket is None:
            self.num_refused += 1
            self.free_pages.append(page)
            return
        self.saves.append(Save(ticket, page, self.canonical([self.content[block] for block in blocks])))

    def finish_save(self) -> None:
        """What a codec thread does: wait, encode, give the page back, where the next user writes to it at once."""
        if not self.saves:
            return
        save = self.saves.pop(self.random.randrange(len(self.saves)))
        save.ticket.wait()
        self.expect(self.joined(save.page), save.expected, "a saved page")
        save.page.fill_(0xEE)
        self.free_pages.append(save.page)
        self.num_saved += 1

    def start_load(self) -> None:
        """A step gives blocks to a load: they were just taken from somebody whose kernels may still be running."""
        blocks = self.idle_blocks(PAGE_BLOCKS)
        if len(blocks) == PAGE_BLOCKS and len(self.loads) < 2:
            self.loads.append(Load(self.device.fence(), blocks, self.random.randbytes(PAGE_BYTES)))

    def finish_load(self) -> None:
        """What a codec thread does, and then the engine: the blocks hold what was loaded."""
        if not self.loads:
            return
        load = self.loads.pop(self.random.randrange(len(self.loads)))
        page = self.device.host_memory(PAGE_BYTES)
        page.copy_(self.split(load.content))
        self.copier.scatter(self.runs, [load.blocks], page, 0, load.fence)
        page.fill_(0xEE)
        for index, block in enumerate(load.blocks):
            layers = np.frombuffer(load.content, np.uint8).reshape(NUM_LAYERS, PAGE_BLOCKS, BLOCK_BYTES)
            self.content[block] = layers[:, index].tobytes()
            self.expect(self.seen(block), self.content[block], f"block {block} after its load")
        self.num_loaded += 1

    def idle_blocks(self, count: int) -> list[int]:
        """Blocks that are not being loaded, as vLLM gives them out: none twice, never the null block."""
        loading = {block for load in self.loads for block in load.blocks}
        free = [block for block in range(1, NUM_BLOCKS) if block not in loading]
        return self.random.sample(free, min(count, len(free)))

    def put(self, block: int, content: bytes) -> None:
        for layer, part in zip(self.layers, np.frombuffer(content, np.uint8).reshape(NUM_LAYERS, -1), strict=True):
            layer[block].copy_(torch.from_numpy(part.copy()))

    def seen(self, block: int) -> bytes:
        return b"".join(layer[block].numpy().tobytes() for layer in self.layers)

    def canonical(self, contents: list[bytes]) -> bytes:
        blocks = np.frombuffer(b"".join(contents), np.uint8).reshape(len(contents), NUM_LAYERS, BLOCK_BYTES)
        return blocks.transpose(1, 0, 2).tobytes()

    def joined(self, page: torch.Tensor) -> bytes:
        return page.numpy().reshape(self.width, -1)[::-1].T.tobytes()

    def split(self, content: bytes) -> torch.Tensor:
        planes = np.frombuffer(content, np.uint8).reshape(-1, self.width).T[::-1]
        return torch.from_numpy(planes.copy().reshape(-1))

    def expect(self, seen: bytes, expected: bytes, what: str) -> None:
        if seen != expected:
            raise WrongBytes(f"{what}: expected {expected.hex()}, seen {seen.hex()}")
