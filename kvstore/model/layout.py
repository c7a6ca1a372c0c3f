"""The canonical shape of one model's cache: its groups, their page length and slices. From the model alone."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import InvalidRequest
from kvstore.model.kinds import GroupKind, RecordKind, Recurrent
from kvstore.model.spans import Span, span_ending_at

__all__ = ["MAX_GROUPS", "MAX_SLICES", "GroupLayout", "Layout"]

MAX_GROUPS = 256
MAX_SLICES = 4096


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
            raise InvalidRequest(f"a layout has 1 to {MAX_GROUPS} groups", groups=len(self.groups))
        for index, group in enumerate(self.groups):
            if not 1 <= group.num_slices <= MAX_SLICES:
                raise InvalidRequest(f"a group has 1 to {MAX_SLICES} slices", group=index, num_slices=group.num_slices)
