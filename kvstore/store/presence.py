"""Asks the tiers what they hold for a query; `placement` decides what to ask."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.api import PrefixQuery
from kvstore.errors import Closed, Unavailable
from kvstore.model.keys import RecordKey
from kvstore.model.layout import Layout
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.store.absent import AbsentKeys
from kvstore.store.catalog_lookup import CatalogLookup
from kvstore.store.placement import (
    Presence,
    Probe,
    SliceMap,
    by_group,
    fill,
    gaps,
    inner_probes,
    last_of_each,
    page_probes,
    spread,
)
from kvstore.tiers.base import Tier
from kvstore.tiers.memory import MemoryTier

__all__ = ["PresenceFinder"]

_PAGE_ROUNDS_MAX = 4
"""With 16 questions a round, three rounds narrow 4,096 pages down to one; `stage` finds holes within holes."""

_FIRST_ROUND_SHARE = 0.75
"""The pages' share of a lookup's time: a tier that hangs must leave time to ask the other one for the tails."""


@dataclass(eq=False, slots=True)
class _Asked:
    """One slower tier during one lookup.

    Attributes:
        tier: The tier.
        found: Where its answers go.
        exact: Ask for every slice of every probe; otherwise guess from a few.
        failed: It did not answer, and is not asked again.
    """

    tier: Tier
    found: SliceMap
    exact: bool
    failed: bool = False


class PresenceFinder:
    """Finds where a query's records are.

    Memory answers first and costs nothing. The hot and the cold tier are then asked at the same time for what memory
    lacks: one batch of heads for the pages, one for the tails and states that still matter. A tier that is down, slow
    or closed is skipped and counted.

    A catalog, if there is one, is asked instead of the tiers, for all boundaries at once. What it has is believed
    (`stage` finds out); so is what it lacks, once it knows of everything that is stored. When it does not answer, the
    tiers are asked.
    """

    def __init__(
        self,
        memory: MemoryTier,
        hot: Tier | None,
        cold: Tier | None,
        absent: AbsentKeys,
        meters: Meters,
        *,
        cold_probes: int,
        catalog: CatalogLookup | None = None,
    ) -> None:
        self._memory = memory
        self._hot = hot
        self._cold = cold
        self._absent = absent
        self._meters = meters
        self._cold_probes = cold_probes
        self._catalog = catalog

    async def find(self, query: PrefixQuery, layout: Layout, deadline: Deadline) -> Presence:
        """Return what is known once all tiers have answered, or at the deadline. Never raises `Unavailable`."""
        presence = Presence(layout, query)
        if self._catalog is not None:
            held = self._memory.prefixes()
            at = [index for index, boundary in enumerate(query.boundaries) if boundary.prefix in held] if held else []
            self._look_in_memory(presence, [(index, group) for index in at for group in range(len(layout.groups))])
            if await self._catalog.fill(presence, deadline, hot=self._hot is not None, cold=self._cold is not None):
                return presence
        pages = page_probes(layout, query)
        self._look_in_memory(presence, pages)
        inner = inner_probes(layout, query, presence.complete)
        self._look_in_memory(presence, inner)
        asked = []
        if self._hot is not None:
            asked.append(_Asked(self._hot, presence.hot, exact=True))
        if self._cold is not None:
            asked.append(_Asked(self._cold, presence.cold, exact=False))
        if not asked:
            return presence
        if wanted := [probe for probe in pages if not presence.complete(probe)]:
            share = deadline.earlier(deadline.remaining_s * _FIRST_ROUND_SHARE) if len(asked) > 1 else deadline
            await asyncio.gather(*(self._ask_pages(presence, place, wanted, share) for place in asked))
            inner = inner_probes(layout, query, presence.complete)
            self._look_in_memory(presence, inner)
        resume_tokens = presence.resume_tokens()  # a record that ends below it would not lengthen the hit
        wanted = [
            probe
            for probe in inner
            if query.boundaries[probe[0]].tokens > resume_tokens and not presence.complete(probe)
        ]
        await asyncio.gather(*(self._ask_inner(presence, place, wanted, deadline) for place in asked))
        return presence

    def _look_in_memory(self, presence: Presence, probes: Iterable[Probe]) -> None:
        for probe in probes:
            if probe in presence.memory:
                continue
            held = 0
            for slice_, key in enumerate(presence.keys(probe)):
                if key in self._memory:
                    held |= 1 << slice_
                    if slice_ == 0 and (record := self._memory.peek(key)) is not None:
                        presence.note_size(probe[1], record.num_bytes)
                elif slice_ == 0 and self._hot is None and self._cold is None:
                    break  # nothing else could complete it
            if held:
                presence.memory[probe] = held

    async def _ask_pages(self, presence: Presence, place: _Asked, pages: Sequence[Probe], deadline: Deadline) -> None:
        """Ask for pages: for all of them, or for a spread of each group's and then, in rounds, where answers change."""
        if place.exact:
            await self._ask_exactly(presence, place, pages, deadline)
            return
        groups = by_group(pages)
        limit = max(2, self._cold_probes // len(groups))
        answers: dict[int, dict[int, bool]] = {group: {} for group in groups}
        for number in range(_PAGE_ROUNDS_MAX):
            chosen = [
                (group, i)
                for group in groups
                for i in (gaps(answers[group], limit) if number else spread(len(groups[group]), limit))
            ]
            if not chosen or place.failed:
                break
            told = await self._ask_one_slice(presence, place, [groups[group][i] for group, i in chosen], deadline)
            for (group, i), answer in zip(chosen, told, strict=True):
                answers[group][i] = answer
        for group, probes in groups.items():
            filled = fill(answers[group], len(probes))
            self._guess(presence, place, [probe for probe, there in zip(probes, filled, strict=True) if there])

    async def _ask_inner(self, presence: Presence, place: _Asked, probes: Sequence[Probe], deadline: Deadline) -> None:
        if place.exact:
            await self._ask_exactly(presence, place, probes, deadline)
            return
        chosen = last_of_each(probes, self._cold_probes)
        told = await self._ask_one_slice(presence, place, chosen, deadline)
        self._guess(presence, place, [probe for probe, there in zip(chosen, told, strict=True) if there])

    async def _ask_exactly(
        self, presence: Presence, place: _Asked, probes: Sequence[Probe], deadline: Deadline
    ) -> None:
        slices = [(probe, slice_) for probe in probes for slice_ in presence.missing(probe)]
        all_keys = {probe: presence.keys(probe) for probe in probes}
        sizes = await self._heads(presence, place, [all_keys[probe][slice_] for probe, slice_ in slices], deadline)
        for (probe, slice_), num_bytes in zip(slices, sizes, strict=True):
            if num_bytes is not None:
                place.found[probe] = place.found.get(probe, 0) | 1 << slice_
                presence.note_size(probe[1], num_bytes)

    async def _ask_one_slice(
        self, presence: Presence, place: _Asked, probes: Sequence[Probe], deadline: Deadline
    ) -> list[bool]:
        """For each probe whether the first slice that memory lacks is there."""
        keys = [presence.keys(probe)[presence.missing(probe)[0]] for probe in probes]
        sizes = await self._heads(presence, place, keys, deadline)
        for probe, num_bytes in zip(probes, sizes, strict=True):
            presence.note_size(probe[1], num_bytes or 0)
        return [num_bytes is not None for num_bytes in sizes]

    def _guess(self, presence: Presence, place: _Asked, probes: Iterable[Probe]) -> None:
        """Assume that all slices that memory lacks are there, except those that were found missing lately."""
        for probe in probes:
            keys = presence.keys(probe)
            for slice_ in presence.missing(probe):
                if not (len(self._absent) and keys[slice_] in self._absent):
                    place.found[probe] = place.found.get(probe, 0) | 1 << slice_

    async def _heads(
        self, presence: Presence, place: _Asked, keys: Sequence[RecordKey], deadline: Deadline
    ) -> Sequence[int | None]:
        if place.failed or not keys:
            return [None] * len(keys)
        try:
            return await place.tier.head(keys, deadline=deadline)
        except (Unavailable, Closed):
            place.failed = True
            presence.silent.add(place.tier.name)
            self._meters.add("lookup_tier_failures", tier=place.tier.name)
            return [None] * len(keys)
