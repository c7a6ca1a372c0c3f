"""The upper bound of all policies: eviction with knowledge of the future."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvstore.eviction.prefixes import Key

__all__ = ["clairvoyant_holds"]


def clairvoyant_holds(paths: Sequence[Sequence[Key]], budget: int) -> tuple[list[int], int]:
    """Belady's algorithm with bypass: evicts what is used again latest, and does not write what is never used again.

    A boundary's next use is never later than that of a longer prefix, so the longest prefixes are evicted first.

    Args:
        paths: All prompts' boundaries, in the order of arrival.
        budget: Boundaries that may be held, all of one size.

    Returns:
        For each prompt how many of its boundaries are held when it arrives, and how many boundaries were written.
    """
    never = len(paths)
    next_uses: list[list[int]] = [[] for _ in paths]
    upcoming: dict[Key, int] = {}
    for index in range(len(paths) - 1, -1, -1):
        next_uses[index] = [upcoming.get(key, never) for key in paths[index]]
        upcoming.update(dict.fromkeys(paths[index], index))
    held: dict[Key, int] = {}  # to the prompt of its next use
    furthest: list[tuple[int, int, Key]] = []  # next use and depth, both negated: the latest, then the deepest, first
    leading, num_written = [], 0
    for index, path in enumerate(paths):
        hits = 0
        while hits < len(path) and path[hits] in held:
            hits += 1
        leading.append(hits)
        added = []
        for depth, (key, use) in enumerate(zip(path, next_uses[index], strict=True)):
            if use == never:
                held.pop(key, None)
                continue
            if key not in held:
                added.append(key)
            held[key] = use
            heapq.heappush(furthest, (-use, -depth, key))
        while len(held) > budget:
            use, _, key = heapq.heappop(furthest)
            if held.get(key) == -use:
                del held[key]
        num_written += sum(key in held for key in added)
    return leading, num_written
