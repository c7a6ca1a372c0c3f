"""One fetch on the store's thread: stage a hit, and prove that what is staged restores the prompt."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

from connector.scheduler.ledger import Fetch
from kvstore.api import Deadline, PageStore, PrefixQuery, Staged
from kvstore.errors import InternalError, InvalidRequest
from kvstore.model.coverage import ends_to_resume
from kvstore.model.layout import Layout
from kvstore.runtime.clock import Clock
from kvstore.runtime.meters import Meters

__all__ = ["check_staged", "staging"]

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
