"""Manifests beside the records of each slower tier: written when a namespace is opened, and again if one is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from kvstore.errors import KVStoreError
from kvstore.format.manifest import parse_manifest
from kvstore.model.keys import NamespaceId
from kvstore.model.namespace import NamespaceDescription
from kvstore.runtime.background import Background
from kvstore.runtime.clock import Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.store.limits import StoreLimits
from kvstore.store.recorder import Recorder
from kvstore.tiers.base import Tier

__all__ = ["Manifests"]


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
