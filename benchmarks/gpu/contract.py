"""Stage 2: pages are exactly their tokens, in every layout of vLLM's backends, and no other byte is written.

The reference is torch's own indexing of the views, on the processor, by layer, head, token and channel. It uses no
runs, rows or planes.

`RECORDED` has the layouts of vLLM 0.32, since the kit runs where vLLM is not installed. A test compares them with
vLLM's own views. They are every layout that one of its backends may use, for three layers of ten blocks: heads outside
tokens and inside, blocks outside layers, blocks of several kernel blocks, elements of one byte, latent vectors. In a
hybrid, attention and states are two views of one int8 allocation.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from benchmarks.gpu.kit import Kit
from connector.canonical.attention import AttentionPages, latent_pages
from connector.canonical.recurrent import StatePages
from connector.canonical.runs import LayerGeometry, PagePlan
from connector.canonical.slices import HeadGrid
from connector.device.base import PageGather, PageScatter
from connector.device.gpu import StreamDevice

__all__ = ["HYBRID", "NUM_BLOCKS", "NUM_LAYERS", "RECORDED", "Group", "Recorded", "run"]

SOURCES = (7, 2, 5)
TARGETS = (1, 9, 4)
_LARGE_GPU = (1 << 34) + (1 << 24)
"""More than 2^31 of the widest words that copies use, of eight bytes."""
_LARGE_HOST = (1 << 31) + (1 << 24)
NUM_LAYERS = 3
NUM_BLOCKS = 10
_DTYPES = {1: torch.uint8, 2: torch.bfloat16}


def run(kit: Kit) -> None:
    """Check all layouts and report each. Then the stage fails if one is wrong."""
    wrong = []
    for seed, layout in enumerate(RECORDED):
        if layout.name not in HYBRID:
            equal = check(kit, [layout], seed)
            kit.tell(layout.name, equal=equal)
            wrong += [] if equal else [layout.name]
    together = [layout for layout in RECORDED if layout.name in HYBRID]
    for name, equal in (
        ("one int8 allocation shared by attention and states", check(kit, together, len(RECORDED))),
        ("a cache of more than 2^31 elements", check_large(kit)),
    ):
        kit.tell(name, equal=equal)
        wrong += [] if equal else [name]
    if wrong:
        raise AssertionError(f"copies are wrong: {', '.join(wrong)}")


@dataclass(frozen=True, slots=True)
class Recorded:
    """The layers of one group in their common allocation.

    Attributes:
        name: What it is: kind, layout, tokens of a block.
        element_bytes: Bytes of an element.
        allocation_bytes: Of the allocation.
        starts: Byte of each layer's first element.
        shape: `[blocks, heads, tokens, channels]`, or with kernel blocks in dimension 1; a state is one token.
        stride: In elements.
    """

    name: str
    element_bytes: int
    allocation_bytes: int
    starts: tuple[int, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The layers over uint8 `[allocation_bytes]`."""
        typed = memory.view(_DTYPES[self.element_bytes])
        return [torch.as_strided(typed, self.shape, self.stride, start // self.element_bytes) for start in self.starts]


class Group:
    """The layers of one group, how its pages are planned, and the reference.

    Args:
        layout: Where the layers are.
        memory: uint8, their allocation.
    """

    def __init__(self, layout: Recorded, memory: torch.Tensor) -> None:
        self.layout = layout
        self.layers = layout.views(memory)
        self.is_state = "state" in layout.name
        heads = layout.shape[-3]
        parts = layout.shape[1] if len(layout.shape) == 5 else 1
        size = layout.element_bytes
        geometry = LayerGeometry(
            parts=parts,
            part_stride=layout.stride[1] * size if parts > 1 else 0,
            heads=heads,
            head_stride=layout.stride[-3] * size,
            tokens=layout.shape[-2],
            token_stride=layout.stride[-2] * size,
            content_bytes=layout.shape[-1] * size,
        )
        geometries = [geometry] * len(self.layers)
        self.plan: PagePlan
        if self.is_state:
            self.slices = range(len(geometries))
            self.plan = StatePages(num_bands=len(geometries), first_slice=0, layers=geometries)
        elif "latent" in layout.name:
            self.slices, self.plan = range(1), latent_pages(geometries)
        else:
            self.slices = range(heads)
            self.plan = AttentionPages(grid=HeadGrid(heads, heads), first_slice=0, layers=geometries)

    def reference(self, slice_index: int, blocks: Sequence[int]) -> torch.Tensor:
        """uint8: what a page of these blocks must hold; the layers must be in host memory."""
        if self.is_state:
            return self.layers[slice_index][blocks[0]].contiguous().view(torch.uint8).reshape(-1)
        whole = [layer if layer.dim() == 5 else layer.unsqueeze(1) for layer in self.layers]
        cells = [layer[list(blocks), :, slice_index].contiguous().view(torch.uint8).reshape(-1) for layer in whole]
        return torch.cat(cells)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Have the reference copy blocks."""
        for layer in self.layers:
            layer[list(targets)] = layer[list(sources)].clone()


def check(kit: Kit, layouts: Sequence[Recorded], seed: int) -> bool:
    """Whether pages of the groups on one allocation are right, and so is every byte of it after loads from them.

    Args:
        kit: Where.
        layouts: The groups.
        seed: Another one each time, so that bytes of an earlier check do not look right.
    """
    memory = kit.noise(layouts[0].allocation_bytes, seed)
    expected = memory.cpu().clone()  # on host memory the first is no copy
    equal = True
    for number, layout in enumerate(layouts):
        mine, reference = Group(layout, memory), Group(layout, expected)
        # on one allocation each group has blocks of its own, as vLLM gives them out
        sources, targets = ([SOURCES[0]], [TARGETS[0]]) if mine.is_state else (SOURCES[number:], TARGETS[number:])
        pages = [reference.reference(index, sources) for index in mine.slices]
        equal &= _copy(kit, mine, pages, sources, targets)
        reference.move(sources, targets)
    kit.settle()
    return equal and torch.equal(memory.cpu(), expected)


def _copy(
    kit: Kit, group: Group, expected: Sequence[torch.Tensor], sources: Sequence[int], targets: Sequence[int]
) -> bool:
    """Gather all slices, compare each with the reference, and scatter them, each in two parts."""
    page_bytes = group.plan.decoded_bytes(len(sources))
    device = StreamDevice(
        kit.streams, ring_bytes=len(group.slices) * page_bytes, page_bytes_max=page_bytes, kernels=kit.kernels
    )
    copier = device.copier(group.layers, [0] * len(group.layers), group.layout.element_bytes)
    host = device.host_memory(len(group.slices) * page_bytes).split(page_bytes)
    pages = [
        PageGather(group.plan.runs(index, len(sources)), [sources], page)
        for index, page in zip(group.slices, host, strict=True)
    ]
    equal = True
    for page, ticket, bytes_of_page in zip(pages, copier.gather_all(pages), expected, strict=True):
        if ticket is None:
            raise AssertionError("the ring has no room for a page that it was made for")
        ticket.wait()
        canonical = page.target.view(copier.plane_width, -1).flip(0).t().reshape(-1)
        equal &= torch.equal(canonical, bytes_of_page)
    after = device.fence()
    with ThreadPoolExecutor(2) as threads:
        works = [
            threads.submit(
                copier.scatter_all, [PageScatter(page.runs, [targets[first:last]], page.target, first)], after
            )
            for page in pages
            for first, last in ((0, 1), (1, len(targets)))
        ]
    for work in works:
        work.result()
    return equal


def check_large(kit: Kit) -> bool:
    """Blocks at both ends of a large cache and around its middle, beside their neighbours."""
    num_bytes = kit.sized(_LARGE_GPU, _LARGE_HOST)
    if kit.is_gpu and torch.cuda.mem_get_info(kit.device)[0] < 2 * num_bytes:
        num_bytes = _LARGE_HOST
    block_bytes = 16384
    num_blocks = num_bytes // block_bytes
    layout = Recorded("attention", 2, num_bytes, (0,), (num_blocks, 4, 16, 128), (8192, 128, 512, 1))
    group = Group(layout, kit.streams.device_memory(num_blocks * block_bytes))
    middle = (1 << 31) // block_bytes
    sources, targets = (1, num_blocks - 1, middle), (num_blocks - 3, 3, middle - 2)
    touched = sorted(
        {block + step for block in (*sources, *targets) for step in (-1, 0, 1) if block + step < num_blocks}
    )
    noise = kit.noise(len(touched) * block_bytes).view(torch.bfloat16).view(len(touched), *layout.shape[1:])
    group.layers[0][touched] = noise
    # the reference has these blocks alone, under numbers of its own
    places = {block: place for place, block in enumerate(touched)}
    small = Recorded("attention", 2, noise.numel() * 2, (0,), tuple(noise.shape), tuple(noise.stride()))
    reference = Group(small, noise.cpu().view(torch.uint8).reshape(-1))

    pages = [reference.reference(index, [places[block] for block in sources]) for index in group.slices]
    equal = _copy(kit, group, pages, sources, targets)
    reference.move([places[block] for block in sources], [places[block] for block in targets])
    kit.settle()
    seen = group.layers[0][touched].cpu().view(torch.uint8)
    return equal and torch.equal(seen, reference.layers[0].view(torch.uint8))


RECORDED = (
    Recorded("attention LBHNC 16", 2, 491520, (0, 163840, 327680), (10, 4, 16, 128), (8192, 2048, 128, 1)),
    Recorded("attention LBNHC 16", 2, 491520, (0, 163840, 327680), (10, 4, 16, 128), (8192, 128, 512, 1)),
    Recorded("attention LHBNC 16", 2, 491520, (0, 163840, 327680), (10, 4, 16, 128), (2048, 20480, 128, 1)),
    Recorded("attention BLHNC 16", 2, 491520, (0, 16384, 32768), (10, 4, 16, 128), (24576, 2048, 128, 1)),
    Recorded("attention BLNHC 16", 2, 491520, (0, 16384, 32768), (10, 4, 16, 128), (24576, 128, 512, 1)),
    Recorded("attention BHLNC 16", 2, 491520, (0, 4096, 8192), (10, 4, 16, 128), (24576, 6144, 128, 1)),
    Recorded("attention LBHNC 16 fp8", 1, 245760, (0, 81920, 163840), (10, 4, 16, 128), (8192, 2048, 128, 1)),
    Recorded("attention LBNHC 16 fp8", 1, 245760, (0, 81920, 163840), (10, 4, 16, 128), (8192, 128, 512, 1)),
    Recorded("attention LHBNC 16 fp8", 1, 245760, (0, 81920, 163840), (10, 4, 16, 128), (2048, 20480, 128, 1)),
    Recorded("attention BLHNC 16 fp8", 1, 245760, (0, 8192, 16384), (10, 4, 16, 128), (24576, 2048, 128, 1)),
    Recorded("attention BLNHC 16 fp8", 1, 245760, (0, 8192, 16384), (10, 4, 16, 128), (24576, 128, 512, 1)),
    Recorded("attention BHLNC 16 fp8", 1, 245760, (0, 2048, 4096), (10, 4, 16, 128), (24576, 6144, 128, 1)),
    Recorded("attention LBNHC 64", 2, 1966080, (0, 655360, 1310720), (10, 4, 64, 128), (32768, 128, 512, 1)),
    Recorded(
        "attention LBNHC 64 in kernel blocks of 16",
        2,
        1966080,
        (0, 655360, 1310720),
        (10, 4, 4, 16, 128),
        (32768, 8192, 128, 512, 1),
    ),
    Recorded(
        "attention LBHNC 64 in kernel blocks of 16",
        2,
        1966080,
        (0, 655360, 1310720),
        (10, 4, 4, 16, 128),
        (32768, 8192, 2048, 128, 1),
    ),
    Recorded("latent 576 LBNHC 64", 2, 2211840, (0, 737280, 1474560), (10, 1, 64, 576), (36864, 576, 576, 1)),
    Recorded("latent 576 BLNHC 64", 2, 2211840, (0, 73728, 147456), (10, 1, 64, 576), (110592, 576, 576, 1)),
    Recorded("latent 576 LBNHC 64 fp8", 1, 1105920, (0, 368640, 737280), (10, 1, 64, 576), (36864, 576, 576, 1)),
    Recorded("hybrid attention LBNHC 32", 2, 983040, (0, 327680, 655360), (10, 4, 32, 128), (16384, 128, 512, 1)),
    Recorded("hybrid state LBNHC 32", 1, 983040, (0, 327680, 655360), (10, 1, 1, 25152), (32768, 25152, 25152, 1)),
)
HYBRID = ("hybrid attention LBNHC 32", "hybrid state LBNHC 32")
"""Two of them that share an allocation, each with blocks of its own."""
