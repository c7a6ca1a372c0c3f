"""One piece of pinned memory near its device: where it is touched, what is released when, what is refused."""

from __future__ import annotations

import gc
import logging
import os
import threading
from pathlib import Path

import pytest
import torch

from connector.device.host_memory import near_processors, pin_near

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
