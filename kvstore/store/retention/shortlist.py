"""The few boundaries among which a round finds all that it evicts. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.store.retention.broken import Flags
from kvstore.store.retention.held import Held


@dataclass(frozen=True, slots=True)
class Need:
    """What a group of boundaries may have to give.

    Attributes:
        group: [boundaries]: whether one belongs to it.
        num_bytes: The most that it may have to give.
    """

    group: Flags
    num_bytes: int


def shortlist(
    held: Held,
    *,
    ranks: npt.NDArray[np.float64],
    stays: Flags,
    leaves: Flags,
    marked: Flags,
    needs: Iterable[Need],
) -> Flags:
    """[boundaries]: whether one is on the list. `Holdings`, which evicts ends of prefixes first and of these the lowest
    rank first, chooses among the listed boundaries as among all.

    A boundary is evicted after all that continue it, so at the latest of their ranks; those that leave anyhow do not
    count. The list has those with the lowest such ranks, of as many bytes as a group may have to give. Boundaries with
    a hint, and what they continue, are listed beside these, since a hint changes the order.

    Args:
        ranks: [boundaries]: the lowest is evicted first, of equal ones the longest unused.
        stays: [boundaries]: whether one stays, and what it continues.
        leaves: [boundaries]: whether one leaves by its age or state, at any rank, unless it stays.
        marked: [boundaries]: whether a hint applies to one.
        needs: Of groups that have no trees of prefixes in common, or contain each other.
    """
    latest = np.empty(len(held), dtype=np.int64)
    latest[np.lexsort((-held.tokens, held.last_use_s, ranks))] = np.arange(len(held))
    free = ~stays
    all_leave, is_marked = leaves & free, marked.copy()
    for rows in held.ends_first():
        above = held.above[rows]
        waited_for = ~all_leave[rows]
        np.maximum.at(latest, above[waited_for], latest[rows[waited_for]])
        free[above[~free[rows]]] = False
        all_leave[above[~all_leave[rows]]] = False
        is_marked[above[is_marked[rows]]] = True
    listed = all_leave | (is_marked & free)
    order = np.lexsort((-held.depth, latest))
    order = order[free[order]]
    for need in needs:
        rows = order[need.group[order]]
        given = np.cumsum(np.where(is_marked[rows], 0, held.num_bytes[rows]))
        listed[rows[: np.searchsorted(given, need.num_bytes) + (need.num_bytes > 0)]] = True
    return listed
