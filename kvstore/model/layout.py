"""The canonical shape of one model's cache: its groups, their page length and slices. From the model alone."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import InvalidRequest
from kvstore.model.kinds import GroupKind, RecordKind, Recurrent
from kvstore.model.spans import Span, span_ending_at

__all__ = ["MAX_GROUPS", "MAX_GROUP_SLICES", "MAX_SLICES", "GroupLayout", "Layout"]

MAX_GROUPS = 64
"""Groups are the kinds and shapes of a model's layers: models have one to about eight."""
MAX_GROUP_SLICES = 512
"""A group has at most 8 slices per pipeline stage."""
MAX_SLICES = 2048
"""Of all groups together: what a lookup looks at for each boundary. 8 slices of 16 stages of 16 groups."""


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
        return isinstance(self.kind, Recurrent)

    def record_at(self, tokens: int, page_tokens: int) -> tuple[RecordKind, Span]:
        """The kind of this group's record at boundary `tokens`, and the tokens that it spans."""
        if self.is_state:
            return RecordKind.STATE, Span(tokens, tokens)
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

    def __post_init__(self) -> None:
        if self.page_tokens <= 0:
            raise InvalidRequest("page_tokens must be positive", page_tokens=self.page_tokens)
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
