"""A round trip through the real device at start-up, while the cache is still empty, to prove that copies copy.

`canonical.tiling` and the tests prove the byte order of pages, on any machine. Only the machine at hand can prove that
its streams, kernels and layout do what those integers mean; if they do not, nothing is cached.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from connector.device.base import Device, PageGather
from connector.device.host_pages import HostPages
from connector.identity import GroupShape
from connector.worker.groups import RankGroup
from kvstore.errors import InvalidRequest

__all__ = ["check_bytes", "check_round_trip"]

_BLOCKS = 2
_GAPS_BYTES = 1 << 20
"""Between pages, which start at multiples of 512 bytes."""


def check_bytes(groups: Sequence[GroupShape]) -> int:
    """Host memory that the check of each of these groups needs."""
    return max(group.facts.rank_block_bytes * (1 if group.is_state else _BLOCKS) for group in groups) + _GAPS_BYTES


@torch.inference_mode()
def check_round_trip(group: RankGroup, layers: Sequence[torch.Tensor], device: Device, pages: HostPages) -> None:
    """Copy some blocks to others through host pages, compare, and restore the old content.

    Args:
        group: The group.
        layers: Its cache tensors, dimension 0 = blocks, whose content nobody uses yet.
        device: Their device.
        pages: Host memory of that device, at least `check_bytes`.

    Raises:
        InvalidRequest: The copies are not equal; the group must not be cached.
    """
    num_blocks = 1 if group.shape.is_state else _BLOCKS
    feeds = group.shape.facts.feeds
    low, high = _disjoint_tables(1 + max(feeds), num_blocks, layers[0].shape[0])
    caches = [(layer.view(torch.uint8), feed) for layer, feed in zip(layers, feeds, strict=True)]
    kept = [cache[low[feed] + high[feed]] for cache, feed in caches]  # indexing with a list copies
    equal = True
    # both ways, with different content: leftovers of the first copy cannot make the second one look right
    for seed, (sources, targets) in enumerate([(low, high), (high, low)]):
        generator = torch.Generator().manual_seed(seed)
        for cache, feed in caches:
            noise = torch.randint(0, 256, cache[sources[feed]].shape, dtype=torch.uint8, generator=generator)
            cache[sources[feed]] = noise.to(cache.device)
        _copy(group, device, pages, sources, targets)
        equal &= all(torch.equal(cache[sources[feed]], cache[targets[feed]]) for cache, feed in caches)
    for (cache, feed), content in zip(caches, kept, strict=True):
        cache[low[feed] + high[feed]] = content
    if not equal:
        raise InvalidRequest("a copy through host memory changes the cache", layer=group.shape.facts.layer_names[0])


def _disjoint_tables(num_tables: int, num_blocks: int, cache_blocks: int) -> tuple[list[list[int]], list[list[int]]]:
    """Tables of the cache's first and last blocks, all disjoint, since layers of different tables may share memory."""
    if 2 * num_tables * num_blocks >= cache_blocks:
        raise InvalidRequest("the cache is too small", blocks=cache_blocks, needed=2 * num_tables * num_blocks + 1)
    starts = range(0, num_tables * num_blocks, num_blocks)
    low = [list(range(1 + start, 1 + start + num_blocks)) for start in starts]
    high = [list(range(cache_blocks - 1 - start, cache_blocks - 1 - start - num_blocks, -1)) for start in starts]
    return low, high


def _copy(
    group: RankGroup, device: Device, host: HostPages, sources: list[list[int]], targets: list[list[int]]
) -> None:
    num_blocks = len(sources[0])
    page_bytes = group.plan.decoded_bytes(num_blocks)
    pages = []
    for slice_index in group.held:
        memory = host.take(page_bytes)
        assert memory is not None, "the host has no room for a page"
        pages.append(PageGather(group.plan.runs(slice_index, num_blocks), sources, memory))
    for page, ticket in zip(pages, group.copier.gather_all(pages), strict=True):
        if ticket is None:
            raise InvalidRequest("the device has no room for a page", page_bytes=page.target.numel())
        ticket.wait()
    after = device.fence()
    for page in pages:
        group.copier.scatter(page.runs, targets, page.target, 0, after)
        host.put(page.target)
