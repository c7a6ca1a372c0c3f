"""The latest prompts whose requests have ended, so that later hints can name them by request or session."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter

from kvstore.errors import InvalidRequest
from kvstore.model.prompt_hint import EndedPrompt
from kvstore.runtime.bounded_map import BoundedMap, SharedRoom, starting_with
from kvstore.runtime.clock import Clock

_KEPT, _KEPT_BYTES, _ROOM_BYTES = 2048, 16 << 20, 64 << 20
"""Limits: prompts and bytes of each tenant, and bytes of all. A prompt of 131,072 tokens takes about 120 KB."""
_ENTRY_BYTES, _BOUNDARY_BYTES = 768, 200
"""About what a prompt takes without its boundaries, and what each of these takes."""
_CANDIDATES_SHOWN = 5
HINT_NAME = "hint-"
"""How the names of prompts begin that hints named by their tokens, since no request of an engine did."""
_NUMBER = attrgetter("number")


@dataclass(slots=True)
class KeptPrompt:
    """A prompt, and what was done about the hints that named it.

    Attributes:
        prompt: As its engine ended it.
        number: Counts the prompts; later ones have higher numbers.
        at_ms: When it was kept, since the Unix epoch.
        hints: Of each hint what was done; the latest replaces an earlier one.
    """

    prompt: EndedPrompt
    number: int
    at_ms: int
    hints: dict[str, str] = field(default_factory=dict)


class EndedPrompts:
    """The latest prompts whose requests have ended, bounded for each tenant. Belongs to one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._room = SharedRoom(_ROOM_BYTES)
        self._of_tenant: dict[str, BoundedMap[str, KeptPrompt]] = {}
        self._numbers = count()

    def add(self, prompt: EndedPrompt) -> KeptPrompt:
        """Keep a prompt, in place of an earlier one of the same request."""
        kept = self._of_tenant.get(prompt.tenant)
        if kept is None:
            kept = self._of_tenant[prompt.tenant] = BoundedMap(self._room, _KEPT, _KEPT_BYTES)
        made = KeptPrompt(prompt, next(self._numbers), self._clock.wall_ms())
        kept.put(prompt.request, made, _ENTRY_BYTES + _BOUNDARY_BYTES * len(prompt.boundaries))
        return made

    def get(self, tenant: str, request: str) -> KeptPrompt | None:
        """The prompt of exactly this request of a tenant."""
        kept = self._of_tenant.get(tenant)
        return kept.entries.get(request) if kept is not None else None

    def matching(self, request: str, tenant: str | None) -> list[KeptPrompt]:
        """The prompts whose requests have this id or, where none of a tenant has, start like it.

        Args:
            tenant: Whose; `None`: of any.
        """
        return [kept for one in self._tenants(tenant) for kept in starting_with(one, request)]

    def of_request(self, request: str, tenant: str | None) -> KeptPrompt:
        """The prompt of a request, by its id or the start of one.

        Args:
            tenant: Whose; `None`: of any.

        Raises:
            InvalidRequest: No request that ended recently has this id, or several start like that.
        """
        found = self.matching(request, tenant)
        exact = [kept for kept in found if kept.prompt.request == request]
        if not found:
            raise InvalidRequest("no request that ended recently has this id", field="request", seen=request[:256])
        if exact or len(found) == 1:
            return max(exact or found, key=_NUMBER)
        shown = ", ".join(kept.prompt.request for kept in heapq.nlargest(_CANDIDATES_SHOWN, found, _NUMBER))
        raise InvalidRequest("several requests start like this", field="request", seen=request[:256], candidates=shown)

    def of_session(self, session: str, tenant: str | None) -> KeptPrompt:
        """The latest prompt of a session.

        Raises:
            InvalidRequest: No request that ended recently named it.
        """
        latest = (
            next((kept for kept in reversed(one.entries.values()) if kept.prompt.wishes.session == session), None)
            for one in self._tenants(tenant)
        )
        found = max((kept for kept in latest if kept is not None), key=_NUMBER, default=None)
        if found is None:
            raise InvalidRequest("no request that ended recently names this session", field="session", seen=session)
        return found

    def _tenants(self, tenant: str | None) -> Iterable[BoundedMap[str, KeptPrompt]]:
        """The prompts of a tenant, or those of each one."""
        if tenant is None:
            return self._of_tenant.values()
        return [self._of_tenant[tenant]] if tenant in self._of_tenant else []
