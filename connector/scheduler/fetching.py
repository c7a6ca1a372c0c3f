"""One fetch on the store's thread: stage a hit, and prove that what is staged restores the prompt."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from connector.scheduler.requests import Fetch, RequestState
from kvstore.api import Deadline, PageStore, PrefixQuery, Staged
from kvstore.errors import InternalError, InvalidRequest
from kvstore.model.coverage import ends_to_resume
from kvstore.model.keys import Boundary, NamespaceId
from kvstore.model.layout import Layout
from kvstore.runtime.clock import Clock
from kvstore.runtime.meters import Meters

__all__ = [
    "Flights",
    "check_staged",
    "common_tokens",
    "staging",
]

_log = logging.getLogger("vllm.kvstore")  # below vLLM's logger, so that its handlers and levels apply


def staging(
    fetch: Fetch, layout: Layout, *, clock: Clock, meters: Meters
) -> Callable[[PageStore], Coroutine[Any, Any, Staged]]:
    """The work of a fetch; its deadline runs from now on.

    Args:
        fetch: Told its task, its lease and how long it took.
        layout: The model's.
        clock: Time.
        meters: Counters.
    """
    deadline = Deadline.after(fetch.ceiling_s)

    async def stage(store: PageStore) -> Staged:
        fetch.task = asyncio.current_task()
        staged = await store.stage(fetch.query, deadline=deadline)
        fetch.lease = staged.lease
        fetch.took_s = clock.monotonic_s() - fetch.started_s
        meters.observe("connector_stage_seconds", fetch.took_s)
        _log.debug(
            "kvstore: staged %d of %d tokens, %d bytes in %d ms from %s",
            staged.resume_tokens,
            fetch.query.cap_tokens,
            staged.num_bytes,
            fetch.took_s * 1000,
            dict(staged.sources),
        )
        try:
            check_staged(staged, fetch.query, layout)
        except InternalError:
            _log.exception("kvstore: what the service staged does not restore the prompt, which is computed")
            raise
        return staged

    return stage


def check_staged(staged: Staged, query: PrefixQuery, layout: Layout) -> None:
    """Take nobody's word for it: vLLM computes nothing of what it is promised, and asserts that it fits the prompt.

    Args:
        staged: What a stage answered.
        query: What it was asked.
        layout: The model's.

    Raises:
        InternalError: It is no resume point of the prompt, or not every byte that one needs is staged.
    """
    if staged.lease is None:
        return
    if not staged.lease_s > 0:
        raise InternalError("a lease that has ended, and would be asked for again and again", seen=staged.lease_s)
    if staged.resume_tokens > query.cap_tokens or staged.resume_tokens % query.step_tokens:
        raise InternalError("no resume point of the prompt", seen=staged.resume_tokens, most=query.cap_tokens)
    places = {boundary.prefix: index for index, boundary in enumerate(query.boundaries)}
    slices: defaultdict[tuple[int, int], set[int]] = defaultdict(set)  # by boundary and group
    for key, span in zip(staged.keys, staged.spans, strict=True):
        place = places.get(key.prefix)
        if key.namespace != query.namespace or place is None or key.group >= len(layout.groups):
            raise InternalError("a staged record is not of the prompt", key=key)
        _, expected = layout.groups[key.group].record_at(query.boundaries[place].tokens, layout.page_tokens)
        if span != (expected.start, expected.stop):
            raise InternalError("a staged record has another span", key=key, seen=span, expected=expected)
        slices[place, key.group].add(key.slice)
    whole = [0] * len(query.boundaries)
    for (place, group), found in slices.items():
        if found == set(range(layout.groups[group].num_slices)):
            whole[place] |= 1 << group
    try:
        ends_to_resume(
            layout,
            [boundary.tokens for boundary in query.boundaries],
            whole,
            resume_tokens=staged.resume_tokens,
            local_tokens=query.local_tokens,
        )
    except InvalidRequest as error:
        raise InternalError("the staged records leave something out", resume=staged.resume_tokens) from error


_SHARE_MIN = 0.5
"""The share of a request's fetch that another one must cover for the request to wait for it: loading a short common
beginning twice takes less time than waiting for all of another prompt."""


class Flights:
    """Fetches from their start until their load has ended, or until they are given up."""

    def __init__(self) -> None:
        self._flying: dict[int, Fetch] = {}

    def __len__(self) -> int:
        return len(self._flying)

    def add(self, fetch: Fetch) -> None:
        """Note that a fetch has begun."""
        self._flying[id(fetch)] = fetch

    def end(self, fetch: Fetch, *, loaded: bool = False, failed: bool = False) -> None:
        """Note that a fetch is over. Idempotent.

        Args:
            fetch: The fetch.
            loaded: vLLM has its tokens in its own cache now.
            failed: The store did not deliver it.
        """
        self._flying.pop(id(fetch), None)
        if not fetch.ended:
            fetch.ended, fetch.loaded, fetch.failed = True, loaded, failed

    def holds_back(
        self,
        state: RequestState,
        namespace: NamespaceId,
        *,
        local_tokens: int,
        resume_tokens: int,
        now_s: float,
        patience_s: Callable[[], float],
    ) -> bool:
        """Whether to wait because another request fetches most of the same: once it is loaded, vLLM has it itself.

        Otherwise it would be loaded again, into blocks of this request's own.

        Args:
            state: The request that has to be answered.
            namespace: Where its pages are.
            local_tokens: What vLLM has of it itself.
            resume_tokens: What the store has of it.
            now_s: Monotonic time.
            patience_s: The longest wait for all leaders together; called once.
        """
        if state.follow_until_s is not None and now_s >= state.follow_until_s:
            return False
        leader = state.follows
        if leader is not None and not leader.ended:
            return True
        if leader is not None and (leader.loaded or leader.failed):
            # vLLM had it, but not for us or not any more; or the store lacks it: the next one would fare the same
            return False
        leader = self._find(state, namespace, local_tokens, resume_tokens)
        if leader is None:
            return False
        state.follows = leader
        if state.follow_until_s is None:
            state.follow_until_s = now_s + patience_s()
        return True

    def _find(self, state: RequestState, namespace: NamespaceId, local_tokens: int, resume_tokens: int) -> Fetch | None:
        """The fetch that covers most of the tokens from `local_tokens` to `resume_tokens` of a prompt, or `None`."""
        assert state.chain is not None
        best: Fetch | None = None
        best_tokens = local_tokens + _SHARE_MIN * (resume_tokens - local_tokens)
        for fetch in self._flying.values():
            if fetch.query.namespace != namespace:
                continue
            common = common_tokens(fetch.query.boundaries, state.chain.boundaries)
            tokens = min(common, fetch.reach_tokens, resume_tokens)
            if tokens > local_tokens and tokens >= best_tokens and (best is None or tokens > best_tokens):
                best, best_tokens = fetch, tokens
        return best


def common_tokens(left: Sequence[Boundary], right: Sequence[Boundary]) -> int:
    """Length of the common beginning of two prompts, in whole boundaries of the same grid."""
    low, high = 0, min(len(left), len(right))
    while low < high:  # equal up to a point and different after it, since each hash covers all before it
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[middle - 1] == right[middle - 1] else (low, middle - 1)
    return left[low - 1].tokens if low else 0
