"""How far each tier alone would carry a prompt, and what would be read from it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from kvstore.api import Offer
from kvstore.model.coverage import ends_to_resume, longest_resumable
from kvstore.store.placement import Presence
from kvstore.store.slices import SliceMap, count_first, groups_present

__all__ = ["offers_of"]


def offers_of(
    presence: Presence, resume_tokens: int, names: Sequence[str], bits: Sequence[int] | None = None
) -> tuple[Offer, ...]:
    """The resume points that memory alone, memory and the hot tier, and all tiers together serve, ascending.

    Args:
        presence: What was found where.
        resume_tokens: The longest resume point of all tiers together.
        names: Names of the memory, the hot and the cold tier.
        bits: `presence.groups_present()`, where the caller has it.

    Each record counts for the first tier that has it, with the mean of its group's record sizes as far as tiers know.
    """
    query = presence.query
    if resume_tokens <= query.local_tokens:
        return ()
    tokens = [boundary.tokens for boundary in query.boundaries]
    places = [presence.memory, presence.hot, presence.cold]
    used = [index for index, found in enumerate(places) if found]
    offers: list[Offer] = []
    for index in used:
        some = places[: index + 1]
        reached = resume_tokens
        if index == used[-1]:
            present = presence.groups_present() if bits is None else bits
        else:
            present = groups_present(presence.layout, len(tokens), some)
            reached = longest_resumable(
                presence.layout,
                tokens,
                present,
                local_tokens=query.local_tokens,
                cap_tokens=resume_tokens,
                step_tokens=query.step_tokens,
            )
        if reached > (offers[-1].resume_tokens if offers else query.local_tokens):
            offers.append(Offer(reached, _tier_bytes(presence, tokens, present, reached, places=some, names=names)))
        if reached == resume_tokens:
            break
    return tuple(offers)


def _tier_bytes(
    presence: Presence,
    tokens: Sequence[int],
    present: Sequence[int],
    resume_tokens: int,
    *,
    places: Sequence[SliceMap],
    names: Sequence[str],
) -> dict[str, int]:
    """Bytes to read from each place for a resume point."""
    layout = presence.layout
    local_tokens = presence.query.local_tokens
    ends = ends_to_resume(layout, tokens, present, resume_tokens=resume_tokens, local_tokens=local_tokens)
    all_tokens = np.asarray(tokens, dtype=np.int64)
    num_bytes: Counter[str] = Counter()
    for group, chosen in enumerate(ends):
        counts = count_first(layout, group, np.searchsorted(all_tokens, chosen), places)
        for name, count in zip(names, counts, strict=False):
            if count:
                num_bytes[name] += count * presence.mean_bytes(group, 0)
    return dict(num_bytes)
