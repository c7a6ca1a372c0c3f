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
OF_TWO_GROUPS = [key[:-1] + bytes([at // 2]) for at, key in enumerate(KEYS)]


class Door:
    """A door whose pages are there, apart from one of another size.

    Args:
        wrong: The key of that page.
        refusal: What each call raises.
        is_silent: Each call takes all of its time, and raises `Unavailable` then.
    """

    def __init__(
        self,
        *,
        chained: bool,
        wrong: bytes | None = None,
        refusal: Exception | None = None,
        is_silent: bool = False,
    ) -> None:
        self.layout = SimpleNamespace(chained=chained, page_tokens=16)
        self._wrong, self._refusal, self._is_silent = wrong, refusal, is_silent

    def read_into(self, keys: Sequence[bytes], pages: Sequence[Sequence[memoryview]], *, timeout_s: float) -> int:
        self._fail(timeout_s)
        if self._wrong in keys:
            raise InvalidRequest("the page that is stored has another size", field=f"pages[{keys.index(self._wrong)}]")
        return len(keys)

    def write_from(
        self, keys: Sequence[bytes], pages: Any, *, after: bytes | None = None, timeout_s: float
    ) -> list[bool]:
        self._fail(timeout_s)
        return [True] * len(keys)

    def _fail(self, timeout_s: float) -> None:
        if self._is_silent:
            time.sleep(timeout_s)
            raise Unavailable("no answer")
        if self._refusal is not None:
            raise self._refusal

    def report(self, *_: object, **__: object) -> None:
        pass


def run(*doors: Door, loads: bool, keys: Sequence[bytes] = KEYS, max_wait_s: float = 30.0) -> Done:
    """A job of some chunks over a door for each group."""
    memory = memoryview(bytearray(len(keys) * SLOT_BYTES)).cast("B", (len(keys), SLOT_BYTES))
    transfers = Transfers(memory, max_wait_s)
    transfers.submit(
        Job(1, Request("r"), keys, range(len(keys)), loads), cast(dict[int, PageDoor], dict(enumerate(doors)))
    )
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


@pytest.mark.parametrize("kind", [InvalidRequest, Closed, Unavailable, ValueError])
@pytest.mark.parametrize("loads", [False, True], ids=["store", "load"])
def test_what_succeeded_before_an_error_counts(kind: Callable[[str], Exception], loads: bool) -> None:
    """The door of the second group fails: the scheduler learns that the chunks of the first are stored, or loaded."""
    doors = (Door(chained=True), Door(chained=True, refusal=kind("refused")))
    assert list(run(*doors, loads=loads, keys=OF_TWO_GROUPS).succeeded) == OF_TWO_GROUPS[:2]


@pytest.mark.parametrize("loads", [False, True], ids=["store", "load"])
def test_a_job_has_one_deadline(loads: bool) -> None:
    """The store is silent: a job of six groups takes as long as one of one group."""
    keys = [f"chunk {at}".encode() + at.to_bytes(4, "big") for at in range(6)]
    done = run(*(Door(chained=True, is_silent=True) for _ in keys), loads=loads, keys=keys, max_wait_s=0.5)
    assert not done.succeeded and 0.4 < done.seconds < 1.5
