"""What the cold tier gets and what is evicted from it."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.store.retention.cold_admission import ColdAdmission
from kvstore.store.retention.operator_rules import OperatorRules
from kvstore.store.retention.policy_choice import PolicyChoice

__all__ = ["RetentionParts"]


@dataclass(frozen=True, slots=True)
class RetentionParts:
    """What a store uses of retention; each part is optional."""

    choice: PolicyChoice | None = None
    """Observes every lookup, to choose the policy that retention follows."""
    admission: ColdAdmission | None = None
    """Decides which saves that wait for memory alone the cold tier gets; `None`: all."""
    operator_rules: OperatorRules | None = None
    """Says which weights are retired: lookups find no record of retired weights. `None`: none are."""
