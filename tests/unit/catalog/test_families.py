"""Boundaries that continue others, found among many."""

from __future__ import annotations

import hashlib
import random

import pytest

from kvstore.catalog.families import family_of, hashes_of, rows_of


@pytest.mark.parametrize("seed", range(20))
def test_the_family_of_roots_is_found(seed: int) -> None:
    """In a random forest with boundaries that are not stored: found are those whose stored ancestors lead to a root,
    stored or not.
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

    found = family_of(hashes_of(roots), hashes_of(stored), hashes_of(parent_of[name] for name in stored))
    assert [bool(one) for one in found] == [is_below(name) for name in stored]


def test_a_cycle_of_parents_ends_the_search() -> None:
    """A cycle in a corrupt catalog does not hang the search."""
    names = [hashlib.sha256(bytes([i])).digest() for i in range(3)]
    found = family_of(hashes_of(names[:1]), hashes_of(names), hashes_of([names[0], names[2], names[1]]))
    assert found.tolist() == [True, False, False]


def test_rows_are_found_by_the_whole_hash() -> None:
    """Two hashes may begin alike; and nothing is found among none."""
    first, second = bytes(31) + b"\1", bytes(31) + b"\2"
    assert rows_of(hashes_of([second, first]), hashes_of([second])).tolist() == [0, -1]
    assert rows_of(hashes_of([first]), hashes_of([])).tolist() == [-1]
