"""Avoids pauses of all threads where many objects are made and dropped: by the cyclic collector, by deallocation."""

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
    """Disable the cyclic collector of the whole process inside the block: with a million live objects each collection
    stops all threads noticeably. Use it on the event loop, for seconds, around work that makes no cycles. Nests.
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
    """Exempt all objects that exist now from collection inside the block, in the whole process: objects that were made
    while the collector was paused would otherwise all be searched in the first collection after it resumes.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def let_go(*containers: list[Any] | MutableMapping[Any, Any]) -> None:
    """Empty large containers piece by piece: dropped whole, they would stop all threads until all objects are gone."""
    for container in containers:
        if isinstance(container, list):
            while container:
                del container[-_AT_ONCE:]
        else:
            while container:
                container.popitem()
