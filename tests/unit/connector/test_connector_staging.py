"""The pool of host buffers: exact sizes, a limit that holds, memory that is used again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from connector.worker.staging import BufferPool, view
from kvstore.errors import InvalidRequest


def test_a_buffer_is_used_again() -> None:
    """What is put back is taken again for the same size, and only for that."""
    pool = BufferPool(1000)
    first = pool.take(300)
    assert first is not None
    pool.put(first)
    assert pool.take(300) is first
    other = pool.take(200)
    assert other is not None
    assert other.numel() == 200


def test_the_limit() -> None:
    """At the limit there is no buffer, until one is put back or dropped."""
    pool = BufferPool(1000)
    one, two = pool.take(600), pool.take(400)
    assert one is not None
    assert two is not None
    assert pool.take(1) is None
    pool.put(two)
    assert pool.take(401) is None
    pool.drop(one)
    assert pool.take(1000) is not None
    assert pool.used_bytes == 1000


def test_free_buffers_of_other_sizes_give_way() -> None:
    """Memory kept for reuse never stands in the way of another size."""
    pool = BufferPool(1000)
    for buffer in [pool.take(250) for _ in range(4)]:
        assert buffer is not None
        pool.put(buffer)
    assert pool.take(1000) is not None
    assert pool._free_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 400)), max_size=60))
def test_used_and_free_together_keep_the_limit(steps: list[tuple[int, int]]) -> None:
    """Over any takes, puts and drops the sums are right, and the memory held is never over the limit."""
    pool, held = BufferPool(1000), []
    for action, size in steps:
        if action <= 3:
            used = sum(buffer.numel() for buffer in held)
            buffer = pool.take(size)
            assert (buffer is None) == (used + size > 1000)
            if buffer is not None:
                assert buffer.numel() == size
                assert all(buffer is not other for other in held)
                held.append(buffer)
        elif held:
            (pool.put if action == 4 else pool.drop)(held.pop(size % len(held)))
        assert pool.used_bytes == sum(buffer.numel() for buffer in held)
        free = sum(buffer.numel() for buffers in pool._free.values() for buffer in buffers)
        assert pool._free_bytes == free
        assert pool.used_bytes + free <= 1000


def test_a_view_is_the_buffer() -> None:
    """Bytes written through the view stand in the tensor."""
    buffer = torch.zeros(4, dtype=torch.uint8)
    view(buffer)[1:3] = b"\x07\x08"
    assert buffer.tolist() == [0, 7, 8, 0]


def test_memory_that_cannot_be_had() -> None:
    """A buffer that could not be made is not counted as taken."""

    def refuse(num_bytes: int) -> torch.Tensor:
        raise InvalidRequest("no memory could be pinned", num_bytes=num_bytes)

    pool = BufferPool(1000, refuse)
    with pytest.raises(InvalidRequest):
        pool.take(600)
    assert pool.used_bytes == 0
