"""The few boundaries among which a round finds all that it evicts. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.store.retention.broken import Flags, Numbers
from kvstore.store.retention.held import Held


@dataclass(frozen=True, slots=True)
class Need:
    """What groups of boundaries may have to give. No tree of prefixes is in several groups.

    Attributes:
        group: [boundaries]: the index of each one's group.
        num_bytes: [groups]: the most that each may have to give.
    """

    group: Numbers
    num_bytes: Numbers


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
    rank first, chooses among the listed boundaries as among all. With hints it may choose a few others, of as many
    bytes: what a hint keeps holds up what it continues.

    A boundary is evicted after all that continue it, so at the latest of their ranks; those that leave anyhow do not
    count. The list has those with the lowest such ranks, of as many bytes as a group may have to give. Boundaries with
    a hint, and what they continue, are listed beside these, since a hint changes the order.

    Args:
        ranks: [boundaries]: the lowest is evicted first, of equal ones the longest unused.
        stays: [boundaries]: whether one stays, and what it continues.
        leaves: [boundaries]: whether one leaves by its age or state, at any rank, unless it stays.
        marked: [boundaries]: whether a hint applies to one.
        needs: By each of these the list has enough.
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
        rows = order[np.argsort(need.group[order], kind="stable")]
        group, num_bytes = need.group[rows], np.where(is_marked[rows], 0, held.num_bytes[rows])
        given_before = np.cumsum(num_bytes) - num_bytes
        given_before -= given_before[np.searchsorted(group, group)]  # by those of its own group alone
        listed[rows[given_before < need.num_bytes[group]]] = True
    return listed
