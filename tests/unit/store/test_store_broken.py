"""Boundaries that serve no hit: a part of them, or of a boundary before them, is missing."""

from __future__ import annotations

import hashlib
import random
import tracemalloc

import numpy as np
import pytest

from kvstore.catalog.entry import BoundaryEntry
from kvstore.catalog.families import hashes_of
from kvstore.model.keys import NamespaceId, PrefixHash
from kvstore.store.retention.broken import BrokenFinder
from kvstore.store.retention.held import Held
from tests.unit.store.held_boundaries import held_of

_NOW_S = 1_000
_NAMESPACES = [NamespaceId(bytes([number]) * 16) for number in range(2)]


def forest(chance: random.Random, namespace: NamespaceId, num_boundaries: int) -> list[BoundaryEntry]:
    """Prompts that share beginnings. Some boundaries lack slices or a group, some are pinned, some are not listed."""
    prefixes = [PrefixHash(hashlib.sha256(namespace + bytes([i])).digest()) for i in range(num_boundaries)]
    entries = []
    for number, prefix in enumerate(prefixes):
        parent = prefixes[chance.randrange(number)] if number and chance.random() < 0.9 else None
        pages = 0b11 if chance.random() < 0.9 else chance.choice([0b01, 0b10, 0])
        states = chance.choice([0b111, 0b111, 0, 0b101 if chance.random() < 0.2 else 0])
        pinned_until_s = _NOW_S + 1 if chance.random() < 0.1 else chance.choice([0, _NOW_S])
        cold = (pages, states)
        entry = BoundaryEntry(
            namespace, prefix, 64, parent, 1, chance.randrange(_NOW_S), 0, pinned_until_s, ((0, 0), cold), ((0, 0),) * 2
        )
        entries.append(entry)
    listed = [entry for entry in entries if chance.random() < 0.9]
    chance.shuffle(listed)
    return listed


def is_broken(entry: BoundaryEntry, held: dict[bytes, BoundaryEntry]) -> bool:
    """The definition, one boundary at a time. Pages have two slices, states three."""
    pages, states = entry.slices[1]
    if pages not in (0, 0b11) or states not in (0, 0b111):
        return True
    if entry.parent is None:
        return False
    parent = held.get(entry.namespace + entry.parent)
    return parent is None or is_broken(parent, held)


def broken_of(held: Held) -> dict[bytes, int]:
    rows = np.flatnonzero(held.broken() & (held.pinned_until_s <= _NOW_S)).tolist()
    return {
        held.namespaces[held.namespace[row]] + held.prefixes[row].tobytes(): int(held.last_use_s[row]) for row in rows
    }


@pytest.mark.parametrize("seed", range(30))
def test_broken_boundaries_are_found(seed: int) -> None:
    """Of two namespaces with equal names of other pages, and in any order: those without a slice that others have, or
    without the boundary before them, and all that continue one, but pinned ones."""
    chance = random.Random(seed)
    entries = [entry for namespace in _NAMESPACES for entry in forest(chance, namespace, 120)]
    held = {entry.namespace + entry.prefix: entry for entry in entries if any(entry.slices[1])}
    expected = {
        name: entry.last_use_s
        for name, entry in held.items()
        if is_broken(entry, held) and entry.pinned_until_s <= _NOW_S
    }
    chance.shuffle(entries)
    found = held_of(entries, (2, 3))
    assert broken_of(found) == expected
    assert expected


def test_nothing_is_broken_where_nothing_is() -> None:
    """No entries, and entries without records in the cold tier."""
    prefix = PrefixHash(bytes(32))
    entry = BoundaryEntry(_NAMESPACES[0], prefix, 64, None, 1, 1, 0, 0, ((1,), (0,)), ((9,), (0,)))
    assert broken_of(held_of([], [1])) == {}
    assert broken_of(held_of([entry], [1])) == {}


def test_a_boundary_takes_a_hundred_bytes_at_most() -> None:
    """A service finds the broken ones of millions: as objects they would be a thousand bytes each."""
    broken, parent = BrokenFinder(), bytes(32)
    tracemalloc.start()
    try:
        for start in range(0, 20_480, 512):
            prefixes = [PrefixHash(hashlib.sha256(b"%d" % number).digest()) for number in range(start, start + 512)]
            above = hashes_of([parent, *prefixes[:-1]])
            broken.add(prefixes, above, np.ones((512, 4), np.int64), np.ones(512, np.int64), np.zeros(512, bool))
            parent = prefixes[-1]
        del prefixes, above
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 100 * 20_480
    assert broken.found() == {}
