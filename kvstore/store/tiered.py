"""`TieredStore`: the `PageStore` of a node, over a memory tier and at most two slower ones."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict

import kvstore
from kvstore.api import Ack, LeaseId, Lookup, PageStore, PrefixQuery, Progress, SaveOutcome, Staged
from kvstore.errors import Closed, CorruptRecord, InvalidRequest, KVStoreError, Unavailable
from kvstore.format.manifest import pack_manifest
from kvstore.format.record import Record
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.model.layout import Layout
from kvstore.model.namespace import NamespaceDescription
from kvstore.runtime.background import Background
from kvstore.runtime.budget import ByteBudget
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.store.absent import AbsentKeys
from kvstore.store.admission import check_header, check_key, check_sizes
from kvstore.store.leases import LeaseTable
from kvstore.store.limits import StoreLimits
from kvstore.store.presence import PresenceFinder
from kvstore.store.promotion import Holding, Promotion
from kvstore.store.write_back import WriteBack
from kvstore.tiers.base import PutOutcome, Tier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.verify import open_off_loop

__all__ = ["TieredStore"]

_SWEEP_S = 1.0
_ANSWER_S = 0.01
"""Kept back from a deadline for the answer itself: what has arrived is returned, not lost to a late reply."""


class TieredStore(PageStore):
    """Writes to memory, then in the background to the hot and the cold tier; reads from memory, then hot, then cold.

    The tiers are the caller's: `aclose` leaves them open. A slower tier that is down costs hits, never an error.

    Args:
        memory: Where records are staged and leased.
        hot: A shared, quick tier, if there is one.
        cold: A large, slow tier, if there is one.
        meters: Where to count.
        limits: Every bound; by default stages may pin three quarters of the memory tier.
        clock: For leases, pauses and deadlines of the store's own.
    """

    def __init__(
        self,
        memory: MemoryTier,
        hot: Tier | None = None,
        cold: Tier | None = None,
        *,
        meters: Meters | None = None,
        limits: StoreLimits | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.meters = meters if meters is not None else Meters()
        self.limits = limits or StoreLimits(stage_bytes=memory.limit_bytes * 3 // 4)
        check_sizes(self.limits.stage_bytes, memory.limit_bytes)
        self._memory = memory
        self._slower = tuple(tier for tier in (hot, cold) if tier is not None)
        self._clock = clock
        self._background = Background("store")
        self._namespaces: OrderedDict[NamespaceId, Layout] = OrderedDict()
        self._manifests_kept: set[tuple[NamespaceId, str]] = set()
        self._leases = LeaseTable(memory, clock, lease_s=self.limits.lease_s, leases_max=self.limits.leases_max)
        self._absent = AbsentKeys(clock)
        self._saves = ByteBudget(self.limits.save_bytes_in_flight)
        self._hot = self._queue(hot)
        self._cold = self._queue(cold)
        self._hot_tier, self._cold_tier = hot, cold
        self._finder = PresenceFinder(memory, hot, cold, self._absent, self.meters, cold_probes=self.limits.cold_probes)
        self._promotion = Promotion(
            memory,
            hot,
            cold,
            absent=self._absent,
            background=self._background,
            meters=self.meters,
            limits=self.limits,
            clock=clock,
            on_cold_hit=self._promote_to_hot,
        )
        self._sweeper: asyncio.Task[None] | None = None
        self._closed = False

    def _queue(self, tier: Tier | None) -> WriteBack | None:
        return None if tier is None else WriteBack(tier, self._background, self.meters, self.limits, self._clock)

    def _promote_to_hot(self, record: Record) -> None:
        if self._hot is not None:
            self._hot.offer(record)

    async def open_namespace(self, description: NamespaceDescription, *, deadline: Deadline) -> NamespaceId:
        self._check_open()
        namespace, layout = description.id, description.layout()
        if namespace not in self._namespaces and len(self._namespaces) >= self.limits.namespaces_max:
            raise Unavailable("too many namespaces are open on this node", limit=self.limits.namespaces_max)
        self._namespaces[namespace] = layout
        manifest = pack_manifest(description)
        for tier in self._slower:
            if (namespace, tier.name) not in self._manifests_kept:
                self._background.spawn(self._keep_manifest(tier, namespace, manifest), f"manifest to {tier.name}")
        return namespace

    async def _keep_manifest(self, tier: Tier, namespace: NamespaceId, manifest: bytes) -> None:
        """Best effort: a manifest explains records, nothing depends on it, and the next engine tries again."""
        deadline = Deadline.after(self.limits.write_back_timeout_s, self._clock)
        try:
            await tier.put_manifest(namespace, manifest, deadline=deadline)
        except KVStoreError:
            self.meters.add("manifest_failures", tier=tier.name)
        else:
            self._manifests_kept.add((namespace, tier.name))

    async def lookup(self, query: PrefixQuery, *, deadline: Deadline) -> Lookup:
        layout = self._layout(query.namespace)
        presence = await self._finder.find(query, layout, _leave_time(deadline))
        bits, resume_tokens = presence.groups_present(), presence.resume_tokens()
        self.meters.add("lookups")
        self.meters.add("lookup_hits", resume_tokens > query.local_tokens)
        return Lookup(resume_tokens, tuple(bits))

    async def stage(
        self, query: PrefixQuery, *, deadline: Deadline, progress: Progress | None = None, owner: str = ""
    ) -> Staged:
        """As `PageStore.stage`.

        Args:
            owner: Whose lease it is: `release_owner` ends all leases of one owner, e.g. of a peer that died.
        """
        layout = self._layout(query.namespace)
        self.meters.add("stages")
        self._leases.sweep()
        if self._leases.full:
            self.meters.add("stage_refused", reason="leases")
            return Staged(None, query.local_tokens)
        deadline = _leave_time(deadline)
        # a tier that hangs while it is asked is as stalled as one that hangs while it is read
        presence = await self._finder.find(query, layout, deadline.earlier(self.limits.stall_timeout_s))
        holding = await self._promotion.stage(presence, deadline, progress)
        if self._closed:
            self._promotion.drop(holding)
            raise Closed("the store was closed during the call")
        if holding.resume_tokens <= query.local_tokens:
            return Staged(None, query.local_tokens)
        return self._lease(holding, owner)

    def _lease(self, holding: Holding, owner: str) -> Staged:
        lease = self._leases.grant(holding.pins, owner)
        self._keep_sweeping()
        self.meters.add("leases_granted")
        self.meters.add("served_bytes", holding.num_bytes)
        for source, count in holding.sources.items():
            self.meters.add("served_records", count, tier=source)
        spans = [pin.records[0].header.span for pin in holding.pins.values()]
        return Staged(
            lease=lease,
            resume_tokens=holding.resume_tokens,
            keys=tuple(holding.pins),
            spans=tuple((span.start, span.stop) for span in spans),
            sources=holding.sources,
            num_bytes=holding.num_bytes,
            lease_s=self._leases.lease_s,
        )

    async def renew(self, lease: LeaseId, *, deadline: Deadline) -> bool:
        self._check_open()
        return self._leases.renew(lease)

    async def load(
        self,
        lease: LeaseId,
        key: RecordKey,
        *,
        deadline: Deadline,
        allocate: Callable[[int], memoryview] | None = None,
    ) -> Record:
        self._layout(key.namespace)
        record = self._leases.record(lease, key)
        if record is None:
            raise Unavailable("the lease has ended, or does not hold the record", key=key)
        return record

    async def save(self, record: Record, *, ack: Ack = Ack.MEMORY, deadline: Deadline) -> SaveOutcome:
        layout = self._layout(record.key.namespace)
        awaited = self._tier_of(ack)
        check_header(record.header, layout)
        if awaited is None and record.key in self._memory:
            return self._count_save(SaveOutcome.EXISTS)
        if record.num_bytes > self._saves.limit_bytes:
            return self._count_save(SaveOutcome.FULL)
        grant = self._saves.try_take(record.num_bytes)
        if grant is None:
            return self._count_save(SaveOutcome.BUSY)
        try:
            async with deadline.scope("verifying a record"):
                await _verify(record)
            self._check_open()
            outcome = self._keep(record, awaited)
            if awaited is not None and outcome is not SaveOutcome.FULL:
                outcome = _OUTCOMES[await awaited.put(record, deadline=deadline)]
        finally:
            self._saves.give_back(grant)
        return self._count_save(outcome)

    def _keep(self, record: Record, awaited: Tier | None) -> SaveOutcome:
        """Put a verified record into memory and queue it for the tiers that nobody waits for. Never suspends."""
        outcome = self._memory.insert(record)
        if outcome is PutOutcome.STORED:
            self._absent.remove(record.key)
            for tier, queue in ((self._hot_tier, self._hot), (self._cold_tier, self._cold)):
                if queue is not None and tier is not awaited:
                    queue.offer(record)
        return _OUTCOMES[outcome]

    def _tier_of(self, ack: Ack) -> Tier | None:
        """The slower tier that a save waits for."""
        if ack is Ack.MEMORY:
            return None
        tier = self._hot_tier if ack is Ack.HOT else self._cold_tier
        if tier is None:
            raise InvalidRequest(f"ack {ack.value} needs a {ack.value} tier, and this store has none", ack=ack.value)
        return tier

    def _count_save(self, outcome: SaveOutcome) -> SaveOutcome:
        self.meters.add("saves", outcome=outcome.value)
        return outcome

    async def release(self, lease: LeaseId) -> None:
        self._leases.release(lease)

    def release_owner(self, owner: str) -> int:
        """End all leases that were staged for `owner` at once; returns how many."""
        return self._leases.release_owner(owner)

    async def discard(self, key: RecordKey, reason: str, *, deadline: Deadline) -> None:
        check_key(key, self._layout(key.namespace))
        self.meters.add("discarded_records")
        self._leases.forget(key)
        self._absent.add(key, self.limits.absent_s)
        for queue in (self._hot, self._cold):
            if queue is not None:
                queue.forget(key)
        failed = []
        for tier in (self._memory, *self._slower):
            try:
                await tier.quarantine(key, reason, deadline=deadline)
            except Unavailable:
                failed.append(tier.name)
                self.meters.add("quarantine_failures", tier=tier.name)
        if failed:
            raise Unavailable("a record could not be put aside in every tier", key=key, tiers=",".join(failed))

    async def status(self, *, deadline: Deadline) -> Mapping[str, object]:
        self._check_open()
        deadline = _leave_time(deadline)
        tiers = await asyncio.gather(*(self._tier_status(tier, deadline) for tier in (self._memory, *self._slower)))
        queues = {
            queue.tier_name: {"records": len(queue), "bytes": queue.used_bytes, "failing": queue.failing}
            for queue in (self._hot, self._cold)
            if queue is not None
        }
        return {
            "version": kvstore.__version__,
            "tiers": {str(tier["name"]): tier for tier in tiers},
            "namespaces": len(self._namespaces),
            "leases": {
                "active": len(self._leases),
                "expired": self._leases.num_expired,
                "pinned_bytes": self._memory.pinned_bytes,
            },
            "write_back": queues,
            "counters": self.meters.snapshot(),
        }

    async def _tier_status(self, tier: Tier, deadline: Deadline) -> dict[str, object]:
        try:
            usage = await tier.usage(deadline=deadline)
        except Unavailable as error:
            return {"name": tier.name, "healthy": False, "reason": str(error)}
        return {"name": tier.name, "healthy": True, **asdict(usage)}

    async def drain(self, deadline: Deadline) -> int:
        """Wait until every record that was saved has reached its slower tiers, or until the deadline.

        Returns:
            Records that are still on their way.
        """
        left = 0
        for queue in (self._hot, self._cold):
            if queue is not None:
                left += await queue.drain(deadline)
        return left

    async def aclose(self) -> None:
        """As `PageStore.aclose`: the write-back gets `drain_timeout_s`, leases and tasks end; the tiers stay open."""
        if self._closed:
            return
        self._closed = True
        try:
            await self.drain(Deadline.after(self.limits.drain_timeout_s, self._clock))
        finally:
            await self._background.aclose()
            self._leases.release_all()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the store is closed")

    def _layout(self, namespace: NamespaceId) -> Layout:
        self._check_open()
        layout = self._namespaces.get(namespace)
        if layout is None:
            raise InvalidRequest("the namespace was not opened: call open_namespace first", namespace=namespace.hex())
        return layout

    def _keep_sweeping(self) -> None:
        if self._sweeper is None or self._sweeper.done():
            with suppress(Closed):
                self._sweeper = self._background.spawn(self._sweep(), "lease sweep")

    async def _sweep(self) -> None:
        """End expired leases while there are any: the bytes they pin are needed whether or not somebody asks."""
        while len(self._leases):
            await asyncio.sleep(min(_SWEEP_S, self.limits.lease_s))
            self.meters.add("leases_expired", self._leases.sweep())


_OUTCOMES = {
    PutOutcome.STORED: SaveOutcome.STORED,
    PutOutcome.EXISTS: SaveOutcome.EXISTS,
    PutOutcome.FULL: SaveOutcome.FULL,
}


async def _verify(record: Record) -> None:
    """Check all of a record's bytes against its seal, and that the header at hand is the one in the bytes.

    Raises:
        CorruptRecord: They do not match.
    """
    opened = await open_off_loop(record.data, record.key)
    if isinstance(opened, str):
        raise CorruptRecord("a saved record does not match its seal", key=record.key, reason=opened)
    if opened.header != record.header:
        raise CorruptRecord("the header differs from the bytes it stands for", key=record.key)


def _leave_time(deadline: Deadline) -> Deadline:
    """A slightly earlier deadline, so that the answer itself arrives in time."""
    remaining_s = deadline.remaining_s
    return deadline.earlier(remaining_s - min(_ANSWER_S, remaining_s / 10))
