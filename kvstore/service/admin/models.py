"""What several resources answer with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ConfigDict, Field

from kvstore.catalog.base import BoundaryEntry, LevelTotals, NamespaceTotals
from kvstore.catalog.entry import Level
from kvstore.service.admin.parameters import PREFIX_EXAMPLE

__all__ = ["Amount", "PrefixSummary", "amounts_of", "sum_of", "summary_of"]

Names = Mapping[Level | None, str]


class Amount(BaseModel):
    """How much is held."""

    num_boundaries: int = Field(description="boundaries with at least one record", examples=[512])
    num_records: int = Field(description="records", examples=[4096])
    num_bytes: int = Field(description="their bytes, headers included", examples=[8589934592])


class PrefixSummary(BaseModel):
    """One boundary of a prompt: the start of a prompt up to it, named by its hash."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "prefix": PREFIX_EXAMPLE,
                "tokens": 8192,
                "parent": None,
                "hits": 17,
                "first_use_s": 1763800000,
                "last_use_s": 1763803600,
                "pinned_until_s": 0,
                "num_bytes": {"redis": 2097152, "s3": 2097152},
            }
        }
    )

    prefix: str = Field(description="hash of all tokens before the boundary")
    tokens: int = Field(description="position of the boundary; 0: not known until it is read")
    parent: str | None = Field(description="the page boundary before it; null: none, or not known until it is read")
    hits: int = Field(description="how often it was read")
    first_use_s: int = Field(description="when its first record was stored, in seconds since the Unix epoch")
    last_use_s: int = Field(description="when it was stored or read last")
    pinned_until_s: int = Field(description="when its pin ends; 0: not pinned")
    num_bytes: dict[str, int] = Field(description="bytes of its records by tier")


def summary_of(entry: BoundaryEntry, names: Names, now_s: int) -> PrefixSummary:
    """An entry as it is told."""
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
        names[level]: Amount(num_boundaries=held.num_boundaries, num_records=held.num_records, num_bytes=held.num_bytes)
        for level, held in zip(Level, totals.levels, strict=True)
        if level in names
    }
