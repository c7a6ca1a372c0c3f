"""Lookups: hash a prompt, query the store, and limit how long a request waits for the answer."""

from __future__ import annotations

import asyncio
import threading

from connector.bridge import Bridge, traced
from connector.identity import CacheShape
from connector.prefix_hash import PrefixChain
from connector.scheduler.requests import RequestState
from connector.settings import ConnectorSettings
from connector.weights import Adapters
from kvstore.api import Deadline, Lookup, PageStore, PrefixQuery
from kvstore.model.instance import hit_cap
from kvstore.model.keys import NamespaceId
from kvstore.runtime.instruments import Instruments

_STALE_S = 2.0
"""A request that waited in vLLM's queue for longer is looked up again: requests before it may have saved its prefix."""

_OPENING_FACTOR, _OPENING_MAX_S = 30, 10.0
"""An engine's first requests wait for the namespace 30 times as long as for a lookup: a private service may have to be
started, which takes up to four seconds on a busy machine. `EngineNamespace.is_expected` ends the wait if none comes."""

_FIRST_FACTOR, _FIRST_MAX_S = 10, 3.0
"""The first lookups wait 10 times as long as later ones: the service may have been started just now. Both waits happen
once, so that a service that never answers costs them once."""

_HANDOFF_POLL_S = 0.02
"""The last page of a prompt arrives some 10 ms after the prefill engine's answer."""

_HANDOFF_POLL_SHARE = 0.2
"""The pause between two lookups as a share of the time waited so far: a late handoff costs few lookups."""

HASHED_AT_ONCE = 131_072
"""Tokens of a prompt that are hashed before the next prompt has its turn. Most prompts are shorter: of many that come
together the first are hashed soon, and not all of them late."""


def takes_whole_prompts(settings: ConnectorSettings, shape: CacheShape) -> bool:
    """Whether hits may include a prompt's last token. A recurrent state that contains it would process it twice."""
    return settings.whole_prompt_hits and not any(group.is_state for group in shape.groups)


class Lookups:
    """Hashes and looks up prompts in the background. Belongs to the engine's thread.

    Args:
        adapters: Digests of the adapters that requests name.
        answered: Set when a lookup is done.
    """

    def __init__(
        self,
        bridge: Bridge,
        settings: ConnectorSettings,
        shape: CacheShape,
        *,
        adapters: Adapters,
        answered: threading.Event,
        instruments: Instruments,
    ) -> None:
        self._bridge = bridge
        self._timeout_s = settings.lookup_timeout_ms / 1000
        self._step_tokens = shape.boundary_tokens
        self._whole_prompts = takes_whole_prompts(settings, shape)
        self._adapters = adapters
        self._answered = answered
        self._meters = instruments.meters
        self._clock = instruments.clock
        self._hashing = asyncio.Lock()  # several threads that hash would keep the interpreter from the engine's thread
        self._first_ends_s: float | None = None
        self._first_answer_s: float | None = None  # written on the store's thread

    def start(self, state: RequestState, namespace: NamespaceId) -> None:
        """Hash the prompt, if it is not hashed, and look it up, if it has a boundary."""
        chain = state.chain
        assert chain is not None
        started_s = self._clock.monotonic_s()
        timeout_s = self._timeout_for(state, started_s)
        prompt = state.prompt

        async def hash_prompt(store: PageStore) -> None:
            if chain.adapter is not None:
                chain.set_adapter(await self._adapters.digest_of(chain.adapter))
            for stop in range(HASHED_AT_ONCE, len(prompt) + HASHED_AT_ONCE, HASHED_AT_ONCE):
                async with self._hashing:
                    await asyncio.get_running_loop().run_in_executor(None, chain.extend, prompt, stop)

        if state.hashed is None:  # once: a chain must not be extended by two threads
            state.hashed = self._bridge.submit(hash_prompt)
        hashed = state.hashed
        if len(prompt) < self._step_tokens:
            return

        async def look_up(store: PageStore) -> Lookup:
            await asyncio.wrap_future(hashed)
            query = self.query(namespace, chain, prompt, local_tokens=0)
            query_s = self._clock.monotonic_s()
            answer = await store.lookup(query, deadline=Deadline.after(timeout_s))
            answer_s = self._clock.monotonic_s()
            self._first_answer_s = self._first_answer_s or answer_s
            self._meters.observe("connector_lookup_seconds", answer_s - query_s)
            return answer

        state.lookup, state.lookup_started_s = self._bridge.submit(traced(state.trace, look_up)), started_s
        state.lookup.add_done_callback(lambda _: self._answered.set())

    def refresh(self, state: RequestState, namespace: NamespaceId) -> None:
        """Start a lookup if there is none, or if its answer is too old for a first use."""
        now_s = self._clock.monotonic_s()
        is_waiting = state.leader is not None or (state.lookup is not None and not state.lookup.done())
        is_stale = now_s - state.lookup_started_s > _STALE_S and not state.lookup_is_fresh
        if state.lookup is None or (not is_waiting and is_stale):
            # the time waited so far does not count against the new lookup
            state.polled_since_s, state.lookup_is_noted = now_s, False
            self.start(state, namespace)
            state.lookup_is_fresh = True  # steps may be longer than an answer is fresh

    def cap_tokens(self, prompt: tuple[int, ...]) -> int:
        """The longest hit of a prompt."""
        return hit_cap(len(prompt), self._step_tokens, whole_prompts=self._whole_prompts)

    def query(
        self, namespace: NamespaceId, chain: PrefixChain, prompt: tuple[int, ...], *, local_tokens: int
    ) -> PrefixQuery:
        """The query of a prompt. Call it once the prompt is hashed: it has the boundaries that the chain has now."""
        boundaries = chain.boundaries[: len(prompt) // self._step_tokens]
        return PrefixQuery(namespace, tuple(boundaries), local_tokens, self.cap_tokens(prompt), self._step_tokens)

    # ---- waiting

    def may_wait(self, state: RequestState) -> bool:
        """Whether a request still has time to wait for its lookup; its first poll starts that time."""
        if state.no_more_hits or state.chain is None:
            return False
        now_s = self._clock.monotonic_s()
        if state.polled_since_s is None:
            state.polled_since_s = now_s
        if state.lookup is None and self._first_answer_s is None:  # it waits for the namespace
            seconds = max(self._timeout_s, min(_OPENING_FACTOR * self._timeout_s, _OPENING_MAX_S))
        else:
            seconds = self._timeout_for(state, state.polled_since_s)
        return now_s - state.polled_since_s < seconds

    def _timeout_for(self, state: RequestState, since_s: float) -> float:
        """How long a request may wait for the answer to its lookup, from a monotonic time on."""
        timeout_s = self._timeout_s
        if self._first_ends_s is None:
            self._first_ends_s = since_s + min(_FIRST_FACTOR * timeout_s, _FIRST_MAX_S)
        # requests that came together keep their time
        if self._first_answer_s is None or since_s <= self._first_answer_s:
            timeout_s = max(timeout_s, self._first_ends_s - since_s)
        if state.handoff is None:
            return timeout_s
        # pages are stored or will be soon: they are worth a longer wait than a lookup that may find nothing
        return max(timeout_s, state.handoff.wait_s)

    def awaits_handoff(self, state: RequestState, namespace: NamespaceId, found_tokens: int) -> bool:
        """Whether a prefill engine promised more than was found, and there is time left to wait for it.

        Looks the prompt up again from time to time. Forgets a promise that was kept or whose time is over.
        """
        handoff = state.handoff
        if handoff is None:
            return False
        now_s = self._clock.monotonic_s()
        if state.handoff_until_s is None:
            state.handoff_until_s = now_s + handoff.wait_s
        arrived = found_tokens >= min(handoff.tokens, self.cap_tokens(state.prompt))
        if arrived or now_s >= state.handoff_until_s:
            self._meters.add("connector_handoffs", outcome="arrived" if arrived else "late")
            state.handoff = None
            return False
        assert state.polled_since_s is not None
        waited_s = now_s - (state.handoff_until_s - handoff.wait_s)
        if now_s - state.polled_since_s >= max(_HANDOFF_POLL_S, _HANDOFF_POLL_SHARE * waited_s):
            state.polled_since_s = now_s
            self.start(state, namespace)
        return True
