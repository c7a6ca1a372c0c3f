"""The namespaces that are open on a node: so many; one more takes the place of one that nobody uses any more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.errors import Unavailable
from kvstore.model.keys import NamespaceId
from kvstore.model.layout import Layout
from kvstore.runtime.clock import Clock

__all__ = ["OpenNamespaces"]

_IDLE_S = 600.0
"""What was used since stays open, whoever else comes: an engine whose weights change opens a namespace for each."""


@dataclass(slots=True)
class _Open:
    layout: Layout
    used_s: float


class OpenNamespaces:
    """Knows the layout of each, and which was used longest ago.

    Args:
        limit: So many at a time.
        clock: For the time of use.
    """

    def __init__(self, limit: int, clock: Clock) -> None:
        self._limit = limit
        self._clock = clock
        self._open: OrderedDict[NamespaceId, _Open] = OrderedDict()  # the one that was used longest ago first

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[NamespaceId]:
        return iter(self._open)

    def open(self, namespace: NamespaceId, layout: Layout) -> NamespaceId | None:
        """Open one, or use it again; returns the one that was closed for it, if any.

        Raises:
            Unavailable: All others are in use.
        """
        closed = None
        if namespace not in self._open and len(self._open) >= self._limit:
            oldest, held = next(iter(self._open.items()))
            if self._clock.monotonic_s() - held.used_s < _IDLE_S:
                raise Unavailable("too many namespaces are in use on this node", limit=self._limit)
            del self._open[oldest]
            closed = oldest
        self._open[namespace] = _Open(layout, 0.0)
        self.use(namespace)
        return closed

    def use(self, namespace: NamespaceId) -> Layout | None:
        """The layout of a namespace that is used now; `None`: it is not open."""
        held = self._open.get(namespace)
        if held is None:
            return None
        held.used_s = self._clock.monotonic_s()
        self._open.move_to_end(namespace)
        return held.layout
