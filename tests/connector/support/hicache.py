"""SGLang's HiCache without SGLang: its interface, real where the package is at hand, and pools of host memory.

The real classes come from the published package: an installed one, or in the folder `.work/sglang` of this checkout or
the one that KVSTORE_TEST_SGLANG names. `tools/other_packages.py sglang` unpacks it there. Its packages import what
needs CUDA, so the modules are imported below empty packages. `sglang.srt.runtime_context`, with the settings, is made
up.
"""

from __future__ import annotations

import enum
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
_INTERFACE = "sglang.srt.mem_cache.hicache_storage"
_PACKAGES = ("sglang", "sglang.srt", "sglang.srt.mem_cache")
RELEASE = "0.5.23"


def find_sglang() -> Path | None:
    """The folder of the real package `sglang`; `None`: it is not at hand."""
    places = [Path(os.environ.get("KVSTORE_TEST_SGLANG", "/nowhere")), ROOT / ".work" / "sglang"]
    found = importlib.util.find_spec("sglang") if "sglang" not in sys.modules else None
    if found is not None and found.origin is not None:
        places.append(Path(found.origin).parent.parent)
    return next((p / "sglang" for p in places if (p / "sglang/srt/mem_cache/hicache_storage.py").exists()), None)


@contextmanager
def hicache(arguments: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """The backend's module and the interface's, for the block.

    Args:
        arguments: SGLang's settings in effect. `is_multimodal` is one of the model's own configuration.
    """
    before = set(sys.modules)
    real = find_sglang()
    try:
        for name in _PACKAGES:
            package = _module(name)
            package.__path__ = [str(real.joinpath(*name.split(".")[1:]))] if real is not None else []
        if real is None:
            _module("sglang.version").__version__ = RELEASE  # type: ignore[attr-defined]
            vars(_module(_INTERFACE)).update(_stand_in())
        context: Any = _module("sglang.srt.runtime_context")
        serving = SimpleNamespace(weight_version="default")
        changes: list[tuple[str, dict[str, str]]] = []
        in_effect = SimpleNamespace(resolved_server_args_dict=lambda: vars(arguments) | vars(serving))
        vars(in_effect).update(_overrides_log=changes, overrides_log=lambda: list(changes))
        context.get_context, context.get_model = lambda: in_effect, lambda: arguments
        context.get_serving = lambda: serving
        context.process_model_config = lambda: SimpleNamespace(is_multimodal=getattr(arguments, "is_multimodal", False))
        yield SimpleNamespace(
            interface=importlib.import_module(_INTERFACE),
            backend=importlib.import_module("connector.sglang.backend"),
            factory=importlib.import_module("sglang.srt.mem_cache.storage.backend_factory") if real else None,
            serving=serving,
            changes=changes,
            in_effect=in_effect,
        )
    finally:
        for name in set(sys.modules) - before:
            if name.startswith(("sglang", "connector.sglang.backend")):
                del sys.modules[name]


def _module(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=name in _PACKAGES)
    sys.modules[name] = module
    return module


def _stand_in() -> dict[str, Any]:
    """As much of SGLang's interface as a storage backend sees."""

    class HiCacheStorage:
        """The base class."""

    class PoolHitPolicy(enum.StrEnum):
        ALL_PAGES = "all_pages"
        TRAILING_PAGES = "trailing_pages"
        BLOCK_GROUPS = "block_groups"

    @dataclass
    class HiCacheStorageExtraInfo:
        prefix_keys: list[str] | None = None
        extra_info: dict[str, Any] | None = None

    @dataclass
    class PoolTransfer:
        name: str
        host_indices: torch.Tensor | None = None
        device_indices: torch.Tensor | None = None
        keys: list[str] | None = None
        hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES

    @dataclass
    class PoolTransferResult:
        kv_hit_pages: int
        extra_pool_hit_pages: dict[str, int]
        restorable_prefix_pages: list[int] | None = None

        @classmethod
        def empty(cls) -> Any:
            return cls(0, {})

    @dataclass
    class HiCacheStorageConfig:
        tp_rank: int
        tp_size: int
        pp_rank: int
        pp_size: int
        attn_cp_rank: int
        attn_cp_size: int
        is_mla_model: bool
        enable_storage_metrics: bool
        is_page_first_layout: bool
        model_name: str | None
        tp_lcm_size: int | None = None
        should_split_heads: bool = False
        dp_rank: int = 0
        extra_config: dict[str, Any] | None = None
        dcp_size: int = 1
        dcp_rank: int = 0

        @property
        def is_storage_writer(self) -> bool:
            return not self.is_mla_model or self.tp_rank == self.dcp_rank

    own = (HiCacheStorage, PoolHitPolicy, HiCacheStorageExtraInfo, PoolTransfer, PoolTransferResult)
    return {kind.__name__: kind for kind in (*own, HiCacheStorageConfig)}


class HostPool:
    """A pool of host memory with the interface of SGLang's, page first: keys of a page, then its values.

    Attributes:
        kv_buffer: [2, slots, heads, bytes of a head] or, with `page_head`, [2, pages, heads, tokens, bytes of a head].
    """

    def __init__(
        self,
        num_pages: int = 64,
        page_size: int = 4,
        heads: int = 4,
        *,
        head_elements: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        layout: str = "page_first",
    ) -> None:
        self.page_size, self.num_pages, self.layout, self.dtype = page_size, num_pages, layout, dtype
        self.start_layer, self.end_layer, self.heads = 0, 2, heads
        inner = (heads, page_size) if layout == "page_head" else (page_size, heads)
        self.kv_buffer = torch.zeros((2, num_pages, *inner, head_elements), dtype=dtype)

    def slots(self, *pages: int) -> torch.Tensor:
        """The slots of some pages."""
        return torch.cat([torch.arange(page * self.page_size, (page + 1) * self.page_size) for page in pages])

    def fill(self, page: int, seed: int) -> None:
        """Give a page a content of its own."""
        made = torch.Generator().manual_seed(seed)
        shape = self.kv_buffer[:, page].shape
        self.kv_buffer[:, page] = torch.randn(shape, generator=made).to(self.dtype)

    def content(self, page: int) -> torch.Tensor:
        return self.kv_buffer[:, page].clone()

    def _addresses(self, indices: torch.Tensor, parts: int) -> tuple[list[int], list[int]]:
        part_bytes = self.kv_buffer[0, 0].nbytes // parts
        found = [
            self.kv_buffer[half, slot // self.page_size].data_ptr() + part * part_bytes
            for slot in indices[:: self.page_size].tolist()
            for part in range(parts)
            for half in range(2)
        ]
        return found, [part_bytes] * len(found)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        return self._addresses(indices, 1)

    def get_split_heads_page_buffer_meta(self, indices: torch.Tensor, split: int) -> tuple[list[int], list[int]]:
        return self._addresses(indices, split)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.kv_buffer[:, index // self.page_size].flatten()

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self.kv_buffer[:, 0].numel(), dtype=self.dtype)

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        self.kv_buffer[:, index // self.page_size] = page.reshape(self.kv_buffer[:, 0].shape)


class StatePool(HostPool):
    """A pool of states: pages of one slot, in one copy."""

    def __init__(self) -> None:
        super().__init__(64, 1, 1, head_elements=200, dtype=torch.float32)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        raise NotImplementedError


def filled(num_pages: int, seed: int = 0, **kind: Any) -> tuple[HostPool, list[str]]:
    """A pool whose first pages have contents, and their keys."""
    pool = HostPool(**kind)
    for page in range(num_pages):
        pool.fill(page, seed + page)
    return pool, [f"{seed}-{page:03}" for page in range(num_pages)]


def holds(pool: HostPool, pages: list[int], like: HostPool, theirs: list[int]) -> bool:
    """Whether these pages of one pool are bit for bit those of another."""
    return all(
        torch.equal(pool.content(one).view(torch.uint8), like.content(other).view(torch.uint8))
        for one, other in zip(pages, theirs, strict=True)
    )
