"""Mistakes of a caller of `PageDoor`: each is an `InvalidRequest`, with its field, what was expected and was seen."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.api import Deadline, PageStore
from kvstore.client import BlockingStore, PageDoor, RemoteStore, describe_pages, page_buffers
from kvstore.codec import CodecPool
from kvstore.errors import Closed, CorruptRecord, InvalidRequest, Unavailable
from kvstore.model.kinds import FullAttention
from kvstore.model.layout import GroupLayout, Layout
from kvstore.model.namespace import NamespaceDescription, describe_layout
from kvstore.testing.serve import IN_MEMORY, Service

DESCRIPTION = describe_pages({"weights_id": "w", "model": "m"}, page_tokens=64)
SLICED = describe_pages({"weights_id": "w", "model": "m"}, page_tokens=64, num_slices=2)
ATTENTION = NamespaceDescription.from_fields(
    {"layout": describe_layout(Layout(64, (GroupLayout(FullAttention(), 1),)))}
)
HUGE = 10**5000
RELEASED = memoryview(b"released")
RELEASED.release()


@pytest.fixture(scope="module")
def nowhere() -> Iterator[BlockingStore]:
    """A store without a service: what is checked first needs none."""
    with BlockingStore("unix:/nowhere/kvstore.sock") as made:
        yield made


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlockingStore]:
    with (
        Service(tmp_path_factory.mktemp("pages"), IN_MEMORY) as service,
        BlockingStore(service.url) as made,
    ):
        yield made


def refused(field: str, call: Callable[[], object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        call()
    details = caught.value.details
    assert details["field"] == field, caught.value
    assert details["expected"] and details["seen"] != "", caught.value
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        *(("element_bytes", {"element_bytes": value}) for value in (0, -1, "2", 2.0, True, HUGE, b"2")),
        *(("timeout_s", {"timeout_s": value}) for value in (0, -1, float("nan"), float("inf"), 1e300, HUGE, "1", True)),
        *(("slices", {"slices": value}) for value in ((), 0, "0", b"\0", None)),
        *(("slices[0]", {"slices": (value,)}) for value in (-1, 1, 0.0, "0", None, True, HUGE)),
        *(("description", {"description": value}) for value in (None, {}, ATTENTION)),
        ("store", {"store": "unix:/nowhere"}),
        ("pool", {"pool": 4}),
    ],
)
def test_wrong_doors(nowhere: BlockingStore, field: str, arguments: dict[str, Any]) -> None:
    """No door is made of wrong arguments."""
    refused(field, lambda: PageDoor(**{"store": nowhere, "description": DESCRIPTION, **arguments}))


@pytest.mark.parametrize(
    ("field", "fields", "arguments"),
    [
        *(("page_tokens", {}, {"page_tokens": value}) for value in (0, -1, "64", 1.5, True, HUGE, None, (1 << 24) + 1)),
        *(("num_slices", {}, {"num_slices": value}) for value in (0, -1, "2", 513, None)),
        ("chained", {}, {"chained": "no"}),
        ("fields", [], {}),
        ("fields", {1: 2}, {}),
        ("fields.layout", {"layout": "page first"}, {}),
        *(("x", {"x": value}, {}) for value in (b"b", {1}, object())),
        ("x[1].y", {"x": [0, {"y": b"b"}]}, {}),
    ],
)
def test_wrong_descriptions(field: str, fields: Any, arguments: dict[str, Any]) -> None:
    """A description is plain values; a field that the door writes itself would be lost, with what it tells apart."""
    refused(field, lambda: describe_pages(fields, **{"page_tokens": 64, **arguments}))


@pytest.mark.parametrize(
    ("field", "keys", "after"),
    [
        *(("keys", keys, None) for keys in ("key", b"key", 1, None, {"a"}, [f"{at}" for at in range(100_001)])),
        *(("keys[1]", ["a", key], None) for key in (1, None, bytearray(b"b"), ["b"], "a", b"a")),
        ("keys[0]", ["a"], "a"),
        ("after", ["a"], 1),
    ],
)
def test_wrong_keys(nowhere: BlockingStore, field: str, keys: Any, after: Any) -> None:
    """Every call refuses them before anything is sent."""
    door = PageDoor(nowhere, DESCRIPTION)
    refused(field, lambda: door.exists(keys, after=after))
    num_pages = len(keys) if isinstance(keys, list) else 1
    refused(field, lambda: door.write_from(keys, [[b"page"]] * num_pages, after=after))
    if after is None:
        refused(field, lambda: door.present(keys))
        refused(field, lambda: door.read_into(keys, [[bytearray(4)]] * num_pages))
    door.close()


@pytest.mark.parametrize(
    ("field", "pages"),
    [
        *(("pages", pages) for pages in (None, b"page", 1, [], [[b"a"], [b"b"], [b"c"]])),
        *(
            ("pages[1]", [[bytearray(2)], page])
            for page in (b"page", bytearray(4), memoryview(b"page"), "page", None, [])
        ),
        *(
            ("pages[1][1]", [[bytearray(2)], [bytearray(2), piece]])
            for piece in (
                *(1, None, "text", [1], RELEASED, memoryview(bytearray(8))[::2], np.zeros((4, 4))[:, :2]),
                np.zeros(4, object),
            )
        ),
    ],
)
def test_wrong_pages(nowhere: BlockingStore, field: str, pages: Any) -> None:
    """Each is a list of buffers without gaps."""
    door = PageDoor(nowhere, DESCRIPTION)
    refused(field, lambda: door.write_from(["a", "b"], pages))
    refused(field, lambda: door.read_into(["a", "b"], pages))
    door.close()


def test_a_page_that_no_record_holds(nowhere: BlockingStore) -> None:
    """It is refused before a byte of it is read: making a record of it would take longer than a call may."""
    door, memory, half = PageDoor(nowhere, DESCRIPTION), np.zeros(3 << 30, np.uint8), 3 << 29
    for page in ([memory], [memory[:half], memory[half:]]):
        refused("pages[0]", lambda page=page: door.write_from(["a"], [page]))  # type: ignore[misc]
        refused("pages[0]", lambda page=page: door.read_into(["a"], [page]))  # type: ignore[misc]
    door.close()
    door = PageDoor(nowhere, SLICED, slices=(0, 1))
    refused("pages[0]", lambda: door.write_from(["a"], [[b"one", memory]]))
    door.close()


def test_slices_that_are_there_twice(nowhere: BlockingStore) -> None:
    """Both parts of a page would be one record: the first one's bytes were read for the second one's."""
    refused("slices[1]", lambda: PageDoor(nowhere, DESCRIPTION, slices=(0, 0)))
    three = describe_pages({"weights_id": "w"}, page_tokens=64, num_slices=3)
    refused("slices[2]", lambda: PageDoor(nowhere, three, slices=[2, 1, 2]))
    PageDoor(nowhere, three, slices=[2, 0, 1]).close()


def test_pages_that_cannot_be_written_to_or_divided(nowhere: BlockingStore) -> None:
    """Memory that is read-only is no target, and each slice has as many buffers."""
    door = PageDoor(nowhere, DESCRIPTION)
    for piece in (b"page", memoryview(b"page"), memoryview(bytearray(4)).toreadonly()):
        refused("pages[0][0]", lambda piece=piece: door.read_into(["a"], [[piece]]))  # type: ignore[misc]
    door.close()
    door = PageDoor(nowhere, SLICED, slices=(0, 1))
    refused("pages[0]", lambda: door.write_from(["a"], [[b"one"]]))
    door.close()


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        *(("num_found", {"num_found": value}) for value in (-1, 3, "1", 1.0)),
        *(("held", {"held": value}) for value in (-1, 1 << 24, "1")),
        ("keys[0]", {"keys": [1, "b"]}),
        ("request", {"request": 1}),
        ("reason", {"reason": None}),
        ("detail", {"detail": ["a"]}),
        ("detail['x']", {"detail": {"x": object()}}),
        ("detail['x']", {"detail": {"x": 1 << 70}}),
    ],
)
def test_wrong_reports(nowhere: BlockingStore, field: str, arguments: dict[str, Any]) -> None:
    """A report that no message can hold would end those behind it."""
    door = PageDoor(nowhere, DESCRIPTION)
    usual = {"request": "r", "keys": ["a", "b"], "num_found": 1, "reason": "nothing_stored"}
    refused(field, lambda: door.report(**{**usual, **arguments}))
    door.close()


@pytest.mark.parametrize("name", ["present", "read_into", "write_from"])
def test_wrong_times(nowhere: BlockingStore, name: str) -> None:
    """A time that is over is no mistake: the answer is too late."""
    door = PageDoor(nowhere, DESCRIPTION)
    calls: dict[str, Callable[[Any], object]] = {
        "present": lambda value: door.present(["a"], timeout_s=value),
        "read_into": lambda value: door.read_into(["a"], [[bytearray(8)]], timeout_s=value),
        "write_from": lambda value: door.write_from(["a"], [[bytearray(8)]], timeout_s=value),
    }
    for value in (float("nan"), float("inf"), -float("inf"), 1e300, HUGE, -HUGE, "1", True):
        refused("timeout_s", lambda value=value: calls[name](value))  # type: ignore[misc]
    for value in (0, -1.0):
        with pytest.raises(Unavailable):
            calls[name](value)
    door.close()


def test_buffers_of_any_kind(store: BlockingStore) -> None:
    """Bytes, arrays and views of other elements are memory too."""
    door = PageDoor(store, DESCRIPTION)
    words, grid = array("I", range(50)), np.arange(8, dtype="f4").reshape(2, 4)
    assert door.write_from(["bytes", "words", "grid"], [[b"x" * 100], [words], (grid,)]) == [True] * 3  # type: ignore[list-item]
    targets: list[Any] = [bytearray(100), array("I", bytes(200)), np.zeros((4, 2), "f4")]
    assert door.read_into(["bytes", "words", "grid"], [[target] for target in targets]) == 3
    assert targets[0] == b"x" * 100 and targets[1] == words and targets[2].tobytes() == grid.tobytes()
    door.close()


class Pair(ctypes.Structure):
    _fields_ = [("number", ctypes.c_int32), ("letter", ctypes.c_char)]


@pytest.mark.parametrize("element_bytes", [None, 2])
@pytest.mark.parametrize(
    "source",
    [
        np.linspace(0, 1, 1 << 19).astype("f2"),  # larger than the pieces in which a page is copied
        np.arange(1 << 18).astype(">i4").reshape(-1, 2),
        np.array(1.5),
        np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
        Pair(7, b"x"),
    ],
    ids=["halves", "a grid", "one number", "records", "a structure"],
)
def test_buffers_of_other_elements_than_bytes(store: BlockingStore, source: Any, element_bytes: int | None) -> None:
    """Their bytes are stored and read, whatever shape and elements they have."""
    door = PageDoor(store, DESCRIPTION, element_bytes=element_bytes)
    key = f"{source!r} {element_bytes}"
    assert door.write_from([key], [[source]]) == [True]
    target = np.zeros_like(source) if isinstance(source, np.ndarray) else type(source)()
    assert door.read_into([key], [[target]]) == 1  # type: ignore[list-item]
    assert bytes(target) == bytes(source)
    door.close()


def test_buffers_are_free_after_a_call(store: BlockingStore) -> None:
    """Whoever handles the error of a call can close its buffers or change their size, also at once."""
    door = PageDoor(store, DESCRIPTION)
    calls: list[Callable[[bytearray, float], object]] = [
        lambda buffer, seconds: door.read_into(["late"], [[buffer]], timeout_s=seconds),
        lambda buffer, seconds: door.write_from(["late"], [[buffer]], timeout_s=seconds),
    ]
    for at in range(20):
        buffer = bytearray(4096)
        try:
            calls[at % 2](buffer, 0.0005 * (at % 3))
        except Unavailable:
            buffer.append(1)
        buffer.append(1)
    door.close()


@pytest.mark.parametrize("element_bytes", [None, 1, 2, 4])
def test_a_page_of_another_size_is_the_callers_mistake(store: BlockingStore, element_bytes: int | None) -> None:
    """The error names the page and both sizes, also behind pages that are right. The page stays for others."""
    door = PageDoor(store, DESCRIPTION, element_bytes=element_bytes)
    keys = [f"{element_bytes} {at}" for at in range(3)]
    assert door.write_from(keys, [[bytes([at]) * 512] for at in range(3)]) == [True] * 3
    for size in (256, 511, 513, 1024):
        right, target = bytearray(512), bytearray(size)
        with pytest.raises(InvalidRequest) as caught:
            door.read_into(keys, [[right], [right[:]], [target[: size // 2], target[size // 2 :]]])
        expected = {"field": "pages[2]", "expected": "buffers of 512 bytes", "seen": f"{size} bytes"}
        assert caught.value.details == expected
        assert not any(target)
    targets = [bytearray(512) for _ in keys]
    assert door.read_into(keys, [[target] for target in targets]) == 3
    assert targets == [bytes([at]) * 512 for at in range(3)]
    door.close()


def test_a_page_that_is_too_large(store: BlockingStore) -> None:
    """The service says how large a record may be; the error names the page."""
    door = PageDoor(store, DESCRIPTION)
    door.open()
    before = store.run(lambda one: _limit(one, 1000), deadline=Deadline.after(10))
    try:
        refused("pages[1]", lambda: door.write_from(["small", "large"], [[bytes(10)], [bytes(1000)]]))
        assert door.present(["small", "large"]) == [True, False]
    finally:
        store.run(lambda one: _limit(one, before), deadline=Deadline.after(10))
    assert door.write_from(["large"], [[bytes(1000)]]) == [True]
    door.close()


async def _limit(store: PageStore, max_payload_bytes: int) -> int:
    assert isinstance(store, RemoteStore)
    for connection in store.pool.connections():
        before = connection.welcome.max_payload_bytes
        connection.welcome = replace(connection.welcome, max_payload_bytes=max_payload_bytes)
    return before


def test_refusals_of_the_service_are_no_groups(store: BlockingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that may not save: `write_from` says so. A damaged page is not there, though it may not be discarded."""
    door = PageDoor(store, DESCRIPTION)
    assert door.write_from(["there"], [[b"page"]]) == [True]

    async def refuse(*_: object, **__: object) -> None:
        raise InvalidRequest("the token may not save or discard: give it the scope save", field="token")

    def damaged(*_: object) -> None:
        raise CorruptRecord("the checksum differs")

    monkeypatch.setattr(RemoteStore, "save_many", refuse)
    monkeypatch.setattr(RemoteStore, "discard", refuse)
    for num_pages in (1, 5):
        with pytest.raises(InvalidRequest, match="may not save"):
            door.write_from([f"new {at}" for at in range(num_pages)], [[b"page"]] * num_pages)
    monkeypatch.setattr(page_buffers, "verify_payload", damaged)
    assert door.read_into(["there"], [[bytearray(4)]]) == 0
    door.close()


@pytest.mark.parametrize("own_threads", [True, False])
def test_a_closed_door(store: BlockingStore, own_threads: bool) -> None:
    """Each call says that it is closed, instead of that nothing is there; a report is lost."""
    pool = None if own_threads else CodecPool(num_threads=1, limit_bytes=1 << 20)
    door = PageDoor(store, DESCRIPTION, pool=pool)
    assert door.write_from(["closed"], [[b"page"]]) == [True]
    door.close()
    door.close()
    for call in (
        door.open,
        lambda: door.present(["closed"]),
        lambda: door.exists(["closed"]),
        lambda: door.read_into(["closed"], [[bytearray(4)]]),
        lambda: door.write_from(["closed"], [[b"page"]]),
    ):
        with pytest.raises(Closed):
            call()
    door.report("r", ["closed"], 0, reason="nothing_stored")
    if pool is not None:  # its threads have ended under a door that is open
        pool.close()
        door = PageDoor(store, DESCRIPTION, pool=pool)
        with pytest.raises(Closed):
            door.read_into(["closed"], [[bytearray(4)]])
        with pytest.raises(Closed):
            door.write_from(["new"], [[b"page"]])


def test_a_frozen_service(tmp_path: Path) -> None:
    """Every call fails `Unavailable`, also one that the service stopped answering in its middle."""
    with Service(tmp_path, IN_MEMORY) as service, BlockingStore(service.url) as one:
        door = PageDoor(one, DESCRIPTION, timeout_s=1.0)
        keys = [f"{at}" for at in range(8)]
        assert door.write_from(keys, [[bytes([at]) * 4096] for at in range(8)]) == [True] * 8
        assert door.exists(keys) == 8
        service.freeze()
        targets = [[bytearray(4096)] for _ in keys]
        for call in (
            lambda: door.read_into(keys, targets),  # leased, so that a load finds out
            lambda: door.exists(keys),
            lambda: door.present(keys),
            lambda: door.write_from(["new"], [[b"page"]]),
        ):
            with pytest.raises(Unavailable):
                call()
        door.close()
