"""Kinds of cache groups. Each answers one question: which tokens, or which state, does a resume point need?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import ClassVar

from kvstore.errors import InvalidRequest

MAX_LAYOUT_TOKENS = (1 << 32) - 1
"""No page, window or chunk is longer: the spans of records and messages have 32 bits."""


class RecordKind(IntEnum):
    """What a record holds; a byte of its header."""

    PAGE = 1
    TAIL = 2
    STATE = 3


@dataclass(frozen=True, slots=True)
class GroupKind:
    """Base of the kinds. By itself it is one whose resume points need all earlier tokens."""

    name: ClassVar[str]
    chained: ClassVar[bool] = True
    """Whether a page is of use only behind those before it, so that retention evicts the ends of prompts first."""
    needs_all: ClassVar[bool] = True
    """Whether every resume point needs the pages of all earlier tokens: `needed_from` is always 0."""
    is_state: ClassVar[bool] = False
    """Whether a resume point needs one state and no pages: `needed_from` is always `None`."""

    def needed_from(self, resume_tokens: int) -> int | None:
        """The first token whose page bytes are needed to resume at `resume_tokens`. `None`: no pages, but one state
        exactly there.
        """
        return 0

    def describe(self) -> dict[str, int | str]:
        """The kind as plain values for a namespace description; `parse_kind` reads it back."""
        return {"kind": self.name, **asdict(self)}


@dataclass(frozen=True, slots=True)
class FullAttention(GroupKind):
    """Keys and values of every earlier token."""

    name: ClassVar[str] = "full_attention"


@dataclass(frozen=True, slots=True)
class Latent(GroupKind):
    """Multi-head latent attention (MLA): one latent vector of every earlier token."""

    name: ClassVar[str] = "latent"


@dataclass(frozen=True, slots=True)
class SlidingWindow(GroupKind):
    """Keys and values of the last tokens only.

    Attributes:
        window_tokens: Tokens that one query attends to, including itself.
        extra_tokens: Additional earlier tokens that the engine retains, e.g. for speculative decoding.
    """

    window_tokens: int
    extra_tokens: int = 0
    name: ClassVar[str] = "sliding_window"
    needs_all: ClassVar[bool] = False

    def needed_from(self, resume_tokens: int) -> int | None:
        return max(0, resume_tokens - self.window_tokens + 1 - self.extra_tokens)


@dataclass(frozen=True, slots=True)
class ChunkedLocal(GroupKind):
    """Keys and values since the start of the current chunk of `chunk_tokens`; at a chunk's start nothing is needed."""

    chunk_tokens: int
    name: ClassVar[str] = "chunked_local"
    needs_all: ClassVar[bool] = False

    def needed_from(self, resume_tokens: int) -> int | None:
        return resume_tokens // self.chunk_tokens * self.chunk_tokens


@dataclass(frozen=True, slots=True)
class Recurrent(GroupKind):
    """Mamba, GDN, short convolution: one state exactly at the resume point."""

    name: ClassVar[str] = "recurrent"
    needs_all: ClassVar[bool] = False
    is_state: ClassVar[bool] = True

    def needed_from(self, resume_tokens: int) -> int | None:
        return None


@dataclass(frozen=True, slots=True)
class Keyed(GroupKind):
    """Pages under keys of the caller's own (`kvstore.client.PageDoor`). The store does not know where in a prompt a
    page stands: every record spans the first page, and a query names the keys in the order in which they are needed.
    """

    name: ClassVar[str] = "keyed"


@dataclass(frozen=True, slots=True)
class KeyedAlone(Keyed):
    """As `Keyed`, of pages that are of use without those before them: states, and the last pages of a window."""

    name: ClassVar[str] = "keyed_alone"
    chained: ClassVar[bool] = False


_KINDS: dict[str, type[GroupKind]] = {
    kind.name: kind for kind in (FullAttention, Latent, SlidingWindow, ChunkedLocal, Recurrent, Keyed, KeyedAlone)
}


def check_fits(field: str, value: int) -> None:
    """Refuse a number of a layout that no format can hold.

    Raises:
        InvalidRequest: It is over 32 bits.
    """
    if value > MAX_LAYOUT_TOKENS:
        seen = f"a number of {value.bit_length()} bits"  # its digits may be thousands
        raise InvalidRequest(
            "a number of a layout is too large", field=field, expected=f"at most {MAX_LAYOUT_TOKENS}", seen=seen
        )


def parse_kind(description: dict[str, int | str]) -> GroupKind:
    """The inverse of `GroupKind.describe`.

    Raises:
        InvalidRequest: The kind is unknown, or its fields are missing, unknown, negative, too large, or zero
            (`extra_tokens` may be).
    """
    fields = dict(description)
    name = fields.pop("kind", None)
    kind = _KINDS.get(str(name))
    if kind is None:
        raise InvalidRequest(f"kind of group must be one of {sorted(_KINDS)}", kind=name)
    if not all(type(value) is int and value >= 0 for value in fields.values()):  # a bool is no number of tokens
        raise InvalidRequest("fields of a kind must be whole numbers, not negative", kind=name, fields=fields)
    for field, value in fields.items():
        check_fits(field, int(value))
    try:
        parsed = kind(**fields)
    except TypeError as error:
        raise InvalidRequest("fields of a kind are missing or unknown", kind=name, fields=sorted(fields)) from error
    if any(value == 0 for field, value in fields.items() if field != "extra_tokens"):
        raise InvalidRequest("window and chunk must be at least one token", kind=name, fields=fields)
    return parsed
