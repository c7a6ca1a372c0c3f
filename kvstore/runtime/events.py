"""What happened lately, for whoever is called at night: a bounded ring that anybody may add to and read."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvstore.runtime.clock import SYSTEM_CLOCK, Clock

__all__ = ["Event", "EventKind", "Events"]

_KEPT = 256
"""Of each kind: a tier that comes and goes all night pushes out nothing else."""
_TEXT_CHARS_MAX = 300


class EventKind(Enum):
    """What may happen. Words are stable."""

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
    """One thing that happened.

    Attributes:
        number: Grows with each event, over restarts too: milliseconds since the Unix epoch, or one more than the last.
            So gaps tell nobody of events that he may not see.
        at_ms: When, since the Unix epoch.
        kind: What.
        text: In words, cut at 300 characters.
        namespace: What it is about, in hex; empty: nothing that is one tenant's.
        tenant: Whose doing it was; `None`: no tenant's.
        is_public: Every tenant may know of it, without its details.
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
    """Keeps the last 256 events of each kind. Safe from any thread; nobody waits for it.

    Args:
        clock: For the time of day.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[EventKind, deque[Event]] = {kind: deque(maxlen=_KEPT) for kind in EventKind}
        self._last = 0

    @property
    def last(self) -> int:
        """The number of the latest event; 0: there was none."""
        return self._last

    def tell(
        self,
        kind: EventKind,
        text: str,
        *,
        namespace: str = "",
        tenant: str | None = None,
        is_public: bool = False,
        detail: Mapping[str, str | int | float] | None = None,
    ) -> None:
        """Something happened just now."""
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
        """Kept events behind a number, in order. A number that is not reached yet is of a clock that went back: then
        all are told.
        """
        with self._lock:
            last = self._last
            kept = [event for ring in self._kept.values() for event in ring]
        start = number if number <= last else 0
        return sorted((event for event in kept if event.number > start), key=lambda event: event.number)
