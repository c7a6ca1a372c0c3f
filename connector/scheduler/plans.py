"""Which pages of a request became final, and which part of which staged record goes to which block. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from connector.canonical.attention import may_lose_blocks
from connector.identity import GroupShape
from connector.jobs import BlockIds, LoadPiece
from connector.scheduler.hook_facts import StateOffer
from kvstore.api import Staged
from kvstore.errors import InternalError
from kvstore.model.layout import Span


def final_pages(*, saved_tokens: int, final_tokens: int, tail_tokens: int, page_tokens: int) -> Iterator[Span]:
    """One group's pages and tail between its cursor and the last final token, in token order.

    Args:
        saved_tokens: The cursor: a page boundary, or where a tail ended.
        final_tokens: Tokens whose cache content does not change after this step.
        tail_tokens: Where a tail ends, if that is inside a page: hits should end at blocks, not at pages. This is the
            last boundary of the prompt while the request runs, and of all its tokens when it ends.
    """
    cursor = saved_tokens
    while True:
        start = cursor // page_tokens * page_tokens
        stop = start + page_tokens
        if cursor < tail_tokens < stop:
            stop = tail_tokens
        if stop > final_tokens:
            return
        yield Span(start, stop)
        cursor = stop


def plan_load(
    staged: Staged,
    groups: Sequence[GroupShape],
    tables: Sequence[Sequence[int]],
    *,
    local_tokens: int,
    resume_tokens: int,
) -> tuple[LoadPiece, ...]:
    """Limit the staged records to the blocks between the engine's own hit and the resume point.

    Args:
        staged: Leased records that serve at least `resume_tokens`.
        tables: For each of vLLM's groups the request's block ids in token order.
        local_tokens: Blocks below hold the engine's own hit and are never written.
        resume_tokens: The engine computes the blocks from here on; they are never written.

    Raises:
        InternalError: A block to write is vLLM's null block, which all requests share; or a state, or the window of a
            hit that is shorter than what was staged, is not of this resume point.
    """
    if resume_tokens < staged.resume_tokens and any(may_lose_blocks(group.facts.kind) for group in groups):
        raise InternalError("a shorter hit's window is not staged", resume=resume_tokens, of=staged.resume_tokens)
    pieces = []
    found: dict[tuple[int, int, int], BlockIds] = {}  # the slices of a page go to the same blocks
    for key, (start, stop) in zip(staged.keys, staged.spans, strict=True):
        group = groups[key.group]
        block_tokens = group.facts.block_tokens
        needed_from = group.facts.kind.needed_from(resume_tokens)
        if needed_from is None:
            if stop != resume_tokens:
                raise InternalError("a state is not of the resume point", key=key, stop=stop, resume=resume_tokens)
            first, last, span_blocks, first_block = stop // block_tokens - 1, stop // block_tokens, 1, 0
        else:
            first = max(start, local_tokens, needed_from) // block_tokens
            last = min(stop, resume_tokens) // block_tokens
            if first >= last:
                continue
            span_blocks, first_block = (stop - start) // block_tokens, first - start // block_tokens
        block_ids = found.get((key.group, first, last))
        if block_ids is None:
            block_ids = found[key.group, first, last] = blocks_of(group, tables, first, last)
            if any(0 in ids for ids in block_ids):
                raise InternalError("a load would write to the null block", key=key, first=first, last=last)
        pieces.append(LoadPiece(key=key, span_blocks=span_blocks, first_block=first_block, block_ids=block_ids))
    return tuple(pieces)


def blocks_of(group: GroupShape, tables: Sequence[Sequence[int]], first: int, last: int) -> BlockIds:
    """For each feed of a group the ids of its blocks `first` to `last` (exclusive).

    Raises:
        InternalError: A table is too short.
    """
    block_ids = tuple(tuple(tables[feed][first:last]) for feed in group.facts.feed_groups)
    if any(len(ids) != last - first for ids in block_ids):
        raise InternalError("a block table is too short", first=first, last=last, group=group.facts.feed_groups)
    return block_ids


def state_blocks_of(group: GroupShape, offers: Iterable[StateOffer], boundary_tokens: int) -> BlockIds | None:
    """For each feed of a recurrent group the block with its state at a boundary; `None` if vLLM does not offer all."""
    blocks = {offer.vllm_group: offer.block_id for offer in offers if offer.boundary_tokens == boundary_tokens}
    found = tuple((blocks.get(feed, 0),) for feed in group.facts.feed_groups)
    return None if (0,) in found else found
