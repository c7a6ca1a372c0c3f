"""Avoids pauses of all threads: by the cyclic collector, by deallocation."""

from __future__ import annotations

import gc
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

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


def age_objects() -> None:
    """Move all objects of the process to the collector's oldest generation. At the end of a block of `collector_paused`
    it has the objects that were made there searched by the next full collection, instead of all at once by the next
    allocation, which stops all threads. Takes microseconds, however many objects there are.
    """
    gc.freeze()
    gc.unfreeze()


def empty_in_pieces(*containers: list[Any] | MutableMapping[Any, Any]) -> None:
    """Empty large containers piece by piece: dropped whole, they would stop all threads until all objects are gone."""
    for container in containers:
        if isinstance(container, list):
            while container:
                del container[-_AT_ONCE:]
        else:
            while container:
                container.popitem()
