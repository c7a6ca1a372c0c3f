"""Which boundaries continue which, among all those of a namespace: as arrays, 64 bytes each. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvstore.model.keys import PREFIX_BYTES

Hashes = npt.NDArray[np.uint8]
"""[boundaries, 32]: prefix hashes."""
Rows = npt.NDArray[np.int64]

_TURNS_MAX = 32
"""Enough for any depth. Only a cycle, in a corrupt catalog, needs more."""
_ROWS_AT_ONCE = 65_536
"""So few that other threads can run in between."""


def hashes_of(prefixes: Iterable[bytes]) -> Hashes:
    """Prefix hashes as an array."""
    return np.frombuffer(b"".join(prefixes), dtype=np.uint8).reshape(-1, PREFIX_BYTES)


def family_of(roots: Hashes, prefixes: Hashes, parents: Hashes) -> npt.NDArray[np.bool_]:
    """[boundaries]: whether one is a root, or continues one.

    Args:
        roots: Those that are not among the boundaries can have children that are.
        prefixes: Of the boundaries.
        parents: Theirs; zeros where there is none, or none is known.
    """
    taken = np.zeros(len(prefixes), dtype=np.bool_)
    at = rows_of(roots, prefixes)
    taken[at[at >= 0]] = True
    for row in np.flatnonzero(at < 0).tolist():
        taken |= (parents == roots[row]).all(axis=1)
    return descendants(taken, rows_of(parents, prefixes))


def descendants(taken: npt.NDArray[np.bool_], above: Rows) -> npt.NDArray[np.bool_]:
    """[boundaries]: whether one is taken, or continues one that is.

    Args:
        taken: [boundaries].
        above: [boundaries]: the row of each one's parent; -1: it has none here.
    """
    found = taken.copy()
    for _ in range(_TURNS_MAX):  # each turn doubles the distance to the ancestor
        reached = above >= 0
        if not reached.any():
            break
        found[reached] |= found[above[reached]]
        above = np.where(reached, above[np.maximum(above, 0)], -1)
    return found


def depths(above: Rows) -> Rows:
    """[boundaries]: how many boundaries each one continues; -1: it continues itself, in a corrupt catalog.

    Args:
        above: As of `descendants`.
    """
    steps, reached = (above >= 0).astype(np.int64), above
    for _ in range(_TURNS_MAX):  # each turn doubles the distance to the ancestor
        goes_on = reached >= 0
        if not goes_on.any():
            return steps
        steps[goes_on] += steps[reached[goes_on]]
        reached = np.where(goes_on, reached[np.maximum(reached, 0)], -1)
    return np.where(reached >= 0, -1, steps)


def rows_of(wanted: Hashes, prefixes: Hashes) -> Rows:
    """[wanted]: the row of each hash among `prefixes`; -1: it is not there."""
    rows = np.full(len(wanted), -1, dtype=np.int64)
    if not len(prefixes):
        return rows
    numbers = _numbers(prefixes)
    order = np.argsort(numbers, kind="stable")
    numbers = numbers[order]
    for start in range(0, len(wanted), _ROWS_AT_ONCE):
        part = wanted[start : start + _ROWS_AT_ONCE]
        place = np.minimum(np.searchsorted(numbers, _numbers(part)), len(order) - 1)
        at = order[place]
        rows[start : start + _ROWS_AT_ONCE] = np.where((prefixes[at] == part).all(axis=1), at, -1)
    return rows


def _numbers(hashes: Hashes) -> npt.NDArray[np.uint64]:
    """[hashes]: the first eight bytes of each, to search by; callers compare the whole hashes."""
    numbers: npt.NDArray[np.uint64] = np.ascontiguousarray(hashes[:, :8]).view("<u8")[:, 0]
    return numbers
