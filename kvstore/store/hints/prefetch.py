"""Prefetch: copies prompts to memory for a request that is expected, within bounds, and counts what is used of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvstore.api import PrefixQuery
from kvstore.errors import KVStoreError
from kvstore.model.keys import RecordKey
from kvstore.model.layout import Layout
from kvstore.runtime.budget import Shares
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.turns import LongWork, TenantTasks
from kvstore.store.context import StoreContext, StorePart
from kvstore.store.presence import Presence, slices_of
from kvstore.store.staging import Stager, fitting_resume, slice_bytes

UNUSED_SHARE = 1 / 8
"""Of the node's memory, what prefetched records that no request has used may take, of all tenants together."""
_UNUSED_S = 600.0
"""A prefetched record that was not used for so long counts as wasted, and no longer against its tenant."""
_RUNS_MAX, _ASKED_MAX = 2, 16
"""Prefetches at a time, so that stages that requests wait for have the tiers; and of a tenant, waiting or running."""
_READS_SHARE = 1 / 4
"""Of the records that stages may read at a time, those of one prefetch."""
_RUN_S = 60.0

Find = Callable[[PrefixQuery, Layout, Deadline], Awaitable[Presence]]


@dataclass(slots=True)
class _Unused:
    """A record that was prefetched and that no request has used."""

    tenant: str
    num_bytes: int
    at_s: float


class Prefetcher(StorePart):
    """Stages prompts without a lease, a few at a time. All methods belong to the store's event loop.

    Tenants share what may lie unused. What does not fit shortens the prefix that is fetched; nothing is evicted beyond
    that for it.

    Args:
        find: Finds where a query's records are.
        stager: Fetches them.
        work: Runs what takes long for a long prompt.
    """

    def __init__(self, context: StoreContext, find: Find, stager: Stager, work: LongWork) -> None:
        super().__init__(context)
        self._find = find
        self._stager = stager
        self._work = work
        self._at_once = max(1, int(context.limits.stage_records_in_flight * _READS_SHARE))
        self._room = Shares(int(context.memory.limit_bytes * UNUSED_SHARE))
        self._unused: OrderedDict[RecordKey, _Unused] = OrderedDict()  # fetched first, first
        self._tasks = TenantTasks(context.background, _RUNS_MAX, of_tenant=_ASKED_MAX)

    def request(self, query: PrefixQuery, layout: Layout, tenant: str, said: Callable[[str], None]) -> bool:
        """Have a prompt fetched soon. Never waits. False: the tenant has too many that wait.

        Args:
            said: Called with what became of it, in words.
        """
        is_taken = self._tasks.start(tenant, partial(self._run, query, layout, tenant, said), "prefetch")
        if not is_taken:
            self._meters.add("prefetches", outcome="refused")
        return is_taken

    def used(self, keys: Iterable[RecordKey]) -> None:
        """Note that a request reads records."""
        for key in keys if self._unused else ():
            if (one := self._unused.pop(key, None)) is not None:
                self._room.give_back(one.tenant, one.num_bytes)
                self._meters.add("prefetched_bytes", one.num_bytes, outcome="used")

    def changed(self, key: RecordKey) -> None:
        """A record was stored in memory, or has left it."""
        if key in self._unused and key not in self._memory:
            self._waste(key)

    def _waste(self, key: RecordKey) -> None:
        one = self._unused.pop(key)
        self._room.give_back(one.tenant, one.num_bytes)
        self._meters.add("prefetched_bytes", one.num_bytes, outcome="wasted")

    async def _run(self, query: PrefixQuery, layout: Layout, tenant: str, said: Callable[[str], None]) -> None:
        started_s = self._clock.monotonic_s()
        try:
            outcome, num_bytes, tokens = await self._fetch(query, layout, tenant)
        except KVStoreError as error:
            self._meters.add("prefetches", outcome="failed")
            said(f"failed: {error.sentence()}")
            return
        took_s = self._clock.monotonic_s() - started_s
        self._meters.add("prefetches", outcome=outcome)
        said(f"{outcome}: {num_bytes} bytes up to token {tokens} in {took_s:.3f} s")

    async def _fetch(self, query: PrefixQuery, layout: Layout, tenant: str) -> tuple[str, int, int]:
        """Fetch what memory lacks; returns the outcome, the bytes fetched, and up to which token memory has all."""
        deadline = Deadline.after(_RUN_S, self._clock)
        self._expire()
        presence = await self._find(query, layout, deadline)
        resume_tokens = await self._work.run(presence.num_items, presence.resume_tokens)
        cap_tokens = await self._work.run(presence.num_cells, self._affordable, presence, tenant)
        if cap_tokens < resume_tokens:
            presence = replace(presence, query=replace(query, cap_tokens=cap_tokens))
        held = await self._work.run(presence.num_cells, _in_memory, presence)
        holding = await self._stager.stage(presence, deadline, at_once=self._at_once)

        def note(keys: Sequence[RecordKey]) -> int:
            return self._note([key for key in keys if key not in held], tenant)

        try:
            num_bytes = sum(await self._work.in_pieces(list(holding.pins), note))
        finally:
            self._stager.drop(holding)
        if holding.resume_tokens <= query.local_tokens:
            return ("no_room" if resume_tokens else "nothing_stored"), num_bytes, 0
        outcome = "fetched" if holding.resume_tokens >= resume_tokens else "part"
        return outcome if num_bytes else "in_memory", num_bytes, holding.resume_tokens

    def _affordable(self, presence: Presence, tenant: str) -> int:
        """The furthest token whose records fit: those that memory lacks may take what is left of the tenant's share of
        unused records.
        """
        held_bytes = sum(
            bits.bit_count() * slice_bytes(presence, group) for (_, group), bits in presence.memory.items()
        )
        return fitting_resume(presence, presence.groups_present(), self._room.left_for(tenant) + held_bytes)

    def _note(self, keys: Iterable[RecordKey], tenant: str) -> int:
        """Count records as prefetched; returns their bytes."""
        total, now_s = 0, self._clock.monotonic_s()
        for key in keys:
            record = self._memory.peek(key)
            if record is None or key in self._unused:
                continue
            num_bytes = record.num_bytes
            total += num_bytes
            self._room.take(tenant, num_bytes)
            self._unused[key] = _Unused(tenant, num_bytes, now_s)
        self._meters.add("prefetched_bytes", total, outcome="fetched")
        return total

    def _expire(self) -> None:
        before_s = self._clock.monotonic_s() - _UNUSED_S
        while self._unused and (first := next(iter(self._unused.items())))[1].at_s < before_s:
            self._waste(first[0])


def _in_memory(presence: Presence) -> set[RecordKey]:
    """The records that memory had when the prompt was looked for."""
    return {presence.key(probe, slice_) for probe, bits in presence.memory.items() for slice_ in slices_of(bits)}
