"""How boundaries leave a level: hidden, deleted, then taken off the totals; ends of prefixes first, in batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from kvstore.catalog.base import BoundaryEntry, Catalog, LeaveReason
from kvstore.catalog.entry import Level
from kvstore.errors import Unavailable
from kvstore.runtime.background import gather_all
from kvstore.runtime.clock import Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.store.retention_plan import Leaver
from kvstore.tiers.base import Tier

__all__ = ["Departures"]

_CALL_S = 10.0
_log = logging.getLogger(__name__)

_AT_ONCE, _CALLS, _TOGETHER_MIN = 64, 4, 4
"""Boundaries that are deleted at a time, the number of calls that share them, and the fewest worth a call of their own:
what a call has deleted makes room at once."""
_HIDDEN_AT_ONCE = 64
"""Boundaries that are hidden before the first of them is deleted."""


class Departures:
    """Deletes what is to leave one level.

    A boundary leaves as a whole, all groups and slices: the catalog hides it, then its records are deleted, then the
    totals change. A process that dies in between leaves it marked in the catalog, and another one finishes the job.

    Args:
        tier: Where to delete; not wrapped in a `CataloguedTier`.
        level: The catalog's name for the tier.
        catalog: Knows what is held.
        meters: Where to count: `retention_boundaries{tier,reason} retention_bytes{tier,reason}
            retention_failures{tier}`.
        clock: For deadlines.
        on_gone: Called with the bytes of what has left.

    Attributes:
        has_unfinished: Whether something may be hidden but not deleted.
    """

    def __init__(
        self,
        tier: Tier,
        level: Level,
        catalog: Catalog,
        *,
        meters: Meters,
        clock: Clock,
        on_gone: Callable[[int], None],
    ) -> None:
        self._tier = tier
        self._level = level
        self._catalog = catalog
        self._meters = meters
        self._clock = clock
        self._on_gone = on_gone
        self._is_failing = False
        self.has_unfinished = True  # perhaps an earlier run of this service was cut off

    async def evict(self, leavers: Sequence[Leaver]) -> int:
        """Evict boundaries, ends of prefixes first; returns the bytes freed."""
        left = 0
        stay: set[int] = set()
        for start in range(0, len(leavers), _HIDDEN_AT_ONCE):
            part = range(start, min(start + _HIDDEN_AT_ONCE, len(leavers)))
            for index in part:  # ends come first: whatever one that stays stands on stays as well
                if index in stay and (below := leavers[index].parent) is not None:
                    stay.add(below)
            indexes = [index for index in part if index not in stay]
            place = {index: at for at, index in enumerate(indexes)}
            leaving = [leavers[index].leaving(place) for index in indexes]
            hidden = await self._catalog.start_leaving(leaving, self._level, deadline=self._soon())
            entries = {index: entry for index, entry in zip(indexes, hidden, strict=True) if entry is not None}
            gone = await self._delete_all(entries, leavers)
            left += sum(entries[index].num_bytes(self._level) for index in gone)
            for index in part:
                if index not in gone and (below := leavers[index].parent) is not None:
                    stay.add(below)
        return left

    async def finish(self, entry: BoundaryEntry) -> int:
        """Delete a boundary that another process, or an earlier run of this one, has hidden; returns bytes freed."""
        return await self._delete([(entry, LeaveReason.EVICTED)]) or 0

    async def _delete_all(self, hidden: Mapping[int, BoundaryEntry], leavers: Sequence[Leaver]) -> set[int]:
        """Delete the records of hidden boundaries, ends first; returns the indexes of those that are deleted. What the
        tier fails to delete stays hidden until a later round; what follows it becomes visible again.
        """
        gone: set[int] = set()
        indexes = list(hidden)
        for start in range(0, len(indexes), _AT_ONCE):
            part = indexes[start : start + _AT_ONCE]
            together = max(_TOGETHER_MIN, -(-len(part) // _CALLS))
            calls = [part[at : at + together] for at in range(0, len(part), together)]
            deleted = await gather_all(
                self._delete([(hidden[index], leavers[index].reason) for index in call]) for call in calls
            )
            gone.update(*(call for call, num_bytes in zip(calls, deleted, strict=True) if num_bytes is not None))
            if None in deleted:
                for index in indexes[start + _AT_ONCE :]:
                    one = hidden[index]
                    await self._catalog.stop_leaving(one.namespace, one.prefix, self._level, deadline=self._soon())
                break
        return gone

    async def _delete(self, leaving: Sequence[tuple[BoundaryEntry, LeaveReason]]) -> int | None:
        """Delete the records of hidden boundaries, then take them off the totals; returns the bytes freed. `None`: the
        tier did not answer, a later round tries again.
        """
        try:
            keys = [key for entry, _ in leaving for key in entry.keys(self._level)]
            await self._tier.delete_all(keys, deadline=self._soon())
        except Unavailable as error:
            if not self._is_failing:  # once until it works again: rounds are many
                _log.warning("what should leave cannot be deleted, later rounds try again: %s", error)
            self._is_failing = True
            self._meters.add("retention_failures", tier=self._tier.name)
            self.has_unfinished = True
            return None
        self._is_failing = False
        left = await self._catalog.finish_leaving(leaving, self._level, deadline=self._soon())
        for entry, reason in leaving:
            why, num_bytes = reason.name.lower(), entry.num_bytes(self._level)
            self._meters.add("retention_boundaries", tier=self._tier.name, reason=why)
            self._meters.add("retention_bytes", num_bytes, tier=self._tier.name, reason=why)
        self._on_gone(sum(entry.num_bytes(self._level) for entry, _ in leaving))  # not before the totals tell of it
        return left

    def _soon(self) -> Deadline:
        return Deadline.after(_CALL_S, self._clock)
