"""Keeps a level within its budgets: one owner per namespace decides what leaves, and deletes it, ends first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from kvstore.catalog.base import BoundaryEntry, Catalog
from kvstore.catalog.coordination import Ownership
from kvstore.catalog.entry import Level
from kvstore.errors import Closed, CorruptRecord, InvalidRequest, KVStoreError, Unavailable, UnsupportedFormat
from kvstore.eviction.holdings import Quota
from kvstore.format.manifest import parse_manifest
from kvstore.model.keys import PREFIX_BYTES, NamespaceId, PrefixHash
from kvstore.runtime.background import Background
from kvstore.runtime.clock import Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.runtime.pauses import collector_paused, collector_spared, empty_in_pieces
from kvstore.store.departures import Departures
from kvstore.store.policy_choice import PolicyChoice
from kvstore.store.retention_plan import LeavingPlan, broken_of, incomplete_of, plan_leaving
from kvstore.store.retention_rules import RetentionRules
from kvstore.store.room import Room
from kvstore.tiers.base import Tier

__all__ = ["Retention"]

_log = logging.getLogger(__name__)

_CALL_S = 10.0
_FRESH_S = 10
_MENDED_S, _MENDED_S_MAX = 60, 3600
"""How long a boundary that serves no hit is left alone, since what it lacks may be on its way. Also the time from an
eviction to the search for boundaries that have lost their start; each search that evicts nothing doubles it."""
_BUSY_S = 0.1
_LOOK_SHARE = 0.1
"""Share of the time spent on reading the totals while others write: over all slots of a cluster it is not free."""
_READ_AT_ONCE = 64


class Retention:
    """Applies rules to one level, from the catalog's totals and entries.

    `Departures` deletes what leaves. What was used since the catalog was read stays, and so does all below it.

    Args:
        tier: Where to delete; not wrapped in a `CataloguedTier`.
        level: The catalog's name for the tier.
        catalog: Knows what is held; stays the caller's.
        ownership: Leases on namespaces among the services that share the tier.
        rules: Budgets and times.
        choice: The policy that ranks what may leave.
        num_refused: How many additions the catalog has refused so far because their boundary is being deleted. A new
            one starts a round: a boundary whose deletion was abandoned would refuse records for ever.
        meters: Where to count: `retention_boundaries{tier,reason} retention_bytes{tier,reason}
            retention_failures{tier}`.
        clock: For time to live, pins and deadlines.
        room: Told how much is held and what has left; `None`: no writer waits for eviction.
    """

    def __init__(
        self,
        tier: Tier,
        level: Level,
        catalog: Catalog,
        ownership: Ownership,
        rules: RetentionRules,
        *,
        choice: PolicyChoice,
        meters: Meters,
        clock: Clock,
        num_refused: Callable[[], int] = lambda: 0,
        room: Room | None = None,
    ) -> None:
        self._tier = tier
        self._level = level
        self._catalog = catalog
        self._ownership = ownership
        self._rules = rules
        self._choice = choice
        self._meters = meters
        self._clock = clock
        self._room = room
        self._departures = Departures(tier, level, catalog, meters=meters, clock=clock, on_gone=self._on_gone)
        self._background = Background(f"retention of {tier.name}")
        self._owned: set[NamespaceId] = set()
        self._is_over = self._is_failing = False
        self._has_grown = False
        self._stored_bytes = 0
        self._tenant_bytes: Mapping[str, int] | None = None
        self._known: set[NamespaceId] = set()
        self._swept_s = float("-inf")
        self._num_refused = num_refused
        self._num_seen = 0
        self._mend_at_s = float("inf")
        self._mend_s = _MENDED_S
        self._cost = 1.0
        """Bytes of the budget that a stored byte takes: a directory's files fill whole blocks."""

    def start(self) -> None:
        """Work in the background from now on, until `aclose`."""
        self._background.spawn(self._run(), "rounds")

    def tenant_bytes(self) -> Mapping[str, int] | None:
        """What each tenant held at the last look; `None`: there was none. Safe from any thread."""
        return self._tenant_bytes

    def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """Apply these quotas from the next round on."""
        self._rules = replace(self._rules, quotas=quotas)

    async def _run(self) -> None:
        while True:
            is_stuck, started_s = True, self._clock.monotonic_s()
            try:
                is_stuck = await self.round() == 0 and self._is_over
                self._is_failing = False
            except KVStoreError as error:
                if not isinstance(error, Closed) and not self._is_failing:  # once until one works: rounds are many
                    _log.warning("a round of retention was cut short, the next one tries again: %s", error)
                self._is_failing = True
                self._meters.add("retention_failures", tier=self._tier.name)
                self._departures.has_unfinished = True  # what was hidden before it failed
                if self._room is not None:
                    self._room.suspend()
            if self._room is None or is_stuck:
                is_busy = self._room is not None and bool(self._room.boundaries_in_work())
                await asyncio.sleep(_BUSY_S if is_busy else self._rules.period_s)
            else:
                await self._room.wanted(self._look_s(self._clock.monotonic_s() - started_s))

    def _note_held(self, held: Mapping[NamespaceId, int], tenants: Mapping[bytes, str]) -> None:
        """Keep what a look has found."""
        by_tenant: dict[str, int] = {}
        for namespace, num_bytes in held.items():
            by_tenant[tenants[namespace]] = by_tenant.get(tenants[namespace], 0) + num_bytes
        stored = sum(held.values())
        self._tenant_bytes = by_tenant
        self._has_grown, self._stored_bytes = stored > self._stored_bytes, stored

    def _look_s(self, took_s: float) -> float:
        """Seconds to the next look. Others' writes show in the totals only, so look often while these grow."""
        if self._rules.is_private or not self._has_grown:
            return self._rules.period_s
        return min(self._rules.period_s, max(_BUSY_S, took_s / _LOOK_SHARE))

    async def round(self) -> int:
        """Look once, and evict what is over budget, quota or age; returns the bytes freed.

        Raises:
            Unavailable: The catalog did not answer. What was begun is finished by a later round.
        """
        if self._rules.hold_nothing:
            return 0
        if self._rules.is_private and not await self._catalog.is_complete(deadline=self._deadline()):
            if self._room is not None:
                self._room.suspend()
            return 0
        ended_bytes = self._room.ended_bytes if self._room is not None else 0
        totals = await self._catalog.totals(deadline=self._deadline())
        tenants: dict[bytes, str] = {namespace: total.tenant for namespace, total in totals.items()}
        held = {namespace: total.levels[self._level].num_bytes for namespace, total in totals.items()}
        stored = sum(held.values())
        used = await self._used_bytes(stored)
        self._note_held(held, tenants)
        if self._room is not None:
            self._room.settle(used + self._room.ended_bytes - ended_bytes)
            used += self._room.asked_bytes
        excess = self._rules.excess_bytes(used, self._room.start_bytes if self._room is not None else None)
        self._is_over = excess > 0
        if self._rules.budget_bytes is not None:
            boundaries = sum(total.levels[self._level].num_boundaries for total in totals.values())
            is_near = used > self._rules.budget_bytes * self._rules.near_share
            mean_bytes = int(stored * self._cost) // max(1, boundaries)
            await self._choice.settle(self._rules.budget_bytes, mean_bytes, is_near=is_near)
            if is_near:
                leases = {namespace: self._lease_name(namespace) for namespace in held}
                await self._choice.agree(leases, self._ownership, self._deadline())
        num_refused = self._num_refused()
        is_due = self._is_over or self._is_due(held, tenants) or self._now_s() >= self._mend_at_s
        if not is_due and not self._departures.has_unfinished and num_refused == self._num_seen:
            return 0
        self._owned = {
            namespace
            for namespace in held
            if held[namespace]
            and await self._know(namespace)
            and await self._ownership.hold(self._lease_name(namespace), deadline=self._deadline())
        }
        self._departures.has_unfinished = False
        with ExitStack() as spared:
            with collector_paused():
                entries, left = await self._entries()
                if len(self._owned) == sum(map(bool, held.values())):
                    self._num_seen = num_refused  # else try again to own the rest, until it is gone or ours
                # our share of what all owners together must free
                own = sum(held[namespace] for namespace in self._owned)
                free_bytes = int(excess / self._cost) * own // max(1, stored) - left
                elsewhere = {
                    tenant: sum(
                        num for name, num in held.items() if tenants[name] == tenant and name not in self._owned
                    )
                    for tenant in self._rules.quotas
                }
                plan = await self._plan(entries, tenants, free_bytes, elsewhere)
                await asyncio.to_thread(empty_in_pieces, entries)
                spared.enter_context(collector_spared())
            left += await self._departures.evict(plan.leavers)
            await asyncio.to_thread(empty_in_pieces, plan.leavers)
        if self._room is not None and left:
            self._room.evicted()
        self._mend_later(left, plan)
        owns_all = len(self._owned) == sum(map(bool, held.values()))
        is_stuck = left == 0 and self._is_over and owns_all
        if is_stuck and self._room is not None and not self._room.boundaries_in_work():
            self._room.stuck()
        return left

    async def _entries(self) -> tuple[list[BoundaryEntry], int]:
        """The entries owned here, and the bytes freed by finishing deletions that others, or an earlier run, left."""
        entries: list[BoundaryEntry] = []
        left = 0
        for namespace in self._owned:
            async for entry in self._catalog.iterate(namespace):
                if self._level not in entry.leaving:
                    entries.append(entry)
                    if len(entries) % _READ_AT_ONCE == 0:  # the catalog hands out hundreds without a pause
                        await asyncio.sleep(0)
                else:
                    left += await self._departures.finish(entry)
        return entries, left

    async def _plan(
        self,
        entries: Sequence[BoundaryEntry],
        tenants: Mapping[bytes, str],
        free_bytes: int,
        elsewhere: Mapping[str, int],
    ) -> LeavingPlan:
        """What leaves. Computed in a thread: a million entries would stop the loop for seconds. Boundaries that are
        written here stay; new ones stay if evicting others is enough, since more of them may be on its way.
        """
        room, now_s = self._room, self._now_s()
        writing = set(room.boundaries_in_flight()) if room is not None else set()
        recent = room.boundaries_in_work() if room is not None else frozenset()
        order = room.order() if room is not None else None
        # asked after the entries were read: in an incomplete catalog a missing one may be stored all the same
        is_complete = await self._catalog.is_complete(deadline=self._deadline())

        def work() -> LeavingPlan:
            in_work = writing | incomplete_of(entries, recent, self._level)
            broken = broken_of(entries, self._level, now_s) if is_complete else {}
            leave = {name for name, used_s in broken.items() if used_s <= now_s - _MENDED_S and name not in in_work}
            for kept_since_s in (now_s - _FRESH_S, None):
                plan = plan_leaving(
                    entries,
                    level=self._level,
                    tenants=tenants,
                    free_bytes=free_bytes,
                    quotas=self._rules.quotas,
                    ttl_s=self._rules.ttl_s,
                    now_s=now_s,
                    make_policy=self._choice.make_policy,
                    kept=in_work,
                    kept_since_s=kept_since_s,
                    broken=leave,
                    order=order,
                    elsewhere=elsewhere,
                )
                if plan.is_enough:
                    break
            return replace(plan, has_broken=bool(broken))

        return await asyncio.to_thread(work)

    def _mend_later(self, left_bytes: int, plan: LeavingPlan) -> None:
        """Schedule the next search for boundaries that serve no hit. One whose start left while it was being written
        may be found by nothing else: the level need not be full."""
        if left_bytes:
            self._mend_s = _MENDED_S
        self._mend_at_s = self._now_s() + self._mend_s if left_bytes or plan.has_broken else float("inf")
        self._mend_s = min(2 * self._mend_s, _MENDED_S_MAX)

    async def _used_bytes(self, stored: int) -> int:
        """What the level uses of its budget: the bytes of its records, or what the medium says they occupy."""
        if not self._rules.is_private:
            return stored
        used = (await self._tier.usage(deadline=self._deadline())).used_bytes or stored
        self._cost = max(1.0, used / max(1, stored))
        return used

    def _is_due(self, held: Mapping[NamespaceId, int], tenants: Mapping[bytes, str]) -> bool:
        """Whether something may have to leave though there is room."""
        rules = self._rules
        if rules.ttl_s is not None:
            now_s = self._clock.monotonic_s()
            if now_s - self._swept_s >= max(rules.period_s, rules.ttl_s / 20):
                self._swept_s = now_s
                return True
        by_tenant = {
            tenant: sum(held[namespace] for namespace in held if tenants[namespace] == tenant)
            for tenant in rules.quotas
        }
        maxima = ((by_tenant[tenant], quota.maximum_bytes) for tenant, quota in rules.quotas.items())
        return any(maximum is not None and taken > maximum for taken, maximum in maxima)

    async def _know(self, namespace: NamespaceId) -> bool:
        """Whether this service can read the namespace's entries. One that no engine has opened here is registered from
        its manifest; without a manifest it is left to a service on which it is open.
        """
        if namespace in self._known:
            return True
        try:
            await self._catalog.get(namespace, PrefixHash(bytes(PREFIX_BYTES)), deadline=self._deadline())
        except InvalidRequest:  # not registered here yet
            manifest = await self._tier.get_manifest(namespace, deadline=self._deadline())
            if manifest is None:
                return False
            try:
                description = parse_manifest(manifest, namespace)
            except (CorruptRecord, UnsupportedFormat):
                self._meters.add("retention_failures", tier=self._tier.name)
                return False
            await self._catalog.register(namespace, description.layout(), description.tenant, deadline=self._deadline())
        self._known.add(namespace)
        return True

    def _lease_name(self, namespace: NamespaceId) -> str:
        return f"retention/{self._level.name.lower()}/{namespace.hex()}"

    def _on_gone(self, num_bytes: int) -> None:
        if self._room is not None:
            self._room.free(int(num_bytes * self._cost))

    async def aclose(self) -> None:
        """Stop, and give the leases back. Idempotent."""
        await self._background.aclose()
        owned, self._owned = self._owned, set()
        for namespace in owned:
            try:
                await self._ownership.release(self._lease_name(namespace), deadline=self._deadline())
            except (Unavailable, Closed):
                return  # they end by themselves

    def _deadline(self) -> Deadline:
        return Deadline.after(_CALL_S, self._clock)

    def _now_s(self) -> int:
        return self._clock.wall_ms() // 1000
