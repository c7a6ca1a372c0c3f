"""The worker side of the connector: one object per rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from connector.canonical.attention import AttentionPages
from connector.canonical.tiling import prove_tiling
from connector.device.cpu import CpuCopier
from connector.facts import AttentionFacts, EngineFacts
from connector.identity import CacheShape
from connector.jobs import RankReport, StepJobs
from connector.scheduler.bridge import Bridge
from connector.settings import ConnectorSettings
from connector.worker.loader import Loader
from connector.worker.saver import Saver
from connector.worker.staging import BufferPool
from kvstore.codec import CodecPool, chain_for_element_bytes
from kvstore.errors import InvalidRequest
from kvstore.runtime.meters import Meters

__all__ = ["WorkerSide", "rank_page_bytes"]

_DRAIN_S = 4.0  # vLLM kills its workers after 5 s
_MAX_CODEC_THREADS = 4
_RECEIVE_BYTES = 64 << 20
_EMPTY_STEP_S = 0.005


class WorkerSide:
    """Proves the layout of this rank's cache, then saves and loads what the scheduler side asks for.

    Attributes:
        refusal: Why this rank's cache cannot be cached, or `None`; known after `register`.
    """

    def __init__(
        self, settings: ConnectorSettings, facts: EngineFacts, shape: CacheShape, bridge: Bridge, *, num_cores: int
    ) -> None:
        self._settings = settings
        self._facts = facts
        self._shape = shape
        self._bridge = bridge
        self._pool = CodecPool(
            num_threads=max(1, min(_MAX_CODEC_THREADS, num_cores)),
            limit_bytes=max(settings.pinned_bytes // 2, 64 << 20),
        )
        self.meters = Meters()
        self.refusal: str | None = "cache tensors were not registered"
        self.saver: Saver | None = None
        self.loader: Loader | None = None

    def register(self, layers: Sequence[torch.Tensor]) -> None:
        """Take the cache tensors of the group, `[blocks, heads, tokens, channels]` each, and prove their layout."""
        attention = self._facts.attention
        assert attention is not None
        try:
            slices = self._shape.grid.slices_of(self._facts.tp_rank, self._facts.tp_size)
            plan = self._prove(attention, slices, layers)
        except InvalidRequest as error:
            self.refusal = str(error)
            return
        copier = CpuCopier(layers)
        self.saver = Saver(
            self._bridge,
            copier,
            plan,
            self._shape.layout.groups[0],
            page_tokens=self._shape.layout.page_tokens,
            slices=slices,
            chain=chain_for_element_bytes(attention.element_bytes),
            pool=self._pool,
            buffers=BufferPool(max(self._settings.pinned_bytes // 2, rank_page_bytes(attention, self._shape))),
            meters=self.meters,
        )
        self.loader = Loader(
            self._bridge,
            copier,
            plan,
            slices=slices,
            pool=self._pool,
            buffers=BufferPool(_RECEIVE_BYTES),
            stall_s=self._settings.stall_timeout_ms / 1000,
            meters=self.meters,
        )
        self.refusal = None

    def _prove(self, attention: AttentionFacts, slices: range, layers: Sequence[torch.Tensor]) -> AttentionPages:
        """The page plan for these tensors; raises `InvalidRequest` unless every content byte is in it exactly once."""
        shape = (attention.rank_heads, attention.block_tokens, attention.head_size + attention.head_size_v)
        for name, layer in zip(attention.layer_names, layers, strict=True):
            if tuple(layer.shape[1:]) != shape or layer.element_size() != attention.element_bytes:
                raise InvalidRequest("unknown cache layout", layer=name, expected=shape, seen=tuple(layer.shape[1:]))
            if layer.stride(3) != 1 or layer.stride(2) != shape[2] or layer.shape[0] != self._facts.num_blocks:
                raise InvalidRequest("a head's bytes do not stand together", layer=name, stride=layer.stride())
            if layer.stride() != layers[0].stride():
                raise InvalidRequest("layers of one group differ in layout", layer=name)
        head_stride = layers[0].stride(1) * attention.element_bytes
        plan = AttentionPages(
            num_layers=len(layers),
            grid=self._shape.grid,
            first_head=slices.start * self._shape.grid.heads_per_slice,
            block_tokens=attention.block_tokens,
            cell_bytes=attention.cell_bytes,
            head_stride=head_stride,
        )
        content = [(head * head_stride, head * head_stride + attention.cell_bytes) for head in range(shape[0])]
        prove_tiling(plan, slices, [content] * len(layers))
        return plan

    def start_loads(self, jobs: StepJobs) -> None:
        if self.loader is not None:
            self.loader.load(jobs.loads)

    def save(self, jobs: StepJobs) -> None:
        if self.saver is not None:
            self.saver.save(jobs.saves)

    def take_results(self, *, computes: bool = True) -> tuple[set[str], set[str]]:
        """Finished and failed loads.

        In a step that computes nothing the rank waits a moment for a load to end: it would otherwise spin for the next
        step, in Python, and hold the interpreter's lock against the threads that load.
        """
        if self.loader is None:
            return set(), set()
        return self.loader.take_results(wait_s=0.0 if computes else _EMPTY_STEP_S)

    def take_report(self) -> RankReport | None:
        return self.saver.take_report() if self.saver is not None else None

    def status(self) -> Mapping[str, Any]:
        """Plain values for people and tests."""
        return {"refusal": self.refusal, **self.meters.snapshot()}

    def shutdown(self) -> None:
        """Send what is still on its way, within a bound, then stop. Idempotent."""
        if self.saver is not None:
            self.saver.drain(_DRAIN_S)
        self._pool.close()


def rank_page_bytes(attention: AttentionFacts, shape: CacheShape) -> int:
    """Host bytes of one page of all slices of one rank."""
    return attention.head_token_bytes * attention.rank_heads * shape.layout.page_tokens
