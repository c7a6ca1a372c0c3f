"""The catalog as a guest, on the administration's own loop and connection; namespaces as far as one may see them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from kvstore.catalog.base import Catalog, NamespaceTotals
from kvstore.catalog.entry import Level
from kvstore.compose import open_catalog, open_tier
from kvstore.errors import CorruptRecord, InvalidRequest, Unavailable, UnsupportedFormat
from kvstore.format.manifest import parse_manifest
from kvstore.model.keys import NamespaceId
from kvstore.model.layout import Layout
from kvstore.model.namespace import NamespaceDescription
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.service.admin.bridge import Bridge
from kvstore.service.admin.problems import Refused
from kvstore.service.credentials import Grant
from kvstore.settings import Settings
from kvstore.store.upkeep.operations import StoreOperations
from kvstore.tiers.base import Tier
from kvstore.tiers.locations import RedisLocation

__all__ = ["CatalogAccess", "Namespace"]

_FRESH_S = 1.0
"""Totals over all slots of a cluster cost something: read so often at most."""
_HANGS_S = 1.0
"""A catalog that does not answer a small question for so long is taken for one that hangs."""
_NEVER = float("-inf")
_KEPT = 1024


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace whose entries can be read.

    Attributes:
        id: Its id.
        description: In words; its tenant is a part of what the id is a digest of.
        layout: Its groups and slices.
    """

    id: NamespaceId
    description: NamespaceDescription
    layout: Layout


class CatalogAccess:
    """Opens the catalog when it is first needed, and again after it could not be opened.

    Args:
        settings: Where it is.
        bridge: The way to the store, which finds manifests.
        operations: The store's.
    """

    def __init__(self, settings: Settings, bridge: Bridge, operations: StoreOperations) -> None:
        self._settings = settings
        self._bridge = bridge
        self._operations = operations
        self._stack = AsyncExitStack()
        self._catalog: Catalog | None = None
        self._opening = asyncio.Lock()
        self._known: OrderedDict[NamespaceId, Namespace] = OrderedDict()
        self._tenants: tuple[float, Mapping[NamespaceId, str]] = _NEVER, {}
        self._totals: tuple[float, Mapping[NamespaceId, NamespaceTotals]] = _NEVER, {}
        self._last_totals: tuple[Mapping[NamespaceId, NamespaceTotals], int] | None = None
        self._hangs_until_s = _NEVER
        self._why = ""

    async def open(self) -> Catalog:
        """The catalog.

        Raises:
            Unavailable: There is none, or it cannot be opened now.
        """
        async with self._opening:
            if self._catalog is None:
                try:
                    catalog = open_catalog(self._settings, is_guest=True, gate=self._operations.check_hot)
                    self._catalog = await self._stack.enter_async_context(catalog)
                except InvalidRequest as error:
                    raise Unavailable(
                        "this service keeps no books: that needs a Redis as hot, or a directory as cold"
                    ) from error
            return self._catalog

    async def totals(self, *, deadline: Deadline) -> Mapping[NamespaceId, NamespaceTotals]:
        """What every namespace holds, at most a second ago."""
        catalog = await self.open()
        async with self._opening:
            read_s, totals = self._totals
            if SYSTEM_CLOCK.monotonic_s() - read_s > _FRESH_S:
                await self._check_answers(catalog)
                totals = await catalog.totals(deadline=deadline)
                self._totals = SYSTEM_CLOCK.monotonic_s(), totals
                self._last_totals = totals, SYSTEM_CLOCK.wall_ms() // 1000
            return totals

    def last_totals(self) -> tuple[Mapping[NamespaceId, NamespaceTotals], int] | None:
        """What was held when the catalog answered last, and when, in seconds since the Unix epoch."""
        return self._last_totals

    async def _check_answers(self, catalog: Catalog) -> None:
        """Ask something small first: a server that hangs is told soon and as such, however long the answer may take.

        Raises:
            Unavailable: It does not answer; the message says what that means.
        """
        if SYSTEM_CLOCK.monotonic_s() < self._hangs_until_s:
            raise Unavailable(self._why)
        try:
            await catalog.is_complete(deadline=Deadline.after(_HANGS_S))
        except Unavailable as error:
            where = "the hot tier" if isinstance(self._settings.hot, RedisLocation) else "the disk"
            self._why = (
                f"{where} does not answer, and keeps the catalog, so what is held cannot be told now: it is frozen, "
                "overloaded, down or cut off, `kvstore doctor` tells which"
            )
            self._hangs_until_s = SYSTEM_CLOCK.monotonic_s() + _FRESH_S
            raise Unavailable(self._why) from error

    async def tenant_of(self, namespace: NamespaceId, *, deadline: Deadline) -> str | None:
        """Whose a namespace is, as of a second ago at most; `None`: there is none."""
        catalog = await self.open()
        async with self._opening:
            read_s, tenants = self._tenants
            if SYSTEM_CLOCK.monotonic_s() - read_s > _FRESH_S:
                await self._check_answers(catalog)
                tenants = await catalog.namespaces(deadline=deadline)
                self._tenants = SYSTEM_CLOCK.monotonic_s(), tenants
            return tenants.get(namespace)

    @asynccontextmanager
    async def tier(self, level: Level) -> AsyncIterator[Tier]:
        """A slower tier over connections of our own, for walks over all of it; nobody else waits for what it does.

        Raises:
            InvalidRequest: There is none.
            Unavailable: It cannot be opened.
        """
        location = self._settings.hot if level is Level.HOT else self._settings.cold
        async with open_tier(location, self._settings) as opened:
            yield opened

    def forget_totals(self) -> None:
        """Something was deleted: read them anew."""
        self._totals = _NEVER, {}

    async def check(self, namespace: NamespaceId, grant: Grant, *, deadline: Deadline) -> None:
        """Refuse a namespace that is not there for a token.

        Raises:
            Refused: It is not there, or another tenant's.
        """
        tenant = await self.tenant_of(namespace, deadline=deadline)
        if tenant is None or not grant.sees(tenant):
            raise _unknown(namespace)

    async def find(self, namespace: NamespaceId, grant: Grant, *, deadline: Deadline) -> Namespace:
        """A namespace that a token may see. Another tenant's is not there, and that is told as quickly.

        Raises:
            Refused: It is not there.
            Unavailable: Its manifest is nowhere.
        """
        await self.check(namespace, grant, deadline=deadline)
        found = self._known.get(namespace) or await self._learn(namespace, deadline)
        # the tenant in the description is a part of what the id is a digest of: nobody can claim another's
        if not grant.sees(found.description.tenant):
            raise _unknown(namespace)
        return found

    async def names(self, namespaces: Sequence[NamespaceId], *, deadline: Deadline) -> dict[NamespaceId, str]:
        """What people call namespaces: model and types. Those whose description cannot be read in time are left out."""
        found: dict[NamespaceId, str] = {}
        for namespace in namespaces:
            known = self._known.get(namespace)
            if known is None and not deadline.expired:
                try:
                    known = await self._learn(namespace, deadline)
                except (Unavailable, InvalidRequest):
                    continue
            if known is not None:
                found[namespace] = known.description.name
        return found

    async def _learn(self, namespace: NamespaceId, deadline: Deadline) -> Namespace:
        manifest = await self._bridge.call(
            lambda: self._operations.manifest(namespace, deadline=deadline), deadline=deadline
        )
        try:
            description = parse_manifest(manifest, namespace) if manifest is not None else None
        except (CorruptRecord, UnsupportedFormat) as error:
            raise Unavailable("the manifest of the namespace cannot be read", error=error) from error
        if description is None:
            raise Unavailable("the manifest of the namespace is nowhere: an engine that opens it writes it again")
        found = Namespace(namespace, description, description.layout())
        catalog = await self.open()
        await catalog.register(namespace, found.layout, description.tenant, deadline=deadline)
        self._known[namespace] = found
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return found

    async def aclose(self) -> None:
        """Let go of it. Idempotent."""
        await self._stack.aclose()


def _unknown(namespace: NamespaceId) -> Refused:
    return Refused(404, "no such namespace", field="namespace", seen=namespace.hex())
