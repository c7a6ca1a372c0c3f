"""What must be true, whatever fails: knows every byte that was offered, every promise, and who may break one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.api import Ack
from kvstore.format.record import Record
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from tests.simulation.media import Gone, Medium
from tests.simulation.sightings import Sightings

_EVENTS_SHOWN = 120


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass
class Trace:
    """What happened, in order.

    Attributes:
        events: Time, actor, what happened, and to what.
    """

    now_s: Callable[[], float]
    events: list[tuple[float, str, str, object]] = field(default_factory=list)

    def add(self, actor: str, what: str, about: object = "") -> None:
        self.events.append((self.now_s(), actor, what, about))

    def lines(self) -> list[str]:
        return [f"{at_s:10.4f} {actor:8} {what} {about}".rstrip() for at_s, actor, what, about in self.events]

    def readable(self, about: RecordKey | None = None) -> str:
        """The last events, and before them all that concern one record."""
        start = max(0, len(self.events) - _EVENTS_SHOWN)
        lines = self.lines()
        chosen = [i for i, event in enumerate(self.events) if i >= start or (about is not None and event[3] == about)]
        return "\n".join(lines[i] for i in chosen)


class Oracle:
    """Watches media and clients. A violation is noted where it is seen, and raised by `check`, since what sees it is
    often in the middle of the store, which would take the exception for its own.

    Args:
        trace: Of the simulation.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.versions: dict[RecordKey, set[bytes]] = {}
        self.promises: dict[RecordKey, Ack] = {}
        self.num_promised = 0
        self.num_served = 0
        self.pins: dict[tuple[NamespaceId, PrefixHash], float] = {}
        self.media: dict[str, Medium] = {}
        self.sightings: Sightings | None = None  # where the cold tier gets what was seen before
        self._excused_s: dict[RecordKey, float] = {}
        self._suspected: set[RecordKey] = set()
        self._violations: list[tuple[str, RecordKey | None]] = []

    def violate(self, text: str, key: RecordKey | None = None) -> None:
        self.trace.add("ORACLE", f"VIOLATION: {text}", key if key is not None else "")
        self._violations.append((text, key))

    def check(self) -> None:
        """Raise what was noted.

        Raises:
            Violation: With the trace.
        """
        if self._violations:
            text, key = self._violations[0]
            raise Violation(f"{text}{f' key={key}' if key else ''}\n{self.trace.readable(key)}")

    # bytes

    def offered(self, record: Record) -> None:
        """Somebody is about to save this."""
        self.versions.setdefault(record.key, set()).add(bytes(record.data))

    def served(self, record: Record, asked: RecordKey, by: str) -> None:
        """A reader got this."""
        self.num_served += 1
        if record.key != asked or bytes(record.data) not in self.versions.get(asked, ()):
            self.violate(f"{by} returned wrong bytes", asked)

    def suspect(self, key: RecordKey) -> None:
        """A read of it was damaged, or a reader says that it is bad: it may be quarantined."""
        self._suspected.add(key)

    def is_suspect(self, key: RecordKey) -> bool:
        return key in self._suspected

    # promises

    def acknowledged(self, key: RecordKey, ack: Ack, started_s: float) -> None:
        """A save that began then was acknowledged."""
        if ack is Ack.MEMORY:
            return
        self.num_promised += 1
        if self._excused_s.get(key, -1.0) >= started_s:
            return  # it was lost meanwhile, for a good reason
        hot, cold = self.media["redis"], self.media["s3"]
        if not self._is_kept(key, ack):
            self.violate(f"acknowledged at {ack.value}, but the record is not there", key)
            return
        if ack is Ack.HOT and key not in cold.records and key in hot.evictable:
            self.violate("acknowledged at hot, may be evicted there, and the cold tier does not have it", key)
        if any(key in m.records and m.records[key] not in self.versions[key] for m in (hot, cold)):
            return  # damaged where it stands: there is nothing to promise
        if self.promises.get(key) is not Ack.COLD:
            self.promises[key] = ack

    def _is_kept(self, key: RecordKey, ack: Ack) -> bool:
        hot, cold = self.media["redis"], self.media["s3"]
        return key in cold.records or (ack is Ack.HOT and key in hot.records)

    def stored(self, medium: Medium, key: RecordKey) -> None:
        self.trace.add(medium.name, "has", key)
        if medium.records[key] not in self.versions.get(key, ()):
            self.violate(f"{medium.name} was given bytes that nobody saved", key)
        if medium is self.media["s3"] and self.sightings is not None and not self.sightings.may_be_kept(key):
            self.violate("what nobody had seen before is in the cold tier", key)

    def allowed(self, medium: Medium, key: RecordKey) -> None:
        self.trace.add(medium.name, "may evict", key)
        if key in self.promises and key not in self.media["s3"].records:
            self.violate(f"{medium.name} may evict an acknowledged record that the cold tier does not have", key)

    def gone(self, medium: Medium, key: RecordKey, why: Gone) -> None:
        self.trace.add(medium.name, f"lost ({why.value})", key)
        if why is Gone.EVICTED:
            promise = self.promises.get(key)
            if promise is not None and not self._is_kept(key, promise):
                self.violate(f"{medium.name} evicted an acknowledged record that the cold tier does not have", key)
            return
        if why is Gone.DAMAGED:
            self._suspected.add(key)
        elif why is Gone.QUARANTINED and key not in self._suspected:
            self.violate(f"{medium.name}: a good record was quarantined", key)
        elif why is Gone.DELETED:
            if medium is not self.media["s3"]:
                self.violate(f"{medium.name}: nobody may delete here", key)
            if self.pins.get((key.namespace, key.prefix), 0.0) > self.trace.now_s():
                self.violate("a pinned record was deleted", key)
        elif why is Gone.FLUSHED and key in self.promises and self._is_kept(key, self.promises[key]):
            return
        self._excused_s[key] = self.trace.now_s()
        self.promises.pop(key, None)
