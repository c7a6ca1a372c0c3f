"""What is told of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from connector.scheduler.saves import Offer

__all__ = ["StepFacts"]


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the engine computes in one step.

    Attributes:
        final_tokens: By request, tokens whose cache content is final after this step's forward.
        tables: By request, for each of vLLM's groups its current block ids; only looked up when a page is saved.
        offers: By request, the recurrent states that this step's forward writes.
        preempted: Requests that lost their blocks.
        computed_tokens: By request, tokens that were computed before this step.
    """

    final_tokens: Mapping[str, int]
    tables: Mapping[str, Sequence[Sequence[int]]]
    offers: Mapping[str, Sequence[Offer]] = field(default_factory=dict)
    preempted: Sequence[str] = ()
    computed_tokens: Mapping[str, int] = field(default_factory=dict)
