"""Which policy ranks what leaves: a fixed one, or `auto`, which watches the lookups of this node."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from kvstore.api import PrefixQuery
from kvstore.eviction.admission import AdmitAll
from kvstore.eviction.auto import Auto
from kvstore.eviction.base import Policy
from kvstore.eviction.candidates import CANDIDATES, POLICIES
from kvstore.model.layout import Layout

__all__ = ["AutoChoice", "FixedChoice", "PolicyChoice"]

_WAITING_MAX = 65_536
"""Boundaries of prompts that wait to be replayed, some 10 MB; beyond, the oldest prompts are not counted."""
_REBUILD_AT = 2.0
"""Copies are begun anew when what a budget holds has changed so many times over: they would be of the wrong size."""


class PolicyChoice(Protocol):
    """What `Retention` asks at each round."""

    def observe(self, query: PrefixQuery, layout: Layout) -> None:
        """A prompt was looked up. Never waits."""

    async def settle(self, budget_bytes: int, boundary_bytes: int) -> None:
        """Take what was observed into account.

        Args:
            budget_bytes: Of the level.
            boundary_bytes: Of a usual boundary there.
        """

    def make_policy(self) -> Policy:
        """A fresh policy, of the kind that is followed now."""


class FixedChoice:
    """Always the same policy.

    Args:
        name: One of `POLICIES`.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def observe(self, query: PrefixQuery, layout: Layout) -> None:
        pass

    async def settle(self, budget_bytes: int, boundary_bytes: int) -> None:
        pass

    def make_policy(self) -> Policy:
        return POLICIES[self._name]()


class AutoChoice:
    """Replays the prompts that were looked up here on copies of the candidates, off the event loop.

    The candidates are the policies alone: an admission rule would have to be kept by whoever saves.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[list[bytes], list[int]]] = deque()
        self._num_waiting = 0
        self._auto: Auto | None = None
        self._built_for = 1.0
        self._now = 0
        self._followed = POLICIES[CANDIDATES[0].policy]

    def observe(self, query: PrefixQuery, layout: Layout) -> None:
        pages = [boundary for boundary in query.boundaries if boundary.tokens % layout.page_tokens == 0]
        if not pages:
            return
        path = [query.namespace + boundary.prefix for boundary in pages]
        self._waiting.append((path, [boundary.tokens for boundary in pages]))
        self._num_waiting += len(pages)
        while self._num_waiting > _WAITING_MAX:
            self._num_waiting -= len(self._waiting.popleft()[0])

    async def settle(self, budget_bytes: int, boundary_bytes: int) -> None:
        if not self._waiting:
            return
        room = budget_bytes / max(1, boundary_bytes)
        if self._auto is None or not 1 / _REBUILD_AT < room / self._built_for < _REBUILD_AT:
            candidates = [candidate for candidate in CANDIDATES if candidate.admission == AdmitAll.name]
            self._auto = Auto(candidates, budget_bytes=budget_bytes, boundary_bytes=max(1, boundary_bytes))
            self._built_for = room
        waiting, self._waiting, self._num_waiting = self._waiting, deque(), 0
        # to the end even if the caller is cancelled: nobody else touches the copies meanwhile
        await asyncio.shield(asyncio.to_thread(self._replay, self._auto, waiting, boundary_bytes))

    def _replay(self, auto: Auto, prompts: deque[tuple[list[bytes], list[int]]], boundary_bytes: int) -> None:
        for path, tokens in prompts:
            self._now += 1
            auto.observe(path, tokens, [boundary_bytes] * len(path), float(self._now))
        self._followed = POLICIES[auto.current.policy]

    def make_policy(self) -> Policy:
        return self._followed()
