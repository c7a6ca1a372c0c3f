"""Whether the catalog and the records in one Redis know of each other, seen from a few names at a time."""

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
"""Of these, where a boundary has 32 records, some 15 are entries."""
_UNKNOWN_MAX = 256
_PATIENCE_S = 40.0
"""Whoever has just stored a record tells of it at once; a dead service's is told by whoever finishes it, by default
after 30 s."""
_CALL_S = 10.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What was seen.

    Attributes:
        num_lost: Records that entries told of and that are not there. The entries are right now.
        num_unknown: Records that nobody has told of for a while. They, and all of their boundaries, are told of now.
    """

    num_lost: int
    num_unknown: int


class Sampler:
    """Goes round over a Redis, a step with each look; what it finds wrong stands for much that it has not seen yet.

    Args:
        catalog: Stays the caller's.
        patience_s: How long a record may be unknown.
        clock: For that.
    """

    def __init__(self, catalog: RedisCatalog, *, patience_s: float = _PATIENCE_S, clock: Clock = SYSTEM_CLOCK) -> None:
        self._catalog = catalog
        self._patience_s = patience_s
        self._clock = clock
        self._unknown_since_s: dict[RecordKey, float] = {}

    async def look(self) -> Sample:
        """Take the next step.

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
        return Sample(num_lost, await self._look_at_records(records, deadline))

    async def _look_at_records(self, records: list[RecordKey], deadline: Deadline) -> int:
        now_s = self._clock.monotonic_s()
        unknown = await self._unknown([*self._unknown_since_s, *records], deadline)
        stored = await self._catalog.are_stored(unknown, deadline=deadline)
        since_s = {
            key: self._unknown_since_s.get(key, now_s) for key, there in zip(unknown, stored, strict=True) if there
        }
        late = [key for key, at_s in since_s.items() if now_s - at_s >= self._patience_s]
        kept = [key for key in since_s if key not in late][:_UNKNOWN_MAX]
        self._unknown_since_s = {key: since_s[key] for key in kept}
        # any size: the look at the boundary that follows sets it right
        await self._catalog.add([Addition(key, Level.HOT, 1, 0) for key in late], deadline=deadline)
        for namespace, prefixes in _by_namespace((key.namespace, key.prefix) for key in late).items():
            await self._catalog.observe_hot(namespace, prefixes, deadline=deadline)
        return len(late)

    async def _unknown(self, records: Iterable[RecordKey], deadline: Deadline) -> list[RecordKey]:
        """Those that no entry tells of, and that are not being deleted; of namespaces that can be read here."""
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
