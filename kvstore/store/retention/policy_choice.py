"""Which eviction policy and which admission rule apply: fixed ones, or `auto`, chosen by the lookups of this node."""

from __future__ import annotations

import asyncio
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
from kvstore.store.retention.cold_admission import ColdAdmission

_WAITING_MAX = 65_536
"""Boundaries of prompts that wait for the replay, some 10 MB; beyond, the oldest prompts are dropped."""
_REBUILD_AT = 2.0
"""The candidates' copies start over when the level's capacity has changed by this factor: their size would be wrong."""


def candidates_of(policy: str, rule: str) -> Sequence[Candidate]:
    """The candidates that a policy and a rule allow, either of which may be `auto`."""
    return [one for one in CANDIDATES if policy in (AUTO, one.policy) and rule in (AUTO, one.admission)]


class PolicyChoice:
    """The policy and the admission rule that `RetentionOwner` uses in a round.

    With one candidate it is fixed. With several, it replays the prompts that were looked up here on a copy of each, off
    the event loop, and follows the leading one. If they have several admission rules, the leading one applies once the
    level is nearly full: until then nothing is declined.

    Args:
        admission: Gets the rule that the services agree on. `None`: everything is admitted, and of several candidates
            only those that admit everything are tried.
    """

    def __init__(self, candidates: Sequence[Candidate], admission: ColdAdmission | None = None) -> None:
        if admission is None and len(candidates) > 1:
            candidates = [one for one in candidates if one.admission == AdmitAll.name]
        self._admission = admission
        self._candidates = candidates
        self._followed = candidates[0]
        self._tries_rules = len({one.admission for one in candidates}) > 1
        self._is_near = False
        self._waiting: deque[tuple[list[bytes], list[int]]] = deque()
        self._num_waiting = 0
        self._auto: Auto | None = None
        self._built_for = 1.0
        self._now = 0

    @property
    def rule(self) -> str:
        """The admission rule that this service would follow."""
        return AdmitAll.name if self._tries_rules and not self._is_near else self._followed.admission

    def make_policy(self) -> Policy:
        """A new policy of the kind that applies now."""
        return self._followed.make_policy()

    def observe(self, query: PrefixQuery, layout: Layout) -> None:
        """Note that a prompt was looked up. Never waits."""
        if len(self._candidates) == 1:
            return
        pages = [boundary for boundary in query.boundaries if boundary.tokens % layout.page_tokens == 0]
        if not pages:
            return
        path = [query.namespace + boundary.prefix for boundary in pages]
        self._waiting.append((path, [boundary.tokens for boundary in pages]))
        self._num_waiting += len(pages)
        while self._num_waiting > _WAITING_MAX:
            self._num_waiting -= len(self._waiting.popleft()[0])

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
        if not self._waiting:
            return
        capacity = budget_bytes / max(1, boundary_bytes)
        if self._auto is None or not 1 / _REBUILD_AT < capacity / self._built_for < _REBUILD_AT:
            self._auto = Auto(self._candidates, budget_bytes=budget_bytes, boundary_bytes=max(1, boundary_bytes))
            self._built_for = capacity
        waiting, self._waiting, self._num_waiting = self._waiting, deque(), 0
        # shielded: if cancelled the replay still runs to its end, and nothing else touches the copies until then
        await asyncio.shield(asyncio.to_thread(self._replay, self._auto, waiting, boundary_bytes))

    async def agree(self, leases: Mapping[NamespaceId, str], ownership: Ownership, deadline: Deadline) -> None:
        """As `ColdAdmission.agree`, for the rule that this service would follow."""
        if self._admission is not None:
            await self._admission.agree(leases, self.rule, ownership, deadline)

    def _replay(self, auto: Auto, prompts: deque[tuple[list[bytes], list[int]]], boundary_bytes: int) -> None:
        for path, tokens in prompts:
            self._now += 1
            auto.observe(path, tokens, [boundary_bytes] * len(path), float(self._now))
        self._followed = auto.current
