"""`PageDoor`: pages under a caller's own keys, over a real service, and what is left of a caller's buffers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.api import Outcome, PageStore
from kvstore.client import BlockingStore, PageDoor, RemoteStore, describe_pages
from kvstore.client.pages import name_of_page
from kvstore.codec import CodecPool
from kvstore.errors import Closed, InvalidRequest, Unavailable
from kvstore.model.coverage import usable_lengths
from kvstore.model.keys import Boundary
from kvstore.testing.serve import IN_MEMORY, Service
from kvstore.testing.waiting import eventually, soon

DESCRIPTION = describe_pages({"weights_id": "w", "model": "m"}, page_tokens=64)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path, IN_MEMORY) as running:
        yield running


@pytest.fixture
def store(service: Service) -> Iterator[BlockingStore]:
    with BlockingStore(service.url) as made:
        yield made


def page_of(seed: int, *piece_bytes: int) -> list[memoryview]:
    rng = np.random.default_rng(seed)
    return [memoryview(bytearray(rng.standard_normal(size // 4).astype("f4").tobytes())) for size in piece_bytes]


def empty_like(page: list[memoryview]) -> list[memoryview]:
    return [memoryview(bytearray(piece.nbytes)) for piece in page]


@pytest.mark.parametrize("element_bytes", [None, 1, 2, 4])
@pytest.mark.parametrize("piece_bytes", [(4096,), (4096, 2048), (64, 64, 64, 64), (0,)])
def test_pages_come_back(store: BlockingStore, element_bytes: int | None, piece_bytes: tuple[int, ...]) -> None:
    """In one piece or several, compressed or not, empty too; also at another place of another chain."""
    door = PageDoor(store, DESCRIPTION, element_bytes=element_bytes)
    keys: list[str | bytes] = ["a", b"b", "c" * 1000, "\u00e9"]
    pages = [page_of(seed, *piece_bytes) for seed in range(4)]
    assert door.present(keys) == [False] * 4 and door.exists(keys) == 0
    assert door.write_from(keys[:3], pages[:3]) == [True] * 3
    assert door.write_from(keys, pages, after="before") == [True] * 4
    assert door.present([*keys, "unknown"]) == [True] * 4 + [False]
    assert door.exists([*keys, "unknown"]) == 4 and door.exists(keys[2:], after=keys[1]) == 2
    targets = [empty_like(page) for page in pages]
    assert door.read_into(keys, targets) == 4 and targets == pages
    targets = [empty_like(page) for page in pages]
    assert door.read_into([keys[3], keys[0], "unknown", keys[1]], targets) == 2
    assert targets[:2] == [pages[3], pages[0]]
    door.close()


def test_a_page_is_all_its_slices(store: BlockingStore) -> None:
    """Two callers hold a slice each, a third both: a page is there when both wrote, and each reads its own."""
    description = describe_pages({"weights_id": "w", "model": "sliced"}, page_tokens=64, num_slices=2)
    doors = [PageDoor(store, description, slices=slices) for slices in ((0,), (1,), (0, 1))]
    page = page_of(1, 512, 512)
    assert doors[0].write_from(["k"], [page[:1]]) == [True]
    assert [door.exists(["k"]) for door in doors] == [0, 0, 0]
    assert doors[1].write_from(["k"], [page[1:]]) == [True]
    assert [door.exists(["k"]) for door in doors] == [1, 1, 1]
    both = empty_like(page)
    assert doors[2].read_into(["k"], [both]) == 1 and both == page
    with pytest.raises(InvalidRequest, match="no such slices"):
        PageDoor(store, description, slices=(2,))
    for door in doors:
        door.close()


def test_no_keys(store: BlockingStore) -> None:
    """Of no pages none is there."""
    door = PageDoor(store, DESCRIPTION)
    assert door.exists([]) == 0 and door.present([]) == [] and door.read_into([], []) == 0
    assert door.write_from([], []) == []
    door.close()


def test_no_buffer_is_touched_after_a_call(store: BlockingStore) -> None:
    """A call gives up while its page is being written to the caller's memory: it returns when that has ended. One that
    gives up before it began to be written leaves it as it is.
    """
    began, go_on = threading.Event(), threading.Event()

    class Slow(CodecPool):
        async def run(self, num_bytes, work, *, deadline):  # type: ignore[no-untyped-def] # as of its base
            def late():  # type: ignore[no-untyped-def]
                began.set()
                go_on.wait(10)
                return work()

            return await super().run(num_bytes, late, deadline=deadline)

    fast = PageDoor(store, DESCRIPTION)
    page = page_of(1, 4096)
    assert fast.write_from(["k"], [page]) == [True]
    pool = Slow(num_threads=1, limit_bytes=1 << 20)
    door, target = PageDoor(store, DESCRIPTION, timeout_s=0.3, pool=pool), empty_like(page)
    with pytest.raises(Unavailable):
        door.read_into(["k"], [target])
    assert began.is_set()
    assert not any(target[0])
    go_on.set()
    time.sleep(0.3)
    assert not any(target[0])  # the late thread was refused
    assert fast.read_into(["k"], [target]) == 1 and target == page
    fast.close()
    pool.close()


def test_arguments_that_take_long_to_check_count(store: BlockingStore) -> None:
    """The time of a call begins before the check of its arguments, of which a large call has many."""

    class Slow(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            time.sleep(0.2)
            return super().__iter__()

    door, page = PageDoor(store, DESCRIPTION), page_of(1, 4096)
    assert door.write_from(["k"], [page]) == [True]
    with pytest.raises(Unavailable):
        door.read_into(["k"], Slow([page]), timeout_s=0.1)
    assert door.read_into(["k"], Slow([page]), timeout_s=10) == 1
    door.close()


def test_a_call_of_many_pages_is_a_few_tasks(store: BlockingStore) -> None:
    """One for each page takes longer to end than a caller waits behind its deadline: what was done would be lost."""
    num_tasks: list[int] = []

    class Counting(CodecPool):
        async def run(self, num_bytes, work, *, deadline):  # type: ignore[no-untyped-def] # as of its base
            num_tasks.append(len(asyncio.all_tasks()))
            return await super().run(num_bytes, work, deadline=deadline)

    pool = Counting(num_threads=2, limit_bytes=1 << 20)
    door, keys = PageDoor(store, DESCRIPTION, timeout_s=60, pool=pool), [f"k{number}" for number in range(1500)]
    assert all(door.write_from(keys, [[b"page"]] * len(keys)))
    assert door.read_into(keys, [[bytearray(4)] for _ in keys]) == len(keys)
    assert max(num_tasks) < 300
    door.close()
    pool.close()


def test_an_outage_and_its_end(service: Service, store: BlockingStore) -> None:
    """Calls fail at once while the service is away; afterwards the door goes on, though its leases are gone."""
    door = PageDoor(store, DESCRIPTION, timeout_s=2)
    page = page_of(1, 4096)
    assert door.write_from(["k"], [page]) == [True] and door.exists(["k"]) == 1
    service.kill()
    with pytest.raises(Unavailable):
        door.read_into(["k"], [empty_like(page)])
    with pytest.raises(Unavailable):
        door.exists(["k"])
    service.start()
    eventually(lambda: door.exists(["k"]) == 0, 30, despite=Unavailable)
    assert door.write_from(["k"], [page]) == [True]
    target = empty_like(page)
    assert door.read_into(["k"], [target]) == 1 and target == page
    store.close()
    with pytest.raises(Closed):
        door.exists(["k"])
    door.close()


def test_a_report_says_how_far_pages_reach(store: BlockingStore) -> None:
    """What a query found and the key that it missed, as of a request; nothing before the namespace is open."""
    door, sent = PageDoor(store, DESCRIPTION), list[Outcome]()
    store.run(lambda one: _listen(one, sent), deadline=soon())
    keys: list[str | bytes] = ["a", b"\x01", "c"]
    door.report("early", keys, 1, reason="nothing_stored")
    namespace = door.open()
    door.report("part", keys, 1, reason="nothing_stored", held=2)
    door.report("whole", keys, 3, reason="nothing_stored")
    door.report("slow", keys, 0, reason="lookup_timeout", detail={"waited_ms": 100})
    door.report("nothing wanted", [], 0, reason="nothing_stored")
    store.run(lambda one: _listen(one, sent), deadline=soon())  # behind them
    part, whole, slow = sent
    assert (part.namespace, part.prompt_tokens, part.local_tokens, part.resume_tokens) == (namespace, 320, 128, 192)
    assert part.stop == Boundary(256, name_of_page(b"\x01")) and part.detail == {"page_key": "01"}
    assert (whole.reason, whole.resume_tokens, whole.stop) == ("", 192, None)
    assert (slow.reason, slow.stop) == ("lookup_timeout", None)
    assert list(slow.detail.items()) == [("page_key", "a"), ("waited_ms", 100)]  # a service keeps the first ones
    door.close()


async def _listen(store: PageStore, sent: list[Outcome]) -> None:
    store.report = sent.append  # type: ignore[method-assign]


def test_a_read_is_whole_whatever_other_calls_read(store: BlockingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time that a call is about to read pages, another thread looks the same ones up and reads them, which ends
    the lease that both share."""
    door, keys = PageDoor(store, DESCRIPTION), ["a", "b", "c"]
    pages, load_many, others = [page_of(seed, 4096) for seed in range(3)], RemoteStore.load_many, list[int]()
    assert door.write_from(keys, pages) == [True] * 3

    def read_too() -> None:
        assert door.exists(keys) == 3 and door.read_into(keys, [empty_like(page) for page in pages]) == 3

    async def late(self: RemoteStore, *args: Any, **kwargs: Any) -> Any:
        if len(others) % 2 == 0:
            others.append(1)
            await asyncio.get_running_loop().run_in_executor(None, read_too)
            others.append(1)
        return await load_many(self, *args, **kwargs)

    monkeypatch.setattr(RemoteStore, "load_many", late)
    targets = [empty_like(page) for page in pages]
    assert door.exists(keys) == 3 and door.read_into(keys, targets) == 3 and targets == pages
    assert len(others) > 2
    door.close()


def test_many_threads_at_once(store: BlockingStore) -> None:
    """Eight threads write, look and read in two doors of one namespace: each reads what the key stands for."""
    doors = [PageDoor(store, DESCRIPTION, element_bytes=4) for _ in range(2)]
    wrong: list[str] = []

    def work(number: int) -> None:
        for step in range(25):
            first = (number + step) % 12
            keys = [f"k{index}" for index in range(first, first + 4)]
            pages = [page_of(index, 2048) for index in range(first, first + 4)]
            door = doors[step % 2]
            door.write_from(keys, pages)
            targets = [empty_like(page) for page in pages]
            if door.exists(keys) != 4 or door.read_into(keys, targets) != 4 or targets != pages:
                wrong.append(keys[0])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    status = store.run(lambda one: one.status(deadline=soon()), deadline=soon())
    assert status["leases"]["active"] == 0  # each was read to its end
    for door in doors:
        door.close()


@given(
    st.integers(0, 12).flatmap(
        lambda pages: st.lists(
            st.tuples(st.lists(st.booleans(), min_size=pages, max_size=pages), st.none() | st.integers(1, 5)),
            min_size=1,
            max_size=4,
        )
    )
)
def test_usable_lengths_are_those_that_every_pool_can_restore(pools: list[tuple[list[bool], int | None]]) -> None:
    """Against the definition, length by length."""
    num_pages = len(pools[0][0])

    def restores(present: list[bool], last: int | None, length: int) -> bool:
        start = 0 if last is None else max(0, length - last)
        return all(present[start:length])

    expected = [n for n in range(1, num_pages + 1) if all(restores(has, last, n) for has, last in pools)]
    assert usable_lengths(num_pages, pools) == expected
