"""What every component is given beside its own arguments: a clock, and the places to count, record and trace."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.events import Events
from kvstore.runtime.meters import Meters
from kvstore.runtime.tracing import Tracing


@dataclass(frozen=True, slots=True)
class Instruments:
    """One value that `compose` makes once and passes to every component of a store.

    Attributes:
        clock: Every time and every deadline is read from it; tests pass their own.
        events: The last events of each kind, for operators.
        tracing: Makes spans; `None`: tracing is off.
    """

    clock: Clock = SYSTEM_CLOCK
    meters: Meters = field(default_factory=Meters)
    events: Events = field(default_factory=Events)
    tracing: Tracing | None = None
