"""Spans of tokens, and the division of a prefix into cells of one page each."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MAX_PREFIX_TOKENS", "Span", "cell_of", "span_ending_at"]

MAX_PREFIX_TOKENS = 1 << 24
"""No prefix is longer: bounds the work that a query can cause, and fits the u32 of a record's header."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start` (inclusive) to `stop` (exclusive). A recurrent state has `start == stop`: it is at a boundary."""

    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


def cell_of(last_token_end: int, page_tokens: int) -> int:
    """Index of the page cell that holds the token before position `last_token_end` (> 0)."""
    return (last_token_end - 1) // page_tokens


def span_ending_at(tokens: int, page_tokens: int) -> Span:
    """The span of the page or tail that ends at `tokens` (> 0): from its cell's start.

    A full page when `tokens` is a multiple of `page_tokens`, else a tail. So a record's span follows from its
    boundary alone, and a key never has two meanings.
    """
    return Span(cell_of(tokens, page_tokens) * page_tokens, tokens)
