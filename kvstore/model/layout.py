"""Spans of tokens, and the division of a prefix into cells of one page each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvstore.errors import InvalidRequest
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.model.kinds import GroupKind, Keyed, RecordKind, check_fits

MAX_PREFIX_TOKENS = 1 << 24
"""No prefix is longer: bounds the work that a query can cause, and fits the u32 of a record's header."""


class Span(NamedTuple):
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


MAX_GROUPS = 64
"""Groups are the kinds and shapes of a model's layers: models have one to about eight."""
MAX_GROUP_SLICES = 512
"""A group has at most 8 slices per pipeline stage."""
MAX_SLICES = 2048
"""Of all groups together; a lookup checks them for each boundary. 8 slices of 16 stages of 16 groups."""


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One canonical group.

    Attributes:
        kind: Which records make a boundary resumable.
        num_slices: Records that a page, tail or state of this group consists of.
    """

    kind: GroupKind
    num_slices: int

    @property
    def is_state(self) -> bool:
        return self.kind.is_state

    def record_at(self, tokens: int, page_tokens: int) -> tuple[RecordKind, Span]:
        """The kind of this group's record at boundary `tokens`, and the tokens that it spans."""
        if self.is_state:
            return RecordKind.STATE, Span(tokens, tokens)
        if isinstance(self.kind, Keyed):
            return RecordKind.PAGE, Span(0, page_tokens)  # the boundary is a place in the query alone
        span = span_ending_at(tokens, page_tokens)
        return (RecordKind.PAGE if span.num_tokens == page_tokens else RecordKind.TAIL), span


@dataclass(frozen=True, slots=True)
class Layout:
    """All canonical groups of a model.

    Attributes:
        page_tokens: Tokens of a full page, the same for all groups.
        groups: In the order of their index in record keys.
    """

    page_tokens: int
    groups: tuple[GroupLayout, ...]

    @property
    def chained(self) -> bool:
        """Whether the boundaries of a query are each other's parents, shortest first."""
        return all(group.kind.chained for group in self.groups)

    def keys_of(self, namespace: NamespaceId, prefix: PrefixHash) -> list[RecordKey]:
        """Every record that a boundary can have."""
        return [
            RecordKey(namespace, prefix, group, slice_)
            for group, one in enumerate(self.groups)
            for slice_ in range(one.num_slices)
        ]

    def __post_init__(self) -> None:
        if self.page_tokens <= 0:
            raise InvalidRequest("page_tokens must be positive", page_tokens=self.page_tokens)
        check_fits("layout.page_tokens", self.page_tokens)
        if not 1 <= len(self.groups) <= MAX_GROUPS:
            raise InvalidRequest(
                "the layout has too many groups, or none",
                field="layout.groups",
                expected=f"1 to {MAX_GROUPS}",
                seen=len(self.groups),
            )
        for index, group in enumerate(self.groups):
            if not 1 <= group.num_slices <= MAX_GROUP_SLICES:
                raise InvalidRequest(
                    "the group has too many slices, or none",
                    field=f"layout.groups[{index}].num_slices",
                    expected=f"1 to {MAX_GROUP_SLICES}",
                    seen=group.num_slices,
                )
        num_slices = sum(group.num_slices for group in self.groups)
        if num_slices > MAX_SLICES:
            raise InvalidRequest(
                "the groups have too many slices together",
                field="layout.groups[*].num_slices",
                expected=f"at most {MAX_SLICES}",
                seen=num_slices,
            )
