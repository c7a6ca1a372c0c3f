"""How many inputs each fuzz gets, and how one is made from its seed."""

from __future__ import annotations

import os
import random
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hypothesis import given, settings
from hypothesis import strategies as st

FULL = os.environ.get("KVSTORE_TEST_FULL") == "1"
SHARE = 50
"""`make test` runs one input in so many."""

PLANNED: dict[str, int] = {}
"""Inputs of each fuzz in `make test-full`."""
RUN: dict[str, int] = {}
"""Inputs that were really run."""


def fuzz(num_inputs: int) -> Callable[[Callable[[random.Random], None]], Callable[..., None]]:
    """Run a function on `num_inputs` inputs, a share of them outside `make test-full`.

    The function gets a generator; all that it does follows from its seed, which hypothesis prints when it fails:
    `@example(seed)` in front of the test replays it.
    """

    def decorate(test: Callable[[random.Random], None]) -> Callable[..., None]:
        PLANNED[test.__name__] = num_inputs

        def run(seed: int) -> None:
            RUN[test.__name__] = RUN.get(test.__name__, 0) + 1
            test(random.Random(seed))

        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        examples = num_inputs if FULL else num_inputs // SHARE
        return settings(max_examples=examples, database=None)(given(st.integers(0, (1 << 63) - 1))(run))

    return decorate


@contextmanager
def bounded_memory(limit_bytes: int) -> Iterator[None]:
    """Fail when the block holds more than `limit_bytes` more at any moment than before it."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < limit_bytes, f"{peak:,} bytes were held"


def mutated(data: bytes, choose: random.Random) -> bytes:
    """Some of what happens to bytes: flipped bits, lost, doubled, moved and foreign stretches, another length."""
    changed = bytearray(data)
    for _ in range(choose.randint(1, 3)):
        at = choose.randrange(len(changed) + 1)
        stretch = changed[at : at + choose.choice((1, 2, 4, 16, 100))]
        match choose.randrange(7):
            case 0 if changed:
                changed[min(at, len(changed) - 1)] ^= 1 << choose.randrange(8)
            case 1:
                del changed[at:]
            case 2:
                del changed[at : at + len(stretch)]
            case 3:
                changed[at:at] = stretch
            case 4:
                target = choose.randrange(len(changed) + 1)
                changed[target : target + len(stretch)] = stretch
            case 5:
                changed[at : at + 8] = choose.choice((b"\xff" * 8, bytes(8), b"\x7f" + bytes(7), choose.randbytes(8)))
            case _:
                changed += choose.randbytes(choose.choice((1, 15, 200)))
    return bytes(changed)


def pieces(data: bytes, choose: random.Random) -> Iterator[bytes]:
    """The same bytes as a network delivers them."""
    most = choose.choice((1, 7, 60, 500, 1 << 20)) if len(data) < 5000 else choose.choice((500, 1 << 20))
    at = 0
    while at < len(data):
        count = choose.randint(1, most)
        yield data[at : at + count]
        at += count
