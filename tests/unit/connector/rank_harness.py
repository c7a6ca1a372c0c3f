"""Worker sides with small caches on a real store, driven as vLLM's workers drive them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from connector.identity import describe_namespace
from connector.jobs import LoadJob, SaveJob, StepJobs
from connector.prefix_hash import PrefixChain
from connector.scheduler.plans import plan_load
from connector.settings import ConnectorSettings
from connector.worker.side import WorkerSide
from kvstore.api import PrefixQuery, Staged
from kvstore.model.layout import span_ending_at
from kvstore.testing.waiting import eventually, soon
from tests.unit.connector.device_contract import Cache
from tests.unit.connector.support import BLOCK, MIB, PAGE, WEIGHTS, LoopBridge, make_facts, make_shape, tokens_of

HEADS = 4
NUM_BLOCKS = 32
TOKENS = tokens_of("prompt", 170)
SOURCE = (7, 3, 4, 5, 30, 29, 28, 1, 12, 9)
"""Blocks that hold the prompt where it is saved, and"""
TARGET = (20, 21, 22, 2, 31, 6, 5, 4, 8, 10)
"""where it is loaded to."""


class Rank:
    """One worker side with a cache of its own."""

    def __init__(
        self,
        bridge: LoopBridge,
        *,
        rank: int = 0,
        ranks: int = 1,
        stage: int = 0,
        stages: int = 1,
        layout: str = "layer_outer",
        element_bytes: int = 4,
        channels: int = 6,
        seed: int = 1,
        **settings: Any,
    ) -> None:
        dtype = {2: "bfloat16", 4: "float32"}[element_bytes]
        self.heads = HEADS // ranks
        self.facts = make_facts(
            total_heads=HEADS,
            rank_heads=self.heads,
            tp_rank=rank,
            tp_size=ranks,
            stage=stage,
            pp_size=stages,
            num_blocks=NUM_BLOCKS,
            head_size=channels // 2,
            head_size_v=channels // 2,
            element_bytes=element_bytes,
            dtype=dtype,
        )
        self.shape = make_shape(self.facts)
        self.cache = Cache(layout, 2, NUM_BLOCKS, self.heads, BLOCK, channels, element_bytes, seed, "cpu")
        self.layers = self.cache.tensors()
        self.bridge = bridge
        values = {"pinned_bytes": 8 * MIB, "stall_timeout_ms": 5000, **settings}
        self.side = WorkerSide(ConnectorSettings(**values), self.facts, self.shape, bridge, num_cores=2)
        self.side.register(lambda _: self.layers)
        assert self.side.refusal is None
        self.description = describe_namespace(self.facts, self.shape, WEIGHTS)
        bridge.run(lambda store: store.inner.open_namespace(self.description, deadline=soon()))

    @property
    def meters(self) -> Any:
        return self.side.meters

    def jobs(self, ends: tuple[int, ...] = (64, 128, 160), first_id: int = 0) -> StepJobs:
        """Save jobs for the pages and the tail of the prompt that stands in `SOURCE`."""
        chain = PrefixChain(BLOCK)
        chain.extend(TOKENS)
        jobs = []
        for number, end in enumerate(ends, first_id):
            span = span_ending_at(end, PAGE)
            jobs.append(
                SaveJob(
                    number,
                    self.description.id,
                    chain.boundaries[end // BLOCK - 1].prefix,
                    0,
                    span.start,
                    end,
                    (SOURCE[span.start // BLOCK : end // BLOCK],),
                )
            )
        return StepJobs(saves=tuple(jobs))

    def save(self, ends: tuple[int, ...] = (64, 128, 160)) -> None:
        """Save, overwrite the blocks at once as the engine may, and wait for the report."""
        kept = [layer.clone() for layer in self.layers]
        self.side.save(self.jobs(ends))
        for layer in self.layers:
            layer[list(SOURCE)] = 0
        assert self.side.saver is not None
        assert self.side.saver.drain(10)
        for layer, content in zip(self.layers, kept, strict=True):
            layer.copy_(content)
        report = self.side.take_report()
        assert report is not None
        assert (report.saves_done, report.saves_failed) == (dict.fromkeys(range(len(ends)), 1), set())
        assert self.side.take_report() is None

    def stage(self, local_tokens: int = 0) -> Staged:
        chain = PrefixChain(BLOCK)
        chain.extend(TOKENS)
        query = PrefixQuery(self.description.id, tuple(chain.boundaries), local_tokens, 160, BLOCK)
        staged = self.bridge.run(lambda store: store.inner.stage(query, deadline=soon()))
        assert staged.lease is not None
        return staged

    def load_job(self, staged: Staged, request_id: str = "r", local_tokens: int = 0) -> StepJobs:
        pieces = plan_load(
            staged, self.shape.groups, [TARGET], local_tokens=local_tokens, resume_tokens=staged.resume_tokens
        )
        assert staged.lease is not None
        return StepJobs(loads=(LoadJob(request_id, staged.lease, pieces),))

    def result(self) -> tuple[set[str], set[str]]:
        """Wait for loads to be reported."""
        return eventually(self.side.take_results, holds=lambda results: results[0])

    def blocks(self, ids: tuple[int, ...]) -> torch.Tensor:
        """uint8 [layers, blocks, heads, bytes]"""
        whole = torch.stack([layer[list(ids)] for layer in self.layers]).contiguous()
        return whole.view(torch.uint8).reshape(2, len(ids), self.heads, -1)

    def copier_that(self, before: Callable[[], None]) -> None:
        """Call `before` in front of every scatter."""
        loader = self.side.loader
        assert loader is not None
        inner = loader._groups[0].copier

        class Slow:
            plane_width = inner.plane_width
            gather_all = staticmethod(inner.gather_all)

            @staticmethod
            def scatter_all(*args: Any) -> None:
                before()
                inner.scatter_all(*args)

        loader._groups = (replace(loader._groups[0], copier=Slow()),)


Make = Callable[..., Rank]


@contextmanager
def ranks_on(bridge: LoopBridge) -> Iterator[Make]:
    """Make ranks; at the end they are shut down, and none may hold a buffer."""
    made: list[Rank] = []

    def make(**changes: Any) -> Rank:
        made.append(Rank(bridge, **changes))
        return made[-1]

    yield make
    for one in made:
        one.side.shutdown()
        assert one.side.saver is not None
        eventually(lambda one=one: one.side.saver._pages.used_bytes == 0)  # the store's thread gives them back
        assert one.side._save_threads is not None
        assert one.side._save_threads.used_bytes == 0
        assert (pool := one.side._pool) is None or pool.used_bytes == 0


def fill(rank: Rank) -> Rank:
    """Content as activations have it, so that the codec finds something to compress."""
    generator = torch.Generator().manual_seed(3)
    for layer in rank.layers:
        layer.copy_(torch.randn(layer.shape, generator=generator))
    return rank
