"""Stage 2: pages are exactly their tokens, in every layout of vLLM's backends, and no other byte is written.

The reference is torch's own indexing of the views, on the processor, in words of layer, head, token and channel; it
knows nothing of runs, rows and planes.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.gpu.kit import Kit
from benchmarks.gpu.layouts import HYBRID, RECORDED, Recorded
from connector.canonical.attention import AttentionPages, latent_pages
from connector.canonical.recurrent import StatePages
from connector.canonical.runs import LayerGeometry, PagePlan
from connector.canonical.slices import HeadGrid
from connector.device.base import PageGather
from connector.device.gpu import StreamDevice

__all__ = ["Group", "run"]

SOURCES = (7, 2, 5)
TARGETS = (1, 9, 4)
_LARGE_GPU = (1 << 34) + (1 << 24)
"""More than 2^31 of the widest words that copies use, of eight bytes."""
_LARGE_HOST = (1 << 31) + (1 << 24)


def run(kit: Kit) -> None:
    """Check all; every layout is told before the first wrong one fails the stage."""
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
        seed: Another one each time: what an earlier check left in memory must not look right.
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
    """Gather all slices, compare each with what it must be, and scatter them, each in two parts."""
    page_bytes = group.plan.decoded_bytes(len(sources))
    device = StreamDevice(
        kit.streams, ring_bytes=len(group.slices) * page_bytes, page_bytes_max=page_bytes, num_lanes=2
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
            threads.submit(copier.scatter, page.runs, [targets[first:last]], page.target, first, after)
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
