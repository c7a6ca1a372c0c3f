"""Counters and gauges: the dashboard, the metrics endpoint and the tests read the same numbers."""

from __future__ import annotations

import re
import threading
from collections import defaultdict, deque

_KEPT_OBSERVATIONS = 1000
_LABEL = re.compile(r'([a-z_]+)="([^"]*)"')


def name_and_labels(key: str) -> tuple[str, dict[str, str]]:
    """The name of a meter and its labels, from a key of `Meters.snapshot`."""
    name, _, labels = key.partition("{")
    return name, dict(_LABEL.findall(labels))


class Meters:
    """Named numbers with labels, e.g. `meters.add("tier_errors", tier="redis")`. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: defaultdict[str, float] = defaultdict(float)
        self._observations: dict[str, deque[float]] = {}

    @staticmethod
    def _key(name: str, labels: dict[str, str]) -> str:
        if not labels:
            return name
        inner = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
        return f"{name}{{{inner}}}"

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter."""
        with self._lock:
            self._values[self._key(name, labels)] += amount

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        with self._lock:
            self._values[self._key(name, labels)] = value

    def observe(self, name: str, value: float) -> None:
        """Add one value to a distribution: counters `<name>_count` and `<name>_sum`, and the value itself.

        The last 1,000 values of each name are kept for `take_observations`.
        """
        with self._lock:
            self._values[f"{name}_count"] += 1
            self._values[f"{name}_sum"] += value
            self._observations.setdefault(name, deque(maxlen=_KEPT_OBSERVATIONS)).append(value)

    def take_observations(self) -> dict[str, list[float]]:
        """The values observed since the last call, by name, in order. For one reader: they are removed."""
        if not self._observations:
            return {}
        with self._lock:
            taken, self._observations = self._observations, {}
        return {name: list(values) for name, values in taken.items()}

    def get(self, name: str, **labels: str) -> float:
        """The current value; zero for a name that was never set."""
        with self._lock:
            return self._values.get(self._key(name, labels), 0)

    def snapshot(self) -> dict[str, float]:
        """All values by name, labels in Prometheus notation."""
        with self._lock:
            return dict(self._values)
