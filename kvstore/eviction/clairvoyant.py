"""The bound that no policy can pass: eviction by somebody who knows the future."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvstore.eviction.prefixes import Key

__all__ = ["clairvoyant_holds"]


def clairvoyant_holds(paths: Sequence[Sequence[Key]], budget: int) -> tuple[list[int], int]:
    """Belady's algorithm with bypass: what is used again latest leaves first, and what never is, is not even written.

    A boundary's next use is never later than that of a longer prefix, so what leaves first is always an end.

    Args:
        paths: All prompts' boundaries, in the order in which they come.
        budget: Boundaries that may be held, all of one size.

    Returns:
        For each prompt how many of its boundaries are held when it comes, and how many boundaries were written.
    """
    never = len(paths)
    next_uses: list[list[int]] = [[] for _ in paths]
    upcoming: dict[Key, int] = {}
    for index in range(len(paths) - 1, -1, -1):
        next_uses[index] = [upcoming.get(key, never) for key in paths[index]]
        upcoming.update(dict.fromkeys(paths[index], index))
    held: dict[Key, int] = {}  # to the next use
    furthest: list[tuple[int, int, Key]] = []  # next use and depth, negative: of one prompt, the end goes first
    leading, num_written = [], 0
    for index, path in enumerate(paths):
        hits = 0
        while hits < len(path) and path[hits] in held:
            hits += 1
        leading.append(hits)
        came = []
        for depth, (key, use) in enumerate(zip(path, next_uses[index], strict=True)):
            if use == never:
                held.pop(key, None)
                continue
            if key not in held:
                came.append(key)
            held[key] = use
            heapq.heappush(furthest, (-use, -depth, key))
        while len(held) > budget:
            use, _, key = heapq.heappop(furthest)
            if held.get(key) == -use:
                del held[key]
        num_written += sum(key in held for key in came)
    return leading, num_written
