"""Stage 4: gather and scatter of pages, how long the engine's thread is busy, and what computing beside them loses."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.gpu.kit import GB, Kit
from connector.canonical.attention import AttentionPages
from connector.canonical.runs import LayerGeometry
from connector.canonical.slices import HeadGrid
from connector.device.base import BlockCopier, Device, Fence, PageGather, PageScatter
from connector.device.cpu import CpuDevice
from connector.device.gpu import StreamDevice

__all__ = ["Pages", "run"]

LAYOUTS = ("LBHNC", "LBNHC")
"""Heads outside tokens, as on a CPU; tokens outside heads, vLLM's first choice on a GPU."""
THREADS = (1, 2, 4, 8, 16)
"""That scatter at a time."""
_HEAD_BYTES = 512
_PAGE_TOKENS = 256


def run(kit: Kit) -> None:
    """Each layout alone, then both directions beside a matmul."""
    for layout in LAYOUTS:
        pages = Pages(kit, layout, num_threads=THREADS[-1])
        pages.gather()
        kit.tell(
            f"gather {layout}",
            gb_s=pages.num_bytes / kit.seconds(pages.gather) / GB,
            engine_thread_us_per_page=pages.engine_thread_us(),
            page_bytes=pages.page_bytes,
            bytes=pages.num_bytes,
        )
        for threads in THREADS:
            seconds = kit.seconds(lambda pages=pages, threads=threads: pages.scatter(threads))  # type: ignore[misc]
            kit.tell(f"scatter {layout}", threads=threads, gb_s=pages.num_bytes / seconds / GB)
        if not pages.is_equal():
            raise AssertionError(f"blocks do not hold what was copied to them: {layout}")
        if kit.is_gpu:
            _beside_matmul(kit, pages, layout)
    if not kit.is_gpu:
        pages = Pages(kit, LAYOUTS[0], num_threads=1, device=CpuDevice())
        pages.gather()
        for name, work in (("gather", pages.gather), ("scatter", lambda: pages.scatter(1))):
            kit.tell(f"{name} {LAYOUTS[0]} by the processor's copier", gb_s=pages.num_bytes / kit.seconds(work) / GB)
        kit.tell("beside a matmul", skipped="no GPU")


class Pages:
    """A cache of a model of the size of Llama 3 8B, and pages of a share of it.

    Args:
        kit: Where.
        layout: One of `LAYOUTS`.
        num_threads: Scatters at a time, at most.
        device: Whose copies; by default those with streams.
    """

    def __init__(self, kit: Kit, layout: str, *, num_threads: int, device: Device | None = None) -> None:
        self._kit = kit
        num_layers, num_heads, block_tokens = kit.sized(32, 2), kit.sized(8, 2), kit.sized(16, 128)
        page_blocks = _PAGE_TOKENS // block_tokens
        self.page_bytes = num_layers * _PAGE_TOKENS * _HEAD_BYTES
        num_spans = kit.sized(1 << 30, 1 << 22) // (num_heads * self.page_bytes)
        num_blocks = 1 + 2 * num_spans * page_blocks
        block_shape = (num_heads, block_tokens) if layout == "LBHNC" else (block_tokens, num_heads)
        cache = kit.noise(num_blocks * num_heads * block_tokens * _HEAD_BYTES)
        cache = cache.expand(num_layers, -1).reshape(num_layers, num_blocks, *block_shape, _HEAD_BYTES).contiguous()
        cache[:, :, 0, 0, 0] = torch.arange(num_layers, dtype=torch.uint8, device=kit.device).view(-1, 1)
        self.layers = list(cache if layout == "LBHNC" else cache.transpose(2, 3))  # [blocks, heads, tokens, bytes] each
        geometry = LayerGeometry(
            1, 0, num_heads, self.layers[0].stride(1), block_tokens, self.layers[0].stride(2), _HEAD_BYTES
        )
        plan = AttentionPages(grid=HeadGrid(num_heads, num_heads), first_slice=0, layers=[geometry] * num_layers)
        self.num_bytes = num_spans * num_heads * self.page_bytes
        self.device: Device = device or StreamDevice(
            kit.streams, ring_bytes=self.num_bytes, page_bytes_max=self.page_bytes, kernels=kit.kernels
        )
        self.copier: BlockCopier = self.device.copier(self.layers, [0] * num_layers, 2)
        # an engine that has run for a while hands out its blocks in no order
        ids = (1 + torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1))).tolist()
        half = num_spans * page_blocks
        self.sources = [ids[start : start + page_blocks] for start in range(0, half, page_blocks)]
        self.targets = [ids[half + start : half + start + page_blocks] for start in range(0, half, page_blocks)]
        host = iter(self.device.host_memory(self.num_bytes).split(self.page_bytes))
        self.pages = [
            PageGather(plan.runs(index, page_blocks), [blocks], next(host))
            for blocks in self.sources
            for index in range(num_heads)
        ]
        self._threads = ThreadPoolExecutor(num_threads)
        self._num_heads = num_heads

    def gather(self) -> None:
        """All pages to the host."""
        for ticket in self.copier.gather_all(self.pages):
            if ticket is None:
                raise AssertionError("the ring has no room")
            ticket.wait()

    def engine_thread_us(self) -> float:
        """What ordering a page's gather takes of the engine's thread, in a step that saves one page of all heads."""
        self._kit.settle()
        started_s = time.perf_counter()
        tickets = self.copier.gather_all(self.pages[: self._num_heads])
        taken_s = time.perf_counter() - started_s
        for ticket in tickets:
            if ticket is not None:
                ticket.wait()
        return taken_s / self._num_heads * 1e6

    def scatter(self, num_threads: int, after: Fence | None = None) -> None:
        """Scatter all pages to other blocks from several threads, behind a fence (default: all work ordered so far)."""
        after = after or self.device.fence()
        works = list(zip(self.pages, [blocks for blocks in self.targets for _ in range(self._num_heads)], strict=True))

        def share(index: int) -> None:
            for page, blocks in works[index::num_threads]:
                self.copier.scatter_all([PageScatter(page.runs, [blocks], page.target)], after)

        list(self._threads.map(share, range(num_threads)))

    def is_equal(self) -> bool:
        """Whether the targets hold what the sources hold."""
        pairs = list(zip(self.sources, self.targets, strict=True))
        return all(torch.equal(layer[source], layer[target]) for layer in self.layers for source, target in pairs)


def _beside_matmul(kit: Kit, pages: Pages, layout: str) -> None:
    """How much longer the same matmuls take while pages are copied beside them."""
    size, count = 8192, 40
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=kit.device) for _ in range(2))
    result = torch.empty_like(left)

    def compute() -> None:
        for _ in range(count):
            torch.matmul(left, right, out=result)

    def step_seconds() -> float:
        """Of the compute stream alone: the copies may end later."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        compute()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    compute()
    alone_s = min(step_seconds() for _ in range(3))
    with ThreadPoolExecutor(1) as thread:
        for name in ("scatters", "gathers"):
            kit.settle()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            if name == "gathers":  # as in a step: on the engine's thread, in front of the next forward
                tickets = pages.copier.gather_all(pages.pages)
                compute()
                end.record()
                end.synchronize()
                for ticket in tickets:
                    if ticket is not None:
                        ticket.wait()
            else:
                copies = thread.submit(pages.scatter, 4, pages.device.fence())
                compute()
                end.record()
                end.synchronize()
                copies.result()
            beside_s = begin.elapsed_time(end) / 1e3
            kit.tell(
                f"matmul beside {name} {layout}",
                alone_ms=alone_s * 1e3,
                beside_ms=beside_s * 1e3,
                slower_percent=(beside_s / alone_s - 1) * 100,
                bytes=pages.num_bytes,
            )
