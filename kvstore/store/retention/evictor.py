"""Evicts boundaries: hidden in the catalog, deleted, then subtracted from the totals; ends of prefixes first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from kvstore.catalog.base import Catalog, LeaveReason
from kvstore.catalog.entry import BoundaryEntry, Level
from kvstore.errors import Unavailable
from kvstore.runtime.background import gather_all
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.store.retention.plan import Victim
from kvstore.tiers.base import Tier

_log = logging.getLogger(__name__)

_LEVEL = Level.COLD
_CALL_S = 10.0
_AT_ONCE = 64
"""Boundaries that are hidden and then deleted, before others are hidden."""
_CALLS, _TOGETHER_MIN = 4, 4
"""The number of calls that share them, and the fewest worth a call of their own: what a call has deleted is free at
once."""
_LOGGED_AGAIN_S = 60.0
"""A tier that answers now and then, as one that is throttled, fails and works many times a second."""


class Evictor:
    """Deletes what is evicted from the cold tier.

    A boundary is evicted as a whole, all groups and slices: the catalog hides it, then its records are deleted, then
    the totals change. If the process dies in between, the boundary stays marked in the catalog, and a later round of
    any service finishes it.

    Args:
        tier: Where to delete; not wrapped in a `CataloguedTier`.
        on_freed: Called with the bytes of what was deleted.
        check_tier: Called before more is hidden; raises `Unavailable` while the tier is not used. What is hidden then
            stays hidden, and would be tried again in every round.

    Attributes:
        has_unfinished: Whether something may be hidden but not deleted.
    """

    def __init__(
        self,
        tier: Tier,
        catalog: Catalog,
        instruments: Instruments,
        on_freed: Callable[[int], None],
        check_tier: Callable[[], None],
    ) -> None:
        self._tier = tier
        self._catalog = catalog
        self._meters = instruments.meters
        self._clock = instruments.clock
        self._on_freed = on_freed
        self._check_tier = check_tier
        self._logged_s = float("-inf")
        self.has_unfinished = True  # an earlier run of this service may have been cut off

    async def evict(self, victims: Sequence[Victim]) -> int:
        """Evict boundaries, ends of prefixes first; returns the bytes freed.

        Raises:
            Unavailable: The tier is not used, or the catalog does not answer.
        """
        freed = 0
        stay: set[int] = set()
        for start in range(0, len(victims), _AT_ONCE):
            self._check_tier()
            part = range(start, min(start + _AT_ONCE, len(victims)))
            for index in part:  # ends come first: the parent of one that stays comes later, and stays as well
                if index in stay and (parent := victims[index].parent) is not None:
                    stay.add(parent)
            indexes = [index for index in part if index not in stay]
            place = {index: at for at, index in enumerate(indexes)}
            leaving = [victims[index].leaving(place) for index in indexes]
            hidden = await self._catalog.start_leaving(leaving, _LEVEL, deadline=self._deadline())
            entries = {index: entry for index, entry in zip(indexes, hidden, strict=True) if entry is not None}
            deleted = await self._delete_all(entries, victims)
            if entries and not deleted:
                self._check_tier()
                break  # it refuses deletions: more would only be hidden
            freed += sum(entries[index].num_bytes(_LEVEL) for index in deleted)
            for index in part:
                if index not in deleted and (parent := victims[index].parent) is not None:
                    stay.add(parent)
        return freed

    async def finish(self, entry: BoundaryEntry) -> int:
        """Delete a boundary that another process, or an earlier run of this one, has hidden; returns bytes freed."""
        return await self._delete([(entry, LeaveReason.EVICTED)]) or 0

    async def _delete_all(self, hidden: Mapping[int, BoundaryEntry], victims: Sequence[Victim]) -> set[int]:
        """Delete the records of hidden boundaries; returns the indexes of those that are deleted. What the tier fails
        to delete stays hidden until a later round.
        """
        indexes = list(hidden)
        together = max(_TOGETHER_MIN, -(-len(indexes) // _CALLS))
        calls = [indexes[at : at + together] for at in range(0, len(indexes), together)]
        deleted = await gather_all(
            self._delete([(hidden[index], victims[index].reason) for index in call]) for call in calls
        )
        done = (call for call, num_bytes in zip(calls, deleted, strict=True) if num_bytes is not None)
        return set(chain.from_iterable(done))

    async def _delete(self, leaving: Sequence[tuple[BoundaryEntry, LeaveReason]]) -> int | None:
        """Delete the records of hidden boundaries, then subtract them from the totals; returns the bytes freed. `None`:
        the tier did not answer, a later round tries again.
        """
        try:
            keys = [key for entry, _ in leaving for key in entry.keys(_LEVEL)]
            await self._tier.delete_all(keys, deadline=self._deadline())
        except Unavailable as error:
            if self._clock.monotonic_s() - self._logged_s >= _LOGGED_AGAIN_S:
                self._logged_s = self._clock.monotonic_s()
                _log.warning("eviction from %s failed, later rounds try again: %s", self._tier.name, error)
            self._meters.add("retention_failures", tier=self._tier.name, at=self._tier.name)
            self.has_unfinished = True
            return None
        freed = await self._catalog.finish_leaving(leaving, _LEVEL, deadline=self._deadline())
        for entry, reason in leaving:
            why, num_bytes = reason.name.lower(), entry.num_bytes(_LEVEL)
            self._meters.add("retention_boundaries", tier=self._tier.name, reason=why)
            self._meters.add("retention_bytes", num_bytes, tier=self._tier.name, reason=why)
        self._on_freed(sum(entry.num_bytes(_LEVEL) for entry, _ in leaving))  # not before the totals have changed
        return freed

    def _deadline(self) -> Deadline:
        return Deadline.after(_CALL_S, self._clock)
