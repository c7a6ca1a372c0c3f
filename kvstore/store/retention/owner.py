"""Keeps the cold tier within its budgets: one owner per namespace decides what is evicted, and deletes it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import numpy as np

from kvstore.catalog.base import LeaveReason
from kvstore.catalog.coordination import Ownership
from kvstore.catalog.entry import LEAVING_AT, BoundaryEntry, EntryTable, Level
from kvstore.errors import Closed, CorruptRecord, KVStoreError, Unavailable, UnsupportedFormat
from kvstore.eviction.holdings import Quota
from kvstore.format.manifest import parse_manifest
from kvstore.model.keys import NamespaceId, PrefixHash
from kvstore.runtime.background import Background
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.pauses import age_objects, collector_paused
from kvstore.store.recorder import Recorder
from kvstore.store.retention.backpressure import BudgetGate
from kvstore.store.retention.evictor import Evictor
from kvstore.store.retention.held import Listing
from kvstore.store.retention.hint_marks import applying
from kvstore.store.retention.plan import EvictionPlan, Limits, Ranking, incomplete_of, plan_eviction
from kvstore.store.retention.policy_choice import PolicyChoice
from kvstore.store.retention.rules import RetentionRules
from kvstore.tiers.base import Tier
from kvstore.tiers.guarded import GuardedTier

_log = logging.getLogger(__name__)

LEASE_S = 15.0
"""The lease on a namespace, renewed while a round works: so long after an owner's death a full tier takes no record."""
_LEVEL = Level.COLD
_CALL_S = 10.0
_FRESH_S = 10
_BROKEN_S, _BROKEN_S_MAX = 60, 3600
"""How long a boundary that serves no hit is kept, since what it lacks may be on its way. Also the time from an eviction
to the search for boundaries that have lost their start; each search that evicts nothing doubles it."""
_BUSY_S = 0.1
_READ_SHARE = 0.1
"""Share of the time spent on reading the totals while others write: over all slots of a cluster it is not free."""
_REFUSED_RESTS, _REFUSED_S_MAX = 9.0, 10.0
"""How many times as long as it took a round rests that could delete nothing, and up to how long: a bucket may refuse
deletions for days, and each round tries all that is hidden. Or it did not answer, and does so now."""
_CATALOG = "catalog"
"""What has failed if the tier has not, as the counter of failures names it."""


class RetentionOwner:
    """Evicts from the cold tier, in rounds, what is over its budget, a quota or its time to live, by the catalog's
    totals and entries.

    The policy ranks what may be evicted. What was used since the catalog was read stays, with all prefixes it needs.

    Args:
        tier: Where to delete; not wrapped in a `CataloguedTier`.
        recorder: Names the catalog, and how many additions the catalog has refused because their boundary is being
            deleted. When the number grows, a round starts, which ends deletions that a service has abandoned: until
            then such a boundary takes no record.
        ownership: Leases on namespaces among the services that share the tier.
        hot: The hot tier, not wrapped either: deletions from it that a service has abandoned are ended too. `None`:
            there is none with entries in this catalog.
        budget_gate: Learns how much is held and what was evicted; `None`: no writer waits for eviction.
    """

    def __init__(
        self,
        tier: Tier,
        recorder: Recorder,
        ownership: Ownership,
        rules: RetentionRules,
        *,
        choice: PolicyChoice,
        instruments: Instruments,
        hot: Tier | None = None,
        budget_gate: BudgetGate | None = None,
    ) -> None:
        self._tier = tier
        self._hot = hot
        self._recorder = recorder
        self._catalog = recorder.catalog
        self._ownership = ownership
        self._rules = rules
        self._choice = choice
        self._meters = instruments.meters
        self._clock = instruments.clock
        self._gate = budget_gate
        self._evictor = Evictor(tier, recorder.catalog, instruments, self._on_freed, self._check_tier)
        self._background = Background(f"retention of {tier.name}")
        self._owned: set[NamespaceId] = set()
        self._is_over = False
        self._logged: set[type[Exception]] = set()
        self._asked = _CATALOG
        self._has_grown = False
        self._stored_bytes = 0
        self._tenant_bytes: Mapping[str, int] | None = None
        self._present: set[NamespaceId] = set()
        """The namespaces that had entries when the totals were read last."""
        self._unreadable: set[NamespaceId] = set()
        self._swept_s = float("-inf")
        self._num_seen = 0
        self._find_broken_at_s = float("inf")
        self._find_broken_s = _BROKEN_S
        self._cost = 1.0
        """Bytes of the budget that a stored byte takes: a directory's files fill whole blocks."""

    def start(self) -> None:
        """Work in the background from now on, until `aclose`."""
        self._background.keep_running(self._run, "rounds")

    def tenant_bytes(self) -> Mapping[str, int] | None:
        """What each tenant held in the last totals; `None`: none were read. Safe from any thread."""
        return self._tenant_bytes

    def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """Apply these quotas from the next round on."""
        self._rules = replace(self._rules, quotas=quotas)

    async def _run(self) -> None:
        while True:
            rest_s, is_stuck, started_s = 0.0, True, self._clock.monotonic_s()
            self._asked = _CATALOG
            renewals = self._background.spawn(self._renew(), "leases of a round")
            try:
                freed = await self.round()
                is_stuck = freed == 0 and self._is_over
                if not freed:  # while all that should leave is pinned, every round reads the catalog
                    rest_s = self._clock.monotonic_s() - started_s
                    if self._evictor.has_unfinished:
                        rest_s = max(rest_s, min(_REFUSED_RESTS * rest_s, _REFUSED_S_MAX))
                self._logged.clear()
            except Closed:
                raise
            except KVStoreError as error:
                if type(error) not in self._logged:
                    self._logged.add(type(error))  # each kind once until a round works: rounds are many
                    _log.warning("a round of retention failed, the next one tries again: %s", error)
                self._note_failure()
            except BaseException:
                self._note_failure()
                raise
            finally:
                renewals.cancel()
            took_s = self._clock.monotonic_s() - started_s
            if self._gate is None or is_stuck:
                is_busy = self._gate is not None and bool(self._gate.boundaries_in_work())
                await asyncio.sleep(max(rest_s, _BUSY_S if is_busy else self._rules.period_s))
            else:
                await self._gate.wanted(max(rest_s, self._pause_s(took_s)))

    async def _renew(self) -> None:
        """Keep the leases during a round that takes longer than one lasts. Between rounds they end: another service,
        whose budget is smaller, may have to evict.
        """
        while True:
            await asyncio.sleep(LEASE_S / 3)
            for namespace in self._owned:
                with suppress(Unavailable, Closed):
                    await self._ownership.hold(_lease_name(namespace), deadline=self._deadline())

    def _note_failure(self) -> None:
        if not self._rules.hold_nothing:  # else nothing is evicted, and deletions of others are ended a round later
            self._count_failure(self._asked)
        self._evictor.has_unfinished = True  # what was hidden before it failed
        if self._gate is not None:
            self._gate.suspend()

    def _pause_s(self, took_s: float) -> float:
        """Seconds until the totals are read again: often while they grow, since others' writes show nowhere else."""
        if self._rules.is_private or not self._has_grown:
            return self._rules.period_s
        return min(self._rules.period_s, max(_BUSY_S, took_s / _READ_SHARE))

    async def round(self) -> int:
        """Read the totals once, and evict what is over budget, quota or age; returns the bytes freed.

        Raises:
            Unavailable: The tier is not used, or the catalog did not answer. A later round finishes evictions that this
                one began.
        """
        num_refused = self._recorder.num_refused
        may_finish = self._evictor.has_unfinished or num_refused != self._num_seen
        if self._rules.hold_nothing and not may_finish:
            return 0
        if self._rules.is_private and not await self._catalog.is_complete(deadline=self._deadline()):
            if self._gate is not None:
                self._gate.suspend()
            return 0
        held, tenants, excess = await self._read_totals()
        is_due = self._is_over or self._is_due(_by_tenant(held, tenants)) or self._now_s() >= self._find_broken_at_s
        if is_due:
            self._check_tier()
        elif not may_finish or (isinstance(self._tier, GuardedTier) and self._tier.is_open):
            return 0  # a tier that is not used deletes nothing, and every such round would read the catalog
        self._owned = {
            namespace
            for namespace in self._present
            if await self._register(namespace)
            and await self._ownership.hold(_lease_name(namespace), deadline=self._deadline())
        }
        owns_all = not any(held[namespace] for namespace in self._present - self._owned)
        self._evictor.has_unfinished = False
        if self._rules.hold_nothing:  # the next round applies what is set during this one
            freed = await self._finish_all()
            if owns_all:
                self._num_seen = num_refused
            return freed
        epoch = await self._epoch()
        listing, freed, leaving_bytes = await self._list()
        if owns_all:
            self._num_seen = num_refused  # else try again to own the rest, until it is gone or ours
        # our share of what all owners together must free
        own = sum(held[namespace] for namespace in self._owned)
        free_bytes = int(excess / self._cost) * own // max(1, sum(held.values())) - leaving_bytes
        others = {namespace: num for namespace, num in held.items() if namespace not in self._owned}
        # a record without an entry may be stored, unless the catalog was complete all along
        is_complete = epoch is not None and await self._epoch() == epoch
        with collector_paused():  # the boundaries that can leave are objects, and may be many
            plan = await self._plan(listing, tenants, free_bytes, _by_tenant(others, tenants), is_complete=is_complete)
            age_objects()
        freed += await self._evictor.evict(plan.victims)
        self._schedule_broken(freed, plan)
        if self._gate is not None:
            if freed:
                self._gate.evicted()
            elif self._is_over and owns_all and not self._gate.boundaries_in_work():
                self._gate.stuck()
        return freed

    async def _read_totals(self) -> tuple[dict[NamespaceId, int], dict[bytes, str], int]:
        """The bytes and the tenant of each namespace, and the bytes to evict. Gate and policy learn the totals."""
        ended_bytes = self._gate.ended_bytes if self._gate is not None else 0
        totals = await self._catalog.totals(deadline=self._deadline())
        tenants: dict[bytes, str] = {namespace: total.tenant for namespace, total in totals.items()}
        held = {namespace: total.levels[_LEVEL].num_bytes for namespace, total in totals.items()}
        self._present = {namespace for namespace, total in totals.items() if total.num_boundaries}
        stored = sum(held.values())
        used = await self._used_bytes(stored)
        self._has_grown, self._stored_bytes = stored > self._stored_bytes, stored
        self._tenant_bytes = _by_tenant(held, tenants)
        start_bytes = None
        if self._gate is not None:
            self._gate.settle(used + self._gate.ended_bytes - ended_bytes)
            used += self._gate.requested_bytes
            start_bytes = self._gate.start_bytes
        excess = self._rules.excess_bytes(used, start_bytes)
        self._is_over = excess > 0
        if self._rules.budget_bytes is not None:
            boundaries = sum(total.levels[_LEVEL].num_boundaries for total in totals.values())
            is_near = used > self._rules.budget_bytes * self._rules.near_share
            mean_bytes = int(stored * self._cost) // max(1, boundaries)
            await self._choice.settle(self._rules.budget_bytes, mean_bytes, is_near=is_near)
            if is_near:
                # not by the leases on evicting: a service that evicts nothing would keep others from it
                leases = {namespace: _lease_name(namespace, "admission") for namespace in held}
                await self._choice.agree(leases, self._ownership, self._deadline())
        return held, tenants, excess

    async def _epoch(self) -> bytes | None:
        return await self._catalog.complete_epoch(deadline=self._deadline())

    async def _finish_all(self) -> int:
        """Finish the deletions that others, or an earlier run, left in what is owned here; returns the bytes freed."""
        freed = 0
        async for entry in self._catalog.leaving(self._owned):
            freed += (await self._finish(entry.namespace, entry.prefix))[1]
        return freed

    async def _list(self) -> tuple[Listing, int, int]:
        """The boundaries owned here that are not leaving, the bytes freed by `_finish`, and the bytes of all that were
        leaving: where the tier refuses to delete, these will be free without another eviction.
        """
        listing, freed, leaving_bytes = Listing(), 0, 0
        async for namespace, step in self._catalog.walk(self._owned):
            listing.add(namespace, step.prefixes, step.table)
            for index in np.flatnonzero(step.table.data[:, LEAVING_AT]).tolist():
                table, num_bytes = await self._finish(namespace, step.prefixes[index])
                listing.add(namespace, [step.prefixes[index]], table)
                freed += num_bytes
                if table.leaves(0, _LEVEL):
                    leaving_bytes += int(table.level_bytes(_LEVEL)[0])
            await asyncio.sleep(0)  # the catalog hands out steps without a pause
        return listing, freed, leaving_bytes

    async def _finish(self, namespace: NamespaceId, prefix: PrefixHash) -> tuple[EntryTable, int]:
        """Finish a deletion. Returns the boundary's entry before that, and the bytes freed in the cold tier."""
        # it was read with many others: by now the deletion may have ended, and the boundary be stored again
        table = await self._catalog.lookup(namespace, [prefix], deadline=self._deadline())
        freed = 0
        for entry in table.entries(namespace, [prefix]):
            if Level.HOT in entry.leaving and self._hot is not None:
                await self._end_hot_deletion(self._hot, entry)
            if _LEVEL in entry.leaving:
                freed += await self._evictor.finish(entry)
        return table, freed

    async def _end_hot_deletion(self, hot: Tier, entry: BoundaryEntry) -> None:
        """End a deletion that was interrupted: until then the hot tier takes no record of the boundary. While that tier
        does not answer, a later round tries again.
        """
        try:
            await hot.delete_all(entry.keys(Level.HOT), deadline=self._deadline())
        except Unavailable:
            self._evictor.has_unfinished = True
        else:
            await self._catalog.finish_leaving([(entry, LeaveReason.REMOVED)], Level.HOT, deadline=self._deadline())

    async def _plan(
        self,
        listing: Listing,
        tenants: Mapping[bytes, str],
        free_bytes: int,
        elsewhere: Mapping[str, int],
        *,
        is_complete: bool,
    ) -> EvictionPlan:
        """What to evict. Computed in a thread: a million entries would stop the loop for seconds. Boundaries that are
        written here stay; new ones stay if evicting others is enough, since more of them may be on its way.
        """
        gate, now_s = self._gate, self._now_s()
        writing = set(gate.boundaries_in_flight()) if gate is not None else set()
        recent = gate.boundaries_in_work() if gate is not None else frozenset()
        order = gate.order() if gate is not None else {}
        book = self._choice.marks
        marks = await book.read(self._owned, self._deadline()) if book is not None else {}
        over: list[bytes] = []

        def work() -> EvictionPlan:
            held = listing.held()
            kept = held.flags(held.rows_of(writing | incomplete_of(held, recent)).values())
            broken = held.broken() & (held.pinned_until_s <= now_s) if is_complete else held.flags(())
            priorities, found = applying(marks, held, now_s)
            over.extend(found)
            # hints of a tenant that are not followed change nothing, and each would cost an object
            follows = {tenant: self._choice.follows(tenant) for tenant in set(tenants.values())}
            of_row = [follows[tenants[namespace]] for namespace in held.namespaces]
            priorities = {row: one for row, one in priorities.items() if of_row[held.namespace[row]]}
            rows = {row: order[name] for name, row in held.rows_of(order).items()}
            for kept_since_s in (now_s - _FRESH_S, None):
                plan = plan_eviction(
                    held,
                    tenants=tenants,
                    now_s=now_s,
                    limits=Limits(free_bytes, self._rules.quotas, elsewhere, self._rules.ttl_s),
                    ranking=Ranking(self._choice.make_policy, rows, priorities),
                    kept=kept,
                    kept_since_s=kept_since_s,
                    broken=broken & (held.last_use_s <= now_s - _BROKEN_S) & ~kept,
                )
                if plan.is_enough:
                    break
            return replace(plan, has_broken=bool(broken.any()))

        plan = await asyncio.to_thread(work)
        if book is not None and over:
            await book.drop(over, self._deadline())
        return plan

    def _schedule_broken(self, freed_bytes: int, plan: EvictionPlan) -> None:
        """Schedule the next search for boundaries that serve no hit. If a boundary's start was evicted while it was
        being written, only this search finds it: the tier need not be full."""
        if freed_bytes:
            self._find_broken_s = _BROKEN_S
        is_wanted = freed_bytes or plan.has_broken
        self._find_broken_at_s = self._now_s() + self._find_broken_s if is_wanted else float("inf")
        self._find_broken_s = min(2 * self._find_broken_s, _BROKEN_S_MAX)

    async def _used_bytes(self, stored: int) -> int:
        """What the tier uses of its budget: the bytes of its records, or what the medium says they occupy."""
        if not self._rules.is_private:
            return stored
        self._asked = self._tier.name
        used = (await self._tier.usage(deadline=self._deadline())).used_bytes or stored
        self._asked = _CATALOG
        self._cost = max(1.0, used / max(1, stored))
        return used

    def _is_due(self, by_tenant: Mapping[str, int]) -> bool:
        """Whether something may have to be evicted though the budget is not reached."""
        rules = self._rules
        if rules.ttl_s is not None:
            now_s = self._clock.monotonic_s()
            if now_s - self._swept_s >= max(rules.period_s, rules.ttl_s / 20):
                self._swept_s = now_s
                return True
        return any(
            quota.maximum_bytes is not None and by_tenant.get(tenant, 0) > quota.maximum_bytes
            for tenant, quota in rules.quotas.items()
        )

    async def _register(self, namespace: NamespaceId) -> bool:
        """Whether this service can read the namespace's entries. One that no engine has opened here is registered from
        its manifest; without a manifest it is left to a service on which it is open.
        """
        if self._catalog.knows(namespace):
            return True
        self._asked = self._tier.name
        manifest = await self._tier.get_manifest(namespace, deadline=self._deadline())
        self._asked = _CATALOG
        if manifest is None:
            return False
        try:
            description = parse_manifest(manifest, namespace)
        except (CorruptRecord, UnsupportedFormat) as error:
            self._count_failure(self._tier.name)
            if namespace not in self._unreadable:  # once: rounds are many
                self._unreadable.add(namespace)
                text = "nothing is evicted here of namespace %s, whose description in %s cannot be read: %s"
                _log.warning(text, namespace.hex(), self._tier.name, error)
            return False
        await self._catalog.register(namespace, description.layout(), description.tenant, deadline=self._deadline())
        return True

    def _check_tier(self) -> None:
        """Raise `Unavailable` while the tier's breaker is open."""
        if isinstance(self._tier, GuardedTier):
            self._asked = self._tier.name
            self._tier.check_usable()
            self._asked = _CATALOG

    def _count_failure(self, at: str) -> None:
        self._meters.add("retention_failures", tier=self._tier.name, at=at)

    def _on_freed(self, num_bytes: int) -> None:
        if self._gate is not None:
            self._gate.free(int(num_bytes * self._cost))

    async def aclose(self) -> None:
        """Stop, and give the leases back. Idempotent."""
        await self._background.aclose()
        owned, self._owned = self._owned, set()
        for namespace in owned:
            try:
                await self._ownership.release(_lease_name(namespace), deadline=self._deadline())
            except (Unavailable, Closed):
                return  # they end by themselves

    def _deadline(self) -> Deadline:
        return Deadline.after(_CALL_S, self._clock)

    def _now_s(self) -> int:
        return self._clock.wall_ms() // 1000


def _lease_name(namespace: NamespaceId, duty: str = "retention") -> str:
    return f"{duty}/{_LEVEL.name.lower()}/{namespace.hex()}"


def _by_tenant(held: Mapping[NamespaceId, int], tenants: Mapping[bytes, str]) -> dict[str, int]:
    by_tenant: dict[str, int] = {}
    for namespace, num_bytes in held.items():
        by_tenant[tenants[namespace]] = by_tenant.get(tenants[namespace], 0) + num_bytes
    return by_tenant
