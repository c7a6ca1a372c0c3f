"""Which boundaries serve no hit, since a part of them or of a boundary before them is missing. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.catalog.entry import BoundaryEntry, Level
from kvstore.catalog.families import Hashes, descendants, hashes_of, rows_of
from kvstore.model.keys import PREFIX_BYTES, NamespaceId, PrefixHash

_LEVEL = Level.COLD
_ENTRIES_AT_ONCE = 1024
_NO_PARENT = bytes(PREFIX_BYTES)

Numbers = npt.NDArray[np.int64]


class BrokenFinder:
    """Finds the boundaries of a namespace that serve no hit: the parent is missing, or a group lacks slices that other
    boundaries of the namespace have. All boundaries that need such a one are included.

    Not included are boundaries that are pinned, whose parent is not known, or that lack a group altogether: states are
    not saved at every page.

    Keeps about 90 bytes of each boundary, and no object: with a million objects each cyclic collection would stop all
    threads.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[Hashes, Hashes, npt.NDArray[np.uint16], Numbers, npt.NDArray[np.bool_]]] = []

    def add(
        self,
        prefixes: Sequence[PrefixHash],
        parents: Hashes,
        num_slices: Numbers,
        last_use_s: Numbers,
        is_pinned: npt.NDArray[np.bool_],
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
        lacks_parent = parents.any(axis=1) & (above < 0)
        lacks_slices = ((num_slices > 0) & (num_slices < num_slices.max(axis=0))).any(axis=1)
        broken = descendants(lacks_parent | lacks_slices, above) & ~is_pinned
        return {PrefixHash(prefixes[row].tobytes()): int(last_use_s[row]) for row in np.flatnonzero(broken).tolist()}


def broken_of(entries: Iterable[BoundaryEntry], now_s: int) -> dict[bytes, int]:
    """Names (namespace and prefix) of boundaries that serve no hit from the cold tier, and when they were last used."""
    by_namespace: dict[NamespaceId, list[BoundaryEntry]] = {}
    for entry in entries:
        by_namespace.setdefault(entry.namespace, []).append(entry)
    used_s: dict[bytes, int] = {}
    for namespace, listed in by_namespace.items():
        finder = BrokenFinder()
        for start in range(0, len(listed), _ENTRIES_AT_ONCE):
            part = listed[start : start + _ENTRIES_AT_ONCE]
            finder.add(
                [entry.prefix for entry in part],
                hashes_of(entry.parent or _NO_PARENT for entry in part),
                np.array([[bits.bit_count() for bits in entry.slices[_LEVEL]] for entry in part], dtype=np.int64),
                np.array([entry.last_use_s for entry in part], dtype=np.int64),
                np.array([entry.pinned_until_s > now_s for entry in part]),
            )
        used_s |= {namespace + prefix: last_s for prefix, last_s in finder.found().items()}
    return used_s
