"""Transfers of vLLM's own offloading, over doors that refuse: every job ends, and says what succeeded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from connector.offloading.lookups import Request
from connector.offloading.transfers import Done, Job, Transfers
from kvstore.client import PageDoor
from kvstore.errors import Closed, InvalidRequest, Unavailable

SLOT_BYTES = 8
KEYS = [f"chunk {at}".encode() + bytes(4) for at in range(4)]


class Door:
    """A door whose pages are there, apart from one of another size.

    Args:
        wrong: The key of that page.
        refusal: What each write raises.
    """

    def __init__(self, *, chained: bool, wrong: bytes | None = None, refusal: Exception | None = None) -> None:
        self.layout = SimpleNamespace(chained=chained, page_tokens=16)
        self._wrong, self._refusal = wrong, refusal

    def read_into(self, keys: Sequence[bytes], pages: Sequence[Sequence[memoryview]]) -> int:
        if self._wrong in keys:
            raise InvalidRequest("the page that is stored has another size", field=f"pages[{keys.index(self._wrong)}]")
        return len(keys)

    def write_from(self, keys: Sequence[bytes], pages: Any, *, after: bytes | None = None) -> list[bool]:
        if self._refusal is not None:
            raise self._refusal
        return [True] * len(keys)

    def report(self, *_: object, **__: object) -> None:
        pass


def run(door: Door, *, loads: bool) -> Done:
    """A job of four chunks over a door."""
    transfers = Transfers(memoryview(bytearray(4 * SLOT_BYTES)).cast("B", (4, SLOT_BYTES)), max_wait_s=30.0)
    transfers.submit(Job(1, Request("r"), KEYS, range(4), loads), {0: cast(PageDoor, door)})
    done: list[Done] = []
    ends_s = time.monotonic() + 10
    while not done and time.monotonic() < ends_s:
        done = transfers.finished()
        time.sleep(0.001)
    transfers.close()
    return done[0]


@pytest.mark.parametrize("wrong", range(4))
def test_a_chunk_of_another_size_counts_as_lost(wrong: int) -> None:
    """In a chain those before it are loaded; elsewhere all others."""
    assert run(Door(chained=True, wrong=KEYS[wrong]), loads=True).succeeded == KEYS[:wrong]
    others = [key for key in KEYS if key != KEYS[wrong]]
    assert run(Door(chained=False, wrong=KEYS[wrong]), loads=True).succeeded == others


@pytest.mark.parametrize("kind", [InvalidRequest, Closed, Unavailable, ValueError])
def test_a_store_that_is_refused_ends_its_job(kind: Callable[[str], Exception]) -> None:
    """Whatever a door raises, the scheduler learns that no chunk was stored."""
    assert list(run(Door(chained=True, refusal=kind("refused")), loads=False).succeeded) == []
