"""The state of an open request, from `on_new_request` to its end."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from connector.bridge import result_or_none
from connector.prefix_hash import AdapterRequest, PrefixChain
from connector.request_parameters import Handoff, RequestFlags
from connector.scheduler.fetching import Fetch
from kvstore.api import Lookup
from kvstore.model.keys import NamespaceId, PrefixHash


@dataclass(slots=True)
class RequestState:
    """One request. Belongs to the engine's thread.

    Attributes:
        prompt: The tokens to compute before the first new one: the prompt, and after a preemption also the tokens
            generated before it. A copy, since another thread hashes it.
        chain: Hashes of its boundaries; read only after `hashed` is done. `None`: it cannot be cached.
        tokens: All tokens so far; vLLM appends to this sequence.
        uncacheable: Why it cannot be cached, if it cannot.
        handoff: What a prefill engine promised; `None` once that has arrived or its time is over.
        handoff_until_s: Monotonic time at which that time is over.
        hashed: Done when all of `prompt` is hashed.
        hashed_well: It, once it is known to have ended well: each step asks, and to ask a future takes locks.
        lookup: The store's answer. It also shows what need not be saved.
        lookup_started_s: Monotonic time.
        lookup_is_fresh: vLLM's poll started the lookup, and vLLM has not polled since its answer.
        polled_since_s: Monotonic time at which vLLM first polled for a hit.
        fetch: Records that are being staged, or are staged for the next admission.
        loading: A staged fetch that vLLM admitted and the ranks are loading.
        leader: The fetch of another request that this one waits for, or the last such fetch.
        follow_until_s: Monotonic time at which it stops waiting for leaders.
        no_more_hits: Every further poll is answered with 0.
        load_failed: A load failed. Then a preemption does not allow hits again.
        cursors: By group: every page up to here is saved, stored or given up.
        planned_tokens: Final tokens when pages to save were last searched.
        pages_delayed: Pages are final and found no host memory yet.
        save_stopped: A page was dropped for good. Later pages could never be used.
        stored_groups: By boundary, a bit for each group whose record is stored or on its way to the store.
        lookup_is_noted: `stored_groups` includes the lookup's answer.
        namespace: Where it was looked up when vLLM last polled; `local_tokens` and `cap_tokens` are of that time too.
        local_tokens: The engine's own hit.
        cap_tokens: The furthest point from which it can be resumed.
        last_outcome: The reason and resume point that were last reported to the store.
        trace: Passed to the store with each call for it; empty: none.
        adapter: Its adapter.
    """

    request_id: str
    prompt: tuple[int, ...]
    chain: PrefixChain | None
    tokens: Sequence[int] = ()
    flags: RequestFlags = field(default_factory=RequestFlags)
    uncacheable: str | None = None
    handoff: Handoff | None = None
    handoff_until_s: float | None = None
    hashed: Future[None] | None = None
    hashed_well: Future[None] | None = None
    lookup: Future[Lookup] | None = None
    lookup_started_s: float = 0.0
    lookup_is_fresh: bool = False
    polled_since_s: float | None = None
    fetch: Fetch | None = None
    loading: Fetch | None = None
    leader: Fetch | None = None
    follow_until_s: float | None = None
    no_more_hits: bool = False
    load_failed: bool = False
    cursors: dict[int, int] = field(default_factory=dict)
    planned_tokens: int = 0
    pages_delayed: bool = False
    save_stopped: bool = False
    stored_groups: dict[int, int] = field(default_factory=dict)
    lookup_is_noted: bool = False
    namespace: NamespaceId | None = None
    local_tokens: int = 0
    cap_tokens: int = 0
    last_outcome: tuple[str, int] | None = None
    trace: str = ""
    adapter: AdapterRequest | None = None

    # ---- hashing

    @property
    def is_hashing_over(self) -> bool:
        """Whether hashing has ended, with or without success."""
        return self.hashed is not None and self.hashed.done()

    @property
    def is_hashed(self) -> bool:
        hashed = self.hashed
        if hashed is not None and hashed is not self.hashed_well and hashed.done() and not hashed.cancelled():
            self.hashed_well = hashed if hashed.exception() is None else None
        return hashed is not None and hashed is self.hashed_well

    @property
    def hashed_tokens(self) -> int:
        """The last boundary whose hash is known."""
        return self.chain.boundaries[-1].tokens if self.chain is not None and self.chain.boundaries else 0

    def extend_chain(self, tokens: int, boundary_tokens: int) -> None:
        """Hash up to the last boundary within the first `tokens`; only once the prompt is hashed.

        Cheap: after the prompt it is one boundary per `boundary_tokens` generated tokens.
        """
        assert self.chain is not None
        wanted = min(tokens, len(self.tokens)) // boundary_tokens * boundary_tokens
        if wanted > self.hashed_tokens:
            self.chain.extend(self.tokens, wanted)

    def prefix_at(self, tokens: int, boundary_tokens: int) -> PrefixHash:
        """The hash of the first `tokens`, a boundary that is hashed."""
        assert self.chain is not None
        boundary = self.chain.boundaries[tokens // boundary_tokens - 1]
        assert boundary.tokens == tokens
        return boundary.prefix

    # ---- lookup and hits

    @property
    def is_polled(self) -> bool:
        """Whether vLLM polls for this request's answer."""
        return self.polled_since_s is not None and not self.no_more_hits and self.loading is None

    @property
    def lookup_answer(self) -> Lookup | None:
        """The lookup's answer; `None` before it, or if the lookup failed."""
        return result_or_none(self.lookup) if self.lookup is not None and self.lookup.done() else None

    def preempt(self) -> None:
        """Prepare a request that lost its blocks for another hit, with the tokens generated so far as its prompt."""
        self.no_more_hits, self.polled_since_s, self.lookup = self.load_failed, None, None
        self.leader = self.follow_until_s = None
        if self.is_hashed and len(self.tokens) > len(self.prompt):
            self.prompt, self.hashed = tuple(self.tokens), None

    # ---- what is stored

    def is_stored(self, boundary_tokens: int, group: int) -> bool:
        """Whether the group's record at a boundary is stored or on its way to the store."""
        return bool(self.stored_groups.get(boundary_tokens, 0) >> group & 1)

    def note_stored(self, boundary_tokens: int, group: int) -> None:
        self.stored_groups[boundary_tokens] = self.stored_groups.get(boundary_tokens, 0) | 1 << group

    def note_not_stored(self, boundary_tokens: int, group: int) -> None:
        self.stored_groups[boundary_tokens] = self.stored_groups.get(boundary_tokens, 0) & ~(1 << group)

    def note_lookup(self) -> None:
        """Note what an answered lookup found stored."""
        answer = None if self.lookup_is_noted or self.chain is None else self.lookup_answer
        if answer is None or self.chain is None:
            return
        # the chain may have grown since: its first boundaries are the ones of the query
        for boundary, groups in zip(self.chain.boundaries, answer.groups_present, strict=False):
            self.stored_groups[boundary.tokens] = self.stored_groups.get(boundary.tokens, 0) | groups
        self.lookup_is_noted = True
