"""A rank's host memory: pages cut from one piece, shares of it, and one piece of pinned memory near its device."""

from __future__ import annotations

import gc
import logging
import os
import random
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from connector.device.host_memory import HostPages, near_processors, pin_near
from kvstore.errors import InternalError

KIB = 1 << 10


def pages_of(num_bytes: int) -> HostPages:
    return HostPages(torch.zeros(num_bytes, dtype=torch.uint8))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5000)), max_size=80))
def test_a_page_is_nobody_elses(steps: list[tuple[bool, int]]) -> None:
    """Pages of any sizes, taken and given back in any order: none overlaps another, and all memory returns."""
    pages, held = pages_of(64 * KIB), list[tuple[torch.Tensor, int]]()
    for number, (takes, size) in enumerate(steps):
        if takes:
            page = pages.take(size)
            if page is not None:
                assert page.shape == (size,) and page.is_contiguous() and page.storage_offset() % 512 == 0
                held.append((page.fill_(number), number))
        elif held:
            page, mark = held.pop(size % len(held))
            assert set(page.tolist()) == {mark}
            pages.put(page)
    for page, mark in held:
        assert set(page.tolist()) == {mark}
        pages.put(page)
    whole = pages.take(64 * KIB)
    assert whole is not None


def test_memory_runs_out() -> None:
    """What does not fit is refused, until something is given back."""
    pages = pages_of(4 * KIB)
    first, second = pages.take(2 * KIB), pages.take(2 * KIB)
    assert first is not None and second is not None
    assert pages.take(1) is None
    pages.put(first)
    assert pages.take(3 * KIB) is None
    assert pages.take(2 * KIB) is not None


def test_a_page_goes_back_once() -> None:
    """A page that was given back, or never taken, is an error: it may be another's by now."""
    pages = pages_of(4 * KIB)
    page = pages.take(KIB)
    assert page is not None
    pages.put(page)
    for wrong in (page, torch.zeros(KIB, dtype=torch.uint8)):
        with pytest.raises(InternalError):
            pages.put(wrong)


def test_saves_that_fit_by_their_bytes_find_a_place() -> None:
    """Pages, states and tails of an engine in any order, half of the memory at most: gaps between them never refuse
    one. Sizes of a hybrid with 27 billion parameters on one rank, in KiB: a page's slice, tails of it, a state's."""
    generator = random.Random(7)
    for _ in range(20):
        pages, held = pages_of(512 * KIB), list[torch.Tensor]()
        used = 0
        for _ in range(2000):
            # scaled down by a thousand: 6.3 MB, blocks of it in tails, 3.2 MB, and awkward ones
            size = generator.choice((6272, 3207, 784, 1568, 2352, 4704, generator.randrange(512, 6272)))
            if used + size <= 256 * KIB:
                page = pages.take(size)
                assert page is not None, (used, size)
                held.append(page)
                used += size
            else:
                for _ in range(generator.randrange(1, 9)):
                    if held:
                        page = held.pop(generator.randrange(len(held)))
                        used -= page.numel()
                        pages.put(page)


def test_a_limit_leaves_memory_for_gaps() -> None:
    """Above the limit nothing is taken, though there is memory; half of the limit in use is reported."""
    pages = HostPages(torch.zeros(64 * KIB, dtype=torch.uint8), limit_bytes=8 * KIB)
    held = [pages.take(4 * KIB)]
    assert pages.is_half_used
    held.append(pages.take(4 * KIB))
    assert pages.take(1) is None
    for page in held:
        assert page is not None
        pages.put(page)
    assert (pages.used_bytes, pages.is_half_used) == (0, False)


def test_full_memory_counts_nothing() -> None:
    """A page that cannot be had is not counted as used."""
    pages = pages_of(4 * KIB)
    assert pages.take(3 * KIB) is not None
    assert pages.take(2 * KIB) is None
    assert pages.used_bytes == 3 * KIB


# ---- pinned memory

SIZE = (1 << 20) + 512


class Registry:
    """What CUDA would do, and what it saw."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.processors: set[int] = set()
        self.thread: threading.Thread | None = None

    def register(self, address: int, num_bytes: int) -> None:
        self.pinned[address] = num_bytes
        self.processors = os.sched_getaffinity(0)
        self.thread = threading.current_thread()

    def release(self, address: int) -> None:
        del self.pinned[address]


def test_memory_is_touched_near_its_device() -> None:
    """A thread on the device's processors touches and registers all of it; the caller stays where it was."""
    registry, before = Registry(), os.sched_getaffinity(0)
    near = frozenset([max(before)])
    piece = pin_near(SIZE, near, register=registry.register, release=registry.release)
    assert piece.numel() == SIZE and not piece.any()
    assert registry.pinned == {piece.data_ptr(): SIZE}
    assert registry.processors == near
    assert registry.thread is not threading.current_thread()
    assert os.sched_getaffinity(0) == before
    assert resident_bytes(piece) >= SIZE


def resident_bytes(piece: torch.Tensor) -> int:
    """Of the mapping that the piece is in, as the kernel counts it."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line[0].isupper():
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            found = first <= piece.data_ptr() < last
        elif found and line.startswith("Rss:"):
            return int(line.split()[1]) << 10
    return 0


def test_it_is_released_with_its_last_view() -> None:
    """Pages that were cut from it keep it pinned; after the last one it is released, while it is still mapped."""
    registry = Registry()
    pages = pin_near(SIZE, frozenset(), register=registry.register, release=registry.release).split(512)
    page = pages[3]
    del pages
    gc.collect()
    page.fill_(7)
    assert len(registry.pinned) == 1
    del page
    gc.collect()
    assert registry.pinned == {}


def test_processors_that_are_not_ours(caplog: pytest.LogCaptureFixture) -> None:
    """Memory that cannot be near its device is pinned all the same, and the log says why it is elsewhere."""
    registry = Registry()
    with caplog.at_level(logging.INFO, logger="vllm.kvstore"):
        pin_near(SIZE, frozenset([4095]), register=registry.register, release=registry.release)
        pin_near(SIZE, frozenset(), register=registry.register, release=registry.release)
    assert ["may not run" in text for text in caplog.messages] == [True, False]
    assert ["not known" in text for text in caplog.messages] == [False, True]


def test_memory_that_cannot_be_pinned() -> None:
    """The error reaches the caller, and nothing is released that was never registered."""
    registry = Registry()

    def refuse(address: int, num_bytes: int) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        pin_near(SIZE, frozenset(), register=refuse, release=registry.release)
    gc.collect()


@pytest.mark.parametrize(
    ("text", "processors"),
    [("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("5\n", {5}), ("\n", set()), ("what\n", set()), (None, set())],
)
def test_processors_of_a_device(tmp_path: Path, text: str | None, processors: set[int]) -> None:
    """As the system lists them; nothing where it does not."""
    if text is not None:
        folder = tmp_path / "bus/pci/devices/0000:3b:00.0"
        folder.mkdir(parents=True)
        (folder / "local_cpulist").write_text(text)
    assert near_processors("0000:3b:00.0", tmp_path) == processors
