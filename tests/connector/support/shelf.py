"""A second cache beside ours: keeps blocks in host memory, as vLLM's own CPU offloading does on a GPU.

vLLM's offloading connectors refuse a CPU engine. This one has their shape: per-block saves by vLLM's own hashes,
asynchronous loads, metadata of its own in both directions. For models with one group of full attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import group_kernel_blocks

__all__ = ["ShelfConnector"]

Places = list[tuple[bytes, int]]
"""Hashes of blocks, and the block that each is in or goes to."""


@dataclass
class _Step(KVConnectorMetadata):
    saves: Places = field(default_factory=list)
    loads: dict[str, Places] = field(default_factory=dict)


@dataclass
class _Kept(KVConnectorWorkerMetadata):
    hashes: set[bytes]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> _Kept:
        assert isinstance(other, _Kept)
        return _Kept(self.hashes & other.hashes)


class ShelfConnector(KVConnectorBase_V1, SupportsHMA):
    """Both roles; only what a role needs is used.

    Attributes:
        shelf: Worker: blocks by hash, all layers.
        known: Scheduler: what the worker has said to have.
        num_hits: Scheduler: requests resumed from the shelf.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        (group,) = kv_cache_config.kv_cache_groups
        self._block_tokens = group.kv_cache_spec.block_size
        self._layer_names = group.layer_names
        self._layers: list[torch.Tensor] = []
        self._requests: dict[str, Any] = {}
        self._step = _Step()
        self._kept: set[bytes] = set()
        self._loaded: set[str] = set()
        self.shelf: dict[bytes, list[torch.Tensor]] = {}
        self.known: set[bytes] = set()
        self.num_hits = 0

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def forget(self) -> None:
        """Lose everything, as a cache that was too small."""
        self.shelf.clear()
        self.known.clear()

    # ---- scheduler

    def on_new_request(self, request: Any) -> None:
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        first, last = num_computed_tokens // self._block_tokens, (request.num_tokens - 1) // self._block_tokens
        held = first
        while held < last and request.block_hashes[held] in self.known:
            held += 1
        return (held - first) * self._block_tokens, held > first

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens == 0:
            return
        (block_ids,) = blocks.get_block_ids()
        last = len(block_ids)
        hashes = request.block_hashes[:last]
        count = num_external_tokens // self._block_tokens
        first = next(index for index in range(last) if self._is_run(hashes[index : index + count]))
        self._step.loads[request.request_id] = list(
            zip(hashes[first : first + count], block_ids[first : first + count], strict=True)
        )
        self.num_hits += 1

    def _is_run(self, hashes: list[bytes]) -> bool:
        return all(block_hash in self.known for block_hash in hashes)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        step, self._step = self._step, _Step()
        computed = {request.req_id: request.num_computed_tokens for request in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            (block_ids,) = scheduler_output.kv_connector_block_state.get_block_ids(request_id)
            full = (computed[request_id] + scheduled) // self._block_tokens
            hashes = self._requests[request_id].block_hashes[:full]
            for block_hash, block_id in zip(hashes, block_ids, strict=False):
                if block_hash not in self.known and block_id:
                    step.saves.append((block_hash, block_id))
        return step

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, _Kept):
            self.known |= meta.hashes

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        del self._requests[request.request_id]
        return False, None

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        num_blocks = self._kv_cache_config.num_blocks
        self._layers = [group_kernel_blocks(kv_caches[name], num_blocks) for name in self._layer_names]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request_id, places in self._metadata().loads.items():
            for block_hash, block_id in places:
                for layer, content in zip(self._layers, self.shelf[block_hash], strict=True):
                    layer[block_id].copy_(content)
            self._loaded.add(request_id)

    def wait_for_save(self) -> None:
        for block_hash, block_id in self._metadata().saves:
            self.shelf[block_hash] = [layer[block_id].clone() for layer in self._layers]
            self._kept.add(block_hash)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        loaded, self._loaded = self._loaded, set()
        return set(), loaded

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        kept, self._kept = self._kept, set()
        return _Kept(kept) if kept else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are whole requests."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Saves are whole blocks."""

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def _metadata(self) -> _Step:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _Step)
        return metadata
