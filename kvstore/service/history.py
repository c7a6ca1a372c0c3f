"""What the service counted over the last hours: samples, and their sums over equal steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

STEP_S = 10
"""Finer steps would show nothing that an operator could act on."""
_SAMPLES_MAX = 6 * 3600 // STEP_S
"""Six hours: half a night. Some MB when everything counts."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What happened in one step.

    Attributes:
        at_ms: End of the step, since the Unix epoch.
        counts: By meter, with labels in Prometheus notation, its increase; meters that did not grow are left out.
        tier_bytes: By tier, bytes held at the end of the step; left out if not known.
        away: Tiers that did not answer, or whose breaker was open.
    """

    at_ms: int
    counts: Mapping[str, float] = field(default_factory=dict)
    tier_bytes: Mapping[str, int] = field(default_factory=dict)
    away: frozenset[str] = frozenset()


class History:
    """Keeps the samples of six hours. Written on one thread, read on any.

    Args:
        samples_max: Beyond this the oldest samples are dropped.

    Attributes:
        unmeasured: Tiers that do not know what they hold: S3 would have to be scanned.
    """

    def __init__(self, samples_max: int = _SAMPLES_MAX) -> None:
        self._samples: deque[Sample] = deque(maxlen=samples_max)
        self.unmeasured: frozenset[str] = frozenset()

    def add(self, sample: Sample) -> None:
        """Append the sample of one step."""
        self._samples.append(sample)

    def samples(self) -> list[Sample]:
        """A copy of all samples, in order; made in one step, since the writer may add to them at any time."""
        return list(self._samples)


@dataclass(frozen=True, slots=True)
class Window:
    """Samples summed up over equal steps. Every list has a value for each step.

    Attributes:
        at_s: Ends of the steps, in seconds since the Unix epoch: multiples of the step's length.
        counts: By meter, its increase in each step.
        tier_bytes: By tier, bytes held at the end of each step; `None`: not known.
        away: By tier, 1 for each step in which it was away.
    """

    at_s: list[int]
    counts: dict[str, list[float]]
    tier_bytes: dict[str, list[int | None]]
    away: dict[str, list[int]]

    def sum_of(self, *names: str) -> list[float]:
        """The sum of several meters."""
        return [sum(values) for values in zip(*(self.of(name) for name in names), strict=True)]

    def of(self, name: str) -> list[float]:
        """One meter; zeros where it never counted."""
        return self.counts.get(name) or [0.0] * len(self.at_s)


def window_of(samples: Iterable[Sample], *, now_ms: int, num_steps: int, step_s: int) -> Window:
    """The last steps up to now. Pure.

    Args:
        samples: In any order; those outside the window are ignored.
        now_ms: End of the window, rounded up to a whole step.
    """
    step_ms = step_s * 1000
    last = -(-now_ms // step_ms)
    first = last - num_steps + 1
    window = Window([step_s * step for step in range(first, last + 1)], {}, {}, {})
    for sample in sorted(samples, key=lambda one: one.at_ms):
        index = -(-sample.at_ms // step_ms) - first
        if not 0 <= index < num_steps:
            continue
        for name, grown in sample.counts.items():
            window.counts.setdefault(name, [0.0] * num_steps)[index] += grown
        for tier, held in sample.tier_bytes.items():
            window.tier_bytes.setdefault(tier, [None] * num_steps)[index] = held
        for tier in sample.away:
            window.away.setdefault(tier, [0] * num_steps)[index] = 1
    return window
