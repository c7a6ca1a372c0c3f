"""The namespaces that are open on a node: so many; one more takes the place of one that nobody uses any more."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvstore.api import PrefixQuery
from kvstore.errors import CorruptRecord, InvalidRequest, KVStoreError, Unavailable
from kvstore.format.header_v1 import HeaderV1
from kvstore.format.manifest import parse_manifest
from kvstore.format.record import MAX_RECORD_BYTES
from kvstore.model.coverage import ends_to_resume, longest_resumable
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.model.layout import Layout
from kvstore.model.namespace import NamespaceDescription
from kvstore.runtime.background import Background
from kvstore.runtime.clock import Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.runtime.shares import Shares
from kvstore.store.limits import StoreLimits
from kvstore.store.recorder import Recorder
from kvstore.tiers.base import Tier

__all__ = ["Manifests", "OpenNamespaces", "affordable_resume", "check_header", "check_key", "check_sizes"]

_IDLE_S = 600.0
"""What was used since stays open, whoever else comes: an engine whose weights change opens a namespace for each."""


@dataclass(slots=True)
class _Open:
    layout: Layout
    tenant: str
    num_bytes: int
    used_s: float


class OpenNamespaces:
    """Knows the layout and the tenant of each, and which was used longest ago. Tenants share the places, and the bytes
    of descriptions.

    Args:
        limit: So many at a time.
        clock: For the time of use.
        description_bytes: So many bytes of descriptions at a time.
    """

    def __init__(self, limit: int, clock: Clock, description_bytes: int = 64 << 20) -> None:
        self._places = Shares(limit)
        self._bytes = Shares(description_bytes)
        self._clock = clock
        self._open: OrderedDict[NamespaceId, _Open] = OrderedDict()  # the one that was used longest ago first

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[NamespaceId]:
        return iter(self._open)

    def open(self, namespace: NamespaceId, layout: Layout, tenant: str = "", num_bytes: int = 0) -> list[NamespaceId]:
        """Open one, or use it again; returns those that were closed for it: of the same tenant if it has its share,
        else whoever's were not used for longest.

        Args:
            namespace: Its id.
            layout: Its layout.
            tenant: Whose it is.
            num_bytes: Bytes of its description.

        Raises:
            Unavailable: All that would have to be closed are in use.
        """
        closed: list[NamespaceId] = []
        if namespace not in self._open:
            while not self._has_room(tenant, num_bytes):
                oldest = self._idle(tenant)
                if oldest is None:
                    raise Unavailable(
                        "too many namespaces are in use on this node, or their descriptions are too long",
                        limit=self._places.limit,
                        limit_bytes=self._bytes.limit,
                        tenant=tenant,
                    )
                self._close(oldest)
                closed.append(oldest)
            self._places.take(tenant, 1)
            self._bytes.take(tenant, num_bytes)
            self._open[namespace] = _Open(layout, tenant, num_bytes, 0.0)
        self.use(namespace)
        return closed

    def _has_room(self, tenant: str, num_bytes: int) -> bool:
        return self._places.left_for(tenant) >= 1 and self._bytes.left_for(tenant) >= num_bytes

    def _idle(self, tenant: str) -> NamespaceId | None:
        """The namespace to close: the tenant's own that was not used for longest, else anybody's."""
        now_s, others = self._clock.monotonic_s(), None
        for namespace, held in self._open.items():
            if now_s - held.used_s < _IDLE_S:
                break
            if held.tenant == tenant:
                return namespace
            others = others or namespace
        return others

    def _close(self, namespace: NamespaceId) -> None:
        held = self._open.pop(namespace)
        self._places.give_back(held.tenant, 1)
        self._bytes.give_back(held.tenant, held.num_bytes)

    def use(self, namespace: NamespaceId) -> Layout | None:
        """The layout of a namespace that is used now; `None`: it is not open."""
        held = self._open.get(namespace)
        if held is None:
            return None
        held.used_s = self._clock.monotonic_s()
        self._open.move_to_end(namespace)
        return held.layout

    def tenant_of(self, namespace: NamespaceId) -> str:
        """Whose an open namespace is; empty: nobody's, or it is not open."""
        held = self._open.get(namespace)
        return held.tenant if held is not None else ""

    def of_tenant(self, tenant: str) -> int:
        """How many a tenant has open."""
        return self._places.used_by(tenant)


class Manifests:
    """Best effort: a manifest describes records to readers that have not opened their namespace, e.g. a reindex. Loads
    and saves do not depend on it.

    Args:
        hot: A tier that may lose its manifests with all else, e.g. by FLUSHALL, if there is one.
        cold: Keeps them; what the hot tier has lost, and nobody has open here, is copied from it.
        recorder: The way to the catalog, which lists namespaces.
        background: Owns tasks.
        meters: Where to count.
        limits: Times.
        clock: For deadlines.
    """

    def __init__(
        self,
        hot: Tier | None,
        cold: Tier | None,
        recorder: Recorder | None,
        *,
        background: Background,
        meters: Meters,
        limits: StoreLimits,
        clock: Clock,
    ) -> None:
        self._hot = hot
        self._cold = cold
        self._recorder = recorder
        self._background = background
        self._meters = meters
        self._limits = limits
        self._clock = clock
        self._open: dict[NamespaceId, bytes] = {}
        self._kept: set[tuple[NamespaceId, str]] = set()
        if hot is not None or cold is not None:
            background.spawn(self._run(), "manifests")

    def open(self, namespace: NamespaceId, manifest: bytes) -> None:
        """Note that a namespace was opened, and write its manifest to each tier in the background."""
        self._open[namespace] = manifest
        for tier in (self._hot, self._cold):
            if tier is not None and (namespace, tier.name) not in self._kept:
                self._background.spawn(self._keep(tier, namespace), f"manifest to {tier.name}")

    def close(self, namespace: NamespaceId) -> None:
        """A namespace is not used here any more: its manifests stand in the tiers, and are no longer looked after."""
        self._open.pop(namespace, None)
        self._kept = {kept for kept in self._kept if kept[0] != namespace}

    async def describe(self, namespace: NamespaceId, *, deadline: Deadline) -> NamespaceDescription | None:
        """The description of a namespace; `None`: no manifest of it can be read."""
        try:
            manifest = await self.find(namespace, deadline=deadline)
            return parse_manifest(manifest, namespace) if manifest is not None else None
        except KVStoreError:
            self._meters.add("manifest_failures", tier="read")
            return None

    async def find(self, namespace: NamespaceId, *, deadline: Deadline) -> bytes | None:
        """The manifest of a namespace that is open here or known to a tier; `None`: nobody has it.

        Raises:
            Unavailable: A tier that might have it does not answer.
        """
        found = self._open.get(namespace)
        for tier in (self._hot, self._cold):
            if found is None and tier is not None:
                found = await tier.get_manifest(namespace, deadline=deadline)
        return found

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._limits.manifest_look_s)
            await self.look()

    async def look(self) -> None:
        """Write again what could not be written, and what the hot tier has lost."""
        if self._cold is not None:
            for namespace in list(self._open):
                if (namespace, self._cold.name) not in self._kept:
                    await self._keep(self._cold, namespace)
        if self._hot is not None:
            for namespace in await self._told_of():
                await self._restore(self._hot, namespace)

    async def _keep(self, tier: Tier, namespace: NamespaceId) -> None:
        manifest = self._open.get(namespace)
        if manifest is None:  # closed meanwhile
            return
        try:
            await tier.put_manifest(namespace, manifest, deadline=self._deadline())
        except KVStoreError:
            self._meters.add("manifest_failures", tier=tier.name)
        else:
            self._kept.add((namespace, tier.name))

    async def _told_of(self) -> Iterable[NamespaceId]:
        """The namespaces that are open here, and all in the catalog."""
        told = dict.fromkeys(self._open)
        if self._recorder is not None:
            with suppress(KVStoreError):  # the next look asks again
                told |= dict.fromkeys(await self._recorder.catalog.namespaces(deadline=self._deadline()))
        return told

    async def _restore(self, hot: Tier, namespace: NamespaceId) -> None:
        deadline = self._deadline()
        try:
            if await hot.get_manifest(namespace, deadline=deadline) is not None:
                return
            manifest = self._open.get(namespace)
            if manifest is None and self._cold is not None:
                manifest = await self._cold.get_manifest(namespace, deadline=deadline)
            if manifest is not None:
                await hot.put_manifest(namespace, manifest, deadline=deadline)
        except KVStoreError:
            self._meters.add("manifest_failures", tier=hot.name)

    def _deadline(self) -> Deadline:
        return Deadline.after(self._limits.write_back_timeout_s, self._clock)


def check_key(key: RecordKey, layout: Layout) -> None:
    """Refuse a key whose group or slice the layout does not have.

    Raises:
        CorruptRecord: Group or slice out of range.
    """
    if key.group >= len(layout.groups):
        raise CorruptRecord("the namespace has no such group", key=key, expected=f"below {len(layout.groups)}")
    if key.slice >= layout.groups[key.group].num_slices:
        limit = layout.groups[key.group].num_slices
        raise CorruptRecord("the group has no such slice", key=key, expected=f"below {limit}")


def check_header(header: HeaderV1, layout: Layout, tokens: int | None = None) -> None:
    """Refuse a record whose header could not have been written for this layout.

    Args:
        header: An intact header.
        layout: The layout of the namespace that the header names.
        tokens: The boundary that the record's prefix belongs to, where the caller knows it.

    Raises:
        CorruptRecord: Group or slice out of range, or not the kind or span that this group has at this boundary.
    """
    check_key(header.key, layout)
    stop = header.span.stop if tokens is None else tokens
    if stop <= 0:
        raise CorruptRecord("a record ends behind at least one token", key=header.key, stop=stop)
    kind, span = layout.groups[header.key.group].record_at(stop, layout.page_tokens)
    if (header.kind, header.span) != (kind, span):
        raise CorruptRecord(
            "kind or span of a record does not fit its group",
            key=header.key,
            expected=f"{kind.name} {span.start}-{span.stop}",
            seen=f"{header.kind.name} {header.span.start}-{header.span.stop}",
        )
    if header.payload_bytes > MAX_RECORD_BYTES or header.decoded_bytes > MAX_RECORD_BYTES:
        raise CorruptRecord(f"a record has at most {MAX_RECORD_BYTES} bytes", key=header.key)


def affordable_resume(
    layout: Layout,
    query: PrefixQuery,
    groups_present: Sequence[int],
    *,
    group_bytes: Sequence[int],
    budget_bytes: int,
) -> int:
    """The longest usable resume point whose records fit a budget; `local_tokens` when none does.

    Args:
        group_bytes: For each group the bytes of one of its records, all slices together.
        budget_bytes: Bytes that may be held for it.

    Where a longer prefix needs fewer bytes (windows and states only) the search may overlook a point that fits; it
    never returns one that does not.
    """
    tokens = [boundary.tokens for boundary in query.boundaries]

    def longest(cap_tokens: int) -> int:
        return longest_resumable(
            layout,
            tokens,
            groups_present,
            local_tokens=query.local_tokens,
            cap_tokens=cap_tokens,
            step_tokens=query.step_tokens,
        )

    def fits(resume_tokens: int) -> bool:
        if resume_tokens <= query.local_tokens:
            return True
        needed = ends_to_resume(
            layout, tokens, groups_present, resume_tokens=resume_tokens, local_tokens=query.local_tokens
        )
        return sum(len(ends) * group_bytes[group] for group, ends in enumerate(needed)) <= budget_bytes

    best = longest(query.cap_tokens)
    if fits(best):
        return best
    low, high = query.local_tokens // query.step_tokens, best // query.step_tokens  # `low` fits, `high` does not
    found = query.local_tokens
    while high - low > 1:
        middle = (low + high) // 2
        resume_tokens = longest(middle * query.step_tokens)
        if fits(resume_tokens):
            low, found = middle, max(found, resume_tokens)
        else:
            high = middle
    return found


def check_sizes(stage_bytes: int, memory_bytes: int) -> None:
    """Refuse a staging budget that could fill the whole memory tier, so that no save would fit any more.

    Raises:
        InvalidRequest: It is over three quarters of the memory tier.
    """
    if stage_bytes * 4 > memory_bytes * 3:
        raise InvalidRequest(
            "the staging budget must be at most three quarters of the memory tier",
            stage_bytes=stage_bytes,
            memory_bytes=memory_bytes,
        )
