"""Which pages of a request became final and are wanted. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["PageToSave", "final_pages"]


@dataclass(frozen=True, slots=True)
class PageToSave:
    """A page or tail to save, with its boundary's index in the prompt's chain."""

    start_tokens: int
    stop_tokens: int
    boundary_index: int


def final_pages(
    *,
    saved_tokens: int,
    final_tokens: int,
    prompt_tokens: int,
    page_tokens: int,
    block_tokens: int,
    present: Mapping[int, int],
    wanted_groups: int,
) -> tuple[tuple[PageToSave, ...], int]:
    """The pages between the cursor and the last final token that are not known to be stored.

    A prompt that ends inside a page gives a tail at its last block boundary: hits should end at blocks, not at pages.

    Args:
        saved_tokens: The cursor: a page or tail boundary.
        final_tokens: Tokens whose cache content does not change any more after this step.
        prompt_tokens: Length of the prompt; nothing beyond is saved.
        page_tokens: Tokens of a page.
        block_tokens: Tokens of a block.
        present: By boundary the groups that are stored, as a lookup told.
        wanted_groups: Bits of all groups.

    Returns:
        The pages in token order, and where the cursor stands when all of them are saved.
    """
    final = min(final_tokens, prompt_tokens)
    prompt_end = prompt_tokens // block_tokens * block_tokens
    pages: list[PageToSave] = []
    cursor = saved_tokens
    while cursor < prompt_end:
        stop = min((cursor // page_tokens + 1) * page_tokens, prompt_end)
        if stop > final:
            break
        if present.get(stop, 0) & wanted_groups != wanted_groups:
            pages.append(PageToSave(cursor // page_tokens * page_tokens, stop, stop // block_tokens - 1))
        cursor = stop
    return tuple(pages), cursor
