"""vLLM's `TieringOffloadingSpec` for an engine on a CPU: vLLM's own, apart from copies between blocks and host tier.

vLLM refuses that ("CPU Offloading is currently only supported on CUDA-alike and XPU GPUs"), since its worker copies on
a GPU's streams. Here torch copies a block, at once. Scheduler, manager, host tier and secondary tier are vLLM's and
ours.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class TieringOnCPU(TieringOffloadingSpec):
    """For chunks of one block."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return _CopyWorker(kv_caches, region)


class _CopyWorker(OffloadingWorker):
    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._caches = kv_caches
        self._region = region
        self._rows = [region.create_next_worker_view(one.page_size_bytes) for one in kv_caches.tensors]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        for row, blocks, chunks, block_ids in self._places(src_spec, dst_spec):
            row[chunks] = blocks[block_ids]
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        for row, blocks, chunks, block_ids in self._places(dst_spec, src_spec):
            blocks[block_ids] = row[chunks]
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def _places(
        self, gpu: GPULoadStoreSpec, cpu: LoadStoreSpec
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """For each tensor of each group its rows of the host tier, its blocks, and the indexes of both."""
        assert isinstance(cpu, CPULoadStoreSpec)
        start = 0
        for group, size in enumerate(gpu.group_sizes):
            chunks = torch.from_numpy(cpu.chunk_ids[start : start + size]).long()
            block_ids = torch.from_numpy(gpu.block_ids[start : start + size]).long()
            start += size
            for index in {ref.tensor_idx for ref in self._caches.group_data_refs[group]} if size else ():
                yield self._rows[index], self._caches.tensors[index].tensor, chunks, block_ids

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing waits: a copy is done when it is submitted."""

    def shutdown(self) -> None:
        self._rows.clear()
        self._region.cleanup()
