"""Slices: how a model's KV heads are shared out among records, and which of them a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import InvalidRequest

__all__ = ["MAX_HEAD_SHARES", "HeadGrid", "head_grid"]

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

    def slices_of(self, rank: int, num_ranks: int) -> range:
        """The slices that one of `num_ranks` tensor-parallel ranks holds whole.

        Raises:
            InvalidRequest: A share would be cut by the border of a rank, or heads are replicated over ranks.
        """
        if self.num_slices % num_ranks:
            raise InvalidRequest(
                "the tensor-parallel size must divide the slice grid", tp=num_ranks, num_slices=self.num_slices
            )
        share = self.num_slices // num_ranks
        return range(rank * share, (rank + 1) * share)


def head_grid(num_heads: int) -> HeadGrid:
    """The grid of a model with `num_heads` KV heads: one share per head, at most 8."""
    num_slices = max(shares for shares in range(1, MAX_HEAD_SHARES + 1) if num_heads % shares == 0)
    return HeadGrid(num_heads, num_slices)
