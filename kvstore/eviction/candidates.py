"""Admission rules, and the candidates: an eviction policy with an admission rule, by name."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvstore.errors import InvalidRequest
from kvstore.eviction.policies import FlopsPerByte, Lru, Policy
from kvstore.eviction.prefixes import Key, spread

AUTO = "auto"


class Admission(ABC):
    """Decides how much of a prompt to save. Pure.

    A prefix without its start is useless, so the result is a count: the number of boundaries from the start to save.
    """

    name: ClassVar[str]
    admits_unasked: ClassVar[bool]
    """Whether a boundary may be held that no lookup has queried, e.g. one of generated tokens."""

    @abstractmethod
    def admit(self, path: Sequence[Key]) -> int:
        """How many of a prompt's boundaries (ascending) may be held, from its start; called once for each prompt."""


class AdmitAll(Admission):
    """Admits everything."""

    name: ClassVar[str] = "all"
    admits_unasked: ClassVar[bool] = True

    def admit(self, path: Sequence[Key]) -> int:
        return len(path)


class SecondSight(Admission):
    """Admits boundaries that were offered before, so that a prompt which is seen only once costs no write.

    Args:
        remembered: Boundaries that are remembered, in four bytes each. A newer one may overwrite an older one. So a
            boundary that returns only after many times `remembered` others is not recognised. If `remembered` is about
            the number of boundaries held, it would be evicted before its third use anyway.
    """

    name: ClassVar[str] = "second_sight"
    admits_unasked: ClassVar[bool] = False

    def __init__(self, remembered: int) -> None:
        self._marks = array("I", bytes(4 * max(1, remembered)))

    def admit(self, path: Sequence[Key]) -> int:
        marks, size = self._marks, len(self._marks)
        known = 0
        for index, key in enumerate(path):
            bits = spread(key)
            place, mark = bits % size, (bits >> 32) | 1  # never 0, which marks an empty place
            if marks[place] == mark:
                known = index + 1  # all shorter ones were offered with it, even if their marks are overwritten
            else:
                marks[place] = mark
        return known


POLICIES: Mapping[str, Callable[[], Policy]] = {policy.name: policy for policy in (Lru, FlopsPerByte)}
"""By name: makes a new policy."""

ADMISSIONS: Mapping[str, Callable[[int], Admission]] = {
    AdmitAll.name: lambda _: AdmitAll(),
    SecondSight.name: SecondSight,
}
"""By name: makes a new rule, given how many boundaries are held when the budget is full."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy with an admission rule; spelled `lru`, or `lru+second_sight`.

    Attributes:
        policy: A name of `POLICIES`.
        admission: A name of `ADMISSIONS`.
    """

    policy: str
    admission: str = AdmitAll.name

    @property
    def name(self) -> str:
        return self.policy if self.admission == AdmitAll.name else f"{self.policy}+{self.admission}"

    def make_policy(self) -> Policy:
        return POLICIES[self.policy]()

    def make_admission(self, num_held: int) -> Admission:
        return ADMISSIONS[self.admission](num_held)


CANDIDATES: Sequence[Candidate] = tuple(
    Candidate(policy, admission) for admission in (AdmitAll.name, SecondSight.name) for policy in POLICIES
)
"""The candidates of `auto`."""


def parse_candidate(text: str, others: Sequence[str] = ()) -> Candidate:
    """The inverse of `Candidate.name`.

    Args:
        others: Names that the caller accepts too, for the message.

    Raises:
        InvalidRequest: No such policy or rule. The message has the existing names, and the nearest one.
    """
    policy, plus, admission = text.partition("+")
    for name, known, what in ((policy, POLICIES, "policy"), (admission, ADMISSIONS, "admission rule")):
        if name in known or (what != "policy" and not plus):
            continue
        names = [*others, *known] if what == "policy" else list(known)
        near = difflib.get_close_matches(name, names, n=1)
        advice = f"; did you mean {near[0]}?" if near else ""
        raise InvalidRequest(f"unknown {what} {name!r}: expected one of {', '.join(names)}{advice}")
    return Candidate(policy, admission if plus else AdmitAll.name)
