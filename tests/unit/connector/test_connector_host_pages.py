"""Pages cut from one fixed piece of host memory, and what each user may take of it."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from connector.device.host_memory import HostPages, PageShare
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


def test_a_share_has_a_limit_of_its_own() -> None:
    """One user's limit leaves the rest to others, and says when half of it is in use."""
    pages = pages_of(64 * KIB)
    mine, others = PageShare(pages, 8 * KIB), PageShare(pages, 56 * KIB)
    held = [mine.take(4 * KIB)]
    assert mine.is_half_used
    held.append(mine.take(4 * KIB))
    assert mine.take(1) is None
    assert others.take(48 * KIB) is not None
    for page in held:
        assert page is not None
        mine.put(page)
    assert (mine.used_bytes, mine.is_half_used) == (0, False)


def test_a_share_of_full_memory() -> None:
    """Where others hold the memory, nothing is counted for what could not be had."""
    pages = pages_of(4 * KIB)
    mine = PageShare(pages, 4 * KIB)
    assert pages.take(4 * KIB) is not None
    assert mine.take(KIB) is None
    assert mine.used_bytes == 0
