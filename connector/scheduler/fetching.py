"""Fetches: stage a hit on the store's thread, prove that it restores the prompt, and end its lease."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from connector.bridge import Bridge, post, traced
from connector.logs import LOG
from connector.scheduler.costs import Costs
from connector.scheduler.leases import Lease
from kvstore.api import Deadline, PageStore, PrefixQuery, Staged
from kvstore.errors import InternalError, InvalidRequest
from kvstore.model.coverage import ends_to_resume
from kvstore.model.keys import Boundary, NamespaceId
from kvstore.model.layout import Layout
from kvstore.runtime.instruments import Instruments

_STEADY_SHARE = 0.9
"""A fetch that used this share of its time and delivered less was slow. One that used less of it stalled."""

_SHARE_MIN = 0.5
"""A request waits for another one's fetch if that covers this share of its own. Loading a short common beginning twice
takes less time than waiting for all of another prompt."""


class FetchEnd(Enum):
    """How a fetch ended."""

    LOADED = "vLLM has its tokens in its own cache"
    FAILED = "the store did not deliver it"
    DROPPED = "it is not needed any more, or its load failed"


@dataclass(slots=True, eq=False)
class Fetch:
    """A stage call, and the load of what it staged.

    Attributes:
        ceiling_s: The call ends by itself after this long.
        started_s: Monotonic time.
        shortened: Why it fetches less than is stored, in numbers; empty if it fetches all.
        reach_tokens: The furthest resume point that it may deliver.
        local_tokens: The engine's own hit that the last answer was for.
        taken_tokens: What vLLM took beyond it.
        is_measured: Costs were learned from its time.
        end: `None` while it is under way.
        task: The call's task. This and the following are written on the store's thread.
        lease: Of what is staged; written before the future is done, as `took_s`. `None`: nothing is staged.
        took_s: How long the call took.
    """

    query: PrefixQuery
    ceiling_s: float
    started_s: float
    shortened: Mapping[str, object]
    reach_tokens: int
    future: Future[Staged] = field(init=False)
    local_tokens: int = 0
    taken_tokens: int = 0
    is_measured: bool = False
    end: FetchEnd | None = None
    task: asyncio.Task[Any] | None = None
    lease: Lease | None = None
    took_s: float = 0.0


class Fetches:
    """Starts fetches, and knows which are under way. Belongs to the engine's thread.

    Args:
        costs: Learns from each fetch what its tiers cost.
        answered: Set when a fetch is done.
    """

    def __init__(
        self, bridge: Bridge, layout: Layout, costs: Costs, answered: threading.Event, instruments: Instruments
    ) -> None:
        self._bridge = bridge
        self._layout = layout
        self._costs = costs
        self._answered = answered
        self._meters = instruments.meters
        self._clock = instruments.clock
        self._under_way: dict[int, Fetch] = {}

    def start(self, query: PrefixQuery, ceiling_s: float, *, shortened: Mapping[str, object], trace: str) -> Fetch:
        """Stage a query; the deadline `ceiling_s` starts now."""
        fetch = Fetch(query, ceiling_s, self._clock.monotonic_s(), shortened, reach_tokens=query.cap_tokens)
        fetch.future = self._bridge.submit(traced(trace, self._staging(fetch)))
        fetch.future.add_done_callback(lambda _: self._answered.set())
        self._under_way[id(fetch)] = fetch
        return fetch

    def _staging(self, fetch: Fetch) -> Callable[[PageStore], Coroutine[Any, Any, Staged]]:
        deadline = Deadline.after(fetch.ceiling_s)

        async def stage(store: PageStore) -> Staged:
            fetch.task = asyncio.current_task()
            staged = await store.stage(fetch.query, deadline=deadline)
            if staged.lease is not None:
                fetch.lease = Lease(
                    self._bridge, self._clock, staged.lease, lease_s=staged.lease_s, granted_s=fetch.started_s
                )
            fetch.took_s = self._clock.monotonic_s() - fetch.started_s
            self._meters.observe("connector_stage_seconds", fetch.took_s)
            LOG.debug(
                "kvstore: staged %d of %d tokens, %d bytes in %d ms from %s",
                staged.resume_tokens,
                fetch.query.cap_tokens,
                staged.num_bytes,
                fetch.took_s * 1000,
                dict(staged.sources),
            )
            try:
                _check_staged(staged, fetch.query, self._layout)
            except InternalError:
                LOG.exception("kvstore: the staged records do not restore the prompt; it is computed instead")
                raise
            return staged

        return stage

    def learn(self, fetch: Fetch, staged: Staged) -> None:
        """Learn the costs of its tiers, once. A fetch that stalled shows no tier's usual pace."""
        if fetch.is_measured:
            return
        fetch.is_measured = True
        fetch.reach_tokens = staged.resume_tokens
        is_whole = staged.resume_tokens >= fetch.query.cap_tokens
        if not is_whole and staged.lease is not None:
            self._meters.add("connector_hits_cut", reason="staged_less")
        if is_whole or fetch.took_s >= _STEADY_SHARE * fetch.ceiling_s:
            self._costs.on_staged(staged, fetch.took_s, now_s=self._clock.monotonic_s())

    def end(self, fetch: Fetch, how: FetchEnd, *, release: bool = True) -> None:
        """Note that a fetch is over, and end its lease unless `release` is false. Idempotent: the first end counts."""
        self._under_way.pop(id(fetch), None)
        fetch.end = fetch.end or how
        if not release:
            return

        async def end(store: PageStore) -> None:
            # here, on the store's thread: cancelling the future from outside could lose a lease granted just now
            if fetch.lease is not None:
                await store.release(fetch.lease.id)
            elif fetch.task is not None:
                fetch.task.cancel()

        post(self._bridge, end)

    def covering(
        self, namespace: NamespaceId, boundaries: Sequence[Boundary], local_tokens: int, resume_tokens: int
    ) -> Fetch | None:
        """The fetch under way that covers most of a prompt's tokens from `local_tokens` to `resume_tokens`.

        `None` if no fetch covers half of them.
        """
        best: Fetch | None = None
        best_tokens = local_tokens + _SHARE_MIN * (resume_tokens - local_tokens)
        half = math.ceil(best_tokens / boundaries[0].tokens) - 1
        needed = tuple(boundaries[half : half + 1])  # a prompt that differs here has too little in common
        for fetch in self._under_way.values():
            known = fetch.query.boundaries
            if fetch.query.namespace != namespace or known[half : half + 1] != needed:
                continue
            tokens = min(common_tokens(known, boundaries), fetch.reach_tokens, resume_tokens)
            if tokens > local_tokens and tokens >= best_tokens and (best is None or tokens > best_tokens):
                best, best_tokens = fetch, tokens
        return best


def common_tokens(left: Sequence[Boundary], right: Sequence[Boundary]) -> int:
    """Length of the common beginning of two prompts, in whole boundaries of the same grid."""
    low, high = 0, min(len(left), len(right))
    while low < high:  # equal up to a point and different after it, since each hash covers all tokens before it
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[middle - 1] == right[middle - 1] else (low, middle - 1)
    return left[low - 1].tokens if low else 0


def _check_staged(staged: Staged, query: PrefixQuery, layout: Layout) -> None:
    """Check the service's answer: vLLM computes nothing of what it is promised, and asserts that it fits the prompt.

    Raises:
        InternalError: It is no resume point of the prompt, or a byte that one needs is not staged.
    """
    if staged.lease is None:
        return
    if not staged.lease_s > 0:
        raise InternalError("the lease has no time left", seen=staged.lease_s)
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
        raise InternalError("a record of the resume point is not staged", resume=staged.resume_tokens) from error
