"""The catalog as the administration reads it: over a connection of its own, limited to what a token may see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from kvstore.catalog.base import Catalog, NamespaceTotals
from kvstore.catalog.entry import Level
from kvstore.compose import open_catalog, open_tier
from kvstore.errors import CorruptRecord, InvalidRequest, KVStoreError, Unavailable, UnsupportedFormat
from kvstore.format.manifest import parse_manifest
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.model.layout import Layout
from kvstore.model.namespace import NamespaceDescription
from kvstore.runtime.bounded_map import Latest
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.service.admin.data_loop import CALL_S, DataLoop
from kvstore.service.admin.problems import Refused
from kvstore.service.authentication import Grant
from kvstore.settings import Settings
from kvstore.store.upkeep.operations import StoreOperations
from kvstore.tiers.base import Tier
from kvstore.tiers.locations import RedisLocation

T = TypeVar("T")

NO_CATALOG = "this service has no catalog: it needs Redis as the hot tier, or a directory as the cold tier"

FRESH_S = 1.0
"""Totals and tenants are read at most this often: in a Redis cluster a read asks every slot."""
_PROBE_S = 1.0
"""A catalog that does not answer a small request within this time counts as hanging."""
_NEVER = float("-inf")
_NAMESPACES_MAX = 1024


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace whose entries can be read.

    Attributes:
        id: A digest of the description, of which the tenant is a part.
        catalog: The catalog that has its entries.
    """

    id: NamespaceId
    description: NamespaceDescription
    layout: Layout
    catalog: Catalog

    @property
    def weights_id(self) -> str:
        """The weights that its pages were computed with; empty: the description does not say."""
        return self.description.weights_id

    def keys_of(self, prefix: PrefixHash) -> list[RecordKey]:
        """Every record that a boundary can have."""
        return self.layout.keys_of(self.id, prefix)


@dataclass(slots=True)
class _Cached(Generic[T]):
    """A value of the catalog, when it was read on the monotonic clock, and when since the Unix epoch; 0: never."""

    value: T
    read_s: float = _NEVER
    at_s: int = 0
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)


class CatalogAccess:
    """Opens the catalog at the first use, and tries again at the next use after a failure. The store is used, over the
    data loop, to find manifests.
    """

    def __init__(self, settings: Settings, data_loop: DataLoop, operations: StoreOperations) -> None:
        self._settings = settings
        self._data_loop = data_loop
        self._operations = operations
        self._stack = AsyncExitStack()
        self._catalog: Catalog | None = None
        self._opening = asyncio.Lock()
        self._known = Latest[NamespaceId, Namespace](_NAMESPACES_MAX)
        self._tenants = _Cached[Mapping[NamespaceId, str]]({})
        self._totals = _Cached[Mapping[NamespaceId, NamespaceTotals]]({})
        self._whole = replace(self._totals)  # as they were when the catalog was complete
        self._hangs_until_s = _NEVER
        self._is_complete = True

    async def open(self) -> Catalog:
        """The catalog.

        Raises:
            Unavailable: The service has no catalog, or it cannot be opened now.
        """
        async with self._opening:
            if self._catalog is None:
                try:
                    catalog = open_catalog(self._settings, is_guest=True, gate=self._operations.check_hot)
                    self._catalog = await self._stack.enter_async_context(catalog)
                except InvalidRequest as error:
                    raise Unavailable(NO_CATALOG) from error
            return self._catalog

    async def totals(self, within_s: float = CALL_S) -> Mapping[NamespaceId, NamespaceTotals]:
        """What every namespace holds by its entries, read at most one second ago."""
        found = await self._read(self._totals, lambda catalog, limit: catalog.totals(deadline=limit), within_s)
        if self._is_complete:
            self._whole = replace(self._totals)
        return found

    @property
    def is_complete(self) -> bool:
        """Whether the catalog had an entry for everything that is stored, when totals or tenants were read last."""
        return self._is_complete

    async def whole_totals(self, within_s: float) -> tuple[Mapping[NamespaceId, NamespaceTotals], int | None]:
        """What every namespace holds, all of it. Of a catalog that does not answer, or may lack records: the totals
        that were read last before that, and when, in seconds since the Unix epoch; `None`: now.

        Raises:
            Unavailable: They were never known here.
        """
        try:
            found = await self.totals(within_s)
        except KVStoreError:
            if not self._whole.at_s:
                raise
        else:
            if self._is_complete:
                return found, None
        if not self._whole.at_s:
            raise Unavailable("the catalog may lack records that are stored: wait until a service has added them")
        return self._whole.value, self._whole.at_s

    def forget_totals(self) -> None:
        """Read the totals again at the next use, because records were deleted."""
        self._totals.read_s = _NEVER

    async def tenant_of(self, namespace: NamespaceId) -> str | None:
        """The tenant of a namespace, read at most one second ago; `None`: the catalog has no such namespace."""
        tenants = await self._read(self._tenants, lambda catalog, limit: catalog.namespaces(deadline=limit), CALL_S)
        return tenants.get(namespace)

    async def _read(self, cached: _Cached[T], read: Callable[[Catalog, Deadline], Awaitable[T]], within_s: float) -> T:
        catalog = await self.open()
        deadline = self._data_loop.soon(within_s)
        async with deadline.scope("reading the catalog"), cached.reading:
            if SYSTEM_CLOCK.monotonic_s() - cached.read_s > FRESH_S:
                await self._check_answers(catalog)
                cached.value = await read(catalog, deadline)
                cached.read_s, cached.at_s = SYSTEM_CLOCK.monotonic_s(), SYSTEM_CLOCK.wall_ms() // 1000
            return cached.value

    async def _check_answers(self, catalog: Catalog) -> None:
        """Send a small request first, so that a server that hangs is reported after a second.

        Raises:
            Unavailable: The catalog does not answer.
        """
        where = "the hot tier" if isinstance(self._settings.hot, RedisLocation) else "the disk"
        why = (
            f"{where} holds the catalog and does not answer: it is frozen, overloaded, down or unreachable; run "
            "`kvstore doctor` to find out"
        )
        if SYSTEM_CLOCK.monotonic_s() < self._hangs_until_s:
            raise Unavailable(why)
        try:
            self._is_complete = await catalog.is_complete(deadline=Deadline.after(_PROBE_S))
        except Unavailable as error:
            self._hangs_until_s = SYSTEM_CLOCK.monotonic_s() + FRESH_S
            raise Unavailable(why) from error

    @asynccontextmanager
    async def tier(self, level: Level) -> AsyncIterator[Tier]:
        """A slower tier over connections of its own, for a scan of the whole tier that delays no other caller.

        Raises:
            InvalidRequest: The service has no such tier.
            Unavailable: It cannot be opened.
        """
        location = self._settings.hot if level is Level.HOT else self._settings.cold
        async with open_tier(location, self._settings) as opened:
            yield opened

    async def check(self, namespace: NamespaceId, grant: Grant) -> None:
        """Refuse a namespace that does not exist for a token.

        Raises:
            Refused: The namespace does not exist, or belongs to another tenant.
        """
        tenant = await self.tenant_of(namespace)
        if tenant is None or not grant.sees(tenant):
            raise _unknown(namespace)

    async def find(self, namespace: NamespaceId, grant: Grant) -> Namespace:
        """A namespace that a token may see. The answer for another tenant's is the same as for an unknown one, and
        takes the same time.

        Raises:
            Refused: It does not exist for this token.
            Unavailable: No tier has its manifest.
        """
        await self.check(namespace, grant)
        found = self._known.get(namespace) or await self._load(namespace, self._data_loop.soon())
        # the id is a digest of the description with its tenant, so no tenant can claim another's namespace
        if not grant.sees(found.description.tenant):
            raise _unknown(namespace)
        return found

    async def described(
        self, namespaces: Sequence[NamespaceId], within_s: float
    ) -> dict[NamespaceId, NamespaceDescription]:
        """Descriptions of namespaces. Left out are those that cannot be read in time."""
        deadline = self._data_loop.soon(within_s)
        found: dict[NamespaceId, NamespaceDescription] = {}
        for namespace in namespaces:
            known = self._known.get(namespace)
            if known is None and not deadline.expired:
                try:
                    known = await self._load(namespace, deadline)
                except (Unavailable, InvalidRequest):
                    continue
            if known is not None:
                found[namespace] = known.description
        return found

    async def _load(self, namespace: NamespaceId, deadline: Deadline) -> Namespace:
        """Read a namespace's manifest, and have the catalog know its layout."""
        manifest = await self._data_loop.call(
            lambda limit: self._operations.manifest(namespace, deadline=limit), deadline.remaining_s
        )
        try:
            description = parse_manifest(manifest, namespace) if manifest is not None else None
        except (CorruptRecord, UnsupportedFormat) as error:
            raise Unavailable("the manifest of the namespace cannot be read", error=error) from error
        if description is None:
            raise Unavailable("no tier has the manifest of the namespace; an engine that opens it writes it again")
        found = Namespace(namespace, description, description.layout(), await self.open())
        found.catalog.know(namespace, found.layout, description.tenant)
        self._known[namespace] = found
        return found

    async def aclose(self) -> None:
        """Close the catalog. Idempotent."""
        await self._stack.aclose()


def _unknown(namespace: NamespaceId) -> Refused:
    return Refused(404, "no such namespace", field="namespace", seen=namespace.hex())
