"""The namespaces of a node: which are open, which keys and headers fit one, and their manifests in the slower tiers."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from kvstore.errors import CorruptRecord, KVStoreError, Unavailable, UnsupportedFormat
from kvstore.format.header_v1 import HeaderV1
from kvstore.format.manifest import pack_manifest, parse_manifest
from kvstore.format.record import MAX_RECORD_BYTES
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.model.layout import Layout
from kvstore.model.namespace import NamespaceDescription
from kvstore.runtime.budget import Shares
from kvstore.runtime.clock import Clock
from kvstore.runtime.deadline import Deadline
from kvstore.store.context import StoreContext, StorePart
from kvstore.store.recorder import Recorder
from kvstore.tiers.base import Tier

_log = logging.getLogger(__name__)

_IDLE_S = 600.0
"""A namespace that was used within this time stays open. An engine whose weights change opens one for each version."""


@dataclass(slots=True)
class OpenNamespace:
    """What is known of a namespace until it is closed.

    Attributes:
        name: As people use it.
        num_bytes: Bytes of its description.
        described_in: Names of the tiers that were seen to have its manifest.
    """

    id: NamespaceId
    name: str
    layout: Layout
    tenant: str
    weights_id: str
    manifest: bytes
    num_bytes: int
    used_s: float
    described_in: set[str] = field(default_factory=set)


class OpenNamespaces:
    """What is known of each open namespace, in the order of last use. Tenants share the places, and the bytes of
    descriptions.

    Args:
        limit: Namespaces open at a time.
        description_bytes: Bytes of their descriptions.
    """

    def __init__(self, limit: int, clock: Clock, description_bytes: int) -> None:
        self._places = Shares(limit)
        self._bytes = Shares(description_bytes)
        self._clock = clock
        self._open: OrderedDict[NamespaceId, OpenNamespace] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[NamespaceId]:
        return iter(self._open)

    def get(self, namespace: NamespaceId) -> OpenNamespace | None:
        """What is known of a namespace; `None`: it is not open. This is no use of it."""
        return self._open.get(namespace)

    def open(self, description: NamespaceDescription) -> OpenNamespace:
        """Open a namespace that is not open. Closes others for it: the tenant's least recently used, or any tenant's if
        this one has none that is idle.

        Raises:
            InvalidRequest: The description has no valid layout.
            Unavailable: All that would have to be closed are in use.
        """
        layout, tenant, num_bytes = description.layout(), description.tenant, len(description.canonical)
        while self._places.left_for(tenant) < 1 or self._bytes.left_for(tenant) < num_bytes:
            oldest = self._idle(tenant)
            if oldest is None:
                raise Unavailable(
                    "too many namespaces are in use on this node, or their descriptions are too long",
                    limit=self._places.limit,
                    limit_bytes=self._bytes.limit,
                    tenant=tenant,
                )
            held = self._open.pop(oldest)
            self._places.give_back(held.tenant, 1)
            self._bytes.give_back(held.tenant, held.num_bytes)
        opened = OpenNamespace(
            id=description.id,
            name=description.name,
            layout=layout,
            tenant=tenant,
            weights_id=description.weights_id,
            manifest=pack_manifest(description),
            num_bytes=num_bytes,
            used_s=self._clock.monotonic_s(),
        )
        self._places.take(tenant, 1)
        self._bytes.take(tenant, num_bytes)
        self._open[opened.id] = opened
        return opened

    def _idle(self, tenant: str) -> NamespaceId | None:
        """The namespace to close: the tenant's least recently used one, or any tenant's."""
        now_s, others = self._clock.monotonic_s(), None
        for namespace, held in self._open.items():
            if now_s - held.used_s < _IDLE_S:
                break
            if held.tenant == tenant:
                return namespace
            others = others or namespace
        return others

    def use(self, namespace: NamespaceId) -> OpenNamespace | None:
        """As `get`, for a namespace that is used now."""
        held = self._open.get(namespace)
        if held is not None:
            held.used_s = self._clock.monotonic_s()
            self._open.move_to_end(namespace)
        return held

    def tenant_of(self, namespace: NamespaceId) -> str:
        """The tenant of an open namespace; empty: it has none, or it is not open."""
        held = self._open.get(namespace)
        return held.tenant if held is not None else ""

    def of_tenant(self, tenant: str) -> int:
        """How many namespaces a tenant has open."""
        return self._places.used_by(tenant)


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


async def read_description(
    namespace: NamespaceId, tiers: Iterable[Tier | None], *, deadline: Deadline
) -> NamespaceDescription | None:
    """The description of a namespace from the first tier that has a readable manifest; `None`: there is none. A damaged
    manifest, or one of a later release, counts as none.

    Raises:
        Unavailable: A tier does not answer.
    """
    manifest = await _read_manifest(namespace, tiers, deadline)
    return _parsed(manifest, namespace) if manifest is not None else None


async def _read_manifest(namespace: NamespaceId, tiers: Iterable[Tier | None], deadline: Deadline) -> bytes | None:
    """The first readable manifest in a tier, or else one that cannot be read; `None`: there is none."""
    unreadable: bytes | None = None
    for tier in tiers:
        manifest = await tier.get_manifest(namespace, deadline=deadline) if tier is not None else None
        if manifest is not None and _parsed(manifest, namespace) is not None:
            return manifest
        unreadable = unreadable or manifest
    return unreadable


def _parsed(manifest: bytes, namespace: NamespaceId) -> NamespaceDescription | None:
    with suppress(CorruptRecord, UnsupportedFormat):
        return parse_manifest(manifest, namespace)
    return None


class Manifests(StorePart):
    """A manifest beside the records of each slower tier, written when a namespace is opened, and again if it is lost.

    Best effort: a manifest describes records to readers that have not opened their namespace, such as a reindex. Loads
    and saves do not depend on it. The hot tier may lose its manifests, as by FLUSHALL: they are copied from the cold
    tier for namespaces that are not open here.

    Args:
        recorder: The way to the catalog, which lists namespaces; `None`: there is no catalog.
    """

    def __init__(self, context: StoreContext, opened: OpenNamespaces, recorder: Recorder | None) -> None:
        super().__init__(context)
        self._opened = opened
        self._recorder = recorder
        self._failing: set[str] = set()  # names of tiers that could not be written; "": a manifest could not be read
        if context.slower:
            context.background.repeat(self.check, "manifests", every_s=self._limits.manifest_check_s)

    def write(self, opened: OpenNamespace) -> None:
        """Write the manifest of a namespace that was opened to each tier, in the background."""
        for tier in (self._hot, self._cold):
            if tier is not None:
                self._background.spawn(self._write(tier, opened), f"manifest to {tier.name}")

    async def describe(self, namespace: NamespaceId, *, deadline: Deadline) -> NamespaceDescription | None:
        """The description of a namespace; `None`: there is none, or none that this release can read.

        Raises:
            Unavailable: A tier that may have it does not answer.
        """
        manifest = await self.find(namespace, deadline=deadline)
        try:
            described = parse_manifest(manifest, namespace) if manifest is not None else None
        except KVStoreError as error:
            self._meters.add("manifest_read_failures")
            self._warn("", "the description of namespace %s cannot be read: %s", namespace.hex(), error)
            return None
        self._failing.discard("")
        return described

    async def find(self, namespace: NamespaceId, *, deadline: Deadline) -> bytes | None:
        """The manifest of a namespace that is open here, or from a tier, a readable one if any has it; `None`: none.

        Raises:
            Unavailable: A tier that may have it does not answer.
        """
        opened = self._opened.get(namespace)
        if opened is not None:
            return opened.manifest
        return await _read_manifest(namespace, (self._hot, self._cold), deadline)

    async def check(self) -> None:
        """Write again what could not be written, and what the hot tier has lost."""
        if self._cold is not None:
            for namespace in list(self._opened):
                opened = self._opened.get(namespace)
                if opened is not None and self._cold.name not in opened.described_in:
                    await self._write(self._cold, opened)
        if self._hot is not None:
            for namespace in await self._all_namespaces():
                await self._restore(self._hot, namespace)

    async def _write(self, tier: Tier, opened: OpenNamespace) -> None:
        try:
            await tier.put_manifest(opened.id, opened.manifest, deadline=self._deadline())
        except KVStoreError as error:
            self._failed(tier, error)
        else:
            self._failing.discard(tier.name)
            opened.described_in.add(tier.name)

    def _failed(self, tier: Tier, error: KVStoreError) -> None:
        self._meters.add("manifest_failures", tier=tier.name)
        text = "the descriptions of namespaces cannot be written to %s, which is tried again every %g s: %s"
        self._warn(tier.name, text, tier.name, self._limits.manifest_check_s, error)

    def _warn(self, what: str, text: str, *values: object) -> None:
        """Log once until one succeeds, since there may be a thousand namespaces."""
        if what not in self._failing:
            self._failing.add(what)
            _log.warning(text, *values)

    async def _all_namespaces(self) -> Iterable[NamespaceId]:
        """The namespaces that are open here, and all in the catalog."""
        found = dict.fromkeys(self._opened)
        if self._recorder is not None:
            with suppress(KVStoreError):  # the next check reads it again
                found |= dict.fromkeys(await self._recorder.catalog.namespaces(deadline=self._deadline()))
        return found

    async def _restore(self, hot: Tier, namespace: NamespaceId) -> None:
        deadline = self._deadline()
        try:
            if await hot.get_manifest(namespace, deadline=deadline) is not None:
                return
            manifest = await self.find(namespace, deadline=deadline)
            if manifest is not None:
                await hot.put_manifest(namespace, manifest, deadline=deadline)
                self._failing.discard(hot.name)
        except KVStoreError as error:
            self._failed(hot, error)

    def _deadline(self) -> Deadline:
        return Deadline.after(self._limits.write_back_timeout_s, self._clock)
