"""Cross-checks the catalog and the records in one Redis, a few names at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.catalog.base import Addition
from kvstore.catalog.entry import Level
from kvstore.catalog.redis import RedisCatalog, parse_entry_name
from kvstore.errors import InvalidRequest
from kvstore.format.names import parse_name
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.deadline import Deadline

__all__ = ["Sample", "Sampler"]

_NAMES = 512
"""Names that each step reads, of entries and of records. A boundary has one entry and many records."""
_UNKNOWN_MAX = 256
_GRACE_S = 40.0
"""A stored record is reported at once, or, where its service died, by whoever takes over its pending entry: by default
after 30 s (`pending_lease_s`)."""
_CALL_S = 10.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What a step found, and has corrected.

    Attributes:
        num_lost: Records that had an entry and were not there.
        num_unknown: Records that were there, and that nobody reported within the grace period.
    """

    num_lost: int
    num_unknown: int


class Sampler:
    """Scans a Redis again and again, one step per call. One wrong entry or record suggests many more.

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

    async def look(self) -> Sample:
        """Check the next names, and correct the catalog where it is wrong.

        Raises:
            Unavailable: Redis does not answer.
        """
        deadline = Deadline.after(_CALL_S, self._clock)
        names = await self._catalog.next_names(_NAMES, deadline=deadline)
        entries = [place for place in map(parse_entry_name, names) if place is not None]
        records = [key for key in map(_record_key, names) if key is not None]
        num_lost = 0
        for namespace, prefixes in _by_namespace(entries).items():
            if await self._catalog.know(namespace, deadline=deadline):
                num_lost += await self._catalog.observe_hot(namespace, prefixes, deadline=deadline)
        return Sample(num_lost, await self._check_records(records, deadline))

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
            if not await self._catalog.know(namespace, deadline=deadline):
                continue
            table = await self._catalog.lookup(namespace, list(of_prefix), deadline=deadline)
            for index, keys in enumerate(of_prefix.values()):
                if not table.leaves(index, Level.HOT):
                    held = [key for key in keys if table.shape.holds(key.group, key.slice)]
                    unknown += [key for key in held if not table.has(index, Level.HOT, key.group, key.slice)]
        return unknown


def _by_namespace(places: Iterable[tuple[NamespaceId, PrefixHash]]) -> dict[NamespaceId, list[PrefixHash]]:
    found: dict[NamespaceId, dict[PrefixHash, None]] = {}
    for namespace, prefix in places:
        found.setdefault(namespace, {})[prefix] = None
    return {namespace: list(prefixes) for namespace, prefixes in found.items()}


def _record_key(name: bytes) -> RecordKey | None:
    try:
        return parse_name(name.decode())
    except (InvalidRequest, UnicodeDecodeError):
        return None
