"""Policies and admission rules by the names that settings, `simulate` and reports use."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvstore.errors import InvalidRequest
from kvstore.eviction.policies import FlopsPerByte, Lru, Policy, S3Fifo
from kvstore.eviction.prefixes import Key, spread

__all__ = [
    "ADMISSIONS",
    "AUTO",
    "CANDIDATES",
    "POLICIES",
    "Admission",
    "AdmitAll",
    "BySize",
    "Candidate",
    "LiveAdmission",
    "SecondSight",
    "parse_candidate",
]


class Admission(ABC):
    """Decides how much of a prompt to save. Pure.

    A prefix without its start is useless, so the answer is a count: how many boundaries from the start to save.
    """

    name: ClassVar[str]

    @abstractmethod
    def admit(self, path: Sequence[Key], tokens: Sequence[int]) -> int:
        """How many of a prompt's boundaries, from its start, may be held; called once for each prompt.

        Args:
            path: The prompt's boundaries, ascending.
            tokens: Position of each, in tokens.
        """

    @abstractmethod
    def admits_unasked(self, tokens: int) -> bool:
        """Whether a boundary may be held that no lookup has asked for, e.g. one of generated tokens.

        Args:
            tokens: Its position, in tokens.
        """


class AdmitAll(Admission):
    """Admits everything."""

    name: ClassVar[str] = "all"

    def admit(self, path: Sequence[Key], tokens: Sequence[int]) -> int:
        return len(path)

    def admits_unasked(self, tokens: int) -> bool:
        return True


class SecondSight(Admission):
    """Admits what was offered before: a prompt that is seen only once then costs no write.

    Args:
        remembered: Boundaries that are remembered, in four bytes each. A newer one may overwrite an older one, so a
            boundary that comes again only after many times `remembered` others is not recognised. It would not be held
            long enough for a third use anyway, where `remembered` is about the number of boundaries held.
    """

    name: ClassVar[str] = "second_sight"

    def __init__(self, remembered: int) -> None:
        self._marks = array("I", bytes(4 * max(1, remembered)))

    def admit(self, path: Sequence[Key], tokens: Sequence[int]) -> int:
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

    def admits_unasked(self, tokens: int) -> bool:
        return False


class BySize(Admission):
    """Admits long prompts: a short one is computed about as quickly as it is fetched.

    Args:
        min_tokens: Shorter prompts are not kept.
    """

    name: ClassVar[str] = "by_size"

    def __init__(self, min_tokens: int) -> None:
        self._min_tokens = min_tokens

    def admit(self, path: Sequence[Key], tokens: Sequence[int]) -> int:
        return len(path) if tokens and self.admits_unasked(tokens[-1]) else 0

    def admits_unasked(self, tokens: int) -> bool:
        return tokens >= self._min_tokens


AUTO = "auto"

_REMEMBERED_PER_HELD = 1
"""Boundaries that `second_sight` remembers per held one: what returns later would be evicted before its third use."""
_BY_SIZE_MIN_TOKENS = 1024

POLICIES: Mapping[str, Callable[[], Policy]] = {policy.name: policy for policy in (Lru, S3Fifo, FlopsPerByte)}
"""By name: makes a new policy."""

ADMISSIONS: Mapping[str, Callable[[int], Admission]] = {
    AdmitAll.name: lambda _: AdmitAll(),
    SecondSight.name: lambda num_held: SecondSight(_REMEMBERED_PER_HELD * num_held),
    BySize.name: lambda _: BySize(_BY_SIZE_MIN_TOKENS),
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
"""What `auto` chooses from. Not `by_size`: which size pays depends on the model and the link, unknown to `auto`."""


def parse_candidate(text: str) -> Candidate:
    """The inverse of `Candidate.name`.

    Raises:
        InvalidRequest: No such policy or rule; the nearest name is in the message.
    """
    policy, plus, admission = text.partition("+")
    for name, known, what in ((policy, POLICIES, "policy"), (admission, ADMISSIONS, "admission rule")):
        if name not in known and (plus or name is policy):
            nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
            raise InvalidRequest(
                f"unknown {what} {name!r}: expected one of {', '.join(known)}; did you mean {nearest}?"
            )
    return Candidate(policy, admission if plus else AdmitAll.name)


class LiveAdmission(Admission):
    """Applies the rule of the candidate that is followed. The other rules see every prompt too, so that their memory is
    warm when one of them takes over.

    Attributes:
        follows: Name of the rule that is applied.
    """

    name = AUTO

    def __init__(self, num_held: int, candidates: Sequence[Candidate]) -> None:
        names = dict.fromkeys(candidate.admission for candidate in candidates)
        self._rules = {name: ADMISSIONS[name](num_held) for name in names}
        self.follows = candidates[0].admission

    def admit(self, path: Sequence[Key], tokens: Sequence[int]) -> int:
        answers = {name: rule.admit(path, tokens) for name, rule in self._rules.items()}
        return answers[self.follows]

    def admits_unasked(self, tokens: int) -> bool:
        return self._rules[self.follows].admits_unasked(tokens)
