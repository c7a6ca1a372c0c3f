"""Which eviction policy and which admission rule apply: fixed ones, or `auto`, chosen by the lookups of this node."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.api import PrefixQuery
from kvstore.catalog.coordination import Ownership
from kvstore.eviction.auto import Auto
from kvstore.eviction.candidates import AUTO, CANDIDATES, AdmitAll, Candidate
from kvstore.eviction.hint_trial import HintTrial
from kvstore.eviction.hints import Hint, Hinted
from kvstore.eviction.policies import Policy
from kvstore.model.keys import NamespaceId
from kvstore.model.layout import Layout
from kvstore.model.prompt_hint import EndedPrompt
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.deadline import Deadline
from kvstore.store.retention.cold_admission import ColdAdmission
from kvstore.store.retention.hint_marks import HintMarks

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

    The hints of a tenant are followed while two more copies show that they gain hits, see `HintTrial`. Without hints
    there are no such copies.

    Args:
        admission: Gets the rule that the services agree on. `None`: everything is admitted, and of several candidates
            only those that admit everything are tried.
        marks: Where hints are kept for the service that evicts; `None`: they are not followed.

    Attributes:
        marks: As the argument.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        admission: ColdAdmission | None = None,
        *,
        marks: HintMarks | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.marks = marks
        self._clock = clock
        if admission is None and len(candidates) > 1:
            candidates = [one for one in candidates if one.admission == AdmitAll.name]
        self._admission = admission
        self._candidates = candidates
        self._followed = candidates[0]
        self._tries_rules = len({one.admission for one in candidates}) > 1
        self._is_near = False
        self._waiting: deque[_Seen | _Hinted] = deque()
        self._num_waiting = 0
        self._auto: Auto | None = None
        self._has_hints = False
        self._trial: HintTrial | None = None
        self._built_for = 1.0
        self._now = 0

    @property
    def rule(self) -> str:
        """The admission rule that this service would follow."""
        return AdmitAll.name if self._tries_rules and not self._is_near else self._followed.admission

    def make_policy(self) -> Policy:
        """A new policy of the kind that applies now."""
        policy = self._followed.make_policy()
        return policy if self._trial is None else Hinted(policy, self.follows)

    def follows(self, tenant: str) -> bool:
        """Whether the hints of a tenant are followed now. Safe from any thread."""
        return self._trial is not None and self._trial.follows(tenant)

    def hint(self, prompt: EndedPrompt, hint: Hint, page_tokens: int) -> None:
        """Note a hint for a prompt. Never waits."""
        self._has_hints = True
        # of the prompt alone: what was generated is looked up by the next turn
        if (last := prompt.last_page(page_tokens, prompt.prompt_tokens)) is not None:
            self._add(_Hinted(prompt.namespace + last.prefix, hint, self._clock.monotonic_s()))
        if self.marks is not None:
            self.marks.add(prompt, hint, page_tokens)

    def observe(self, query: PrefixQuery, layout: Layout, tenant: str = "") -> None:
        """Note that a prompt of a tenant was looked up. Never waits."""
        if len(self._candidates) == 1 and not self._has_hints:
            return
        pages = [boundary for boundary in query.boundaries if boundary.tokens % layout.page_tokens == 0]
        if not pages:
            return
        path = [query.namespace + boundary.prefix for boundary in pages]
        self._add(_Seen(path, [boundary.tokens for boundary in pages], tenant, self._clock.monotonic_s()))

    def _add(self, one: _Seen | _Hinted) -> None:
        self._waiting.append(one)
        self._num_waiting += one.num_boundaries
        while self._num_waiting > _WAITING_MAX:
            self._num_waiting -= self._waiting.popleft().num_boundaries

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
            self._trial = None
            self._built_for = capacity
        if self._has_hints and self._trial is None:
            self._trial = HintTrial(budget_bytes=budget_bytes, boundary_bytes=max(1, boundary_bytes))
        waiting, self._waiting, self._num_waiting = self._waiting, deque(), 0
        # shielded: if cancelled the replay still runs to its end, and nothing else touches the copies until then
        await asyncio.shield(asyncio.to_thread(self._replay, self._auto, self._trial, waiting, boundary_bytes))

    async def agree(self, leases: Mapping[NamespaceId, str], ownership: Ownership, deadline: Deadline) -> None:
        """As `ColdAdmission.agree`, for the rule that this service would follow."""
        if self._admission is not None:
            await self._admission.agree(leases, self.rule, ownership, deadline)

    def _replay(self, auto: Auto, trial: HintTrial | None, seen: deque[_Seen | _Hinted], boundary_bytes: int) -> None:
        for one in seen:
            if isinstance(one, _Hinted):
                if trial is not None:
                    trial.hint(one.key, one.hint, one.at_s)
                continue
            self._now += 1
            sizes = [boundary_bytes] * len(one.path)
            if len(self._candidates) > 1:
                auto.observe(one.path, one.tokens, sizes, float(self._now))
            if trial is not None:
                trial.observe(one.path, one.tokens, sizes, one.at_s, owner=one.tenant)
        self._followed = auto.current


@dataclass(frozen=True, slots=True)
class _Seen:
    """A prompt that was looked up: its pages' names and positions."""

    path: list[bytes]
    tokens: list[int]
    tenant: str
    at_s: float

    @property
    def num_boundaries(self) -> int:
        return len(self.path)


@dataclass(frozen=True, slots=True)
class _Hinted:
    """A hint for the page that ends a prompt."""

    key: bytes
    hint: Hint
    at_s: float
    num_boundaries: int = 1
