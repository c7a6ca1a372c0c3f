"""Corrects the catalog's hot level after Redis evicted, expired or lost records."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from kvstore.catalog.base import Addition
from kvstore.catalog.entry import Level
from kvstore.catalog.redis.catalog import RedisCatalog
from kvstore.catalog.redis.counters import ServerCounters, counters_of, run_ids
from kvstore.catalog.redis.entry_names import parse_entry_name
from kvstore.errors import CorruptRecord, InvalidRequest, Unavailable, UnsupportedFormat
from kvstore.format.manifest import parse_manifest
from kvstore.format.names import record_key
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters

_log = logging.getLogger(__name__)

_PERIOD_S = 15.0
"""How often the servers' counters are read, so that every loss is recorded within 60 s."""
_REST_SHARE = 3
_LEASE = "reconcile"
_LEASE_S = 20.0
_NEXT_STEP = "lookups also query the tiers, which is slower, until one of the services has added them"
_CALL_S = 10.0
_SAMPLE_NAMES = 512
"""Names that each check reads, of entries and of records. A boundary has one entry and many records."""
_UNKNOWN_MAX = 256
_GRACE_S = 40.0
"""A stored record is reported at once. If its service dies, the service that claims its pending entry reports it: by
default after 30 s (`pending_lease_s`)."""


class Reconciler:
    """Checks periodically whether a server evicted, expired or lost keys. If so, one of the services compares every hot
    boundary with the stored records, and stores the servers' counters for the others.

    Marks the catalog as not complete when a server was replaced, or is back after others were used in its place, since
    it may lack entries. Also when a sample shows records that no service reported. What a sample shows while it is
    incomplete is left to the rebuild; if some is left after that, a later sample shows it.

    Args:
        catalog: The caller closes it.
        period_s: Seconds between checks.
        grace_s: How long a stored record may lack an entry.
    """

    def __init__(
        self,
        catalog: RedisCatalog,
        meters: Meters,
        *,
        period_s: float = _PERIOD_S,
        grace_s: float = _GRACE_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._catalog = catalog
        self._meters = meters
        self._period_s = period_s
        self._ownership = catalog.ownership(_LEASE_S)
        self._sampler = Sampler(catalog, grace_s=grace_s, clock=clock)
        self._clock = clock
        self._counters: list[ServerCounters] | None = None
        self._was_complete = False
        self._servers: tuple[set[str], bytes] | None = None  # their run ids and the catalog's epoch, at the last check
        self._left: tuple[set[str], bytes] | None = None  # the same of those that were used before these

    async def run(self) -> None:
        """Check until cancelled; after a failure, again in the next period. Pauses at least three times as long as the
        last check took, so that checks take at most a quarter of Redis' time where it evicts constantly.

        Raises:
            Closed: The catalog was closed.
        """
        while True:
            started_s = asyncio.get_running_loop().time()
            try:
                await self.check()
            except (Unavailable, CorruptRecord, InvalidRequest):
                self._meters.add("catalog_failures", call="reconcile")
            took_s = asyncio.get_running_loop().time() - started_s
            await asyncio.sleep(max(self._period_s, _REST_SHARE * took_s))

    async def check(self) -> int:
        """Check once, and compare everything if a record is gone; returns how many records are gone."""
        await self._check_catalog()
        sample = await self._sampler.check()
        if sample.num_unknown:
            self._meters.add("catalog_unknown_records", sample.num_unknown)
        if self._was_complete:  # else a rebuild is due or runs, which corrects both, and would begin again
            if sample.num_unknown:
                await self._mark_incomplete("Redis holds records that were never reported to the catalog")
            if sample.lacks_totals:
                await self._mark_incomplete("the catalog has lost totals")
        counters = await self._read_counters()
        await self._check_servers(run_ids(counters))
        is_known = (
            counters == self._counters and await self._catalog.read_counters(deadline=self._deadline()) is not None
        )
        if (is_known and not sample.num_lost) or not await self._hold():
            return sample.num_lost  # the lease's holder may die: `_counters` stays, so that the next check tries again
        try:
            lost = sample.num_lost + await self._reconcile(counters, is_wrong=sample.num_lost > 0)
        finally:
            with suppress(Unavailable):  # if it expired, it would count in `expired_keys` and start the next comparison
                await self._ownership.release(_LEASE, deadline=self._deadline())
        self._counters = counters
        return lost

    async def _check_catalog(self) -> None:
        """Check whether Redis has lost parts of the catalog itself, as by FLUSHALL."""
        deadline = self._deadline()
        await self._catalog.register_again(deadline=deadline)
        is_complete = await self._catalog.is_complete(deadline=deadline)
        self._meters.set("catalog_complete", is_complete)
        if self._was_complete and not is_complete:
            _log.warning("the catalog is no longer complete: %s", _NEXT_STEP)
        self._was_complete = is_complete

    async def _check_servers(self, servers: set[str]) -> None:
        """Check whether servers are used again that were left for others, as when an address moves and moves back. They
        lack what was reported to the others, though none was restarted. In another epoch than before, a service has
        marked the catalog since.
        """
        now = (servers, await self._catalog.epoch(deadline=self._deadline()))
        if self._servers is not None and servers != self._servers[0]:
            if now == self._left:
                await self._mark_incomplete("the address of the catalog's Redis moved, and it may lack entries")
            self._left = self._servers
        self._servers = now

    async def _mark_incomplete(self, why: str) -> None:
        await self._catalog.mark_incomplete(deadline=self._deadline())
        self._was_complete = False
        _log.warning("%s: %s", why, _NEXT_STEP)

    async def _read_counters(self) -> list[ServerCounters]:
        deadline = self._deadline()
        servers = await self._catalog.info("server", deadline=deadline)
        stats = await self._catalog.info("stats", deadline=deadline)
        return sorted(
            (counters_of(server, stat) for server, stat in zip(servers, stats, strict=True)), key=lambda one: one.run_id
        )

    async def _reconcile(self, counters: list[ServerCounters], *, is_wrong: bool) -> int:
        """Compare the hot level unless another service has done so at these `counters`; returns the lost records.

        Args:
            counters: Of the servers, now.
            is_wrong: A sample has shown a lost record: compare in any case.
        """
        seen = await self._catalog.read_counters(deadline=self._deadline())
        before = self._counters if seen is None else seen
        if before is not None and run_ids(counters) != run_ids(before):
            await self._mark_incomplete("a Redis of the catalog was restarted or replaced and may lack entries")
        if counters == seen and not is_wrong:  # another service has done it
            return 0
        lost = await self.compare()
        await self._catalog.write_counters(counters, deadline=self._deadline())
        self._meters.add("catalog_reconciled", lost)
        return lost

    async def compare(self) -> int:
        """Compare every boundary of the catalog's hot level, of all namespaces, with the stored records; returns how
        many records were gone.
        """
        lost = 0
        namespaces = [
            namespace
            for namespace in await self._catalog.namespaces(deadline=self._deadline())
            if await _can_read(self._catalog, namespace, self._deadline())  # else a service that has opened it does it
        ]
        async for namespace, step in self._catalog.walk(namespaces):
            hot = np.flatnonzero(step.table.rows(Level.HOT).any(axis=1))
            lost += await self._observe(namespace, [step.prefixes[index] for index in hot])
        return lost

    async def _observe(self, namespace: NamespaceId, prefixes: list[PrefixHash]) -> int:
        if not prefixes:
            return 0
        await self._hold()  # renews the lease
        return await self._catalog.observe_hot(namespace, prefixes, deadline=self._deadline())

    async def _hold(self) -> bool:
        return await self._ownership.hold(_LEASE, deadline=self._deadline())

    def _deadline(self) -> Deadline:
        return Deadline.after(_CALL_S, self._clock)


@dataclass(frozen=True, slots=True)
class Sample:
    """The errors that a check of the sampler found, and corrected.

    Attributes:
        num_lost: Records that had an entry and are not stored.
        num_unknown: Stored records that no service reported within the grace period.
        lacks_totals: There is an entry whose totals are gone. They are not corrected.
    """

    num_lost: int
    num_unknown: int
    lacks_totals: bool = False


class Sampler:
    """Compares the catalog and the records of one Redis, the next few names per call. One error suggests many more.

    Args:
        catalog: The caller closes it.
        grace_s: How long a stored record may lack an entry.
        clock: Measures the grace period, and deadlines.
    """

    def __init__(self, catalog: RedisCatalog, *, grace_s: float = _GRACE_S, clock: Clock = SYSTEM_CLOCK) -> None:
        self._catalog = catalog
        self._grace_s = grace_s
        self._clock = clock
        self._unknown_since_s: dict[RecordKey, float] = {}

    async def check(self) -> Sample:
        """Check the next names, and correct the catalog where it is wrong.

        Raises:
            Unavailable: Redis does not answer.
        """
        deadline = Deadline.after(_CALL_S, self._clock)
        names = await self._catalog.next_names(_SAMPLE_NAMES, deadline=deadline)
        entries = [place for place in map(parse_entry_name, names) if place is not None]
        records = [key for key in map(record_key, names) if key is not None]
        num_lost, lacks_totals = 0, False
        for namespace, prefixes in _by_namespace(entries).items():
            if await _can_read(self._catalog, namespace, deadline):
                lacks_totals |= await self._catalog.lack_totals(namespace, prefixes, deadline=deadline)
                num_lost += await self._catalog.observe_hot(namespace, prefixes, deadline=deadline)
        return Sample(num_lost, await self._check_records(records, deadline), lacks_totals)

    async def _check_records(self, records: list[RecordKey], deadline: Deadline) -> int:
        """Add records without an entry once their grace period is over; returns how many."""
        now_s = self._clock.monotonic_s()
        unknown = await self._unknown([*self._unknown_since_s, *records], deadline)
        stored = await self._catalog.are_stored(unknown, deadline=deadline)
        since_s = {
            key: self._unknown_since_s.get(key, now_s) for key, there in zip(unknown, stored, strict=True) if there
        }
        late = [key for key, at_s in since_s.items() if now_s - at_s >= self._grace_s]
        kept = [key for key in since_s if key not in late][:_UNKNOWN_MAX]
        self._unknown_since_s = {key: since_s[key] for key in kept}
        # the size does not matter: `observe_hot` corrects it right after
        await self._catalog.add([Addition(key, Level.HOT, 1, 0) for key in late], deadline=deadline)
        for namespace, prefixes in _by_namespace((key.namespace, key.prefix) for key in late).items():
            await self._catalog.observe_hot(namespace, prefixes, deadline=deadline)
        return len(late)

    async def _unknown(self, records: Iterable[RecordKey], deadline: Deadline) -> list[RecordKey]:
        """Those without an entry that are not being deleted, of namespaces that can be read here."""
        unknown: list[RecordKey] = []
        by_namespace: dict[NamespaceId, dict[PrefixHash, set[RecordKey]]] = {}
        for key in records:
            by_namespace.setdefault(key.namespace, {}).setdefault(key.prefix, set()).add(key)
        for namespace, of_prefix in by_namespace.items():
            if not await _can_read(self._catalog, namespace, deadline):
                continue
            table = await self._catalog.lookup(namespace, list(of_prefix), deadline=deadline)
            for index, keys in enumerate(of_prefix.values()):
                if not table.leaves(index, Level.HOT):
                    held = [key for key in keys if table.shape.holds(key.group, key.slice)]
                    unknown += [key for key in held if not table.has(index, Level.HOT, key.group, key.slice)]
        return unknown


async def _can_read(catalog: RedisCatalog, namespace: NamespaceId, deadline: Deadline) -> bool:
    """Whether a namespace is registered, or can be registered now from the manifest beside its records."""
    if catalog.knows(namespace):
        return True
    data = await catalog.manifest(namespace, deadline=deadline)
    if data is None:
        return False
    try:
        description = parse_manifest(data, namespace)
    except (CorruptRecord, UnsupportedFormat):
        return False
    await catalog.register(namespace, description.layout(), description.tenant, deadline=deadline)
    return True


def _by_namespace(places: Iterable[tuple[NamespaceId, PrefixHash]]) -> dict[NamespaceId, list[PrefixHash]]:
    found: dict[NamespaceId, dict[PrefixHash, None]] = {}
    for namespace, prefix in places:
        found.setdefault(namespace, {})[prefix] = None
    return {namespace: list(prefixes) for namespace, prefixes in found.items()}
