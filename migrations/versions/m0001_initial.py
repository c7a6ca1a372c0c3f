"""Step 1: the formats as first released, specified in docs/formats/. Nothing is older, so there is nothing to do."""

from __future__ import annotations

from kvstore.format.record import Record
from migrations.plan import Rewrite, Step, Verdict

__all__ = ["InitialStep"]


class InitialStep(Step):
    """Every record is current."""

    number = 1
    name = "initial"
    text = "records, names, manifests and catalog of version 1"

    def target(self, tenant: str) -> str | None:
        return None

    def rewrite(self, record: Record, tenant: str) -> Rewrite:
        return Rewrite(Verdict.CURRENT)

    def is_same(self, old: Record, new: Record, tenant: str) -> bool:
        return bytes(old.data) == bytes(new.data)
