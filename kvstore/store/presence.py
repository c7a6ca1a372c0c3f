"""Asks the tiers what they hold for a query; `placement` decides what to ask."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from kvstore.api import PrefixQuery
from kvstore.errors import Closed, Unavailable
from kvstore.model.keys import RecordKey
from kvstore.model.layout import Layout
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.runtime.turns import PIECE, LongWork, Turns, who_asks
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
from kvstore.store.slices import slices_of
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

    Args:
        memory, hot, cold: The tiers; `None`: there is none.
        absent: What was expected and not there, lately.
        meters: Where to count.
        cold_probes: Heads per round of questions to the cold tier.
        work: Runs what takes long for a long prompt.
        questions: Turns at asking a tier.
        catalog: Asked instead of the tiers, if there is one.
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
        work: LongWork,
        questions: Turns,
        catalog: CatalogLookup | None = None,
    ) -> None:
        self._memory = memory
        self._hot = hot
        self._cold = cold
        self._absent = absent
        self._meters = meters
        self._cold_probes = cold_probes
        self._work = work
        self._questions = questions
        self._catalog = catalog

    async def find(self, query: PrefixQuery, layout: Layout, deadline: Deadline) -> Presence:
        """Return what is known once all tiers have answered, or at the deadline. Never raises `Unavailable`."""
        presence = Presence(layout, query)
        run, num_cells = self._work.run, presence.num_cells
        await self._look_in_memory(presence)
        if self._catalog is not None and await self._catalog.fill(
            presence, deadline, hot=self._hot is not None, cold=self._cold is not None
        ):
            return presence
        asked = []
        if self._hot is not None:
            asked.append(_Asked(self._hot, presence.hot, exact=True))
        if self._cold is not None:
            asked.append(_Asked(self._cold, presence.cold, exact=False))
        if not asked:
            return presence
        if wanted := await run(num_cells, _pages_wanted, presence):
            share = deadline.earlier(deadline.remaining_s * _FIRST_ROUND_SHARE) if len(asked) > 1 else deadline
            await asyncio.gather(*(self._ask_pages(presence, place, wanted, share) for place in asked))
        wanted = await run(num_cells, _inner_wanted, presence)
        await asyncio.gather(*(self._ask_inner(presence, place, wanted, deadline) for place in asked))
        return presence

    async def _look_in_memory(self, presence: Presence) -> None:
        num_boundaries = len(presence.query.boundaries)
        step = max(1, PIECE // len(presence.layout.groups))
        for start in range(0, num_boundaries, step):
            stop = min(start + step, num_boundaries)
            async with self._work.turn((stop - start) * len(presence.layout.groups)):
                self._look_between(presence, start, stop)

    def _look_between(self, presence: Presence, start: int, stop: int) -> None:
        query, held = presence.query, self._memory.boundaries(presence.query.namespace)
        if not held:
            return
        for index in range(start, stop):
            groups = held.get(query.boundaries[index].prefix)
            for group, bits in groups.items() if groups is not None else ():
                probe = (index, group)
                presence.memory[probe] = bits
                if bits & 1 and (record := self._memory.peek(presence.key(probe, 0))) is not None:
                    presence.note_size(group, record.num_bytes)

    async def _ask_pages(self, presence: Presence, place: _Asked, pages: Sequence[Probe], deadline: Deadline) -> None:
        """Ask for pages: for all of them, or for a spread of each group's and then, in rounds, where answers change."""
        if place.exact:
            await self._ask_exactly(presence, place, pages, deadline)
            return
        groups = await self._work.run(len(pages), by_group, pages)
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
        await self._guess(presence, place, await self._work.run(len(pages), _filled, groups, answers))

    async def _ask_inner(self, presence: Presence, place: _Asked, probes: Sequence[Probe], deadline: Deadline) -> None:
        if place.exact:
            await self._ask_exactly(presence, place, probes, deadline)
            return
        chosen = await self._work.run(len(probes), last_of_each, probes, self._cold_probes)
        told = await self._ask_one_slice(presence, place, chosen, deadline)
        await self._guess(presence, place, [probe for probe, there in zip(chosen, told, strict=True) if there])

    async def _ask_exactly(
        self, presence: Presence, place: _Asked, probes: Sequence[Probe], deadline: Deadline
    ) -> None:
        slices = ((probe, slice_) for probe in probes for slice_ in presence.missing(probe))
        while not place.failed:
            async with self._work.turn(len(probes)):
                piece = list(islice(slices, PIECE))
                keys = [presence.key(probe, slice_) for probe, slice_ in piece]
            if not keys:
                return
            sizes = await self._heads(presence, place, keys, deadline)
            for (probe, slice_), num_bytes in zip(piece, sizes, strict=True):
                if num_bytes is not None:
                    place.found[probe] = place.found.get(probe, 0) | 1 << slice_
                    presence.note_size(probe[1], num_bytes)

    async def _ask_one_slice(
        self, presence: Presence, place: _Asked, probes: Sequence[Probe], deadline: Deadline
    ) -> list[bool]:
        """For each probe whether the first slice that memory lacks is there."""
        keys = [presence.key(probe, presence.missing(probe)[0]) for probe in probes]
        sizes = await self._heads(presence, place, keys, deadline)
        for probe, num_bytes in zip(probes, sizes, strict=True):
            presence.note_size(probe[1], num_bytes or 0)
        return [num_bytes is not None for num_bytes in sizes]

    async def _guess(self, presence: Presence, place: _Asked, probes: Sequence[Probe]) -> None:
        """Assume that all slices that memory lacks are there, except those that were found missing lately."""
        for start in range(0, len(probes), PIECE):
            async with self._work.turn(len(probes)):
                for probe in probes[start : start + PIECE]:
                    bits = presence.missing_bits(probe)
                    if self._absent.has_any(presence.query.boundaries[probe[0]].prefix):
                        for slice_ in slices_of(bits):
                            bits &= ~(int(presence.key(probe, slice_) in self._absent) << slice_)
                    if bits:
                        place.found[probe] = place.found.get(probe, 0) | bits

    async def _heads(
        self, presence: Presence, place: _Asked, keys: Sequence[RecordKey], deadline: Deadline
    ) -> Sequence[int | None]:
        if place.failed or not keys:
            return [None] * len(keys)
        try:
            async with deadline.scope("waiting to ask a tier"):
                await self._questions.begin(who_asks())
            try:
                return await place.tier.head(keys, deadline=deadline)
            finally:
                self._questions.end()
        except (Unavailable, Closed):
            place.failed = True
            presence.silent.add(place.tier.name)
            self._meters.add("lookup_tier_failures", tier=place.tier.name)
            return [None] * len(keys)


def _pages_wanted(presence: Presence) -> list[Probe]:
    """Pages that memory and the catalog do not have in full."""
    return [probe for probe in page_probes(presence.layout, presence.query) if not presence.complete(probe)]


def _filled(groups: Mapping[int, Sequence[Probe]], answers: Mapping[int, Mapping[int, bool]]) -> list[Probe]:
    """The pages of each group that are there, by the answers for some of them."""
    return [
        probe
        for group, probes in groups.items()
        for probe, is_there in zip(probes, fill(answers[group], len(probes)), strict=True)
        if is_there
    ]


def _inner_wanted(presence: Presence) -> list[Probe]:
    """Tails and states that could lengthen the hit; a record that ends below the resume point could not."""
    query, resume_tokens = presence.query, presence.resume_tokens()
    return [
        probe
        for probe in inner_probes(presence.layout, query, presence.complete)
        if query.boundaries[probe[0]].tokens > resume_tokens and not presence.complete(probe)
    ]
