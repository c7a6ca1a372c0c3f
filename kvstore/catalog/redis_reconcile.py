"""Keeps the catalog's hot level true to a Redis that lets records go by itself."""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass

from kvstore.catalog.entry import Level
from kvstore.catalog.redis import RedisCatalog
from kvstore.errors import Closed, CorruptRecord, InvalidRequest, Unavailable
from kvstore.model.keys import NamespaceId, PrefixHash
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters

__all__ = ["Reconciler", "ServerFacts", "facts_of"]

_log = logging.getLogger(__name__)

_LOOK_S = 15.0
"""So often the servers are asked whether they let something go, so that all of it is noted within 60 s."""
_LEASE_S = 25
_CALL_S = 10.0
_BATCH = 256


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a node tells of itself.

    Attributes:
        run: Changes when the server is started anew, or another takes its place.
        gone: Keys that it evicted or that expired, since its start.
    """

    run: str
    gone: int


def facts_of(server: dict[str, str], stats: dict[str, str]) -> ServerFacts:
    """From what `INFO server` and `INFO stats` tell."""
    return ServerFacts(server.get("run_id", ""), int(stats.get("evicted_keys", 0)) + int(stats.get("expired_keys", 0)))


class Reconciler:
    """Looks every 15 s whether a server evicted, expired or lost anything, and if so at every hot boundary; of several
    services one does. A server that was replaced may lack changes: the catalog is then marked as not complete.

    Args:
        catalog: Stays the caller's.
        meters: Where to count.
        look_s: How often to look.
    """

    def __init__(self, catalog: RedisCatalog, meters: Meters, *, look_s: float = _LOOK_S) -> None:
        self._catalog = catalog
        self._meters = meters
        self._look_s = look_s
        self._token = secrets.token_hex(8)  # nobody else's: whose lease it is
        self._facts: list[ServerFacts] | None = None

    async def run(self) -> None:
        """Look for ever; a Redis that does not answer is asked again the next time."""
        while True:
            try:
                await self.look()
            except (Unavailable, CorruptRecord, InvalidRequest):
                self._meters.add("catalog_failures", call="reconcile")
            except Closed:
                return
            await asyncio.sleep(self._look_s)

    async def look(self) -> int:
        """Reconcile if anything is gone; returns how many records were."""
        deadline = Deadline.after(_CALL_S)
        servers = await self._catalog.info("server", deadline=deadline)
        stats = await self._catalog.info("stats", deadline=deadline)
        facts = sorted(
            (facts_of(server, stat) for server, stat in zip(servers, stats, strict=True)), key=lambda one: one.run
        )
        before, self._facts = self._facts, facts
        if facts == before:
            return 0
        if not await self._catalog.take_lease("reconcile", self._token, _LEASE_S, deadline=deadline):
            self._facts = before  # whoever looks now may die: the next one to have the lease looks again
            return 0
        if before is not None and {one.run for one in facts} != {one.run for one in before}:
            await self._catalog.set_complete(False, deadline=deadline)
            _log.warning(
                "a Redis of the catalog was restarted or replaced and may lack entries: lookups ask the tiers as well "
                "until `kvstore reindex` was run"
            )
        try:
            lost = await self.walk()
        except BaseException:
            self._facts = before  # what was not looked at is looked at the next time
            raise
        self._meters.add("catalog_reconciled", lost)
        return lost

    async def walk(self) -> int:
        """Look at every boundary that the catalog tells of at the hot level; returns how many records were gone."""
        lost = 0
        for namespace in self._catalog.registered():
            prefixes: list[PrefixHash] = []
            async for entry in self._catalog.iterate(namespace):
                if any(entry.slices[Level.HOT]):
                    prefixes.append(entry.prefix)
                if len(prefixes) >= _BATCH:
                    lost += await self._observe(namespace, prefixes)
                    prefixes = []
            lost += await self._observe(namespace, prefixes)
        return lost

    async def _observe(self, namespace: NamespaceId, prefixes: list[PrefixHash]) -> int:
        if not prefixes:
            return 0
        return await self._catalog.observe_hot(namespace, prefixes, deadline=Deadline.after(_CALL_S))
