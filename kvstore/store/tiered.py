"""`TieredStore`: the `PageStore` of a node, over a memory tier and at most two slower ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import gcd

import kvstore
from kvstore.api import Ack, LeaseId, Lookup, Outcome, PageStore, PrefixQuery, Progress, Retention, SaveOutcome, Staged
from kvstore.catalog.entry import Level
from kvstore.catalog.pending import PendingLog
from kvstore.errors import Closed, InvalidRequest, Unavailable
from kvstore.format.record import Record
from kvstore.model.coverage import MAX_POINTS
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.model.layout import Layout
from kvstore.model.namespace import NamespaceDescription, NamespaceNotOpen
from kvstore.model.page_blocks import PageBlocks
from kvstore.model.prompt_hint import EndedPrompt
from kvstore.runtime.arena import Arena
from kvstore.runtime.background import Background
from kvstore.runtime.budget import Shares, share_left
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.turns import LongWork, reporting
from kvstore.runtime.watched_file import Watched
from kvstore.store.cache_events.placements import PlacementEvents
from kvstore.store.context import StoreContext
from kvstore.store.encryption.key_ring import KeyRing
from kvstore.store.encryption.tenant_keys import TenantKeys
from kvstore.store.explain.absence import AbsenceFinder
from kvstore.store.explain.explainer import Explainer
from kvstore.store.hints.ended_prompts import KeptPrompt
from kvstore.store.hints.hints import Hints
from kvstore.store.hints.prefetch import Prefetcher
from kvstore.store.leases import LeaseTable
from kvstore.store.limits import StoreLimits
from kvstore.store.lookup import NAMES_AT_ONCE, AbsentKeys, CatalogLookup, PresenceFinder
from kvstore.store.namespaces import Manifests, OpenNamespace, OpenNamespaces, check_key
from kvstore.store.presence import (
    UNKNOWN_BYTES,
    Presence,
    Reach,
    ResumePoints,
    in_memory_and_in_all,
    offers_of,
    reach_of,
)
from kvstore.store.recorder import Backlog, Recorder
from kvstore.store.retention import RetentionParts
from kvstore.store.saving import Saver
from kvstore.store.staging import Holding, Stager
from kvstore.store.upkeep.operations import StoreOperations
from kvstore.tiers.base import Tier
from kvstore.tiers.memory import MemoryTier

_log = logging.getLogger(__name__)

_QUARANTINE_SHARE = 1 / 16
"""What a tenant may have quarantined by its own reports, as a share of its quota."""
_ANSWER_S = 0.01
"""Reserved from a deadline for the answer itself, so that what has arrived is not lost to a late reply."""


class TieredStore(PageStore):
    """Writes to memory, then in the background to the hot and the cold tier; reads from memory, then hot, then cold.

    The tiers stay the caller's: `aclose` leaves them open. A slower tier that is down costs hits, never an error.

    Args:
        memory: Where records are staged and leased.
        hot: A shared, fast tier; `None`: there is none.
        cold: A large, slow tier; `None`: there is none.
        pending: Where write-backs are recorded, so that other services can finish them if this process dies; stays the
            caller's. `None`: they are lost with the process.
        recorder: The way to the catalog; `None`: there is no catalog.
        retention: What decides which records the cold tier gets and keeps.
        limits: Every bound; by default stages may pin three quarters of the memory tier.
        instruments: The code that made the tiers adds to its events.

    Attributes:
        memory: The tier that records are leased from.
        recorder: The way to the catalog.
        leases: What is leased, to whom and until when.
        operations: What operators show, remove and control.
        work: Runs what takes long for a long prompt.
        hints: What clients said of prompts that have ended, and what is done about it.
    """

    def __init__(
        self,
        memory: MemoryTier,
        hot: Tier | None = None,
        cold: Tier | None = None,
        *,
        pending: PendingLog | None = None,
        recorder: Recorder | None = None,
        retention: RetentionParts | None = None,
        limits: StoreLimits | None = None,
        instruments: Instruments | None = None,
    ) -> None:
        limits = limits or StoreLimits(stage_bytes=memory.limit_bytes * 3 // 4)
        if limits.stage_bytes * 4 > memory.limit_bytes * 3:
            raise InvalidRequest(
                "the staging budget must be at most three quarters of the memory tier",
                stage_bytes=limits.stage_bytes,
                memory_bytes=memory.limit_bytes,
            )
        context = StoreContext(memory, hot, cold, limits, instruments or Instruments(), Background("store"))
        parts = retention or RetentionParts()
        self.limits = limits
        self.meters, self.events = context.meters, context.instruments.events
        self.work = LongWork("lookups")
        self._context = context
        self.memory = memory
        self.recorder = recorder
        self._choice, self._admission, self._operator_rules = parts.choice, parts.admission, parts.operator_rules
        self._quarantined = Shares(limits.quarantine_bytes)
        self._namespaces = OpenNamespaces(limits.namespaces_max, context.clock, limits.description_bytes)
        memory.owner_of = self._namespaces.tenant_of
        self._cache_events: PlacementEvents | None = None
        memory.on_changed = self._on_changed
        self.leases = LeaseTable(context)
        self._absent = AbsentKeys(context.clock)
        self._saver = Saver(
            context,
            pending=pending,
            recorder=recorder,
            check_open=self._check_open,
            admission=self._admission,
            absent=self._absent,
            follows=self._follows_hints,
        )
        self._manifests = Manifests(context, self._namespaces, recorder)
        catalog = recorder.catalog if recorder is not None else None
        tiers = {Level.HOT: hot, Level.COLD: cold}
        absence = AbsenceFinder(recorder, self._manifests, tiers) if recorder is not None else None
        self._catalog_lookup: CatalogLookup | None = None
        if catalog is not None:
            levels = [level for level, tier in tiers.items() if tier is not None]
            self._catalog_lookup = CatalogLookup(catalog, levels, context.instruments, self.work)
        self._explainer = Explainer(context, absence, self._is_retired, self.work)
        self.operations = StoreOperations(
            context,
            manifests=self._manifests,
            explainer=self._explainer,
            saver=self._saver,
            operator_rules=self._operator_rules,
            recorder=recorder,
        )
        self._finder = PresenceFinder(context, self._absent, self.work, self._catalog_lookup)
        self._stager = Stager(
            context,
            absent=self._absent,
            work=self.work,
            unpinning=self.leases.unpinning,
            free_for=self._leasable_bytes,
            on_cold_hit=self._saver.copy_to_hot,
        )
        self._prefetcher = Prefetcher(context, self._find, self._stager, self.work)
        self.hints = Hints(
            context,
            self._layout_for_hints,
            self._find,
            self._prefetcher,
            choice=self._choice,
            catalog=catalog,
        )
        self._explainer.hints = self.hints
        self._keys: TenantKeys | None = None
        self._closed = False

    @property
    def slower(self) -> tuple[Tier, ...]:
        """The tiers below memory, the fastest first."""
        return self._context.slower

    @property
    def arena(self) -> Arena | None:
        return self.memory.arena

    def buffer(self, num_bytes: int) -> memoryview:
        return self.memory.buffer(num_bytes)

    async def open_namespace(self, description: NamespaceDescription, *, deadline: Deadline) -> NamespaceId:
        self._check_open()
        opened = self._namespaces.use(description.id)
        if opened is None:  # an open one is answered without parsing its description
            opened = self._namespaces.open(description)
            self._manifests.write(opened)
            if self.recorder is not None:
                self.recorder.register(opened.id, opened.layout, opened.tenant)
        self._explainer.name(opened.id, opened.name)
        if self._keys is not None:
            self._keys.know(opened.tenant)
        return opened.id

    async def lookup(self, query: PrefixQuery, *, deadline: Deadline, learns: bool = True) -> Lookup:
        """As `PageStore.lookup`.

        Args:
            learns: Whether the catalog may learn that each boundary's parent is the one before it.
        """
        layout = self._layout_for(query)
        if self._is_retired(query.namespace):
            return Lookup(query.local_tokens, (0,) * len(query.boundaries))
        if self.recorder is not None and learns and layout.chained:
            self.recorder.parents.learn(query, layout)
        if self._choice is not None and layout.chained:
            self._choice.observe(query, layout, self._namespaces.tenant_of(query.namespace))
        presence = await self._find(query, layout, _leave_time(deadline))
        if self._admission is not None and (lacking := self._admission.seen(presence)):
            self._saver.copy_to_cold(presence, lacking)
        found = await self.work.run(presence.num_items, self._answer, presence)
        self.meters.add("lookups")
        self.meters.add("lookup_hits", found.resume_tokens > query.local_tokens)
        return found

    async def probe(self, query: PrefixQuery, *, deadline: Deadline) -> Lookup:
        """As `lookup`, without side effects: nothing is counted, learnt or copied."""
        presence = await self._find(query, self._layout_for(query), _leave_time(deadline))
        return await self.work.run(presence.num_items, self._answer, presence)

    async def reaches(self, query: PrefixQuery, points: Sequence[ResumePoints], *, deadline: Deadline) -> list[Reach]:
        """How far lookups of a prompt by several engines would reach now, and how far memory alone. Without side
        effects, as `probe`. What is stored is found once for all of them.

        Args:
            query: Its step divides those of all engines, and its cap is the furthest of theirs.
            points: Of each engine.
        """
        layout = self._layout_for(query)
        if self._is_retired(query.namespace):
            return [Reach(query.local_tokens, query.local_tokens) for _ in points]
        presence = await self._find(query, layout, _leave_time(deadline))
        held = await self.work.run(2 * presence.num_items, in_memory_and_in_all, presence)
        return [await self.work.run(presence.num_items, reach_of, presence, *held, one) for one in points]

    async def reaches_by_blocks(
        self, namespace: NamespaceId, hashes: Sequence[bytes], steps_tokens: Sequence[int], *, deadline: Deadline
    ) -> list[Reach]:
        """As `reaches`, of a prompt that is known by the hashes of its blocks: as far as engines have named its pages.

        Args:
            hashes: In order, as `PageBlocks` has them. The prompt may go on behind the last one.
            steps_tokens: At whose multiples each engine can resume.
        """
        events = self._cache_events
        named = await events.boundaries(namespace, hashes) if events is not None else []
        step_tokens = gcd(*steps_tokens)
        boundaries = tuple(boundary for boundary in named if boundary.tokens % step_tokens == 0)
        last_tokens = boundaries[-1].tokens if boundaries else 0
        points = [ResumePoints(step, last_tokens // step * step) for step in steps_tokens]
        query = PrefixQuery(namespace, boundaries, 0, max(one.cap_tokens for one in points), step_tokens)
        return await self.reaches(query, points, deadline=deadline)

    async def _find(self, query: PrefixQuery, layout: Layout, deadline: Deadline, *, stalls: int = 2) -> Presence:
        """Where the records are. A tier that hangs has stalled, however long the caller would wait. A long prompt takes
        longer.

        Args:
            stalls: How many stalls it waits for: first the catalog may hang, then the tiers.
        """
        patience_s = stalls * self.limits.stall_timeout_s * (1 + len(query.boundaries) // NAMES_AT_ONCE)
        return await self._finder.find(query, layout, deadline.earlier(patience_s))

    def _answer(self, presence: Presence) -> Lookup:
        bits = presence.groups_present()
        resume_tokens = presence.resume_tokens(bits)
        places = (self.memory, self._context.hot, self._context.cold)
        names = ["" if tier is None else tier.name for tier in places]
        offers = offers_of(presence, resume_tokens, names, bits)
        return Lookup(resume_tokens, tuple(bits.tolist()), offers, tuple(sorted(presence.silent)))

    async def stage(self, query: PrefixQuery, *, deadline: Deadline, progress: Progress | None = None) -> Staged:
        layout = self._layout_for(query)
        self.meters.add("stages")
        if self._is_retired(query.namespace):
            return Staged(None, query.local_tokens, cut="weights_retired")
        tenant = self._namespaces.tenant_of(query.namespace)
        if self.leases.refuses(tenant):
            return Staged(None, query.local_tokens, cut="node_memory")
        deadline = _leave_time(deadline)
        with reporting():  # the client waits a little longer than one stall; a long prompt's lookup may take several
            presence = await self._find(query, layout, deadline, stalls=1)
        holding = await self._stager.stage(presence, deadline, progress)
        if holding.resume_tokens < query.cap_tokens and presence.silent:
            holding = replace(holding, cut=f"tier_failed:{min(presence.silent)}")
        if self._closed:
            self._stager.drop(holding)
            raise Closed("the store was closed during the call")
        if holding.resume_tokens <= query.local_tokens:
            return Staged(None, query.local_tokens, cut=holding.cut)
        if self.leases.refuses(tenant, len(holding.pins)):  # other stages ended while this one ran
            self._stager.drop(holding)
            return Staged(None, query.local_tokens, cut="node_memory")
        staged = self._lease(holding, tenant)  # before others are staged: leases are limited
        try:
            self._prefetcher.used(holding.pins)
            await self._note_use(query.namespace, holding)
        except BaseException:  # no caller will have the lease
            assert staged.lease is not None
            self.leases.release(staged.lease)
            raise
        return staged

    async def _note_use(self, namespace: NamespaceId, holding: Holding) -> None:
        if self.recorder is not None:
            read = {key.prefix: stop for key, (_, stop) in zip(holding.pins, holding.spans, strict=True)}
            await self.work.in_pieces(list(read.items()), partial(self.recorder.used, namespace))

    def _lease(self, holding: Holding, tenant: str) -> Staged:
        lease = self.leases.grant(holding.pins, tenant)
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
            lease_s=self.leases.lease_s,
            cut=holding.cut,
        )

    async def renew(self, lease: LeaseId, *, deadline: Deadline) -> bool:
        self._check_open()
        return self.leases.renew(lease)

    async def load(
        self,
        lease: LeaseId,
        key: RecordKey,
        *,
        deadline: Deadline,
        allocate: Callable[[int], memoryview] | None = None,
    ) -> Record:
        self._layout(key.namespace)
        record = self.leases.record(lease, key) if not self._is_retired(key.namespace) else None
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
        self.leases.release(lease)
        await self.leases.unpinning.done()

    async def discard(self, key: RecordKey, reason: str, *, deadline: Deadline) -> None:
        check_key(key, self._layout(key.namespace))
        self.meters.add("discarded_records")
        all_seen: list[Record | None] = [*self.leases.forget(key)] or [None]  # `None`: by its name
        self._absent.add(key, self.limits.absent_s)
        self._saver.forget(key)
        failed = []
        num_bytes = sum(record.num_bytes for record in all_seen if record is not None)
        may_quarantine = self._take_quarantine(key.namespace, num_bytes)
        for tier, seen in product((self.memory, *self.slower), all_seen):
            try:
                if may_quarantine:
                    await tier.quarantine(key, reason, seen=seen, deadline=deadline)
                else:
                    await tier.delete(key, deadline=deadline)
            except Unavailable:
                failed.append(tier.name)
        if failed:
            raise Unavailable("a record could not be quarantined in every tier", key=key, tiers=",".join(failed))

    def _take_quarantine(self, namespace: NamespaceId, num_bytes: int) -> bool:
        """Whether a record that a tenant reports bad is quarantined, so that operators can examine it, or deleted:
        quarantined while the tenant has its share of the quarantine and that takes little of its quota.
        """
        tenant = self._namespaces.tenant_of(namespace)
        num_bytes = (num_bytes or UNKNOWN_BYTES) * len(self.slower)
        quota = self._operator_rules.quotas.get(tenant) if self._operator_rules is not None else None
        limit_bytes = quota.maximum_bytes if quota is not None else None
        if limit_bytes is not None and self._quarantined.used_by(tenant) + num_bytes > limit_bytes * _QUARANTINE_SHARE:
            return False
        return self._quarantined.try_take(tenant, num_bytes)

    def report(self, outcome: Outcome) -> None:
        self._explainer.report(outcome)

    def publish_to(self, cache_events: PlacementEvents) -> None:
        """Tell `cache_events` where pages are from now on; it stays the caller's."""
        self._cache_events = cache_events
        cache_events.is_retired = self._is_retired
        if self.recorder is not None:
            self.recorder.on_changed = cache_events.changed

    @property
    def takes_blocks(self) -> bool:
        return self._cache_events is not None

    def name_blocks(self, blocks: PageBlocks) -> None:
        opened = self._namespaces.use(blocks.namespace)
        if self._cache_events is not None and opened is not None:
            blocks.check_page(opened.layout)
            self._cache_events.name(blocks, opened.layout.groups[blocks.group].num_slices, opened.tenant)

    def knows_blocks(self, namespace: NamespaceId) -> bool:
        """Whether engines have named any page of a namespace."""
        return self._cache_events is not None and self._cache_events.knows(namespace)

    def end_prompt(self, prompt: EndedPrompt) -> None:
        if not self._closed:
            self.hints.end(prompt)

    def keep_prompt(self, prompt: EndedPrompt) -> KeptPrompt:
        """Keep a prompt for hints that name it later."""
        return self.hints.keep(prompt)

    def _layout_for_hints(self, namespace: NamespaceId) -> Layout | None:
        opened = self._namespaces.use(namespace)
        return None if opened is None or self._is_retired(namespace) else opened.layout

    def _follows_hints(self, namespace: NamespaceId) -> bool:
        return self._choice is not None and self._choice.follows(self._namespaces.tenant_of(namespace))

    def _on_changed(self, key: RecordKey) -> None:
        self._prefetcher.changed(key)
        if key not in self.memory:
            self._saver.left_memory(key)
        if self._cache_events is not None:
            self._cache_events.changed(key)

    def check_keys(self, keys: Watched[KeyRing]) -> TenantKeys:
        """Have the keys of tenants that open namespaces checked: status and `explain` show what is wrong with them."""
        self._keys = TenantKeys(self._context, keys)
        self._explainer.key_reason = self._keys.reason
        return self._keys

    async def explain(self, request: str, *, deadline: Deadline, tenant: str | None = "") -> Mapping[str, object]:
        self._check_open()
        return await self._explainer.explain(request, tenant, _leave_time(deadline))

    async def status(self, *, deadline: Deadline, tenant: str = "") -> Mapping[str, object]:
        self._check_open()
        deadline = _leave_time(deadline)
        tiers = {state.name: state.status() for state in await self.operations.tiers(deadline=deadline)}
        if tenant:
            return self._status_for(tenant, tiers)
        return {
            "version": kvstore.__version__,
            "tiers": tiers,
            "namespaces": len(self._namespaces),
            "leases": {
                "active": len(self.leases),
                "expired": self.leases.num_expired,
                "pinned_bytes": self.memory.pinned_bytes,
            },
            "write_back": {
                name: {
                    "records": len(queue),
                    "bytes": queue.num_bytes,
                    "failing": queue.failing,
                    "paused": queue.is_paused,
                }
                for name, queue in self._saver.queues.items()
            },
            "catalog": _catalog_status(self.operations.backlog(), self._catalog_lookup),
            "admission": self._admission.rules() if self._admission is not None else {},
            "counters": self.meters.snapshot(),
            "recent": self._explainer.recent(),
            "quotas": self.operations.quotas(),
            "encryption": self._keys.status() if self._keys is not None else {},
        }

    def _status_for(self, tenant: str, tiers: Mapping[str, Mapping[str, object]]) -> Mapping[str, object]:
        pinned_bytes = self.memory.pinned_by[tenant]
        return {
            "version": kvstore.__version__,
            "tiers": {name: {"name": name, "healthy": tier["healthy"]} for name, tier in tiers.items()},
            "namespaces": self._namespaces.of_tenant(tenant),
            "leases": {"active": self.leases.of_tenant(tenant), "pinned_bytes": pinned_bytes},
            "recent": self._explainer.recent(tenant),
            "quotas": {name: quota for name, quota in self.operations.quotas().items() if name == tenant},
        }

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
            left = await self.drain(Deadline.after(self.limits.drain_timeout_s, self._context.clock))
            if left:
                _log.warning(
                    "writes to slower tiers are left undone: raise drain_timeout_s if tiers are well num=%d", left
                )
        finally:
            await self._context.background.aclose()
            await self._saver.aclose()
            self.memory.on_changed = None
            self.leases.release_all()
            self.work.close()

    def _leasable_bytes(self, namespace: NamespaceId) -> int:
        """How many bytes more may be leased now to the tenant of a namespace."""
        tenant, memory = self._namespaces.tenant_of(namespace), self.memory
        return share_left(self.limits.stage_bytes, memory.pinned_bytes, memory.pinned_by[tenant], tenant=tenant)

    def _is_retired(self, namespace: NamespaceId) -> bool:
        rules, opened = self._operator_rules, self._namespaces.get(namespace)
        return rules is not None and opened is not None and rules.are_retired(opened.tenant, opened.weights_id)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the store is closed")

    def _layout_for(self, query: PrefixQuery) -> Layout:
        """The layout for a query.

        Raises:
            InvalidRequest: The prompt has too many boundaries for the number of groups.
        """
        layout = self._layout(query.namespace)
        if len(query.boundaries) * len(layout.groups) > MAX_POINTS:
            raise InvalidRequest(
                "the prompt has too many boundaries for the number of groups of its layout",
                field="boundaries",
                expected=f"at most {MAX_POINTS // len(layout.groups)}",
                seen=len(query.boundaries),
            )
        return layout

    def tenant_of(self, namespace: NamespaceId) -> str:
        """The tenant of an open namespace.

        Raises:
            NamespaceNotOpen: It is not open.
        """
        return self._used(namespace).tenant

    def _layout(self, namespace: NamespaceId) -> Layout:
        return self._used(namespace).layout

    def _used(self, namespace: NamespaceId) -> OpenNamespace:
        self._check_open()
        opened = self._namespaces.use(namespace)
        if opened is None:
            raise NamespaceNotOpen("the namespace was not opened: call open_namespace first", namespace=namespace.hex())
        return opened


def _leave_time(deadline: Deadline) -> Deadline:
    """A slightly earlier deadline, so that the answer itself arrives in time."""
    remaining_s = deadline.remaining_s
    return deadline.earlier(remaining_s - min(_ANSWER_S, remaining_s / 10))


def _catalog_status(backlog: Backlog | None, lookups: CatalogLookup | None) -> dict[str, object]:
    """What the catalog does not do, since when and why: take changes, answer lookups."""
    if backlog is None or lookups is None:
        return {}
    away = lookups.outage if lookups.outage.is_lasting else None
    return {
        "waiting_changes": backlog.num_changes,
        "takes_none_since_ms": backlog.since_ms,
        "takes_none_reason": backlog.reason,
        "answers_none_since_ms": away.since_ms if away is not None else None,
        "answers_none_reason": away.reason if away is not None else "",
    }
