"""From a request to a hit: look the prompt up, fetch what is stored, and only then report the hit to vLLM.

Every poll is answered at once from what is known: a number of tokens, or `None` for "ask again". Nothing blocks.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from connector.bridge import Bridge, failure_of, result_or_none
from connector.facts import EngineFacts
from connector.identity import CacheShape
from connector.logs import LOG
from connector.scheduler.audits import Audits
from connector.scheduler.costs import Costs
from connector.scheduler.decide import HitPolicy
from connector.scheduler.fetching import Fetch, FetchEnd, Fetches
from connector.scheduler.lookups import Lookups
from connector.scheduler.outcomes import OutcomeReporter, reason_for_less, silent_tiers
from connector.scheduler.requests import RequestState
from connector.settings import ConnectorSettings
from connector.weights import Adapters
from kvstore.api import Lookup, Staged
from kvstore.model.keys import NamespaceId
from kvstore.runtime.instruments import Instruments

_OVERDUE_S = 0.5
"""A fetch that does not end by itself at its ceiling is given up this much later."""

_LAST_TRY_S = 0.3
"""The least time for a request's own fetch after it waited for another one's: the records are mostly in the node's
memory by then."""


class Hits:
    """Finds and fetches hits for requests. Belongs to the engine's thread.

    Args:
        costs: What this engine has measured.
        adapters: Digests of the adapters that requests name.
        audits: Takes over the hits that are computed instead.

    Attributes:
        answered: Set when an answer has arrived that changes what vLLM gets at its next poll.
        outcomes: Reports what became of requests.
    """

    def __init__(
        self,
        bridge: Bridge,
        settings: ConnectorSettings,
        facts: EngineFacts,
        shape: CacheShape,
        *,
        costs: Costs,
        adapters: Adapters,
        audits: Audits,
        instruments: Instruments,
    ) -> None:
        self._has_local_cache = facts.prefix_caching
        self._policy = HitPolicy(costs, most_s=settings.max_wait_ms / 1000, always=settings.load_always)
        self.outcomes = OutcomeReporter(bridge, shape.layout)
        self._meters = instruments.meters
        self._clock = instruments.clock
        self.answered = threading.Event()
        self.lookups = Lookups(
            bridge, settings, shape, adapters=adapters, answered=self.answered, instruments=instruments
        )
        self._fetches = Fetches(bridge, shape.layout, costs, self.answered, instruments)
        self._audits = audits

    # ---- answers to vLLM's polls

    def poll(self, state: RequestState, namespace: NamespaceId, local_tokens: int) -> int | None:
        """Tokens beyond `local_tokens` that are staged and leased, 0 for none, `None` for "ask again"."""
        if state.no_more_hits or state.chain is None:
            return 0
        state.namespace, state.local_tokens = namespace, local_tokens
        state.cap_tokens = self.lookups.cap_tokens(state.prompt)
        if state.cap_tokens == 0:  # it has no resume point: not worth a step of waiting
            self.outcomes.report(state, "too_short")
            return 0
        if state.fetch is not None:
            return self._poll_fetch(state, state.fetch, local_tokens)
        self.lookups.refresh(state, namespace)
        in_time = self.lookups.may_wait(state)
        assert state.lookup is not None
        if not state.lookup.done():
            return None if in_time else self._miss(state, "lookup_timeout")
        answer = state.lookup_answer
        if answer is None:  # also if its adapter could not be identified
            reason = "lookup_failed" if state.chain.adapter is None else "adapter_unknown"
            return self._miss(state, reason, detail=failure_of(state.lookup))
        state.lookup_is_fresh = False
        if self.lookups.awaits_handoff(state, namespace, max(answer.resume_tokens, local_tokens)):
            return None
        state.note_lookup()
        if answer.resume_tokens <= local_tokens:
            if answer.resume_tokens or local_tokens >= state.cap_tokens:
                return self._held_by_engine(state)
            return self._miss(state, "nothing_stored", detail=silent_tiers(answer), by_lookup=True)
        if self._follows(state, answer.resume_tokens):
            return None
        if state.leader is not None and state.leader.end is FetchEnd.FAILED:
            return self._miss(state, "shared_fetch_failed")  # else each follower would try the same, one by one
        return self._fetch(state, answer, local_tokens)

    def _follows(self, state: RequestState, resume_tokens: int) -> bool:
        """Whether to wait because another request fetches most of the same prompt.

        Once that is loaded, vLLM has it in its own cache; otherwise it would be loaded twice. A request waits for
        leaders no longer than it would for its own fetch.
        """
        if not self._has_local_cache:
            return False
        now_s = self._clock.monotonic_s()
        if state.follow_until_s is not None and now_s >= state.follow_until_s:
            return False
        if state.leader is not None and state.leader.end is not FetchEnd.DROPPED:
            # After an end, another leader would not help: vLLM had it, but dropped it; or the store lacks it.
            return state.leader.end is None
        assert state.chain is not None and state.namespace is not None
        leader = self._fetches.covering(state.namespace, state.chain.boundaries, state.local_tokens, resume_tokens)
        if leader is None:
            return False
        state.leader = leader
        if state.follow_until_s is None:
            state.follow_until_s = now_s + self._policy.ceiling_s(state.local_tokens, resume_tokens)
            self._meters.add("connector_requests_followed")
        return True

    def _fetch(self, state: RequestState, answer: Lookup, local_tokens: int) -> int | None:
        """Start to fetch as much of a hit as pays."""
        now_s = self._clock.monotonic_s()
        choice = self._policy.choose(answer, local_tokens, now_s=now_s)
        shortened: dict[str, float] = {}
        if choice.resume_tokens < answer.resume_tokens:
            shortened = {
                "stored_tokens": answer.resume_tokens,
                "compute_s": choice.compute_s or 0.0,
                "fetch_s": choice.fetch_s,
            }
            if choice.resume_tokens <= local_tokens:
                return self._miss(state, "cheaper_to_compute", detail=shortened)
            self._meters.add("connector_hits_cut", reason="cheaper_to_compute")
        ceiling_s = self._policy.ceiling_s(local_tokens, choice.resume_tokens)
        if state.follow_until_s is not None:  # it spent some of its time on waiting for another fetch
            ceiling_s = min(ceiling_s, max(_LAST_TRY_S, state.follow_until_s - now_s))
        assert state.chain is not None and state.namespace is not None
        query = self.lookups.query(state.namespace, state.chain, state.prompt, local_tokens=local_tokens)
        query = replace(query, cap_tokens=min(query.cap_tokens, choice.resume_tokens))
        state.fetch = self._fetches.start(query, ceiling_s, shortened=shortened, trace=state.trace)
        return None

    def _poll_fetch(self, state: RequestState, fetch: Fetch, local_tokens: int) -> int | None:
        now_s = self._clock.monotonic_s()
        if not fetch.future.done():
            # the stage call ends by itself when records stop arriving; this limit is for a call that does not
            is_overdue = now_s - fetch.started_s >= fetch.ceiling_s + _OVERDUE_S
            return self._miss(state, "stage_timeout") if is_overdue else None
        staged = result_or_none(fetch.future)
        if staged is None:
            return self._miss(state, "stage_failed", detail=failure_of(fetch.future))
        self._fetches.learn(fetch, staged)
        lease = fetch.lease
        if lease is None:
            reason, detail = reason_for_less(staged)
            return self._miss(state, "nothing_staged", reported_as=reason, detail=detail)
        if staged.resume_tokens <= local_tokens:
            return self._held_by_engine(state)
        if lease.has_ended or local_tokens < fetch.query.local_tokens:
            # In the second case vLLM evicted blocks that it had when we fetched, so what is below is not staged.
            self.drop_fetch(state)
            return self._fetch_again(state, local_tokens)
        lease.renew_if_due()
        if (stop := self._audits.claim(state.request_id, staged, lease, local_tokens)) is not None:
            self._fetches.end(fetch, FetchEnd.DROPPED, release=False)
            state.fetch = None  # the audit owns it from now on, with its lease; what is left below is fetched again
            if stop <= local_tokens:
                return self._miss(state, "audited")
            return self._fetch_again(state, local_tokens, most_tokens=stop)
        fetch.local_tokens = local_tokens
        return staged.resume_tokens - local_tokens

    def _fetch_again(self, state: RequestState, local_tokens: int, most_tokens: int | None = None) -> int | None:
        answer = state.lookup_answer
        if answer is None:
            return self._miss(state, "lookup_failed")
        if most_tokens is not None:
            answer = replace(answer, resume_tokens=most_tokens)
        return self._fetch(state, answer, local_tokens)

    def _held_by_engine(self, state: RequestState) -> int:
        """Answer 0 because vLLM has as much itself. Not a miss; vLLM may poll again if it loses its blocks."""
        self.outcomes.report(state, "held_by_engine")
        self.drop_fetch(state)
        state.polled_since_s = None
        return 0

    def _miss(self, state: RequestState, reason: str, *, reported_as: str = "", **evidence: Any) -> int:
        """Answer 0 to this and every further poll."""
        self.outcomes.report(state, reported_as or reason, **evidence)
        self._meters.add("connector_misses", reason=reason)
        LOG.debug("kvstore: no hit: %s request=%s", reason, state.request_id)
        self.drop_fetch(state, FetchEnd.FAILED)
        state.no_more_hits = True
        return 0

    # ---- admission and end

    def admit(self, state: RequestState, taken_tokens: int) -> tuple[Staged, int]:
        """Note that vLLM allocated blocks for `taken_tokens` of the staged hit. Renews its lease for the load.

        Returns:
            What is staged, and the engine's own hit at the time of our answer.
        """
        fetch = state.fetch
        assert fetch is not None and fetch.lease is not None
        staged = fetch.future.result()
        fetch.taken_tokens = taken_tokens
        state.fetch, state.loading, state.polled_since_s = None, fetch, None
        fetch.lease.renew()
        self.outcomes.report_hit(state, fetch, staged)
        return staged, fetch.local_tokens

    def on_loaded(self, state: RequestState, *, failed: bool) -> None:
        """Note that the ranks are done with the load, and end its lease."""
        fetch, state.loading = state.loading, None
        if fetch is None:
            return
        if failed:
            self.outcomes.report(state, "load_failed")
        else:
            # counted now and not before, since a load may fail
            self._meters.add("connector_hits")
            self._meters.add("connector_external_tokens", fetch.taken_tokens)
            for tier, count in fetch.future.result().sources.items():
                self._meters.add("connector_staged_records", count, tier=tier)
        self._fetches.end(fetch, FetchEnd.DROPPED if failed else FetchEnd.LOADED)

    def drop_fetch(self, state: RequestState, how: FetchEnd = FetchEnd.DROPPED) -> None:
        """Cancel what is being staged, or end the lease of what is staged."""
        fetch, state.fetch = state.fetch, None
        if fetch is not None:
            self._fetches.end(fetch, how)

    def forget(self, state: RequestState) -> None:
        """Cancel what runs for a request that ended, and end its leases, except that of a load in flight."""
        for future in (state.hashed, state.lookup):
            if future is not None:
                future.cancel()
        self.drop_fetch(state)
