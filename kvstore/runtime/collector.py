"""Python's cyclic garbage collector, and what else stops all threads where many objects are made and dropped."""

from __future__ import annotations

import gc
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

__all__ = ["collector_paused", "collector_spared", "let_go"]

_AT_ONCE = 512

_num_paused = 0
_was_on = True


@contextmanager
def collector_paused() -> Iterator[None]:
    """Search for no cycles inside, in the whole process: with a million objects alive each search stops all threads
    for a good part of a second. To be used on the event loop, for seconds, around work that makes no cycles.
    """
    global _num_paused, _was_on
    if _num_paused == 0:
        _was_on = gc.isenabled()
    _num_paused += 1
    gc.disable()
    try:
        yield
    finally:
        _num_paused -= 1
        if _num_paused == 0 and _was_on:
            gc.enable()


@contextmanager
def collector_spared() -> Iterator[None]:
    """Search for no cycles inside among what is alive now, in the whole process: what was made while the collector was
    paused, and stays for a while, would be searched in one step as soon as it goes on.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def let_go(*containers: list[Any] | MutableMapping[Any, Any]) -> None:
    """Empty large containers piece by piece: dropped whole, nothing else would run until their last object is gone."""
    for container in containers:
        if isinstance(container, list):
            while container:
                del container[-_AT_ONCE:]
        else:
            while container:
                container.popitem()
