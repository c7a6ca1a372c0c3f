"""Which boundaries go on from others: the arrays tell what following parents one by one does."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

from kvstore.service.admin.jobs.deletions import descendants


@pytest.mark.parametrize("seed", range(20))
def test_what_goes_on_from_roots_is_found(seed: int) -> None:
    """In a random forest, some of whose boundaries are not stored: those whose parents, followed while they are stored,
    lead to a root, stored or not.
    """
    chance = random.Random(seed)
    names = [hashlib.sha256(f"{seed} {i}".encode()).digest() for i in range(200)]
    parent_of = {
        name: names[chance.randrange(i)] if i and chance.random() < 0.9 else bytes(32) for i, name in enumerate(names)
    }
    stored = [name for name in names if chance.random() < 0.8]
    roots = chance.sample(names, 5)

    def is_below(name: bytes) -> bool:
        while name in stored:
            if name in roots or parent_of[name] in roots:
                return True
            name = parent_of[name]
        return False

    found = descendants(array(stored), array([parent_of[name] for name in stored]), array(roots))
    assert [bool(one) for one in found] == [is_below(name) for name in stored]


def test_a_boundary_that_stands_on_itself_ends_the_search() -> None:
    """A catalog that is wrong costs no more than a right one."""
    names = [hashlib.sha256(bytes([i])).digest() for i in range(3)]
    found = descendants(array(names), array([names[0], names[2], names[1]]), array([names[0]]))
    assert found.tolist() == [True, False, False]


def array(names: list[bytes]) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.frombuffer(b"".join(names), dtype=np.uint8).reshape(-1, 32)
