"""How much is stored: per level, per namespace."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.catalog.entry import Level

__all__ = ["LevelTotals", "NamespaceTotals"]


@dataclass(frozen=True, slots=True)
class LevelTotals:
    """What one level holds.

    Attributes:
        num_boundaries: Boundaries with at least one record there.
        num_records: Their records.
        num_bytes: Bytes of these records, headers included.
    """

    num_boundaries: int = 0
    num_records: int = 0
    num_bytes: int = 0

    def __add__(self, other: LevelTotals) -> LevelTotals:
        return LevelTotals(
            self.num_boundaries + other.num_boundaries,
            self.num_records + other.num_records,
            self.num_bytes + other.num_bytes,
        )


@dataclass(frozen=True, slots=True)
class NamespaceTotals:
    """What one namespace holds.

    Attributes:
        tenant: Its tenant.
        num_boundaries: Entries; one with records at both levels counts once.
        levels: Totals per `Level`.
    """

    tenant: str = ""
    num_boundaries: int = 0
    levels: tuple[LevelTotals, ...] = field(default_factory=lambda: tuple(LevelTotals() for _ in Level))
