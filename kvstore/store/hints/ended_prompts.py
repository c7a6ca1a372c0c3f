"""The latest prompts whose requests have ended, so that later hints can name them by request or session."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from kvstore.errors import InvalidRequest
from kvstore.model.prompt_hint import EndedPrompt
from kvstore.store.explain.kept import ENTRY_BYTES, Kept, Room

_KEPT, _KEPT_BYTES, _ROOM_BYTES = 2048, 16 << 20, 64 << 20
"""Prompts and bytes of each tenant, and bytes of all: a prompt of 131,072 tokens has some 120 KB."""
_BOUNDARY_BYTES = 200
_CANDIDATES_SHOWN = 5


@dataclass(slots=True)
class KeptPrompt:
    """A prompt, and what was done about the hints that named it.

    Attributes:
        prompt: As its engine ended it.
        number: Counts the prompts; later ones have higher numbers.
        hints: Of each hint what was done; the latest replaces an earlier one.
    """

    prompt: EndedPrompt
    number: int
    hints: dict[str, str] = field(default_factory=dict)


class EndedPrompts:
    """Keeps them, bounded for each tenant. Belongs to one event loop."""

    def __init__(self) -> None:
        self._room = Room(_ROOM_BYTES)
        self._of_tenant: dict[str, Kept[str, KeptPrompt]] = {}
        self._numbers = count()

    def add(self, prompt: EndedPrompt) -> KeptPrompt:
        """Keep a prompt, in place of an earlier one of the same request."""
        kept = self._of_tenant.get(prompt.tenant)
        if kept is None:
            kept = self._of_tenant[prompt.tenant] = Kept(self._room, _KEPT, _KEPT_BYTES)
        told = KeptPrompt(prompt, next(self._numbers))
        kept.put(prompt.request, told, ENTRY_BYTES + _BOUNDARY_BYTES * len(prompt.boundaries))
        return told

    def get(self, tenant: str, request: str) -> KeptPrompt | None:
        """The prompt of exactly this request of a tenant."""
        kept = self._of_tenant.get(tenant)
        return kept.entries.get(request) if kept is not None else None

    def of_request(self, request: str, tenant: str | None) -> KeptPrompt:
        """The prompt of a request, by its id or the start of one.

        Args:
            tenant: Whose; `None`: of any.

        Raises:
            InvalidRequest: No request that ended recently has this id, or several start like that.
        """
        found = [told for told in self._latest(tenant) if told.prompt.request.startswith(request)]
        exact = [told for told in found if told.prompt.request == request]
        if len(found) == 1 or exact:
            return (exact or found)[0]
        if not found:
            raise InvalidRequest("no request that ended recently has this id", field="request", seen=request[:256])
        shown = ", ".join(told.prompt.request for told in found[:_CANDIDATES_SHOWN])
        raise InvalidRequest("several requests start like this", field="request", seen=request[:256], candidates=shown)

    def of_session(self, session: str, tenant: str | None) -> KeptPrompt:
        """The latest prompt of a session.

        Raises:
            InvalidRequest: No request that ended recently named it.
        """
        found = next((told for told in self._latest(tenant) if told.prompt.wishes.session == session), None)
        if found is None:
            raise InvalidRequest("no request that ended recently names this session", field="session", seen=session)
        return found

    def _latest(self, tenant: str | None) -> Iterator[KeptPrompt]:
        """The prompts of a tenant, or of all, the latest first."""
        if tenant is not None:
            kept = self._of_tenant.get(tenant)
            return iter(()) if kept is None else reversed(kept.entries.values())
        every = [told for kept in self._of_tenant.values() for told in kept.entries.values()]
        return iter(sorted(every, key=lambda told: -told.number))
