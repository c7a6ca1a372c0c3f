"""From a request to a hit: hash the prompt, ask what is there, fetch it, and only then promise it.

Every question is answered at once with what is known: a number of tokens, or `None` for "ask again". Nothing waits.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from connector.prefix_hash import PrefixChain
from connector.scheduler.bridge import Bridge, result_or_none
from connector.scheduler.ledger import Fetch, RequestState
from connector.settings import ConnectorSettings
from kvstore.api import Deadline, LeaseId, Lookup, PageStore, PrefixQuery, Staged
from kvstore.errors import Closed
from kvstore.model.keys import NamespaceId
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.meters import Meters

__all__ = ["Lookups"]

_log = logging.getLogger("vllm.kvstore")  # below vLLM's logger, so that its handlers and levels apply

_RENEW_SHARE = 3
"""A lease is renewed after a third of its time, so that two lost renewals do not end it."""


class Lookups:
    """Finds and stages hits for requests.

    Args:
        bridge: To the store.
        settings: Timeouts.
        step_tokens: Hits end on multiples of this (the engine's scheduler block).
        meters: Counters.
        clock: Time.
    """

    def __init__(
        self,
        bridge: Bridge,
        settings: ConnectorSettings,
        *,
        step_tokens: int,
        meters: Meters,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._bridge = bridge
        self._settings = settings
        self._step_tokens = step_tokens
        self._meters = meters
        self._clock = clock
        self.answered = threading.Event()
        """Set when an answer came that vLLM's next question would get."""

    def start(self, state: RequestState, namespace: NamespaceId) -> None:
        """Hash the prompt and look it up, in the background."""
        chain = state.chain
        assert chain is not None
        timeout_s = self._settings.lookup_timeout_ms / 1000
        prompt, step_tokens = state.prompt, self._step_tokens

        async def hash_prompt(store: PageStore) -> None:
            await asyncio.get_running_loop().run_in_executor(None, chain.extend, prompt)

        if state.hashed is None:  # once: a chain must not be extended by two threads
            state.hashed = self._bridge.submit(hash_prompt)
        hashed = state.hashed

        async def look_up(store: PageStore) -> Lookup:
            await asyncio.wrap_future(hashed)
            query = _query(namespace, chain, prompt, step_tokens, local_tokens=0)
            return await store.lookup(query, deadline=Deadline.after(timeout_s))

        state.lookup = self._bridge.submit(look_up)
        state.lookup.add_done_callback(lambda _: self.answered.set())

    def may_wait(self, state: RequestState) -> bool:
        """Whether the time that a request gives to the question "is anything there?" is not over yet."""
        if state.closed or state.chain is None:
            return False
        now = self._clock.monotonic_s()
        if state.asked_s is None:
            state.asked_s = now
        return now - state.asked_s < self._settings.lookup_timeout_ms / 1000

    def hit(self, state: RequestState, namespace: NamespaceId, local_tokens: int) -> int | None:
        """Tokens beyond `local_tokens` that are staged and leased, 0 for none, `None` for "ask again"."""
        if state.closed or state.chain is None or len(state.prompt) <= self._step_tokens:
            return 0  # a prompt that short has no resume point: not worth a step of waiting
        now = self._clock.monotonic_s()
        if state.fetch is not None:
            return self._poll_fetch(state, namespace, local_tokens, now)
        if state.lookup is None:
            state.asked_s = now  # what it waited for the namespace is not the lookup's time
            self.start(state, namespace)
        in_time = self.may_wait(state)
        lookup = state.lookup
        assert lookup is not None
        if not lookup.done():
            if in_time:
                return None
            return self._give_up(state, "lookup_timeout")
        answer = result_or_none(lookup)
        if answer is None:
            return self._give_up(state, "lookup_failed")
        state.learn_presence()
        if answer.resume_tokens <= local_tokens:
            return self._give_up(state, "nothing_stored")
        self._fetch(state, namespace, local_tokens, now)
        return None

    def _fetch(self, state: RequestState, namespace: NamespaceId, local_tokens: int, now: float) -> None:
        assert state.chain is not None
        query = _query(namespace, state.chain, state.prompt, self._step_tokens, local_tokens=local_tokens)
        deadline = Deadline.after(self._settings.max_wait_ms / 1000)
        fetch = Fetch(query, now, now)

        async def stage(store: PageStore) -> Staged:
            fetch.task = asyncio.current_task()
            staged = await store.stage(query, deadline=deadline)
            _log.debug(
                "kvstore: staged %d of %d tokens, %d bytes in %d ms from %s",
                staged.resume_tokens,
                query.cap_tokens,
                staged.num_bytes,
                (self._clock.monotonic_s() - fetch.started_s) * 1000,
                dict(staged.sources),
            )
            fetch.lease = staged.lease
            return staged

        fetch.future = self._bridge.submit(stage)
        fetch.future.add_done_callback(lambda _: self.answered.set())
        state.fetch = fetch

    def _poll_fetch(self, state: RequestState, namespace: NamespaceId, local_tokens: int, now: float) -> int | None:
        fetch = state.fetch
        assert fetch is not None
        if not fetch.future.done():
            # the stage call ends by itself when nothing comes any more; this is the ceiling above it
            if now - fetch.started_s < self._settings.max_wait_ms / 1000 + 1.0:
                return None
            return self._give_up(state, "stage_timeout")
        staged = result_or_none(fetch.future)
        if staged is None or staged.lease is None or staged.resume_tokens <= local_tokens:
            return self._give_up(state, "stage_failed" if staged is None else "nothing_staged")
        if local_tokens < fetch.query.local_tokens:
            # vLLM evicted blocks that it had when we fetched: what lies below is not staged, start over
            self.drop_fetch(state)
            self._fetch(state, namespace, local_tokens, now)
            return None
        if now - fetch.renewed_s > staged.lease_s / _RENEW_SHARE:
            if now - fetch.renewed_s >= staged.lease_s:
                self.drop_fetch(state)
                self._fetch(state, namespace, local_tokens, now)
                return None
            fetch.renewed_s = now
            self._renew(staged.lease)
        fetch.local_tokens = local_tokens
        return staged.resume_tokens - local_tokens

    def _renew(self, lease: LeaseId) -> None:
        async def renew(store: PageStore) -> None:
            await store.renew(lease, deadline=Deadline.after(1.0))

        self._submit_quietly(renew)

    def _give_up(self, state: RequestState, reason: str) -> int:
        self._meters.add("connector_misses", reason=reason)
        _log.debug("kvstore: no hit: %s request=%s", reason, state.request_id)
        self.drop_fetch(state)
        state.closed = True
        return 0

    def admitted(self, state: RequestState) -> tuple[Staged, int]:
        """vLLM allocated blocks for the staged hit: it is being loaded from now on; its lease starts anew.

        Returns:
            What is staged, and the engine's own hit that it was promised beyond.
        """
        fetch = state.fetch
        assert fetch is not None
        staged = fetch.future.result()
        assert staged.lease is not None
        state.fetch, state.loading = None, fetch
        self._renew(staged.lease)
        return staged, fetch.local_tokens

    def drop_fetch(self, state: RequestState) -> None:
        """Forget what was being staged and end its lease."""
        fetch, state.fetch = state.fetch, None
        if fetch is not None:
            self._release(fetch)

    def loaded(self, state: RequestState) -> None:
        """The ranks are done with the load, well or not: end its lease."""
        fetch, state.loading = state.loading, None
        if fetch is not None:
            self._release(fetch)

    def forget(self, state: RequestState) -> None:
        """The request ended: cancel what runs for it and end its leases, except that of a load in flight."""
        for future in (state.hashed, state.lookup):
            if future is not None:
                future.cancel()
        self.drop_fetch(state)

    def _release(self, fetch: Fetch) -> None:
        async def end(store: PageStore) -> None:
            # here, on the loop's thread: a future cancelled from outside loses a lease that was granted just now
            if fetch.lease is not None:
                await store.release(fetch.lease)
            elif fetch.task is not None:
                fetch.task.cancel()

        self._submit_quietly(end)

    def _submit_quietly(self, work: Callable[[PageStore], Coroutine[Any, Any, None]]) -> None:
        with suppress(Closed):  # at the very end: leases end with the connection
            self._bridge.submit(work)


def _query(
    namespace: NamespaceId, chain: PrefixChain, prompt: tuple[int, ...], step_tokens: int, *, local_tokens: int
) -> PrefixQuery:
    # at least one token is left to compute: the engine needs the logits of the last one
    cap_tokens = max(0, len(prompt) - 1) // step_tokens * step_tokens
    return PrefixQuery(namespace, tuple(chain.boundaries), local_tokens, cap_tokens, step_tokens)
