"""The arena: buffers that share nothing, memory that comes back, readers that cannot be deceived."""

from __future__ import annotations

import gc
import mmap
import os
import random
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.runtime.arena import Arena, ArenaView, Place
from kvstore.testing.waiting import eventually

MIB = 1 << 20
READS = 100_000 if os.environ.get("KVSTORE_TEST_FULL") == "1" else 3000


@pytest.fixture
def arena():
    opened = Arena.open(8 * MIB)
    assert opened is not None
    yield opened
    opened.close()


def is_free(arena: Arena) -> bool:
    """Whether all memory is one free range."""
    return arena.take(arena.capacity_bytes - 64) is not None


def test_buffers_share_nothing_and_their_memory_returns(arena: Arena) -> None:
    """A thousand random lives of buffers: each keeps what was written to it, and after that all memory is one range."""
    generator = random.Random(7)
    living: list[tuple[memoryview, int]] = []
    for number in range(1000):
        if living and generator.random() < 0.5:
            view, mark = living.pop(generator.randrange(len(living)))
            assert set(bytes(view)) == {mark}
            del view
        else:
            buffer = arena.take(generator.randrange(1, 300_000))
            if buffer is None:
                living = living[len(living) // 2 :]
                continue
            mark = number % 256
            buffer[:] = bytes([mark]) * len(buffer)
            living.append((buffer, mark))
            del buffer
    for view, mark in living:
        assert set(bytes(view)) == {mark}
    living.clear()
    del view
    assert is_free(arena)


def test_buffers_of_several_threads_share_nothing(arena: Arena) -> None:
    """Four threads take, fill, check and drop buffers at the same time, with a change of threads every few
    instructions: each buffer keeps its content and its stamp, and all memory returns."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    wrong: list[object] = []

    def live(mark: int) -> None:
        generator = random.Random(mark)
        try:
            for _ in range(400):
                views = [view for _ in range(4) if (view := arena.take(generator.randrange(1, 64 << 10))) is not None]
                for view in views:
                    np.frombuffer(view, np.uint8)[:] = mark
                places = [arena.place(view) for view in views]
                for view, place in zip(views, places, strict=True):
                    if place is None or arena.place(view) != place or not (np.frombuffer(view, np.uint8) == mark).all():
                        wrong.append(place)
        except Exception as error:  # noqa: BLE001 - a thread's top
            wrong.append(error)

    threads = [threading.Thread(target=live, args=(mark,)) for mark in range(1, 5)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before_s)
    gc.collect()
    assert wrong == []
    assert is_free(arena)


def test_a_slice_keeps_its_buffer(arena: Arena) -> None:
    """Memory returns with the last view of it, not with the first, in any thread."""
    buffer = arena.take(MIB)
    assert buffer is not None
    part = buffer[100:200].toreadonly()
    del buffer
    assert not is_free(arena)
    held = [part]
    del part
    dropper = threading.Thread(target=held.clear)
    dropper.start()
    dropper.join()
    assert is_free(arena)


def test_no_room_is_told(arena: Arena) -> None:
    """What does not fit is refused; what fits exactly is given."""
    assert arena.take(arena.capacity_bytes) is None
    whole = arena.take(arena.capacity_bytes - 64)
    assert whole is not None
    assert arena.take(1) is None


def test_many_dropped_buffers_are_freed_little_by_little(arena: Arena) -> None:
    """As when a namespace is deleted: the next buffer waits for few of them, and one that needs all memory gets it."""
    view, buffers = ArenaView(arena.descriptor, arena.capacity_bytes), [arena.take(64) for _ in range(400)]
    places = [arena.place(buffer) for buffer in buffers if buffer is not None]
    buffers.clear()
    assert arena.take(64) is not None
    assert 300 < sum(map(view.holds, places)) < 400
    assert is_free(arena)
    assert not any(map(view.holds, places))


def test_a_peer_reads_what_stands_there(arena: Arena) -> None:
    """A reader with the descriptor sees the bytes, of a part of a buffer that part, and cannot change them."""
    buffer = arena.take(MIB)
    assert buffer is not None
    buffer[:] = os.urandom(MIB)
    view = ArenaView(arena.descriptor, arena.capacity_bytes)
    place = arena.place(buffer.toreadonly())
    assert place is not None and place.num_bytes == MIB
    assert view.at(place) == buffer
    assert view.at(replace(place, num_bytes=1000)) == buffer[:1000]
    assert view.at(place).readonly
    with pytest.raises(ValueError):
        np.frombuffer(view.at(place), np.uint8).setflags(write=True)
    assert view.holds(place)


def test_a_place_that_was_given_back_is_noticed(arena: Arena) -> None:
    """Bytes of a buffer whose memory serves another one are not taken for the first one's."""
    view = ArenaView(arena.descriptor, arena.capacity_bytes)
    first = arena.take(MIB)
    assert first is not None
    place = arena.place(first)
    assert place is not None and view.holds(place)
    del first
    gc.collect()
    second = arena.take(MIB)
    assert second is not None
    again = arena.place(second)
    assert again is not None and again.offset == place.offset
    assert not view.holds(place)
    assert view.holds(again)


def test_a_place_inside_a_larger_successor_is_noticed(arena: Arena) -> None:
    """Memory of three buffers that serves one larger buffer now: none of the old places is believed."""
    view = ArenaView(arena.descriptor, arena.capacity_bytes)
    small = [arena.take(100_000) for _ in range(3)]
    places = [arena.place(buffer) for buffer in small if buffer is not None]
    small.clear()
    large = arena.take(MIB)
    assert large is not None
    assert [place is not None and view.holds(place) for place in places] == [False] * 3


def test_what_was_read_is_of_one_buffer(arena: Arena) -> None:
    """A reader reads while the memory serves thousands of buffers in turn. Where the stamp is the same afterwards, all
    bytes are of that buffer; there are such reads, and others."""
    view = ArenaView(arena.descriptor, arena.capacity_bytes)
    newest: list[tuple[Place, int]] = []
    end = threading.Event()

    def replace_buffers() -> None:
        number = 0
        while not end.is_set():
            buffer = arena.take(300_000)
            assert buffer is not None
            content: Any = np.frombuffer(buffer, np.uint8)
            content.fill(number % 251)
            place = arena.place(buffer)
            assert place is not None
            newest[:] = [(place, number % 251)]
            number += 1
            if number % 3:
                time.sleep(0.0001)
            del buffer, content

    writer = threading.Thread(target=replace_buffers)
    writer.start()
    seen = {True: 0, False: 0}
    try:
        give_up_s = time.monotonic() + 60 + READS / 100
        while min(seen.values()) < 20 or sum(seen.values()) < READS:
            assert time.monotonic() < give_up_s, seen
            if not newest:
                continue
            place, expected = newest[0]
            read: Any = np.array(np.frombuffer(view.at(place), np.uint8))
            holds = view.holds(place)
            assert not holds or bool((read == expected).all())
            seen[holds] += 1
    finally:
        end.set()
        writer.join()


def test_a_view_outlives_the_arena_and_its_mapping(arena: Arena) -> None:
    """A service that ended takes nothing away: what a reader holds stays readable and is what it was."""
    buffer = arena.take(MIB)
    assert buffer is not None
    content = os.urandom(MIB)
    buffer[:] = content
    place = arena.place(buffer)
    assert place is not None
    view = ArenaView(arena.descriptor, arena.capacity_bytes)
    held = view.at(place)
    del buffer
    arena.close()
    assert held == content and view.holds(place)
    del view
    gc.collect()
    assert held == content


def test_foreign_bytes_have_no_place(arena: Arena) -> None:
    """Bytes that stand elsewhere, and parts from the middle of a buffer, are not described as standing here."""
    assert arena.place(memoryview(bytearray(100))) is None
    buffer = arena.take(1000)
    assert buffer is not None
    assert arena.place(buffer[64:]) is None


@pytest.mark.parametrize(
    "place",
    [
        *(Place(0, 10, 1), Place(63, 10, 1), Place(8 * MIB, 10, 1), Place(8 * MIB - 5, 10, 1), Place(64, 9, 0)),
        *(Place(64, 8 * MIB, 1), Place(64, (1 << 63) - 1, 1), Place((1 << 63) - 1, 10, 1)),
    ],
)
def test_places_that_cannot_be_are_refused(arena: Arena, place: Place) -> None:
    """A reader refuses places outside the arena, in front of it, or without stamp."""
    view = ArenaView(arena.descriptor, arena.capacity_bytes)
    with pytest.raises(InvalidRequest):
        view.at(place)


def test_a_peer_cannot_write(arena: Arena) -> None:
    """The descriptor that peers get maps for reading only, and neither shrinks nor grows."""
    with pytest.raises(PermissionError):
        mmap.mmap(arena.descriptor, arena.capacity_bytes)
    for size in (0, 16 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.descriptor, size)


def test_an_arena_that_is_smaller_than_said_is_not_mapped(arena: Arena) -> None:
    """A size beyond the descriptor's would fault a reader: it is refused."""
    with pytest.raises(Unavailable):
        ArenaView(arena.descriptor, 2 * arena.capacity_bytes)


def test_memory_is_warmed_ahead_of_its_use() -> None:
    """The requested part is resident soon after the start, more as that is used, and content stays."""
    arena = Arena.open(32 * MIB, ahead_bytes=8 * MIB)
    assert arena is not None
    try:
        _wait_warm(arena, 8 * MIB)
        buffer = arena.take(6 * MIB)
        assert buffer is not None
        buffer[:] = b"\7" * len(buffer)
        _wait_warm(arena, 14 * MIB)
        assert set(bytes(buffer)) == {7}
    finally:
        arena.close()


def _wait_warm(arena: Arena, num_bytes: int) -> None:
    eventually(lambda: os.fstat(arena.descriptor).st_blocks * 512 >= num_bytes, 30)


def test_close_is_idempotent_and_leaves_buffers() -> None:
    """What was taken can be read and written after the arena was closed."""
    arena = Arena.open(MIB, ahead_bytes=MIB)
    assert arena is not None
    buffer = arena.take(1000)
    assert buffer is not None
    arena.close()
    arena.close()
    buffer[:] = b"x" * 1000
    assert bytes(buffer) == b"x" * 1000
