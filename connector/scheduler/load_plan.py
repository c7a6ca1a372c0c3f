"""Which part of which staged record goes to which block. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from connector.jobs import LoadPiece
from kvstore.api import Staged
from kvstore.errors import InternalError

__all__ = ["plan_load"]


def plan_load(
    staged: Staged, tables: Sequence[Sequence[int]], *, local_tokens: int, resume_tokens: int, block_tokens: int
) -> tuple[LoadPiece, ...]:
    """Cut the staged records to the blocks between the engine's own hit and the resume point.

    Args:
        staged: Leased records that serve at least `resume_tokens`.
        tables: For each group the request's block ids in token order.
        local_tokens: Blocks below hold the engine's own hit and are never written.
        resume_tokens: Blocks from here on are the engine's to compute and are never written.
        block_tokens: Tokens of a block.

    Raises:
        InternalError: A block to write is the null block, which belongs to nobody.
    """
    pieces = []
    for key, (start, stop) in zip(staged.keys, staged.spans, strict=True):
        first = max(start, local_tokens) // block_tokens
        last = min(stop, resume_tokens) // block_tokens
        if first >= last:
            continue
        block_ids = tuple(tables[key.group][first:last])
        if 0 in block_ids or len(block_ids) != last - first:
            raise InternalError("a load would write to the null block", key=key, first=first, last=last)
        pieces.append(
            LoadPiece(
                key=key,
                span_blocks=(stop - start) // block_tokens,
                first_block=first - start // block_tokens,
                block_ids=block_ids,
            )
        )
    return tuple(pieces)
