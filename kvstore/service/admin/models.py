"""Parameters that several routes take, and models that several routes return."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

from fastapi import Path, Query
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kvstore.catalog.base import LevelTotals, NamespaceTotals
from kvstore.catalog.entry import BoundaryEntry, Level
from kvstore.model.keys import NamespaceId, PrefixHash
from kvstore.runtime.wrong_values import as_whole

NAMESPACE_PATTERN, PREFIX_PATTERN = "^[0-9a-f]{32}$", "^[0-9a-f]{64}$"
NAMESPACE_EXAMPLE, PREFIX_EXAMPLE = "6b1f0c6d2f7e4a1b9c3d5e7f90a1b2c3", "9f86d081884c7d65" * 4


WHOLE_NUMBER = BeforeValidator(as_whole)
"""For a strict integer field: accepts 5.0, since JSON has no integers, and refuses "5" and true."""
NamespaceText = Annotated[
    str, Path(pattern=NAMESPACE_PATTERN, examples=[NAMESPACE_EXAMPLE], description="32 hex digits, as in the list")
]
PrefixText = Annotated[
    str, Path(pattern=PREFIX_PATTERN, examples=[PREFIX_EXAMPLE], description="64 hex digits: hash of a prompt's start")
]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=1 << 32), WHOLE_NUMBER]
Limit = Annotated[int, Query(ge=1, le=1000, description="entries per page at most")]
Cursor = Annotated[str, Query(max_length=200, description="`next_cursor` of the previous page")]
Confirm = Annotated[bool, Query(description="false: a dry run, which changes nothing")]


def shown_tenant(tenant: str) -> str:
    """How routers' requests and answers name a tenant: those that have none are `default`, as Mooncake's RFC 1403 has
    it."""
    return tenant or "default"


def namespace_id(text: str) -> NamespaceId:
    """A namespace from its 32 hex digits."""
    return NamespaceId(bytes.fromhex(text))


def prefix_hash(text: str) -> PrefixHash:
    """A boundary from its 64 hex digits."""
    return PrefixHash(bytes.fromhex(text))


Names = Mapping[Level | None, str]


class Amount(BaseModel):
    """How much is held."""

    model_config = ConfigDict(from_attributes=True)

    num_boundaries: int = Field(description="boundaries with at least one record", examples=[512])
    num_records: int = Field(description="records", examples=[4096])
    num_bytes: int = Field(description="their bytes, headers included", examples=[8589934592])


class PrefixSummary(BaseModel):
    """One boundary of a prompt: the start of a prompt up to it, named by its hash."""

    prefix: str = Field(description="hash of all tokens before the boundary", examples=[PREFIX_EXAMPLE])
    tokens: int = Field(description="position of the boundary; 0: not known until it is read", examples=[8192])
    parent: str | None = Field(description="the previous page boundary; null: none, or not known until it is read")
    hits: int = Field(description="how often it was read", examples=[17])
    first_use_s: int = Field(
        description="when its first record was stored, in seconds since the Unix epoch", examples=[1763800000]
    )
    last_use_s: int = Field(description="when it was last stored or read", examples=[1763803600])
    pinned_until_s: int = Field(description="when its pin ends; 0: not pinned", examples=[0])
    num_bytes: dict[str, int] = Field(
        description="bytes of its records by tier", examples=[{"redis": 2097152, "s3": 2097152}]
    )


def summary_of(entry: BoundaryEntry, names: Names, now_s: int) -> PrefixSummary:
    """The model of a catalog entry."""
    return PrefixSummary(
        prefix=entry.prefix.hex(),
        tokens=entry.tokens,
        parent=entry.parent.hex() if entry.parent is not None else None,
        hits=entry.hits,
        first_use_s=entry.first_use_s,
        last_use_s=entry.last_use_s,
        pinned_until_s=entry.pinned_until_s if entry.pinned_until_s > now_s else 0,
        num_bytes={names[level]: entry.num_bytes(level) for level in Level if level in names},
    )


def sum_of(totals: Iterable[NamespaceTotals]) -> NamespaceTotals:
    """What several namespaces hold together."""
    levels = [LevelTotals() for _ in Level]
    num_boundaries = 0
    for held in totals:
        num_boundaries += held.num_boundaries
        levels = [one + other for one, other in zip(levels, held.levels, strict=True)]
    return NamespaceTotals(num_boundaries=num_boundaries, levels=tuple(levels))


def amounts_of(totals: NamespaceTotals, names: Names) -> dict[str, Amount]:
    """What is held, by tier."""
    return {
        names[level]: Amount.model_validate(held)
        for level, held in zip(Level, totals.levels, strict=True)
        if level in names
    }
