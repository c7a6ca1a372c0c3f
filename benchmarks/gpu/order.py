"""Stage 3: the order that copies keep between the engine's kernels, the ring and host memory, on streams that sleep.

`Engine` plays vLLM: kernels on the compute stream that write and read blocks, saves, loads, host pages that are
overwritten as soon as they may be. What any of them saw is compared with what a device without delay would have shown.
The unit tests run it on simulated streams, which interleave in any order that events allow. Here it runs on a GPU whose
streams sleep at random before each piece of work, also with the fence left out: then it must find wrong bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.gpu.kit import Kit
from connector.canonical.runs import BlockRun
from connector.device.base import Fence, PageGather, PageScatter, SharedRecord, Ticket
from connector.device.gpu import StreamCopier, StreamDevice
from connector.device.streams import Event, Piece, Stream, Streams

if TYPE_CHECKING:  # it needs Triton
    from connector.device.kernels import DeviceKernels

__all__ = ["BLOCK_BYTES", "NUM_BLOCKS", "NUM_LAYERS", "PAGE_BLOCKS", "Engine", "SleepyStreams", "WrongBytes", "run"]

NUM_BLOCKS = 9
NUM_LAYERS = 2
BLOCK_BYTES = 24
PAGE_BLOCKS = 2
_NUM_CONTENTS = 64
_SLEEP_US_MAX = 300.0
_LATE_US_MAX = 3000.0
"""Of the compute stream, where an order is missing: a load takes the interpreter longer than the other sleeps."""


class WrongBytes(AssertionError):
    """A kernel, a page or a block had bytes of another time."""


@dataclass
class Save:
    """A page on its way to the host, and what it must hold."""

    ticket: Ticket
    page: torch.Tensor
    expected: bytes


@dataclass
class Load:
    """Blocks that were given to a load, and the content that it writes."""

    fence: Fence
    blocks: list[int]
    content: bytes


class Engine:
    """Random steps of an engine on a device, checked against what a device without delay would do.

    Args:
        seed: Of the steps and of all content.
        streams: The device.
        settle: Returns when all that was ordered is done.
        element_bytes: Of a cache's element.
        block_bytes: Of a block in one layer.

    Attributes:
        num_saved: Pages that arrived right.
        num_refused: Saves for which the ring had no room.
        num_loaded: Loads that were done.
    """

    def __init__(
        self,
        seed: int,
        streams: Streams,
        settle: Callable[[], object],
        *,
        element_bytes: int = 2,
        block_bytes: int = BLOCK_BYTES,
        kernels: type[DeviceKernels] | None = None,
    ) -> None:
        self.computing = streams.compute()
        self.random = random.Random(f"engine {seed}")
        self.settle = settle
        self.block_bytes = block_bytes
        self.page_bytes = NUM_LAYERS * PAGE_BLOCKS * block_bytes
        self.memory = torch.zeros((NUM_LAYERS, NUM_BLOCKS, block_bytes), dtype=torch.uint8, device=streams.device)
        self.device = StreamDevice(
            streams, ring_bytes=2 * self.page_bytes, page_bytes_max=self.page_bytes, unit_bytes_min=1, kernels=kernels
        )
        self.copier: StreamCopier = self.device.copier(list(self.memory), [0] * NUM_LAYERS, element_bytes)
        self.width = self.copier.plane_width
        self.runs = [
            BlockRun(layer, 0, block_bytes, layer * PAGE_BLOCKS * block_bytes, block_bytes)
            for layer in range(NUM_LAYERS)
        ]
        # on the device before the first step: an upload in between would be an order that the copies do not have
        self.contents = [self.random.randbytes(NUM_LAYERS * block_bytes) for _ in range(_NUM_CONTENTS)]
        uploaded = torch.frombuffer(bytearray(b"".join(self.contents)), dtype=torch.uint8)
        self.uploaded = uploaded.view(_NUM_CONTENTS, NUM_LAYERS, block_bytes).to(streams.device)
        self.content = [bytes(NUM_LAYERS * block_bytes)] * NUM_BLOCKS  # in the order of the compute stream
        self.reads: list[tuple[torch.Tensor, bytes, str]] = []
        self.saves: list[Save] = []
        self.loads: list[Load] = []
        # pinned once: to pin or to free memory later waits for the device, and hides an order that is missing
        *self.free_pages, self.arriving = self.device.host_memory(5 * self.page_bytes).split(self.page_bytes)
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
        self.settle()
        for seen, expected, what in self.reads:
            self.expect(_bytes(seen), expected, what)
        for block in range(1, NUM_BLOCKS):
            self.expect(self.seen(block), self.content[block], f"block {block} at the end")

    def write(self) -> None:
        """A forward that fills some blocks."""
        for block in self.idle_blocks(2):
            number = self.random.randrange(_NUM_CONTENTS)
            self.content[block] = self.contents[number]
            self.computing.run(partial(self._put, block, number))

    def _put(self, block: int, number: int) -> None:
        self.memory[:, block].copy_(self.uploaded[number])

    def read(self) -> None:
        """A forward that attends to a block: it must see what was there in the order of the compute stream."""
        for block in self.idle_blocks(1):
            self.attend(block, f"a kernel on {block}")

    def attend(self, block: int, what: str) -> None:
        """Order a kernel that keeps what it sees of a block."""
        seen = torch.empty_like(self.memory[:, block])
        self.computing.run(lambda: seen.copy_(self.memory[:, block]))
        self.reads.append((seen, self.content[block], what))

    def save(self) -> None:
        """The gather of a page."""
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
        """A step gives blocks to a load. Kernels of their last user may still be running."""
        blocks = self.idle_blocks(PAGE_BLOCKS)
        if len(blocks) == PAGE_BLOCKS and len(self.loads) < 2:
            self.loads.append(Load(self.device.fence(), blocks, self.random.randbytes(self.page_bytes)))

    def finish_load(self) -> None:
        """What a codec thread does, and then the engine: a forward sees what was loaded."""
        if not self.loads:
            return
        load = self.loads.pop(self.random.randrange(len(self.loads)))
        page = PageScatter(self.runs, [load.blocks], self.arriving)
        if self.random.random() < 0.5:
            self.arriving.copy_(self.split(load.content))
        else:  # as from memory that the service reuses, at once when the page was checked
            self.arriving.copy_(torch.frombuffer(bytearray(load.content), dtype=torch.uint8))
            page = replace(page, source=SharedRecord((self.arriving,), self.page_bytes), check=self.overwrite)
        self.copier.scatter_all([page], load.fence)
        self.arriving.fill_(0xEE)
        for index, block in enumerate(load.blocks):
            layers = np.frombuffer(load.content, np.uint8).reshape(NUM_LAYERS, PAGE_BLOCKS, self.block_bytes)
            self.content[block] = layers[:, index].tobytes()
            self.attend(block, f"a kernel on {block} after its load")
        self.num_loaded += 1

    def overwrite(self) -> None:
        """Reuse the memory of a page that is being loaded."""
        self.arriving.fill_(0xEE)

    def idle_blocks(self, count: int) -> list[int]:
        """Blocks that are not being loaded, as vLLM gives them out: none twice, never the null block."""
        loading = {block for load in self.loads for block in load.blocks}
        free = [block for block in range(1, NUM_BLOCKS) if block not in loading]
        return self.random.sample(free, min(count, len(free)))

    def seen(self, block: int) -> bytes:
        """What a block holds now."""
        return _bytes(self.memory[:, block])

    def canonical(self, contents: list[bytes]) -> bytes:
        """A page of these blocks."""
        blocks = np.frombuffer(b"".join(contents), np.uint8).reshape(len(contents), NUM_LAYERS, self.block_bytes)
        return blocks.transpose(1, 0, 2).tobytes()

    def joined(self, page: torch.Tensor) -> bytes:
        """A host page in canonical form."""
        return _bytes(page.view(self.width, -1).flip(0).t())

    def split(self, content: bytes) -> torch.Tensor:
        """The inverse."""
        planes = np.frombuffer(content, np.uint8).reshape(-1, self.width).T[::-1]
        return torch.from_numpy(planes.copy().reshape(-1))

    def expect(self, seen: bytes, expected: bytes, what: str) -> None:
        """Raise `WrongBytes` unless they are equal."""
        if seen != expected:
            raise WrongBytes(f"{what}: expected {expected[:24].hex()}, seen {seen[:24].hex()}")


def _bytes(tensor: torch.Tensor) -> bytes:
    content: bytes = tensor.cpu().numpy().tobytes()
    return content


class SleepyStreams:
    """Streams that sleep before each piece of work, for a time that a seed chooses."""

    def __init__(self, kit: Kit, seed: int, *, compute_us: float = _SLEEP_US_MAX) -> None:
        self.device = kit.device
        self._compute_us = compute_us
        self._kit = kit
        self._random = random.Random(f"sleep {seed}")
        self.lanes: list[SleepyStream] = []

    def compute(self) -> Stream:
        return SleepyStream(self._kit.streams.compute(), partial(self._sleep, self._compute_us))

    def side(self) -> Stream:
        self.lanes.append(SleepyStream(self._kit.streams.side(), partial(self._sleep, _SLEEP_US_MAX)))
        return self.lanes[-1]

    def _sleep(self, most_us: float) -> None:
        self._kit.sleep(self._random.choice([0.0, 0.1, 1.0]) * most_us)

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        return self._kit.streams.device_memory(num_bytes)

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return self._kit.streams.host_memory(num_bytes)

    def host_arena(self, num_bytes: int) -> torch.Tensor:
        return self._kit.streams.host_arena(num_bytes)

    def copy_in(self, memory: torch.Tensor, pieces: Sequence[Piece]) -> None:
        self._kit.streams.copy_in(memory, pieces)

    def register(self, address: int, num_bytes: int) -> None:
        self._kit.streams.register(address, num_bytes)

    def release(self, address: int) -> None:
        self._kit.streams.release(address)


class SleepyStream:
    """One of them."""

    def __init__(self, inner: Stream, sleep: Callable[[], None]) -> None:
        self._inner = inner
        self._sleep = sleep
        self.keeps_order = True

    def run(self, work: Callable[[], None]) -> None:
        self._inner.run(self._sleep)
        self._inner.run(work)

    def record(self) -> Event:
        return self._inner.record()

    def wait(self, event: Event) -> None:
        if self.keeps_order:
            self._inner.wait(event)

    def settle(self) -> None:
        self._inner.settle()


def run(kit: Kit) -> None:
    """Many engines; then, on a GPU, some whose copies are not ordered behind the engine's work: these must go wrong."""
    seeds, steps = kit.sized(60, 10), 60
    late_seeds = 20
    engines = []
    for seed in range(seeds):
        with _engine(kit, seed) as (engine, _):
            engine.run(steps)
            engines.append(engine)
    kit.tell(
        "no wrong bytes",
        engines=seeds,
        steps=seeds * steps,
        saved=sum(engine.num_saved for engine in engines),
        refused=sum(engine.num_refused for engine in engines),
        loaded=sum(engine.num_loaded for engine in engines),
    )
    if not kit.is_gpu:
        kit.tell("orders left out", skipped="no GPU")
        return
    for what, lanes in (
        ("the drain does not wait for the gather", slice(0, 1)),
        ("loads have no fence", slice(1, None)),
    ):
        found = 0
        for seed in range(late_seeds):
            with _engine(kit, seed, compute_us=_LATE_US_MAX) as (engine, streams):
                for lane in streams.lanes[lanes]:
                    lane.keeps_order = False
                try:
                    engine.run(steps)
                except WrongBytes:
                    found += 1
        kit.tell(what, engines=late_seeds, wrong=found)
        if not found:
            raise AssertionError(f"the check would not have found an error: {what}, and nothing was wrong")


@contextmanager
def _engine(kit: Kit, seed: int, *, compute_us: float = _SLEEP_US_MAX) -> Iterator[tuple[Engine, SleepyStreams]]:
    streams = SleepyStreams(kit, seed, compute_us=compute_us)
    element_bytes = (1, 2, 4)[seed % 3]
    yield (
        Engine(seed, streams, kit.settle, element_bytes=element_bytes, block_bytes=4096, kernels=kit.kernels),
        streams,
    )
    kit.settle()
