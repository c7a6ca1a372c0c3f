"""`TieredStore`: the `PageStore` of a node, over a memory tier and at most two slower ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product

import kvstore
from kvstore.api import Ack, LeaseId, Lookup, Outcome, PageStore, PrefixQuery, Progress, Retention, SaveOutcome, Staged
from kvstore.catalog.pending import PendingLog
from kvstore.errors import Closed, InvalidRequest, Unavailable
from kvstore.format.manifest import pack_manifest
from kvstore.format.record import Record
from kvstore.model.coverage import MAX_POINTS
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.model.layout import Layout
from kvstore.model.namespace import NamespaceDescription, NamespaceNotOpen
from kvstore.runtime.arena import Arena
from kvstore.runtime.background import Background
from kvstore.runtime.budget import Shares, share_left
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.events import Events
from kvstore.runtime.meters import Meters
from kvstore.runtime.tracing import Tracing
from kvstore.runtime.turns import PIECE, LongWork, Turns
from kvstore.store.absence import AbsenceFinder
from kvstore.store.absent import AbsentKeys
from kvstore.store.admission import check_key, check_sizes
from kvstore.store.catalog_lookup import CatalogLookup
from kvstore.store.cold_admission import ColdAdmission
from kvstore.store.explaining import Explainer
from kvstore.store.lease_sweep import LeaseSweep
from kvstore.store.leases import LeaseTable
from kvstore.store.limits import StoreLimits
from kvstore.store.manifests import Manifests
from kvstore.store.offers import offers_of
from kvstore.store.open_namespaces import OpenNamespaces
from kvstore.store.operations import StoreOperations
from kvstore.store.placement import UNKNOWN_BYTES, Presence
from kvstore.store.policy_choice import PolicyChoice
from kvstore.store.presence import PresenceFinder
from kvstore.store.promotion import Promotion
from kvstore.store.recorder import Recorder
from kvstore.store.saving import Saver
from kvstore.store.stage_run import Holding
from kvstore.store.standing_orders import StandingOrders
from kvstore.tiers.base import Tier
from kvstore.tiers.memory import MemoryTier

__all__ = ["TieredStore"]

_QUESTIONS_AT_ONCE = 64
"""Questions to the slower tiers at a time, of a few thousand names at most; more of them wait their turn."""
_ASIDE_SHARE = 1 / 16
"""What a tenant may have put aside by its own word, as a share of its quota."""
_ANSWER_S = 0.01
"""Reserved from a deadline for the answer itself, so that what has arrived is not lost to a late reply."""


class TieredStore(PageStore):
    """Writes to memory, then in the background to the hot and the cold tier; reads from memory, then hot, then cold.

    The tiers are the caller's: `aclose` leaves them open. A slower tier that is down costs hits, never an error.

    Args:
        memory: Where records are staged and leased.
        hot: A shared, fast tier, if there is one.
        cold: A large, slow tier, if there is one.
        pending: Where write-backs are recorded, so that others can finish them if this process dies; stays the
            caller's. Without it they are lost with the process.
        recorder: The way to the catalog, if there is one.
        choice: Told of every lookup, to choose the policy that retention follows.
        admission: Told of every lookup; decides which saves that wait for memory alone the cold tier gets. `None`: all.
        orders: Knows which weights are retired: nothing of theirs is found. `None`: none.
        meters: Where to count.
        events: What happened lately; the code that made the tiers adds to it.
        limits: Every bound; by default stages may pin three quarters of the memory tier.
        clock: For leases, pauses and the store's own deadlines.
        tracing: Makes spans of what is written in the background.

    Attributes:
        operations: What operators may ask of it.
        work: Runs what takes long for a long prompt.
    """

    def __init__(
        self,
        memory: MemoryTier,
        hot: Tier | None = None,
        cold: Tier | None = None,
        *,
        pending: PendingLog | None = None,
        recorder: Recorder | None = None,
        choice: PolicyChoice | None = None,
        admission: ColdAdmission | None = None,
        orders: StandingOrders | None = None,
        meters: Meters | None = None,
        events: Events | None = None,
        limits: StoreLimits | None = None,
        clock: Clock = SYSTEM_CLOCK,
        tracing: Tracing | None = None,
    ) -> None:
        self.meters = meters if meters is not None else Meters()
        self.events = events if events is not None else Events(clock)
        self.limits = limits = limits or StoreLimits(stage_bytes=memory.limit_bytes * 3 // 4)
        check_sizes(self.limits.stage_bytes, memory.limit_bytes)
        self._memory = memory
        self._slower = tuple(tier for tier in (hot, cold) if tier is not None)
        self._tier_names = [memory.name, *("" if tier is None else tier.name for tier in (hot, cold))]
        self._clock = clock
        self._background = Background("store")
        self._aside = Shares(self.limits.aside_bytes)
        self._namespaces = OpenNamespaces(self.limits.namespaces_max, clock, self.limits.description_bytes)
        memory.owner_of = self._namespaces.tenant_of
        self._leases = LeaseTable(
            memory, clock, lease_s=limits.lease_s, leases_max=limits.leases_max, records_max=limits.lease_records_max
        )
        self._absent = AbsentKeys(clock)
        self._saver = Saver(
            memory,
            hot,
            cold,
            pending=pending,
            recorder=recorder,
            check_open=self._check_open,
            admission=admission,
            absent=self._absent,
            background=self._background,
            meters=self.meters,
            limits=self.limits,
            clock=clock,
            tracing=tracing,
        )
        self._manifests = Manifests(
            hot, cold, recorder, background=self._background, meters=self.meters, limits=self.limits, clock=clock
        )
        absence = AbsenceFinder(recorder.catalog, self._manifests) if recorder is not None else None
        self._orders = orders
        self._explainer = Explainer(absence, clock, self.meters, self._is_retired, background=self._background)
        self.operations = StoreOperations(
            memory,
            hot,
            cold,
            manifests=self._manifests,
            explainer=self._explainer,
            saver=self._saver,
            meters=self.meters,
            orders=orders,
            clock=clock,
        )
        self._recorder = recorder
        self._choice = choice
        self._admission = admission
        self.work = LongWork("lookups")
        self._finder = self._find_with(hot, cold)
        self._promotion = Promotion(
            memory,
            hot,
            cold,
            absent=self._absent,
            background=self._background,
            meters=self.meters,
            limits=self.limits,
            clock=clock,
            work=self.work,
            room_for=self._room_for,
            on_cold_hit=self._saver.promote_to_hot,
        )
        self._sweep = LeaseSweep(self._leases, self._background, self.meters)
        self._closed = False

    def _find_with(self, hot: Tier | None, cold: Tier | None) -> PresenceFinder:
        catalog = self._recorder.catalog if self._recorder is not None else None
        return PresenceFinder(
            self._memory,
            hot,
            cold,
            self._absent,
            self.meters,
            cold_probes=self.limits.cold_probes,
            work=self.work,
            questions=Turns(_QUESTIONS_AT_ONCE),
            catalog=CatalogLookup(catalog, self.meters, self._clock, self.work) if catalog is not None else None,
        )

    @property
    def slower(self) -> tuple[Tier, ...]:
        """The tiers below memory, the fastest first."""
        return self._slower

    @property
    def arena(self) -> Arena | None:
        return self._memory.arena

    def buffer(self, num_bytes: int) -> memoryview:
        return self._memory.buffer(num_bytes)

    async def open_namespace(self, description: NamespaceDescription, *, deadline: Deadline) -> NamespaceId:
        self._check_open()
        namespace, layout = description.id, description.layout()
        for closed in self._namespaces.open(namespace, layout, description.tenant, len(description.canonical)):
            self._manifests.close(closed)
        self._explainer.know(namespace, description.name)
        if self._orders is not None:
            self._orders.know(description)
        if self._recorder is not None:
            self._recorder.register(namespace, layout, description.tenant)
        self._manifests.open(namespace, pack_manifest(description))
        return namespace

    async def lookup(self, query: PrefixQuery, *, deadline: Deadline, learns: bool = True) -> Lookup:
        """As `PageStore.lookup`.

        Args:
            learns: Whether the catalog may learn that each boundary's parent is the one before it.
        """
        layout = self._layout_for(query)
        if self._is_retired(query.namespace):
            return Lookup(query.local_tokens, (0,) * len(query.boundaries))
        if self._recorder is not None and learns:
            self._recorder.learn(query, layout)
        if self._choice is not None:
            self._choice.observe(query, layout)
        presence = await self._find(query, layout, _leave_time(deadline))
        if self._admission is not None and (lacking := self._admission.seen(presence)):
            self._saver.bring(presence, lacking)
        found = await self.work.run(presence.num_cells, self._found, presence)
        self.meters.add("lookups")
        self.meters.add("lookup_hits", found.resume_tokens > query.local_tokens)
        return found

    async def probe(self, query: PrefixQuery, *, deadline: Deadline) -> Lookup:
        """As `lookup`, without side effects: nothing is counted, learnt or brought anywhere."""
        presence = await self._find(query, self._layout_for(query), _leave_time(deadline))
        return await self.work.run(presence.num_cells, self._found, presence)

    async def _find(self, query: PrefixQuery, layout: Layout, deadline: Deadline) -> Presence:
        """Where the records are, for a lookup. What hangs has stalled, however long the caller would wait: first the
        catalog may, then the tiers. A long prompt takes longer.
        """
        patience_s = 2 * self.limits.stall_timeout_s * (1 + len(query.boundaries) // PIECE)
        return await self._finder.find(query, layout, deadline.earlier(patience_s))

    def _found(self, presence: Presence) -> Lookup:
        bits = presence.groups_present()
        resume_tokens = presence.resume_tokens(bits)
        offers = offers_of(presence, resume_tokens, self._tier_names, bits)
        return Lookup(resume_tokens, tuple(bits), offers, tuple(sorted(presence.silent)))

    async def stage(
        self, query: PrefixQuery, *, deadline: Deadline, progress: Progress | None = None, owner: str = ""
    ) -> Staged:
        """As `PageStore.stage`.

        Args:
            owner: The lease's owner: `release_owner` ends all leases of one owner, e.g. of a peer that died.
        """
        layout = self._layout_for(query)
        self.meters.add("stages")
        if self._is_retired(query.namespace):
            return Staged(None, query.local_tokens, cut="weights_retired")
        tenant = self._namespaces.tenant_of(query.namespace)
        if self._sweep.is_full(tenant):
            return Staged(None, query.local_tokens, cut="node_memory")
        deadline = _leave_time(deadline)
        # a tier that hangs during a lookup is as stalled as one that hangs during a read; a long prompt asks it often
        patience_s = self.limits.stall_timeout_s * (1 + len(query.boundaries) // PIECE)
        presence = await self._finder.find(query, layout, deadline.earlier(patience_s))
        holding = await self._promotion.stage(presence, deadline, progress)
        if holding.resume_tokens < query.cap_tokens and presence.silent:
            holding = replace(holding, cut=f"tier_failed:{min(presence.silent)}")
        if self._closed:
            self._promotion.drop(holding)
            raise Closed("the store was closed during the call")
        if holding.resume_tokens <= query.local_tokens:
            return Staged(None, query.local_tokens, cut=holding.cut)
        if self._sweep.is_full(tenant, len(holding.pins)):  # other stages ended while this one ran
            self._promotion.drop(holding)
            return Staged(None, query.local_tokens, cut="node_memory")
        try:
            await self._note_use(query.namespace, holding)
        except BaseException:
            self._promotion.drop(holding)
            raise
        return self._lease(holding, owner, tenant)

    async def _note_use(self, namespace: NamespaceId, holding: Holding) -> None:
        if self._recorder is None:
            return
        read = {key.prefix: stop for key, (_, stop) in zip(holding.pins, holding.spans, strict=True)}
        uses = list(read.items())
        for start in range(0, len(uses), PIECE):
            async with self.work.turn(len(uses)):
                self._recorder.used(namespace, uses[start : start + PIECE])

    def _lease(self, holding: Holding, owner: str, tenant: str) -> Staged:
        lease = self._leases.grant(holding.pins, owner, tenant)
        self._sweep.go_on()
        self.meters.add("leases_granted")
        self.meters.add("served_bytes", holding.num_bytes)
        for source, count in holding.sources.items():
            self.meters.add("served_records", count, tier=source)
        return Staged(
            lease=lease,
            resume_tokens=holding.resume_tokens,
            keys=tuple(holding.pins),
            spans=holding.spans,
            sources=holding.sources,
            num_bytes=holding.num_bytes,
            lease_s=self._leases.lease_s,
            cut=holding.cut,
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
        record = self._leases.record(lease, key) if not self._is_retired(key.namespace) else None
        if record is None:
            raise Unavailable("the lease has ended, or does not hold the record", key=key)
        return record

    async def save(
        self,
        record: Record,
        *,
        ack: Ack = Ack.MEMORY,
        retention: Retention = Retention.NORMAL,
        deadline: Deadline,
    ) -> SaveOutcome:
        layout = self._layout(record.key.namespace)
        if self._is_retired(record.key.namespace):
            self.meters.add("saves", outcome="retired")
            return SaveOutcome.FULL
        return await self._saver.save(record, layout, ack=ack, retention=retention, deadline=deadline)

    async def release(self, lease: LeaseId) -> None:
        self._leases.release(lease)

    def release_owner(self, owner: str) -> int:
        """End all leases that were staged for `owner` at once; returns how many."""
        return self._leases.release_owner(owner)

    async def discard(self, key: RecordKey, reason: str, *, deadline: Deadline) -> None:
        check_key(key, self._layout(key.namespace))
        self.meters.add("discarded_records")
        all_seen: list[Record | None] = [*self._leases.forget(key)] or [None]  # `None`: by its name
        self._absent.add(key, self.limits.absent_s)
        self._saver.forget(key)
        failed = []
        keeps = self._keeps_aside(key.namespace, sum(record.num_bytes for record in all_seen if record is not None))
        for tier, seen in product((self._memory, *self._slower), all_seen):
            try:
                if keeps:
                    await tier.quarantine(key, reason, seen=seen, deadline=deadline)
                else:
                    await tier.delete(key, deadline=deadline)
            except Unavailable:
                failed.append(tier.name)
                self.meters.add("quarantine_failures", tier=tier.name)
        if failed:
            raise Unavailable("a record could not be put aside in every tier", key=key, tiers=",".join(failed))

    def _keeps_aside(self, namespace: NamespaceId, num_bytes: int) -> bool:
        """Whether what a tenant calls bad is kept for people to look at, rather than removed: as long as the tenant has
        its share of the room for that, and all of it together is little of the tenant's quota.
        """
        tenant = self._namespaces.tenant_of(namespace)
        num_bytes = (num_bytes or UNKNOWN_BYTES) * len(self._slower)
        quota = self._orders.quotas.get(tenant) if self._orders is not None else None
        limit_bytes = quota.maximum_bytes if quota is not None else None
        if limit_bytes is not None and self._aside.used_by(tenant) + num_bytes > limit_bytes * _ASIDE_SHARE:
            return False
        return self._aside.try_take(tenant, num_bytes)

    def report(self, outcome: Outcome) -> None:
        self._explainer.tell(outcome)

    def explain_keys(self, reason: Callable[[str], str]) -> None:
        """Have misses explained by keys: `reason` returns a word of `REASONS` for a tenant, or an empty one."""
        self._explainer.key_reason = reason

    async def explain(self, request: str, *, deadline: Deadline, tenant: str | None = "") -> Mapping[str, object]:
        self._check_open()
        return await self._explainer.explain(request, tenant, _leave_time(deadline))

    async def status(self, *, deadline: Deadline, tenant: str = "") -> Mapping[str, object]:
        self._check_open()
        deadline = _leave_time(deadline)
        tiers = await asyncio.gather(*(self._tier_status(tier, deadline) for tier in (self._memory, *self._slower)))
        if tenant:
            return self._status_for(tenant, tiers)
        return {
            "version": kvstore.__version__,
            "tiers": {str(tier["name"]): tier for tier in tiers},
            "namespaces": len(self._namespaces),
            "leases": {
                "active": len(self._leases),
                "expired": self._leases.num_expired,
                "pinned_bytes": self._memory.pinned_bytes,
            },
            "write_back": self._saver.describe(),
            "admission": self._admission.rules() if self._admission is not None else {},
            "counters": self.meters.snapshot(),
            "recent": self._explainer.recent(),
            "quotas": self.operations.quotas(),
        }

    def _status_for(self, tenant: str, tiers: Sequence[Mapping[str, object]]) -> Mapping[str, object]:
        pinned_bytes = self._memory.pinned_by[tenant]
        return {
            "version": kvstore.__version__,
            "tiers": {str(tier["name"]): {"name": tier["name"], "healthy": tier["healthy"]} for tier in tiers},
            "namespaces": self._namespaces.of_tenant(tenant),
            "leases": {"active": self._leases.of_tenant(tenant), "pinned_bytes": pinned_bytes},
            "recent": self._explainer.recent(tenant),
            "quotas": {name: quota for name, quota in self.operations.quotas().items() if name == tenant},
        }

    async def _tier_status(self, tier: Tier, deadline: Deadline) -> dict[str, object]:
        try:
            usage = await tier.usage(deadline=deadline)
        except Unavailable as error:
            return {"name": tier.name, "healthy": False, "reason": str(error)}
        self.operations.saw(tier.name, usage)
        return {"name": tier.name, "healthy": True, **asdict(usage)}

    async def drain(self, deadline: Deadline) -> int:
        """Wait until every saved record has reached its slower tiers, or until the deadline.

        Returns:
            Records that are still on their way.
        """
        return await self._saver.drain(deadline)

    async def aclose(self) -> None:
        """As `PageStore.aclose`: the write-back gets `drain_timeout_s`, leases and tasks end; the tiers stay open."""
        if self._closed:
            return
        self._closed = True
        try:
            await self.drain(Deadline.after(self.limits.drain_timeout_s, self._clock))
        finally:
            await self._background.aclose()
            await self._saver.aclose()
            self._leases.release_all()
            self.work.close()

    def _room_for(self, namespace: NamespaceId) -> int:
        """How many bytes more may be leased now to the tenant of a namespace."""
        tenant, memory = self._namespaces.tenant_of(namespace), self._memory
        return share_left(self.limits.stage_bytes, memory.pinned_bytes, memory.pinned_by[tenant], tenant=tenant)

    def _is_retired(self, namespace: NamespaceId) -> bool:
        return self._orders is not None and self._orders.hides(namespace)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the store is closed")

    def _layout_for(self, query: PrefixQuery) -> Layout:
        """The layout for a query.

        Raises:
            InvalidRequest: The prompt has too many boundaries for so many groups.
        """
        layout = self._layout(query.namespace)
        if len(query.boundaries) * len(layout.groups) > MAX_POINTS:
            raise InvalidRequest(
                "the prompt has too many boundaries for a layout of so many groups",
                field="boundaries",
                expected=f"at most {MAX_POINTS // len(layout.groups)}",
                seen=len(query.boundaries),
            )
        return layout

    def _layout(self, namespace: NamespaceId) -> Layout:
        self._check_open()
        layout = self._namespaces.use(namespace)
        if layout is None:
            raise NamespaceNotOpen("the namespace was not opened: call open_namespace first", namespace=namespace.hex())
        return layout


def _leave_time(deadline: Deadline) -> Deadline:
    """A slightly earlier deadline, so that the answer itself arrives in time."""
    remaining_s = deadline.remaining_s
    return deadline.earlier(remaining_s - min(_ANSWER_S, remaining_s / 10))
