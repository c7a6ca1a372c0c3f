"""Finds the boundaries that continue others, among all entries of a namespace, with arrays."""

from __future__ import annotations

import asyncio
from collections.abc import Set

import numpy as np
import numpy.typing as npt

from kvstore.catalog.entry import PARENT_AT
from kvstore.model.keys import PREFIX_BYTES, PrefixHash
from kvstore.runtime.deadline import Deadline
from kvstore.service.admin.catalog_access import Namespace
from kvstore.service.admin.listing import steps_of

__all__ = ["descendants", "family_of"]

Hashes = npt.NDArray[np.uint8]

_TURNS_MAX = 32
"""Enough for any depth. Only a cycle, in a corrupt catalog, needs more."""


async def family_of(namespace: Namespace, roots: Set[PrefixHash], *, deadline: Deadline) -> list[PrefixHash]:
    """The stored boundaries that are roots or continue one. Needs memory for each entry of the namespace: its hash,
    that of its parent, and an index. A boundary whose parent is unknown is not found; after a reindex parents are
    unknown until the boundaries are read.
    """
    prefixes: list[bytes] = []
    parents: list[Hashes] = []
    async for _, step in steps_of(namespace, deadline):
        rows = np.flatnonzero(step.table.present())
        prefixes += [bytes(step.prefixes[row]) for row in rows.tolist()]
        parents.append(step.table.data[rows, PARENT_AT : PARENT_AT + PREFIX_BYTES])
    if not prefixes:
        return []
    own = np.frombuffer(b"".join(prefixes), dtype=np.uint8).reshape(-1, PREFIX_BYTES)
    wanted = np.frombuffer(b"".join(sorted(roots)), dtype=np.uint8).reshape(-1, PREFIX_BYTES)
    found = await asyncio.to_thread(descendants, own, np.concatenate(parents), wanted)
    return list(dict.fromkeys(PrefixHash(prefixes[row]) for row in np.flatnonzero(found).tolist()))


def descendants(prefixes: Hashes, parents: Hashes, roots: Hashes) -> npt.NDArray[np.bool_]:
    """[boundaries]: whether one is a root, or continues one.

    Args:
        prefixes: [boundaries, 32], uint8.
        parents: [boundaries, 32]; zeros where there is none, or none is known.
        roots: [roots, 32].
    """
    order = np.argsort(_numbers(prefixes), kind="stable")
    above = _rows_of(parents, prefixes, order)
    taken = np.zeros(len(prefixes), dtype=np.bool_)
    at = _rows_of(roots, prefixes, order)
    taken[at[at >= 0]] = True
    for row in np.flatnonzero(at < 0).tolist():  # a root that is not stored can have children that are
        taken |= (parents == roots[row]).all(axis=1)
    for _ in range(_TURNS_MAX):  # each turn doubles the distance to the ancestor
        reached = above >= 0
        if not reached.any():
            break
        taken[reached] |= taken[above[reached]]
        above = np.where(reached, above[np.maximum(above, 0)], -1)
    return taken


def _rows_of(wanted: Hashes, prefixes: Hashes, order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[wanted]: the row of each hash; -1: it is not there."""
    sorted_numbers, numbers = _numbers(prefixes)[order], _numbers(wanted)
    place = np.minimum(np.searchsorted(sorted_numbers, numbers), len(order) - 1)
    rows = order[place]
    return np.where((prefixes[rows] == wanted).all(axis=1), rows, -1)


def _numbers(hashes: Hashes) -> npt.NDArray[np.uint64]:
    """[hashes]: the first eight bytes of each, to search by; callers compare the whole hashes."""
    numbers: npt.NDArray[np.uint64] = np.ascontiguousarray(hashes[:, :8]).view("<u8")[:, 0]
    return numbers
