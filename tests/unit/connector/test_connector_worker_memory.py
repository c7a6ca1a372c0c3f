"""Memory is made resident behind the engine's back, and nothing in it changes."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest
import torch

from connector.worker import memory as worker_memory
from connector.worker.memory import Warmer, memory_ranges

PAGE = mmap.PAGESIZE


@pytest.fixture
def memory() -> mmap.mmap:
    """64 pages that nobody has touched."""
    return mmap.mmap(-1, 64 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def resident_pages(memory: mmap.mmap) -> int:
    """By what the kernel says of each page of the range (bit 63 of its pagemap entry)."""
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(address_of(memory) // PAGE * 8)
        entries = pagemap.read(len(memory) // PAGE * 8)
    return sum(entries[index * 8 + 7] >> 7 for index in range(len(memory) // PAGE))


def test_untouched_memory_becomes_resident(memory: mmap.mmap) -> None:
    """All of a range is there afterwards, and what was written before stands as it did."""
    memory[5 * PAGE : 5 * PAGE + 5] = b"hello"
    assert resident_pages(memory) == 1
    warmer = Warmer([(address_of(memory), len(memory))])
    assert warmer.wait(30)
    assert resident_pages(memory) == 64
    assert memory[5 * PAGE : 5 * PAGE + 5] == b"hello"
    assert memory[:PAGE] == bytes(PAGE)
    warmer.stop()


def test_only_whole_pages_inside_the_range_are_touched(memory: mmap.mmap) -> None:
    """A range that begins and ends inside pages: its neighbours are left alone."""
    warmer = Warmer([(address_of(memory) + 100, 10 * PAGE)])
    assert warmer.wait(30)
    assert resident_pages(memory) == 9
    assert warmer.num_bytes == 9 * PAGE


def test_a_limit_is_shared_among_ranges(memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is scarce each range gets its start, not the first one all."""
    monkeypatch.setattr(worker_memory, "spare_bytes", lambda: 16 * PAGE)
    half = 32 * PAGE
    warmer = Warmer([(address_of(memory), half), (address_of(memory) + half, half)])
    assert warmer.wait(30)
    assert resident_pages(memory) == 16


def test_a_system_that_cannot_is_left_in_peace(memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old kernel: nothing happens, nothing is raised."""

    def refuse(*_: object) -> None:
        raise OSError(22, "madvise")

    monkeypatch.setattr(worker_memory, "populate_paced", refuse)
    warmer = Warmer([(address_of(memory), len(memory))])
    assert warmer.wait(30)
    assert resident_pages(memory) == 0


def test_each_storage_is_listed_once() -> None:
    """Layers that share a storage are one range."""
    base = torch.zeros(4, 1024)
    other = torch.zeros(7)
    ranges = memory_ranges([base[0], base[1:], other])
    assert ranges == [(base.data_ptr(), base.nbytes), (other.data_ptr(), other.nbytes)]
