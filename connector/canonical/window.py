"""Sliding windows and chunks: how long a page may be, and which blocks are alive.

vLLM frees blocks once every token in them is out of the window, when it schedules the step after the one that moved it.
A page no longer than the window is therefore complete in the step that makes its last token final, however small the
steps are: when that step begins, the window still covers all of the page's earlier tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.model.kinds import ChunkedLocal, GroupKind, SlidingWindow

__all__ = ["may_lose_blocks", "within_windows"]


def within_windows(page_tokens: int, kinds: Iterable[GroupKind], boundary_tokens: int) -> int:
    """The longest page of at most `page_tokens`, in whole boundaries, that fits every window; at least one boundary."""
    for kind in kinds:
        if isinstance(kind, SlidingWindow):
            page_tokens = min(page_tokens, kind.window_tokens)
        elif isinstance(kind, ChunkedLocal):
            page_tokens = min(page_tokens, kind.chunk_tokens)
    return max(1, page_tokens // boundary_tokens) * boundary_tokens


def may_lose_blocks(kind: GroupKind) -> bool:
    """Whether a request's earlier blocks may be gone while it runs: such a page is left out, later ones still count."""
    return isinstance(kind, SlidingWindow | ChunkedLocal)
