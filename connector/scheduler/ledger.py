"""What the scheduler side remembers of each request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from connector.prefix_hash import PrefixChain
from connector.scheduler.bridge import result_or_none
from kvstore.api import LeaseId, Lookup, PrefixQuery, Staged

__all__ = ["Fetch", "Ledger", "RequestState"]


@dataclass(slots=True)
class Fetch:
    """A stage call on its way, or its result.

    Attributes:
        query: What was asked.
        started_s: Monotonic time of the call.
        renewed_s: Monotonic time of the last renewal of its lease.
        future: The call.
        local_tokens: The engine's own hit that the last answer was for.
        task: The call's task; belongs to the loop's thread, as `lease` does.
        lease: What the call has leased, known there at once.
    """

    query: PrefixQuery
    started_s: float
    renewed_s: float
    future: Future[Staged] = field(init=False)
    local_tokens: int = 0
    task: asyncio.Task[Any] | None = None
    lease: LeaseId | None = None


@dataclass(slots=True)
class RequestState:
    """One request, from `on_new_request` to its end.

    Attributes:
        request_id: vLLM's.
        prompt: The prompt's tokens; copied once, since vLLM appends to its own list.
        chain: Hashes of the prompt's boundaries; only read once `hashed` is done. `None`: not cacheable.
        hashed: Done when the whole prompt is hashed.
        lookup: The presence question; its answer also tells what need not be saved.
        asked_s: Monotonic time at which vLLM first asked for a hit.
        fetch: Records being staged or staged for the next admission.
        loading: A staged fetch that vLLM admitted and the ranks are loading.
        closed: No further hits for this request: nothing there, too slow, or failed before.
        load_failed: A load failed: not even a preemption makes it ask again.
        saved_tokens: Save cursor: every page up to here is saved, known to be stored, or given up.
        present: By boundary the groups that were stored when the lookup was answered.
        save_stopped: A page was dropped for good; what comes behind it could never be used.
    """

    request_id: str
    prompt: tuple[int, ...]
    chain: PrefixChain | None
    hashed: Future[None] | None = None
    lookup: Future[Lookup] | None = None
    asked_s: float | None = None
    fetch: Fetch | None = None
    loading: Fetch | None = None
    closed: bool = False
    load_failed: bool = False
    saved_tokens: int = 0
    save_stopped: bool = False
    present: dict[int, int] = field(default_factory=dict)

    def learn_presence(self) -> None:
        """Take from an answered lookup what need not be saved."""
        if self.present or self.chain is None or self.lookup is None or not self.lookup.done():
            return
        if (answer := result_or_none(self.lookup)) is not None:
            bits = zip(self.chain.boundaries, answer.groups_present, strict=True)
            self.present = {boundary.tokens: groups for boundary, groups in bits}

    @property
    def is_asking(self) -> bool:
        """Whether vLLM was told to ask again for this request."""
        return self.asked_s is not None and not self.closed and self.loading is None

    @property
    def is_hashed(self) -> bool:
        hashed = self.hashed
        return hashed is not None and hashed.done() and not hashed.cancelled() and hashed.exception() is None


class Ledger:
    """All requests that vLLM told us of and did not end yet."""

    def __init__(self) -> None:
        self._states: dict[str, RequestState] = {}

    def open(self, state: RequestState) -> None:
        self._states[state.request_id] = state

    def find(self, request_id: str) -> RequestState | None:
        return self._states.get(request_id)

    def close(self, request_id: str) -> RequestState | None:
        return self._states.pop(request_id, None)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(list(self._states.values()))

    def __len__(self) -> int:
        return len(self._states)
