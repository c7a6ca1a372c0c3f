"""Which eviction policy and which admission rule apply: fixed ones, or `auto`, chosen by the lookups of this node."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence

from kvstore.api import PrefixQuery
from kvstore.catalog.coordination import Ownership
from kvstore.eviction.auto import Auto
from kvstore.eviction.candidates import AUTO, CANDIDATES, AdmitAll, Candidate
from kvstore.eviction.policies import Policy
from kvstore.model.keys import NamespaceId
from kvstore.model.layout import Layout
from kvstore.runtime.deadline import Deadline
from kvstore.store.cold_admission import ColdAdmission

__all__ = ["AutoChoice", "FixedChoice", "PolicyChoice", "candidates_of"]

_WAITING_MAX = 65_536
"""Boundaries of prompts that wait to be replayed, some 10 MB; beyond, the oldest prompts are dropped."""
_REBUILD_AT = 2.0
"""The candidates' copies start over when the level's capacity has changed by this factor: their size would be wrong."""


def candidates_of(policy: str, rule: str) -> Sequence[Candidate]:
    """The candidates that a policy and a rule allow, either of which may be `auto`."""
    return [one for one in CANDIDATES if policy in (AUTO, one.policy) and rule in (AUTO, one.admission)]


class PolicyChoice(ABC):
    """What `Retention` asks at each round.

    Args:
        admission: Told of the rule that is agreed upon; `None`: everything is admitted.
    """

    def __init__(self, admission: ColdAdmission | None = None) -> None:
        self._admission = admission
        self._is_near = False

    @property
    @abstractmethod
    def _candidate(self) -> Candidate:
        """The candidate that applies now."""

    @property
    def rule(self) -> str:
        """The admission rule that this service would follow."""
        return self._candidate.admission

    def make_policy(self) -> Policy:
        """A new policy of the kind that applies now."""
        return self._candidate.make_policy()

    @abstractmethod
    def observe(self, query: PrefixQuery, layout: Layout) -> None:
        """Note that a prompt was looked up. Never waits."""

    async def settle(self, budget_bytes: int, boundary_bytes: int, *, is_near: bool) -> None:
        """Take what was observed into account.

        Args:
            budget_bytes: The level's budget.
            boundary_bytes: Mean size of a boundary there.
            is_near: The level is nearly full.
        """
        self._is_near = is_near
        if is_near and self._admission is not None:
            self._admission.fit(budget_bytes // max(1, boundary_bytes))

    async def agree(self, leases: Mapping[NamespaceId, str], ownership: Ownership, deadline: Deadline) -> None:
        """As `ColdAdmission.agree`, for the rule that this service would follow."""
        if self._admission is not None:
            await self._admission.agree(leases, self.rule, ownership, deadline)


class FixedChoice(PolicyChoice):
    """Always the same candidate.

    Args:
        candidate: The candidate, or the name of a policy to combine with admitting everything.
        admission: As above.
    """

    def __init__(self, candidate: Candidate | str, admission: ColdAdmission | None = None) -> None:
        super().__init__(admission)
        self._fixed = Candidate(candidate) if isinstance(candidate, str) else candidate

    @property
    def _candidate(self) -> Candidate:
        return self._fixed

    def observe(self, query: PrefixQuery, layout: Layout) -> None:
        pass


class AutoChoice(PolicyChoice):
    """Replays the prompts that were looked up here on copies of the candidates, off the event loop.

    Args:
        candidates: What is tried. If they have several admission rules, the leading one applies once the level is
            nearly full: until then nothing is declined.
        admission: As above. Without it only the candidates that admit everything are tried.
    """

    def __init__(self, candidates: Sequence[Candidate] = CANDIDATES, admission: ColdAdmission | None = None) -> None:
        super().__init__(admission)
        if admission is None:
            candidates = [one for one in candidates if one.admission == AdmitAll.name]
        self._candidates = candidates
        self._tries_rules = len({one.admission for one in candidates}) > 1
        self._waiting: deque[tuple[list[bytes], list[int]]] = deque()
        self._num_waiting = 0
        self._auto: Auto | None = None
        self._built_for = 1.0
        self._now = 0
        self._followed = candidates[0]

    @property
    def _candidate(self) -> Candidate:
        return self._followed

    @property
    def rule(self) -> str:
        return AdmitAll.name if self._tries_rules and not self._is_near else self._followed.admission

    def observe(self, query: PrefixQuery, layout: Layout) -> None:
        pages = [boundary for boundary in query.boundaries if boundary.tokens % layout.page_tokens == 0]
        if not pages:
            return
        path = [query.namespace + boundary.prefix for boundary in pages]
        self._waiting.append((path, [boundary.tokens for boundary in pages]))
        self._num_waiting += len(pages)
        while self._num_waiting > _WAITING_MAX:
            self._num_waiting -= len(self._waiting.popleft()[0])

    async def settle(self, budget_bytes: int, boundary_bytes: int, *, is_near: bool) -> None:
        await super().settle(budget_bytes, boundary_bytes, is_near=is_near)
        if not self._waiting:
            return
        room = budget_bytes / max(1, boundary_bytes)
        if self._auto is None or not 1 / _REBUILD_AT < room / self._built_for < _REBUILD_AT:
            self._auto = Auto(self._candidates, budget_bytes=budget_bytes, boundary_bytes=max(1, boundary_bytes))
            self._built_for = room
        waiting, self._waiting, self._num_waiting = self._waiting, deque(), 0
        # shielded: if cancelled the replay still runs to its end, and nothing else touches the copies meanwhile
        await asyncio.shield(asyncio.to_thread(self._replay, self._auto, waiting, boundary_bytes))

    def _replay(self, auto: Auto, prompts: deque[tuple[list[bytes], list[int]]], boundary_bytes: int) -> None:
        for path, tokens in prompts:
            self._now += 1
            auto.observe(path, tokens, [boundary_bytes] * len(path), float(self._now))
        self._followed = auto.current
