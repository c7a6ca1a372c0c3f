"""What the scheduler side remembers of each request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from connector.bridge import result_or_none
from connector.prefix_hash import PrefixChain
from connector.request_parameters import Handoff, RequestFlags
from kvstore.api import LeaseId, Lookup, PrefixQuery, Staged
from kvstore.model.keys import NamespaceId, PrefixHash

__all__ = ["Fetch", "Ledger", "RequestState"]


@dataclass(slots=True, eq=False)
class Fetch:
    """A stage call on its way, or its result.

    Attributes:
        query: What was asked.
        ceiling_s: The call ends by itself after this long.
        started_s: Monotonic time of the call.
        renewed_s: Monotonic time of the last renewal of its lease.
        future: The call.
        local_tokens: The engine's own hit that the last answer was for.
        taken_tokens: What vLLM took beyond it.
        task: The call's task; belongs to the loop's thread, as `lease` does.
        lease: The call's lease; known on that thread first.
        took_s: How long the call took; written on that thread, before the future is done.
        reach_tokens: How far it takes the prompt, as far as is known.
        is_measured: Whether costs were learned from its time.
        lost: The service says that the lease has ended; written on the loop's thread.
        ended: It was loaded or given up.
        loaded: It was loaded.
        failed: The store did not deliver it.
        shortened: Why less was asked for than is stored, in numbers.
    """

    query: PrefixQuery
    ceiling_s: float
    started_s: float
    renewed_s: float
    future: Future[Staged] = field(init=False)
    local_tokens: int = 0
    taken_tokens: int = 0
    task: asyncio.Task[Any] | None = None
    lease: LeaseId | None = None
    took_s: float = 0.0
    reach_tokens: int = 0
    is_measured: bool = False
    lost: bool = False
    ended: bool = False
    loaded: bool = False
    failed: bool = False
    shortened: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class RequestState:
    """One request, from `on_new_request` to its end.

    Attributes:
        request_id: vLLM's.
        prompt: What is to be computed before the first new token: the prompt, and after a preemption what was
            generated until then. A copy, since it is hashed on another thread.
        chain: Hashes of the boundaries; only touched once `hashed` is done. `None`: not cacheable.
        known: All tokens so far; vLLM appends to it.
        flags: What the request asks of the cache.
        uncacheable: Why it has no chain, if that is so.
        handoff: What a prefill engine has promised, until it is there or its time is over.
        handoff_until_s: Monotonic time at which it is over.
        hashed: Done when the whole of `prompt` is hashed.
        lookup: The presence question; its answer also tells what need not be saved.
        looked_s: Monotonic time at which it was put.
        looked_for_question: It was put because vLLM asked, and vLLM did not hear of its answer yet.
        asked_s: Monotonic time at which vLLM first asked for a hit.
        fetch: Records being staged or staged for the next admission.
        loading: A staged fetch that vLLM admitted and the ranks are loading.
        follows: The fetch of another request that this one waits for, or the last one.
        follow_until_s: Monotonic time at which it waits no longer for any.
        closed: No further hits for this request: nothing there, too slow, or failed before.
        load_failed: A load failed: not even a preemption makes it ask again.
        planned_tokens: Final tokens when pages to save were last looked for.
        pages_delayed: Pages are final but found no room yet.
        cursors: By group: every page up to here is saved, known to be stored, or given up.
        present: By boundary the groups that were stored when the lookup was answered, or that were loaded or saved.
        save_stopped: A page was dropped for good; what follows it could never be used.
        namespace: Where it was looked up when vLLM last asked.
        local_tokens: The engine's own hit at that time.
        cap_tokens: The furthest point that it could be resumed from, at that time.
        told: What the store was last told of its outcome.
        trace: Passed to the store with each call for it; empty: none.
    """

    request_id: str
    prompt: tuple[int, ...]
    chain: PrefixChain | None
    known: Sequence[int] = ()
    flags: RequestFlags = field(default_factory=RequestFlags)
    uncacheable: str | None = None
    handoff: Handoff | None = None
    handoff_until_s: float | None = None
    hashed: Future[None] | None = None
    lookup: Future[Lookup] | None = None
    looked_s: float = 0.0
    looked_for_question: bool = False
    asked_s: float | None = None
    fetch: Fetch | None = None
    loading: Fetch | None = None
    follows: Fetch | None = None
    follow_until_s: float | None = None
    closed: bool = False
    load_failed: bool = False
    planned_tokens: int = 0
    pages_delayed: bool = False
    cursors: dict[int, int] = field(default_factory=dict)
    save_stopped: bool = False
    present: dict[int, int] = field(default_factory=dict)
    presence_known: bool = False
    namespace: NamespaceId | None = None
    local_tokens: int = 0
    cap_tokens: int = 0
    told: tuple[str, int] | None = None
    trace: str = ""

    def learn_presence(self) -> None:
        """Take from an answered lookup what need not be saved."""
        if self.presence_known or self.chain is None or self.lookup is None or not self.lookup.done():
            return
        if (answer := result_or_none(self.lookup)) is not None:
            # the chain may have grown since: its first boundaries are the ones that were asked for
            for boundary, groups in zip(self.chain.boundaries, answer.groups_present, strict=False):
                self.present[boundary.tokens] = self.present.get(boundary.tokens, 0) | groups
            self.presence_known = True

    def note_stored(self, boundary_tokens: int, group: int) -> None:
        """Note that the group's record at a boundary is stored or on its way."""
        self.present[boundary_tokens] = self.present.get(boundary_tokens, 0) | 1 << group

    def forget_stored(self, boundary_tokens: int, group: int) -> None:
        """Take `note_stored` back: it was lost on its way."""
        self.present[boundary_tokens] = self.present.get(boundary_tokens, 0) & ~(1 << group)

    def extend_chain(self, tokens: int, boundary_tokens: int) -> None:
        """Hash up to the last boundary within `tokens` of what is known; only once the prompt is hashed.

        Cheap: after the prompt it is one boundary per `boundary_tokens` generated tokens.
        """
        assert self.chain is not None
        wanted = min(tokens, len(self.known)) // boundary_tokens * boundary_tokens
        if wanted > self.hashed_tokens:
            self.chain.extend(self.known[:wanted])

    @property
    def hashed_tokens(self) -> int:
        """The last boundary whose hash is known."""
        return self.chain.boundaries[-1].tokens if self.chain is not None and self.chain.boundaries else 0

    def prefix_at(self, tokens: int, boundary_tokens: int) -> PrefixHash:
        """The hash of the first `tokens`, a known boundary."""
        assert self.chain is not None
        boundary = self.chain.boundaries[tokens // boundary_tokens - 1]
        assert boundary.tokens == tokens
        return boundary.prefix

    def resume(self) -> None:
        """Prepare a request that lost its blocks to be asked for again, with what it has generated so far."""
        self.closed, self.asked_s, self.lookup = self.load_failed, None, None
        self.follows = self.follow_until_s = None
        if self.is_hashed and len(self.known) > len(self.prompt):
            self.prompt, self.hashed = tuple(self.known), None

    @property
    def is_asking(self) -> bool:
        """Whether vLLM was told to ask again for this request."""
        return self.asked_s is not None and not self.closed and self.loading is None

    @property
    def is_hashing_over(self) -> bool:
        """Whether hashing has ended, well or not."""
        return self.hashed is not None and self.hashed.done()

    @property
    def is_hashed(self) -> bool:
        hashed = self.hashed
        return hashed is not None and hashed.done() and not hashed.cancelled() and hashed.exception() is None


class Ledger:
    """All requests that vLLM has announced and not ended yet."""

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
