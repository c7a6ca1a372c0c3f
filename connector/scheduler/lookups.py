"""From a request to a hit: hash the prompt, look it up, fetch what is there, and only then report the hit.

Every question is answered at once with what is known: a number of tokens, or `None` for "ask again". Nothing waits.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

from connector.bridge import Bridge, result_or_none, traced
from connector.prefix_hash import PrefixChain
from connector.scheduler.audits import Audits
from connector.scheduler.decide import Admission
from connector.scheduler.fetching import Flights, staging
from connector.scheduler.outcomes import Outcomes, cut, silent
from connector.scheduler.requests import Fetch, RequestState
from connector.scheduler.waiting import Patience, awaits_more, look_again
from connector.settings import ConnectorSettings
from connector.weights import Adapters
from kvstore.api import Deadline, LeaseId, Lookup, PageStore, PrefixQuery, Staged
from kvstore.errors import Closed
from kvstore.model.keys import NamespaceId
from kvstore.model.layout import Layout
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.meters import Meters

__all__ = ["Lookups"]

_log = logging.getLogger("vllm.kvstore")  # below vLLM's logger, so that its handlers and levels apply

_RENEW_SHARE = 3
"""A lease is renewed after a third of its time, so that two lost renewals do not end it."""

_STALE_S = 2.0
"""A request that waited in vLLM's queue for longer is looked up again: those before it have saved what it may share."""

_OVERDUE_S = 0.5
"""A fetch that does not end by itself at its ceiling is given up this much later."""

_LAST_TRY_S = 0.3
"""The least time for a request's own fetch after it waited for another one's: the records are mostly in the node's
memory by then."""

_STEADY_SHARE = 0.9
"""A fetch that used this share of its time fell short because it was slow, not because it stalled."""


class Lookups:
    """Finds and stages hits for requests.

    Args:
        bridge: To the store.
        settings: Timeouts.
        step_tokens: Hits end on multiples of this (the engine's scheduler block).
        layout: The model's layout.
        admission: Decides how much of a hit to fetch, and how long to wait for it.
        adapters: Digests of the adapters that requests name.
        outcomes: Where to report what became of requests.
        whole_prompts: A hit may be the whole prompt; otherwise it leaves at least one token to compute.
        local_cache: vLLM caches prefixes itself, so that what one request has loaded serves the next one.
        meters: Counters.
        clock: Time.
    """

    def __init__(
        self,
        bridge: Bridge,
        settings: ConnectorSettings,
        *,
        step_tokens: int,
        layout: Layout,
        admission: Admission,
        adapters: Adapters,
        outcomes: Outcomes,
        whole_prompts: bool = False,
        local_cache: bool = True,
        meters: Meters,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._bridge = bridge
        self._settings = settings
        self._step_tokens = step_tokens
        self._layout = layout
        self._admission = admission
        self._adapters = adapters
        self._outcomes = outcomes
        self._whole_prompts = whole_prompts
        self._local_cache = local_cache
        self._flights = Flights()
        self._meters = meters
        self._clock = clock
        self._patience = Patience(settings, clock)
        self.answered = threading.Event()
        """Set when an answer has come that changes what vLLM gets when it next asks."""
        self.audits: Audits | None = None  # set if hits are audited

    def start(self, state: RequestState, namespace: NamespaceId) -> None:
        """Hash the prompt and look it up, in the background."""
        chain = state.chain
        assert chain is not None
        timeout_s = self._patience.for_answer_s(state, self._clock.monotonic_s())
        prompt = state.prompt

        async def hash_prompt(store: PageStore) -> None:
            if chain.adapter is not None:
                chain.tell_adapter(await self._adapters.digest_of(chain.adapter))
            await asyncio.get_running_loop().run_in_executor(None, chain.extend, prompt)

        if state.hashed is None:  # once: a chain must not be extended by two threads
            state.hashed = self._bridge.submit(hash_prompt)
        hashed = state.hashed

        async def look_up(store: PageStore) -> Lookup:
            await asyncio.wrap_future(hashed)
            query = self._query(namespace, chain, prompt, local_tokens=0)
            started_s = self._clock.monotonic_s()
            answer = await store.lookup(query, deadline=Deadline.after(timeout_s))
            self._patience.answered()
            self._meters.observe("connector_lookup_seconds", self._clock.monotonic_s() - started_s)
            return answer

        state.lookup, state.looked_s = self._bridge.submit(traced(state.trace, look_up)), self._clock.monotonic_s()
        state.lookup.add_done_callback(lambda _: self.answered.set())

    def may_wait(self, state: RequestState) -> bool:
        """Whether a request still has time to wait for the answer to its lookup."""
        if state.closed or state.chain is None:
            return False
        return self._patience.lasts(state)

    def hit(self, state: RequestState, namespace: NamespaceId, local_tokens: int) -> int | None:
        """Tokens beyond `local_tokens` that are staged and leased, 0 for none, `None` for "ask again"."""
        if state.closed or state.chain is None:
            return 0
        state.namespace, state.local_tokens, state.cap_tokens = namespace, local_tokens, self._cap_tokens(state.prompt)
        if state.cap_tokens == 0:  # it has no resume point: not worth a step of waiting
            self._outcomes.tell(state, "too_short")
            return 0
        now = self._clock.monotonic_s()
        if state.fetch is not None:
            return self._poll_fetch(state, namespace, local_tokens, now)
        is_waiting = state.follows is not None or (state.lookup is not None and not state.lookup.done())
        is_stale = now - state.looked_s > _STALE_S and not state.looked_for_question
        if state.lookup is None or (not is_waiting and is_stale):
            state.asked_s, state.presence_known = now, False  # earlier waiting does not count against the lookup
            self.start(state, namespace)
            state.looked_for_question = True  # the next question may come later than an answer is fresh: steps are long
        in_time = self.may_wait(state)
        lookup = state.lookup
        assert lookup is not None
        if not lookup.done():
            if in_time:
                return None
            return self._give_up(state, "lookup_timeout")
        answer = result_or_none(lookup)
        if answer is None:  # also if its adapter could not be identified
            return self._give_up(state, "lookup_failed" if state.chain.adapter is None else "adapter_unknown")
        state.looked_for_question = False
        there_tokens, cap_tokens = max(answer.resume_tokens, local_tokens), self._cap_tokens(state.prompt)
        if awaits_more(state, there_tokens=there_tokens, cap_tokens=cap_tokens, now_s=now, meters=self._meters):
            if look_again(state, now):
                state.asked_s = now
                self.start(state, namespace)
            return None
        state.learn_presence()
        if answer.resume_tokens <= local_tokens:
            if answer.resume_tokens:
                return self._held_locally(state)
            return self._give_up(state, "nothing_stored", detail=silent(answer), looked=True)
        if self._waits_for_another(state, namespace, answer.resume_tokens, local_tokens, now):
            return None
        if state.follows is not None and state.follows.failed:
            return self._give_up(state, "shared_fetch_failed")  # else each follower would find out for itself, in turn
        return self._fetch(state, namespace, answer, local_tokens, now)

    def _waits_for_another(
        self, state: RequestState, namespace: NamespaceId, resume_tokens: int, local_tokens: int, now: float
    ) -> bool:
        """Whether to wait for another request that fetches most of the same, for at most the time to compute it."""
        if not self._local_cache:
            return False
        has_waited = state.follow_until_s is not None
        waits = self._flights.holds_back(
            state,
            namespace,
            local_tokens=local_tokens,
            resume_tokens=resume_tokens,
            now_s=now,
            patience_s=lambda: self._ceiling_s(local_tokens, resume_tokens),
        )
        if waits and not has_waited:
            self._meters.add("connector_requests_followed")
        return waits

    def _ceiling_s(self, local_tokens: int, resume_tokens: int) -> float:
        most_s = self._settings.max_wait_ms / 1000
        return self._admission.ceiling_s(local_tokens, resume_tokens, most_s=most_s)

    def _fetch(
        self, state: RequestState, namespace: NamespaceId, answer: Lookup, local_tokens: int, now: float
    ) -> int | None:
        """Start to fetch as much of a hit as pays."""
        choice = self._admission.choose(answer, local_tokens, now_s=now)
        shortened: dict[str, float] = {}
        if choice.resume_tokens < answer.resume_tokens:
            shortened = {
                "stored_tokens": answer.resume_tokens,
                "compute_s": choice.compute_s or 0.0,
                "fetch_s": choice.fetch_s,
            }
            if choice.resume_tokens <= local_tokens:
                return self._give_up(state, "cheaper_to_compute", detail=shortened)
            self._meters.add("connector_hits_cut", reason="cheaper_to_compute")
        ceiling_s = self._ceiling_s(local_tokens, choice.resume_tokens)
        if state.follow_until_s is not None:  # it spent some of its time on waiting for another fetch
            ceiling_s = min(ceiling_s, max(_LAST_TRY_S, state.follow_until_s - now))
        assert state.chain is not None
        query = self._query(namespace, state.chain, state.prompt, local_tokens=local_tokens)
        query = replace(query, cap_tokens=min(query.cap_tokens, choice.resume_tokens))
        fetch = Fetch(query, ceiling_s, now, now, reach_tokens=query.cap_tokens, shortened=shortened)
        work = staging(fetch, self._layout, clock=self._clock, meters=self._meters)
        fetch.future = self._bridge.submit(traced(state.trace, work))
        fetch.future.add_done_callback(lambda _: self.answered.set())
        state.fetch = fetch
        self._flights.add(fetch)
        return None

    def _poll_fetch(self, state: RequestState, namespace: NamespaceId, local_tokens: int, now: float) -> int | None:
        fetch = state.fetch
        assert fetch is not None
        if not fetch.future.done():
            # the stage call ends by itself when nothing arrives any more; this is the ceiling above it
            if now - fetch.started_s < fetch.ceiling_s + _OVERDUE_S:
                return None
            return self._give_up(state, "stage_timeout")
        staged = result_or_none(fetch.future)
        if staged is not None:
            self._learn(fetch, staged, now)
        if staged is None or staged.lease is None:
            if staged is None:
                return self._give_up(state, "stage_failed")
            word, detail = cut(staged)
            return self._give_up(state, "nothing_staged", word=word, detail=detail)
        if staged.resume_tokens <= local_tokens:
            return self._held_locally(state)
        is_late = now - fetch.renewed_s >= staged.lease_s
        if fetch.lost or is_late or local_tokens < fetch.query.local_tokens:
            # The lease has ended, or vLLM evicted blocks that it had when we fetched, so that what is below is not
            # staged: start over.
            self.drop_fetch(state)
            return self._fetch_anew(state, namespace, local_tokens, now)
        if now - fetch.renewed_s > staged.lease_s / _RENEW_SHARE:
            fetch.renewed_s = now
            self._renew(fetch, staged.lease)
        if self.audits is not None and (stop := self.audits.claim(state.request_id, staged, local_tokens)) is not None:
            self._flights.end(fetch, loaded=False)
            state.fetch = None  # the audit owns it from now on, with its lease; what is left below is fetched again
            if stop <= local_tokens:
                return self._give_up(state, "audited")
            return self._fetch_anew(state, namespace, local_tokens, now, most_tokens=stop)
        fetch.local_tokens = local_tokens
        return staged.resume_tokens - local_tokens

    def _fetch_anew(
        self, state: RequestState, namespace: NamespaceId, local_tokens: int, now: float, most_tokens: int | None = None
    ) -> int | None:
        answer = result_or_none(state.lookup) if state.lookup is not None and state.lookup.done() else None
        if answer is None:
            return self._give_up(state, "lookup_failed")
        if most_tokens is not None:
            answer = replace(answer, resume_tokens=most_tokens)
        return self._fetch(state, namespace, answer, local_tokens, now)

    def _learn(self, fetch: Fetch, staged: Staged, now: float) -> None:
        """Learn its tiers' costs from a fetch, once; not if it stalled, which is no tier's usual pace."""
        if fetch.is_measured:
            return
        fetch.is_measured = True
        fetch.reach_tokens = staged.resume_tokens
        is_whole = staged.resume_tokens >= fetch.query.cap_tokens
        if not is_whole and staged.lease is not None:
            self._meters.add("connector_hits_cut", reason="staged_less")
        if is_whole or fetch.took_s >= _STEADY_SHARE * fetch.ceiling_s:
            self._admission.on_staged(staged, fetch.took_s, now_s=now)

    def _renew(self, fetch: Fetch, lease: LeaseId) -> None:
        async def renew(store: PageStore) -> None:
            if not await store.renew(lease, deadline=Deadline.after(1.0)):
                fetch.lost = True

        self._submit_quietly(renew)

    def _held_locally(self, state: RequestState) -> int:
        """Answer "nothing" because vLLM has as much itself: not a miss, and it may ask again if it loses that."""
        self._outcomes.tell(state, "held_by_engine")
        self.drop_fetch(state)
        state.asked_s = None
        return 0

    def _give_up(self, state: RequestState, reason: str, word: str = "", **told: Any) -> int:
        self._outcomes.tell(state, word or reason, **told)
        if state.fetch is not None:
            self._flights.end(state.fetch, failed=True)
        self._meters.add("connector_misses", reason=reason)
        _log.debug("kvstore: no hit: %s request=%s", reason, state.request_id)
        self.drop_fetch(state)
        state.closed = True
        return 0

    def admitted(self, state: RequestState, taken_tokens: int) -> tuple[Staged, int]:
        """Note that vLLM allocated blocks for so much of the staged hit and it is being loaded; renews its lease.

        Returns:
            What is staged, and the engine's own hit at the time of our answer.
        """
        fetch = state.fetch
        assert fetch is not None
        staged = fetch.future.result()
        assert staged.lease is not None
        fetch.taken_tokens = taken_tokens
        state.fetch, state.loading, state.asked_s = None, fetch, None
        self._renew(fetch, staged.lease)
        self._outcomes.hit(state, fetch, staged)
        return staged, fetch.local_tokens

    def drop_fetch(self, state: RequestState) -> None:
        """Forget what was being staged and end its lease."""
        fetch, state.fetch = state.fetch, None
        if fetch is not None:
            self._flights.end(fetch)
            self._release(fetch)

    def loaded(self, state: RequestState, *, failed: bool) -> None:
        """Note that the ranks are done with the load, successfully or not, and end its lease."""
        fetch, state.loading = state.loading, None
        if fetch is not None:
            if failed:
                self._outcomes.tell(state, "load_failed")
            else:
                self._count_hit(fetch)
            self._flights.end(fetch, loaded=not failed)
            self._release(fetch)

    def _count_hit(self, fetch: Fetch) -> None:
        """A request resumes from what the ranks have loaded; not counted before, since a load may fail."""
        self._meters.add("connector_hits")
        self._meters.add("connector_external_tokens", fetch.taken_tokens)
        for tier, count in fetch.future.result().sources.items():
            self._meters.add("connector_records_staged", count, tier=tier)

    def forget(self, state: RequestState) -> None:
        """Cancel what runs for a request that ended and end its leases, except that of a load in flight."""
        for future in (state.hashed, state.lookup):
            if future is not None:
                future.cancel()
        self.drop_fetch(state)

    def _release(self, fetch: Fetch) -> None:
        async def end(store: PageStore) -> None:
            # here, on the loop's thread: cancelling the future from outside could lose a lease granted just now
            if fetch.lease is not None:
                await store.release(fetch.lease)
            elif fetch.task is not None:
                fetch.task.cancel()

        self._submit_quietly(end)

    def _submit_quietly(self, work: Callable[[PageStore], Coroutine[Any, Any, None]]) -> None:
        with suppress(Closed):  # at the very end: leases end with the connection
            self._bridge.submit(work)

    def _cap_tokens(self, prompt: tuple[int, ...]) -> int:
        # the engine needs the last token's logits: if all tokens are there, it computes that one again
        tokens = len(prompt) if self._whole_prompts else max(0, len(prompt) - 1)
        return tokens // self._step_tokens * self._step_tokens

    def _query(
        self, namespace: NamespaceId, chain: PrefixChain, prompt: tuple[int, ...], *, local_tokens: int
    ) -> PrefixQuery:
        boundaries = chain.boundaries[: len(prompt) // self._step_tokens]
        return PrefixQuery(namespace, tuple(boundaries), local_tokens, self._cap_tokens(prompt), self._step_tokens)
