"""Slices: how a model's cache is divided into records, and which of them a rank holds and writes."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import InvalidRequest

MAX_HEAD_SHARES = 8


@dataclass(frozen=True, slots=True)
class HeadGrid:
    """All KV heads of a model in equal shares; a function of the model alone.

    Attributes:
        num_heads: KV heads of the whole model.
        num_slices: Shares; divides `num_heads`.
    """

    num_heads: int
    num_slices: int

    @property
    def heads_per_slice(self) -> int:
        return self.num_heads // self.num_slices


@dataclass(frozen=True, slots=True)
class SliceGrid:
    """The slices of one group and how one engine's ranks share them.

    Each pipeline stage has slices of its own, of its layers, one stage's after the other's; its tensor-parallel ranks
    share them. Neighbouring ranks that hold the same bytes are replicas: all read a slice, one of them writes it.

    Attributes:
        stage_slices: Of one stage.
        replicas: Ranks of a stage that hold the same slices.
        num_stages: Pipeline stages.
    """

    stage_slices: int
    replicas: int = 1
    num_stages: int = 1

    @property
    def num_slices(self) -> int:
        """Of the whole model."""
        return self.num_stages * self.stage_slices

    def slices_of(self, rank: int, num_ranks: int, stage: int = 0) -> range:
        """The slices that one of `num_ranks` ranks of a stage holds whole.

        Raises:
            InvalidRequest: A slice would be split between ranks.
        """
        shards = num_ranks // self.replicas
        if num_ranks % self.replicas or self.stage_slices % shards:
            raise InvalidRequest(
                "the tensor-parallel size must divide the slice grid", tp=num_ranks, num_slices=self.stage_slices
            )
        share = self.stage_slices // shards
        first = stage * self.stage_slices + rank // self.replicas * share
        return range(first, first + share)

    def writes(self, rank: int, prefix: bytes) -> bool:
        """Whether this rank is the one of its replicas that writes the record of `prefix`: they take turns."""
        return prefix[0] % self.replicas == rank % self.replicas


def head_grid(num_heads: int) -> HeadGrid:
    """The grid of a model with `num_heads` KV heads: one share per head, at most 8."""
    num_slices = max(shares for shares in range(1, MAX_HEAD_SHARES + 1) if num_heads % shares == 0)
    return HeadGrid(num_heads, num_slices)


def heads_on_ranks(grid: HeadGrid, rank_heads: int, num_ranks: int, num_stages: int = 1) -> SliceGrid:
    """The shares of the heads on an engine whose stages have `num_ranks` ranks that hold `rank_heads` each.

    Raises:
        InvalidRequest: Ranks hold parts of shares, or overlap without being replicas.
    """
    replicas, rest = divmod(rank_heads * num_ranks, grid.num_heads)
    if rest or replicas == 0 or num_ranks % replicas:
        raise InvalidRequest(
            "the KV heads are not shared out evenly", heads=grid.num_heads, tp=num_ranks, per_rank=rank_heads
        )
    shares = SliceGrid(grid.num_slices, replicas, num_stages)
    shares.slices_of(0, num_ranks)
    return shares
