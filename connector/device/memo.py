"""Caches what a copier computes for each plan of a page, instead of once per copy."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from connector.canonical.runs import BlockRun

__all__ = ["RunsMemo"]

Made = TypeVar("Made")
_KEPT = 512


class RunsMemo(Generic[Made]):
    """A cache by the identity of the runs, since page plans return the same tuple each time. Safe from any thread.

    Args:
        make: Computes the value from the runs and the page's size.
    """

    def __init__(self, make: Callable[[Sequence[BlockRun], int], Made]) -> None:
        self._make = make
        self._lock = threading.Lock()
        # an entry keeps its runs alive, so that no others can get their id
        self._known: OrderedDict[tuple[int, int], tuple[Sequence[BlockRun], Made]] = OrderedDict()

    def of(self, runs: Sequence[BlockRun], page_bytes: int) -> Made:
        """The value for these runs, which must not change afterwards."""
        key = (id(runs), page_bytes)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known[1]
        made = self._make(runs, page_bytes)
        with self._lock:
            self._known[key] = (runs, made)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return made
