"""One of SGLang's pools of host memory: its pages as memory, and what their bytes depend on."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvstore.errors import InvalidRequest

KV = "kv"
MAMBA = "mamba"
Page = list[memoryview]


@dataclass(frozen=True, slots=True)
class Ranks:
    """How the ranks of an engine share a page.

    Attributes:
        slices: The slices that this rank holds; several only if heads are split.
        num_slices: Of a page.
        writes: This rank stores them.
    """

    slices: tuple[int, ...]
    num_slices: int
    writes: bool

    @classmethod
    def of(cls, config: Any, pool: str, host_pool: Any) -> Ranks:
        """The share of one pool's pages, from SGLang's `HiCacheStorageConfig`. Where the ranks hold the same, the first
        one writes; Mamba's state is divided even if the KV cache is not.

        Raises:
            InvalidRequest: The ranks hold the same of other pools, but each has heads of its own in this one.
        """
        rank, size = int(config.tp_rank), int(config.tp_size)
        if config.is_mla_model and pool != MAMBA:
            if size > 1 and hasattr(host_pool, "head_num"):  # as of an EAGLE draft with heads, for a target with MLA
                raise InvalidRequest("not cached: SGLang stores the first rank's heads alone of this pool", pool=pool)
            return cls((0,), 1, bool(config.is_storage_writer))
        if pool == KV and config.should_split_heads:  # engines of another tensor-parallel size can read such slices
            share = int(config.tp_lcm_size) // size
            return cls(tuple(range(rank * share, (rank + 1) * share)), int(config.tp_lcm_size), writes=True)
        return cls((rank,), size, writes=True)


class PoolMemory:
    """The pages of one pool.

    A page is read and written where it is, as the buffers that the pool tells (`get_page_buffer_meta`), or as one copy
    that the pool makes (`get_data_page`). The bytes of both may differ in order.

    Args:
        pool: SGLang's host pool.
        in_place: Use the buffers, where the pool tells them.
        split: Groups of heads that a page is divided into; 1: it is not divided.
    """

    def __init__(self, pool: Any, *, in_place: bool, split: int) -> None:
        self._pool = pool
        self._split = split
        self.page_tokens = int(getattr(pool, "page_size", 1) or 1)
        found = self._find_buffers(torch.zeros(self.page_tokens, dtype=torch.int64)) if in_place else None
        self.in_place = found is not None
        self._piece_bytes = [size for _, size in found] if found is not None else [self.new_page().nbytes]
        if split > 1 and (not self.in_place or len(self._piece_bytes) % split):
            raise InvalidRequest("heads that are split need a pool that tells their buffers", layout=self._layout)

    @property
    def _layout(self) -> str:
        return str(getattr(self._pool, "layout", ""))

    @property
    def element_bytes(self) -> int | None:
        """Width of a page's elements; `None`: not known, or not all the same."""
        dtype = getattr(self._pool, "dtype", None)
        return dtype.itemsize if isinstance(dtype, torch.dtype) and not hasattr(self._pool, "temporal_dtype") else None

    def describe(self) -> Mapping[str, Any]:
        """What the bytes of a page depend on, beside the model."""
        pool = self._pool
        dtypes = [getattr(pool, name, None) for name in ("dtype", "temporal_dtype", "conv_dtype")]
        return {
            "class": type(pool).__name__,
            "layout": self._layout,
            "order": "buffers" if self.in_place else "flat",
            "piece_bytes": self._piece_bytes[: len(self._piece_bytes) // self._split],
            "dtypes": [str(dtype) for dtype in dtypes if dtype is not None],
            "layers": [int(getattr(pool, name, 0) or 0) for name in ("start_layer", "end_layer")],
            "format": str(getattr(pool, "storage_format_tag", None) or ""),
        }

    def new_page(self) -> torch.Tensor:
        """Memory for a page that the pool then takes as a copy."""
        page: torch.Tensor = self._pool.get_dummy_flat_data_page()
        return page

    def pages(self, host_indices: torch.Tensor | None, num_pages: int) -> list[Page]:
        """The pages of slots in place.

        Raises:
            InvalidRequest: There are not as many slots as these pages have.
        """
        host_indices = self.checked(host_indices, num_pages)
        found = self._find_buffers(host_indices)
        if found is None or len(found) != num_pages * len(self._piece_bytes):
            raise InvalidRequest("the pool tells other buffers than at the start", layout=self._layout)
        views = [view_at(address, size) for address, size in found]
        step = len(self._piece_bytes)
        return [views[at : at + step] for at in range(0, len(views), step)]

    def copies(self, host_indices: torch.Tensor | None, num_pages: int) -> list[Page]:
        """Copies of the pages of slots.

        Raises:
            InvalidRequest: There are not as many slots as these pages have.
        """
        host_indices = self.checked(host_indices, num_pages)
        return [[view_of(self._pool.get_data_page(slot, flat=True))] for slot in self._first_slots(host_indices)]

    def put(self, host_indices: torch.Tensor, pages: Sequence[torch.Tensor]) -> None:
        """Write copies of pages to the first of these slots."""
        for slot, page in zip(self._first_slots(host_indices), pages, strict=False):
            self._pool.set_from_flat_data_page(slot, page)

    def _first_slots(self, host_indices: torch.Tensor) -> list[int]:
        slots: list[int] = host_indices[:: self.page_tokens].tolist()
        return slots

    def checked(self, host_indices: torch.Tensor | None, num_pages: int) -> torch.Tensor:
        """The slots of some pages.

        Raises:
            InvalidRequest: There are not as many slots as these pages have.
        """
        expected = num_pages * self.page_tokens
        if host_indices is None or host_indices.numel() != expected:
            seen = None if host_indices is None else host_indices.numel()
            raise InvalidRequest("expected the slots of whole pages", expected=expected, seen=seen)
        return host_indices

    def _find_buffers(self, host_indices: torch.Tensor) -> list[tuple[int, int]] | None:
        """Address and bytes of each buffer, page by page; `None`: the pool has none that can be addressed."""
        try:
            if self._split > 1:
                found = self._pool.get_split_heads_page_buffer_meta(host_indices, self._split)
            else:
                found = self._pool.get_page_buffer_meta(host_indices)
        except (AttributeError, NotImplementedError, ValueError):
            return None
        if not found or not found[0]:
            return None
        addresses, sizes = found
        sizes = [sizes] * len(addresses) if isinstance(sizes, int) else sizes
        return [(int(address), int(size)) for address, size in zip(addresses, sizes, strict=True)]


def view_at(address: int, num_bytes: int) -> memoryview:
    """Memory of a pool, which outlives every call of its engine."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def view_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes; a copy if they are not contiguous."""
    array: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
