"""Which boundaries serve no hit, since a part of them or of a boundary before them is missing. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.catalog.families import Hashes, Rows, descendants, hashes_of, rows_of
from kvstore.model.keys import PrefixHash

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def broken_rows(above: Rows, has_parent: Flags, lack_slices: Flags) -> Flags:
    """[boundaries]: whether one serves no hit, since its parent is missing, slices are, or it needs such a boundary.

    Args:
        above: [boundaries]: the row of each one's parent; -1: it has none here.
        has_parent: [boundaries]: whether a parent is known.
        lack_slices: [boundaries].
    """
    return descendants((has_parent & (above < 0)) | lack_slices, above)


def is_known(parents: Hashes) -> Flags:
    """[boundaries]: whether a parent is known. Its hash is zeros otherwise."""
    return np.asarray(parents.any(axis=1))


def lack_slices(num_slices: Numbers) -> Flags:
    """[boundaries]: whether a group lacks slices that other boundaries of the namespace have. One that lacks a group
    altogether does not count: states are not saved at every page.

    Args:
        num_slices: [boundaries, groups].
    """
    most = num_slices.max(axis=0, initial=0)
    lacking: Flags = ((num_slices > 0) & (num_slices < most)).any(axis=1)
    return lacking


class BrokenFinder:
    """Finds the boundaries of a namespace that serve no hit, but pinned ones: see `broken_rows`.

    Keeps about 90 bytes of each boundary, and no object: with a million objects each cyclic collection would stop all
    threads.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[Hashes, Hashes, npt.NDArray[np.uint16], Numbers, Flags]] = []

    def add(
        self,
        prefixes: Sequence[PrefixHash],
        parents: Hashes,
        num_slices: Numbers,
        last_use_s: Numbers,
        is_pinned: Flags,
    ) -> None:
        """Add boundaries; those without slices are passed over.

        Args:
            prefixes: [boundaries].
            parents: [boundaries, 32]; zeros where there is none, or none is known.
            num_slices: [boundaries, groups].
            last_use_s: [boundaries].
            is_pinned: [boundaries].
        """
        held = num_slices.any(axis=1)
        counts = num_slices[held].astype(np.uint16)
        self._pieces.append((hashes_of(prefixes)[held], parents[held], counts, last_use_s[held], is_pinned[held]))

    def found(self) -> dict[PrefixHash, int]:
        """The broken boundaries, and when each was last used."""
        if not self._pieces:
            return {}
        prefixes, parents, num_slices, last_use_s, is_pinned = map(np.concatenate, zip(*self._pieces, strict=True))
        if not len(prefixes):
            return {}
        above = rows_of(parents, prefixes)
        broken = broken_rows(above, is_known(parents), lack_slices(num_slices)) & ~is_pinned
        return {PrefixHash(prefixes[row].tobytes()): int(last_use_s[row]) for row in np.flatnonzero(broken).tolist()}
