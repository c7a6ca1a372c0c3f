"""`python -m benchmarks.device`: gather and scatter of pages beside a plain copy of the same bytes.

On a GPU the ceiling is one copy between its memory and pinned memory, in the same direction; without one the copier for
host memory is measured against memcpy. See README.md.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from rich.console import Console

from benchmarks.ceilings import memcpy
from benchmarks.measure import Ceiling, Row, Work, measure
from benchmarks.report import as_line, as_table
from connector.canonical.attention import AttentionPages
from connector.canonical.runs import LayerGeometry
from connector.canonical.slices import HeadGrid
from connector.device.base import BlockCopier, Device, PageGather
from connector.device.choose import open_device
from connector.device.streams import Streams, has_gpu, open_streams
from connector.worker.staging import view
from kvstore.runtime.sizes import parse_bytes

__all__ = ["main"]

NUM_LAYERS = 32
NUM_HEADS = 8
HEAD_BYTES = 512
PAGE_TOKENS = 256
BLOCK_TOKENS = {"cpu": 128, "cuda": 16}
"""What vLLM chooses by default."""

LAYOUTS = ("LBHNC", "LBNHC")
"""Heads outside tokens, as on a CPU; tokens outside heads, vLLM's first choice on a GPU."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="benchmarks.device", description=__doc__)
    parser.add_argument("--total-bytes", type=parse_bytes, default=128 << 20, help="what one repetition moves")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="that scatter at a time")
    parser.add_argument("--json", action="store_true", help="print the last line alone")
    chosen = parser.parse_args(arguments)
    where = torch.device("cuda" if has_gpu() else "cpu")
    rows = []
    for layout in LAYOUTS:
        pages = Pages(where, layout, chosen.total_bytes, chosen.threads)
        rows += asyncio.run(pages.rows(chosen.repetitions))
    if not chosen.json:
        Console(width=150).print(as_table(rows))
    print(as_line(rows), flush=True)
    return 0


@dataclass
class Copies(Work):
    """Work that is checked after the clock has stopped."""

    call: Callable[[], None]
    check: Callable[[], bool]

    async def run(self) -> None:
        self.call()

    async def after(self) -> None:
        if not self.check():
            raise RuntimeError("a page or a block does not hold what was copied")


class Pages:
    """A cache of a model of the size of Llama 3 8B, and pages for a share of it."""

    def __init__(self, where: torch.device, layout: str, total_bytes: int, num_threads: int) -> None:
        self.layout, self.where, self.num_threads = layout, where, num_threads
        block_tokens = BLOCK_TOKENS[where.type]
        page_blocks = PAGE_TOKENS // block_tokens
        slice_bytes = NUM_LAYERS * PAGE_TOKENS * HEAD_BYTES
        num_spans = max(1, total_bytes // (NUM_HEADS * slice_bytes))
        num_blocks = 1 + 2 * num_spans * page_blocks
        shape = (NUM_LAYERS, num_blocks, NUM_HEADS, block_tokens, HEAD_BYTES)
        if layout == "LBNHC":
            shape = (shape[0], shape[1], shape[3], shape[2], shape[4])
        generator = torch.Generator().manual_seed(1)
        noise = torch.randint(0, 256, shape[1:], dtype=torch.uint8, generator=generator)
        cache = noise.expand(shape).contiguous().to(where)
        cache[:, :, 0, 0, :8] = torch.arange(NUM_LAYERS, dtype=torch.uint8).view(-1, 1, 1)
        self.layers = list(cache if layout == "LBHNC" else cache.transpose(2, 3))  # [blocks, heads, tokens, bytes] each
        head_stride, token_stride = self.layers[0].stride(1), self.layers[0].stride(2)
        geometry = LayerGeometry(1, 0, NUM_HEADS, head_stride, block_tokens, token_stride, HEAD_BYTES)
        plan = AttentionPages(grid=HeadGrid(NUM_HEADS, NUM_HEADS), first_slice=0, layers=[geometry] * NUM_LAYERS)
        self.device: Device = open_device(
            where, ring_bytes=num_spans * NUM_HEADS * slice_bytes, page_bytes_max=slice_bytes, num_lanes=num_threads
        )
        # an engine that has run for a while hands out its blocks in no order
        ids = (1 + torch.randperm(num_blocks - 1, generator=generator)).tolist()
        half = num_spans * page_blocks
        self.sources = [ids[start : start + page_blocks] for start in range(0, half, page_blocks)]
        self.targets = [ids[half + start : half + start + page_blocks] for start in range(0, half, page_blocks)]
        self.copier: BlockCopier = self.device.copier(self.layers, [0] * NUM_LAYERS, 2)
        self.pages = [
            PageGather(plan.runs(index, page_blocks), [blocks], self.memory(slice_bytes))
            for blocks in self.sources
            for index in range(NUM_HEADS)
        ]
        self.num_bytes = slice_bytes * len(self.pages)

    def memory(self, num_bytes: int) -> torch.Tensor:
        return self.device.host_memory(num_bytes).zero_()

    async def rows(self, repetitions: int) -> list[Row]:
        """Gather first: its pages are what is scattered."""
        size = self.pages[0].target.numel()

        async def row(what: str, work: Work, ceiling: Ceiling, threads: int) -> Row:
            name = f"{what} {self.layout} {self.where.type}"
            return await measure(
                name,
                work,
                ceiling,
                size_bytes=size,
                num_bytes=self.num_bytes,
                in_flight=threads,
                repetitions=repetitions,
            )

        rows = [await row("gather", Copies(self.gather, lambda: True), self.ceiling(to_host=True), 1)]
        with ThreadPoolExecutor(self.num_threads) as pool:
            for threads in sorted({1, self.num_threads}):
                scatter = Copies(lambda threads=threads: self.scatter(pool, threads), self.is_equal)  # type: ignore[misc]
                rows.append(await row("scatter", scatter, self.ceiling(to_host=False), threads))
        return rows

    def gather(self) -> None:
        for ticket in self.copier.gather_all(self.pages):
            if ticket is None:
                raise RuntimeError("the ring has no room")
            ticket.wait()

    def scatter(self, pool: ThreadPoolExecutor, num_threads: int) -> None:
        after = self.device.fence()
        targets = [blocks for blocks in self.targets for _ in range(NUM_HEADS)]
        works = list(zip(self.pages, targets, strict=True))

        def share(index: int) -> None:
            for page, blocks in works[index::num_threads]:
                self.copier.scatter(page.runs, [blocks], page.target, 0, after)

        if num_threads == 1:
            share(0)
        else:
            list(pool.map(share, range(num_threads)))

    def is_equal(self) -> bool:
        """Whether the targets hold what the sources hold."""
        pairs = list(zip(self.sources, self.targets, strict=True))
        return all(torch.equal(layer[source], layer[target]) for layer in self.layers for source, target in pairs)

    def ceiling(self, *, to_host: bool) -> Ceiling:
        """The same bytes in pages, from one place to another."""
        if self.where.type == "cpu":
            return memcpy(*([view(self.memory(page.target.numel())) for page in self.pages] for _ in range(2)))
        return pinned_memcpy(open_streams(self.where), self.num_bytes, to_host=to_host)


def pinned_memcpy(streams: Streams, num_bytes: int, *, to_host: bool) -> Ceiling:
    """One copy between a GPU's memory and pinned memory."""
    stream, near, far = streams.compute(), streams.device_memory(num_bytes), streams.host_memory(num_bytes)
    source, target = (near, far) if to_host else (far, near)

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    def run() -> None:
        stream.run(copy)
        stream.record().wait()

    return Ceiling("pinned memcpy", run)


if __name__ == "__main__":
    raise SystemExit(main())
