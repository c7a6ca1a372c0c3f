"""Which pages of a request became final and are wanted. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["PageToSave", "final_pages"]


@dataclass(frozen=True, slots=True)
class PageToSave:
    """A page or tail to save."""

    start_tokens: int
    stop_tokens: int


def final_pages(
    *,
    saved_tokens: int,
    final_tokens: int,
    tail_tokens: int,
    page_tokens: int,
    is_stored: Callable[[int], bool],
) -> tuple[tuple[PageToSave, ...], int]:
    """One group's pages between its cursor and the last final token that are not known to be stored.

    Args:
        saved_tokens: The cursor: a page boundary, or where a tail ended.
        final_tokens: Tokens whose cache content does not change any more after this step.
        tail_tokens: Where a tail ends if this is inside a page, since hits should end at blocks, not at pages. The last
            boundary of the prompt while the request runs, of all its tokens when it ends.
        page_tokens: Tokens of a page.
        is_stored: Whether the record that ends at a boundary is stored, according to the lookup.

    Returns:
        The pages in token order, and where the cursor is once all of them are saved.
    """
    pages: list[PageToSave] = []
    cursor = saved_tokens
    while True:
        start = cursor // page_tokens * page_tokens
        stop = start + page_tokens
        if cursor < tail_tokens < stop:
            stop = tail_tokens
        if stop > final_tokens:
            return tuple(pages), cursor
        if not is_stored(stop):
            pages.append(PageToSave(start, stop))
        cursor = stop
