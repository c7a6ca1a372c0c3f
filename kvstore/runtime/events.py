"""Recent events, for the operator on call: a bounded ring for each kind."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvstore.runtime.clock import SYSTEM_CLOCK, Clock

_KEPT = 256
"""Events of each kind: a tier that fails and returns all night does not push out events of other kinds."""
_TEXT_CHARS_MAX = 300


class EventKind(Enum):
    """Kinds of events. The values are part of the API: they do not change."""

    STARTED = "started"
    TIER_DOWN = "tier_down"
    TIER_BACK = "tier_back"
    QUARANTINED = "quarantined"
    EVICTED = "evicted"
    SAVES_DROPPED = "saves_dropped"
    CATALOG = "catalog"
    SETTINGS = "settings"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Event:
    """One event.

    Attributes:
        number: Increases with each event, also over restarts: milliseconds since the Unix epoch, or one more than the
            last. So gaps do not reveal events that a reader may not see.
        at_ms: When, in milliseconds since the Unix epoch.
        text: What happened, cut at 300 characters.
        namespace: The namespace concerned, in hex; empty: none.
        tenant: The tenant that caused it; `None`: no tenant did.
        is_public: Every tenant may see it, without its details.
        detail: Plain values.
    """

    number: int
    at_ms: int
    kind: EventKind
    text: str
    namespace: str = ""
    tenant: str | None = None
    is_public: bool = False
    detail: Mapping[str, str | int | float] = field(default_factory=dict)


class Events:
    """Keeps the last 256 events of each kind. Safe from any thread; never blocks for long."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[EventKind, deque[Event]] = {kind: deque(maxlen=_KEPT) for kind in EventKind}
        self._last = 0

    @property
    def last(self) -> int:
        """The number of the latest event; 0: there was none."""
        return self._last

    def add(
        self,
        kind: EventKind,
        text: str,
        *,
        namespace: str = "",
        tenant: str | None = None,
        is_public: bool = False,
        detail: Mapping[str, str | int | float] | None = None,
    ) -> None:
        """Add an event that happened just now; the arguments are as in `Event`."""
        at_ms = self._clock.wall_ms()
        cut = {
            name: value[:_TEXT_CHARS_MAX] if isinstance(value, str) else value for name, value in (detail or {}).items()
        }
        with self._lock:
            number = max(self._last + 1, at_ms)
            self._kept[kind].append(
                Event(number, at_ms, kind, text[:_TEXT_CHARS_MAX], namespace, tenant, is_public, cut)
            )
            self._last = number

    def after(self, number: int) -> list[Event]:
        """The kept events after a number, in order. A number larger than the last one's means that the clock was set
        back: then all are returned.
        """
        with self._lock:
            last = self._last
            kept = [event for ring in self._kept.values() for event in ring]
        start = number if number <= last else 0
        return sorted((event for event in kept if event.number > start), key=lambda event: event.number)
