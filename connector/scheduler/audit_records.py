"""The records of a hit, as the audit compares them: a page, tail or state with all its slices."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from kvstore.api import Staged
from kvstore.model.keys import PrefixHash, RecordKey

__all__ = ["AuditRecord", "records_of"]


@dataclass(slots=True)
class AuditRecord:
    """A staged page, tail or state, all its slices, that waits for the engine to compute it."""

    group: int
    start_tokens: int
    stop_tokens: int
    keys: tuple[RecordKey, ...]

    @property
    def name(self) -> tuple[PrefixHash, int]:
        return self.keys[0].prefix, self.group


def records_of(staged: Staged) -> list[AuditRecord]:
    """The records of a hit, with their slices grouped."""

    def of_record(item: tuple[RecordKey, tuple[int, int]]) -> tuple[int, int, int, bytes]:
        key, (start, stop) = item
        return key.group, stop, start, key.prefix

    items = sorted(zip(staged.keys, staged.spans, strict=True), key=of_record)
    return [
        AuditRecord(group, start, stop, tuple(key for key, _ in slices))
        for (group, stop, start, _), slices in groupby(items, key=of_record)
    ]
