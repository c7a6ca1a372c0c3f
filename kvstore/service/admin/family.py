"""Which boundaries go on from others: found among all entries of a namespace, as arrays. Pure but for the reading."""

from __future__ import annotations

import asyncio
from collections.abc import Set

import numpy as np
import numpy.typing as npt

from kvstore.catalog.base import Catalog
from kvstore.catalog.entry import PARENT_AT
from kvstore.model.keys import PREFIX_BYTES, NamespaceId, PrefixHash
from kvstore.runtime.deadline import Deadline
from kvstore.service.admin.listing import steps_of

__all__ = ["descendants", "family_of"]

Hashes = npt.NDArray[np.uint8]

_TURNS_MAX = 32
"""More would be needed by a boundary that stands on itself, in a catalog that is wrong."""


async def family_of(
    catalog: Catalog, namespace: NamespaceId, roots: Set[PrefixHash], *, deadline: Deadline
) -> list[PrefixHash]:
    """Those of some boundaries that are stored, and all stored ones that go on from any of them. It takes memory for
    each entry of the namespace: its hash, its parent's, and their order. A boundary whose parent is not known, as after
    a reindex until it is read, is not found by its start.
    """
    prefixes: list[bytes] = []
    parents: list[Hashes] = []
    async for _, step in steps_of(catalog, namespace, "", deadline):
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
    """[boundaries]: whether one is a root, or goes on from one.

    Args:
        prefixes: [boundaries, 32], uint8.
        parents: [boundaries, 32]; zeros where there is none, or none known.
        roots: [roots, 32].
    """
    order = np.argsort(_numbers(prefixes), kind="stable")
    above = _rows_of(parents, prefixes, order)
    taken = np.zeros(len(prefixes), dtype=np.bool_)
    at = _rows_of(roots, prefixes, order)
    taken[at[at >= 0]] = True
    for row in np.flatnonzero(at < 0).tolist():  # a root that is not stored has children all the same
        taken |= (parents == roots[row]).all(axis=1)
    for _ in range(_TURNS_MAX):  # twice as far up with each turn
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
    """[hashes]: the first eight bytes of each, by which they are found; that they are equal is looked at."""
    numbers: npt.NDArray[np.uint64] = np.ascontiguousarray(hashes[:, :8]).view("<u8")[:, 0]
    return numbers
