"""Keeps the catalog's hot level true to a Redis that lets records go by itself."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from dataclasses import dataclass

from kvstore.catalog.entry import Level
from kvstore.catalog.redis import RedisCatalog
from kvstore.catalog.redis_sample import Sampler
from kvstore.errors import Closed, CorruptRecord, InvalidRequest, Unavailable
from kvstore.model.keys import NamespaceId, PrefixHash
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters

__all__ = ["Reconciler", "ServerFacts", "facts_of", "format_facts", "parse_facts"]

_log = logging.getLogger(__name__)

_LOOK_S = 15.0
"""So often the servers are asked whether they let something go, so that all of it is noted within 60 s."""
_LEASE = "reconcile"
_LEASE_S = 20.0
_NOTE = "reconciled"
"""Holds what servers told when somebody had last looked at everything."""
_NEXT_STEP = "lookups ask the tiers as well, which is slower, until `kvstore reindex` was run"
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


def format_facts(facts: list[ServerFacts]) -> str:
    """As text that services leave each other."""
    return json.dumps([[one.run, one.gone] for one in facts])


def parse_facts(text: str) -> list[ServerFacts] | None:
    """The inverse; `None` for what is no such text."""
    try:
        return [ServerFacts(str(run), int(gone)) for run, gone in json.loads(text)]
    except (ValueError, TypeError):
        return None


class Reconciler:
    """Looks now and then whether a server evicted, expired or lost anything, and if so at every hot boundary; of
    several services one does, and notes what it saw for the others. A server that was replaced may lack changes: the
    catalog is then marked as not complete. So it is where a sample shows records that nobody has told of.

    Args:
        catalog: Stays the caller's.
        meters: Where to count.
        look_s: How often to look.
        clock: For deadlines.
    """

    def __init__(
        self, catalog: RedisCatalog, meters: Meters, *, look_s: float = _LOOK_S, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._catalog = catalog
        self._meters = meters
        self._look_s = look_s
        self._ownership = catalog.ownership(_LEASE_S)
        self._sampler = Sampler(catalog, clock=clock)
        self._clock = clock
        self._facts: list[ServerFacts] | None = None
        self._was_complete = False

    async def run(self) -> None:
        """Look for ever; a Redis that does not answer is asked again the next time. It rests for as long as it worked,
        so that a Redis which evicts all the time is busy with this for half of the time at most.
        """
        while True:
            started_s = asyncio.get_running_loop().time()
            try:
                await self.look()
            except (Unavailable, CorruptRecord, InvalidRequest):
                self._meters.add("catalog_failures", call="reconcile")
            except Closed:
                return
            await asyncio.sleep(max(self._look_s, asyncio.get_running_loop().time() - started_s))

    async def look(self) -> int:
        """Reconcile if anything is gone; returns how many records were."""
        await self._look_at_catalog()
        sample = await self._sampler.look()
        if sample.num_unknown:
            self._meters.add("catalog_unknown_records", sample.num_unknown)
            await self._doubt("Redis holds records that the catalog was never told of")
        facts = await self._look_at_servers()
        if (facts == self._facts and not sample.num_lost) or not await self._hold():
            return sample.num_lost  # whoever looks now may die: without the lease nothing is taken as seen
        try:
            lost = sample.num_lost + await self._reconcile(facts, is_wrong=sample.num_lost > 0)
        finally:
            await self._release()
        self._facts = facts
        return lost

    async def _look_at_catalog(self) -> None:
        """See what Redis has lost of the catalog itself, as by FLUSHALL."""
        deadline = Deadline.after(_CALL_S, self._clock)
        await self._catalog.register_again(deadline=deadline)
        is_complete = await self._catalog.is_complete(deadline=deadline)
        self._meters.set("catalog_complete", is_complete)
        if self._was_complete and not is_complete:
            _log.warning("the catalog is not complete any more: %s", _NEXT_STEP)
        self._was_complete = is_complete

    async def _doubt(self, why: str) -> None:
        await self._catalog.set_complete(False, deadline=Deadline.after(_CALL_S, self._clock))
        self._was_complete = False
        _log.warning("%s: %s", why, _NEXT_STEP)

    async def _look_at_servers(self) -> list[ServerFacts]:
        deadline = Deadline.after(_CALL_S, self._clock)
        servers = await self._catalog.info("server", deadline=deadline)
        stats = await self._catalog.info("stats", deadline=deadline)
        return sorted(
            (facts_of(server, stat) for server, stat in zip(servers, stats, strict=True)), key=lambda one: one.run
        )

    async def _reconcile(self, facts: list[ServerFacts], *, is_wrong: bool) -> int:
        deadline = Deadline.after(_CALL_S, self._clock)
        noted = await self._catalog.noted(_NOTE, deadline=deadline)
        seen = self._facts if noted is None else parse_facts(noted)
        if seen is not None and {one.run for one in facts} != {one.run for one in seen}:
            await self._doubt("a Redis of the catalog was restarted or replaced and may lack entries")
        if noted is not None and facts == seen and not is_wrong:  # another service has been here
            return 0
        lost = await self.walk()
        await self._catalog.note(_NOTE, format_facts(facts), deadline=Deadline.after(_CALL_S, self._clock))
        self._meters.add("catalog_reconciled", lost)
        return lost

    async def walk(self) -> int:
        """Look at every boundary that the catalog tells of at the hot level, of whichever namespace; returns how many
        records were gone.
        """
        lost = 0
        for namespace in await self._catalog.namespaces(deadline=Deadline.after(_CALL_S, self._clock)):
            if not await self._catalog.know(namespace, deadline=Deadline.after(_CALL_S, self._clock)):
                continue  # nothing that this service could read; whoever has opened it sees to it
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
        await self._hold()  # for as long as it takes
        return await self._catalog.observe_hot(namespace, prefixes, deadline=Deadline.after(_CALL_S, self._clock))

    async def _hold(self) -> bool:
        return await self._ownership.hold(_LEASE, deadline=Deadline.after(_CALL_S, self._clock))

    async def _release(self) -> None:
        """So that the lease need not expire, which is what would be looked at next."""
        with suppress(Unavailable):
            await self._ownership.release(_LEASE, deadline=Deadline.after(_CALL_S, self._clock))
