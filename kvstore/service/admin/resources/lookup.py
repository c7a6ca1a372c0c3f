"""`/v1/lookup`: what is stored for a prompt, and where it stops."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from kvstore.catalog.entry import EntryShape, Level
from kvstore.model.coverage import Numbers, longest_resumable
from kvstore.model.keys import LINK_TOKENS, Boundary
from kvstore.model.layout import Layout
from kvstore.runtime.deadline import Deadline
from kvstore.service.admin.access import Reader
from kvstore.service.admin.catalog_access import Namespace
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.models import namespace_id
from kvstore.service.admin.problems import refusals
from kvstore.service.admin.prompt import ANSWER_S, Prompt, body_of, parse_prompt, read_json
from kvstore.store.encryption.encrypted import named_under
from kvstore.store.presence import PackedSlices, SliceMap, boundaries_of, groups_present

router = APIRouter(tags=["lookup"])

_LISTED_MAX = 1024
READ_AT_ONCE = 1024
"""Boundaries that are read from the catalog in one call."""


class FoundBoundary(BaseModel):
    """A boundary of the prompt with something stored."""

    tokens: int = Field(examples=[256])
    prefix: str
    tiers: list[str] = Field(description="tiers that hold at least one slice", examples=[["redis", "s3"]])
    is_whole: bool = Field(description="the tiers together hold every slice of every group")


class GroupReach(BaseModel):
    """How far one group alone could resume the prompt."""

    group: int
    kind: str = Field(examples=["full_attention"])
    resume_tokens: int = Field(description="the longest resume point if all other groups were whole", examples=[1024])
    next_tokens: int | None = Field(description="the boundary whose record is missing; null: none, or a state's")
    missing_slices: list[int] = Field(
        description="slices that this record lacks; all of them: it is not stored", examples=[[3]]
    )


class PromptFound(BaseModel):
    """What is stored for a prompt, and where it stops."""

    num_tokens: int = Field(description="tokens that were considered, a multiple of 16", examples=[4096])
    resume_tokens: int = Field(
        description="where an engine could resume; its block size and the last token can reduce it", examples=[1024]
    )
    is_certain: bool = Field(description="the catalog is complete; false: the tiers may hold more than this")
    is_retired: bool = Field(default=False, description="the namespace's weights are retired: nothing of it is served")
    groups: list[GroupReach]
    boundaries: list[FoundBoundary] = Field(
        description="in the prompt's order, the first 1,024; boundaries without records are left out"
    )


@router.post("/lookup", responses=refusals(404, 408, 413), openapi_extra=body_of(Prompt))
async def look_up(context: Context, grant: Reader, request: Request) -> PromptFound:
    """What the hot tier, the cold tier and this node's memory hold of a prompt without adapter, media and embeddings.
    Nothing is fetched, and nothing counts as a use.
    """
    body = await read_json(request)
    async with context.prompts.turn():
        prompt, text = await parse_prompt(body, Prompt)
        hashed = await text.boundaries(prompt.cache_salt)
        namespace = await context.catalog.find(namespace_id(prompt.namespace), grant)
        deadline = context.soon(ANSWER_S)
        boundaries, held = await read_slices(context, namespace, hashed, deadline)
        is_certain = await namespace.catalog.is_complete(deadline=deadline)
        is_retired = context.is_retired(namespace)
        return await _found(namespace.layout, boundaries, held, is_certain=is_certain, is_retired=is_retired)


async def read_slices(
    context: AdminContext, namespace: Namespace, boundaries: Sequence[Boundary], deadline: Deadline
) -> tuple[Sequence[Boundary], dict[str, SliceMap]]:
    """The boundaries under the names that their records are stored under, and what each tier has of them, this node's
    memory first; no tier has anything of retired weights.
    """
    if context.is_retired(namespace):
        return boundaries, {}
    named, hot, cold = await _read_stored(context, namespace, boundaries, deadline)
    in_memory: SliceMap = {}
    for start in range(0, len(named), READ_AT_ONCE):
        prefixes = [boundary.prefix for boundary in named[start : start + READ_AT_ONCE]]
        for (index, group), bits in context.operations.memory_slices(namespace.id, prefixes).items():
            in_memory[start + index, group] = bits
        await asyncio.sleep(0)
    names = context.operations.tier_names
    by_level: dict[Level | None, SliceMap] = {None: in_memory, Level.HOT: hot, Level.COLD: cold}
    return named, {names[level]: slices for level, slices in by_level.items() if level in names}


async def names_to_save(
    context: AdminContext, namespace: Namespace, boundaries: Sequence[Boundary]
) -> Sequence[Boundary]:
    """The boundaries under the names that the tenant's current key gives them; empty: the tenant has no key."""
    generations = context.generations(namespace.description.tenant)
    return await named_under(boundaries, generations[0]) if generations else []


async def _read_stored(
    context: AdminContext, namespace: Namespace, boundaries: Sequence[Boundary], deadline: Deadline
) -> tuple[Sequence[Boundary], SliceMap, SliceMap]:
    """The boundaries under the names that their records are stored under, and what the catalog has of them. With
    several keys a boundary gets the first name that has records, the current key's before earlier ones.
    """
    generations = context.generations(namespace.description.tenant)
    named = await named_under(boundaries, generations[0]) if generations else []
    hot, cold = await _read(namespace, named, deadline)
    for generation in generations[1:]:
        others = await named_under(boundaries, generation)
        has_some = boundaries_of(hot) | boundaries_of(cold)
        has_more = {index for held in await _read(namespace, others, deadline) for index in boundaries_of(held)}
        if chosen := has_more - has_some:
            named = [others[index] if index in chosen else boundary for index, boundary in enumerate(named)]
            hot, cold = await _read(namespace, named, deadline)
    return named, hot, cold


async def _read(namespace: Namespace, boundaries: Sequence[Boundary], deadline: Deadline) -> tuple[SliceMap, SliceMap]:
    """What the catalog has at the hot and at the cold level."""
    parts: list[list[np.ndarray[tuple[int, int], np.dtype[np.uint8]]]] = [[] for _ in Level]
    for start in range(0, len(boundaries), READ_AT_ONCE):
        prefixes = [boundary.prefix for boundary in boundaries[start : start + READ_AT_ONCE]]
        table = await namespace.catalog.lookup(namespace.id, prefixes, deadline=deadline)
        for level in Level:
            parts[level].append(table.rows(level))
    blank = np.zeros((0, EntryShape.of(namespace.layout).row_bytes), dtype=np.uint8)
    hot, cold = (PackedSlices(namespace.layout, np.concatenate([blank, *parts[level]])) for level in Level)
    return hot, cold


async def _found(
    layout: Layout, boundaries: Sequence[Boundary], maps: dict[str, SliceMap], *, is_certain: bool, is_retired: bool
) -> PromptFound:
    tiers_at: dict[int, list[str]] = {}
    for name, held in maps.items():
        for index in boundaries_of(held):
            tiers_at.setdefault(index, []).append(name)
    bits = groups_present(layout, len(boundaries), list(maps.values()))
    everything = (1 << len(layout.groups)) - 1
    reach = max(tiers_at, default=-1) + 1  # nothing can be resumed after the last boundary that has records
    tokens = [boundary.tokens for boundary in boundaries]
    groups = []
    for group, one in enumerate(layout.groups):
        await asyncio.sleep(0)
        alone = bits[:reach] >> group & 1
        resume = _resumable(Layout(layout.page_tokens, (one,)), tokens[:reach], alone)
        lacks = None if one.is_state else _next_index(resume, layout.page_tokens, len(boundaries))
        next_tokens, missing = None, []
        if lacks is not None:
            next_tokens, slices = tokens[lacks], _slices_at(maps, lacks, group)
            missing = [slice_ for slice_ in range(one.num_slices) if not slices >> slice_ & 1]
        groups.append(
            GroupReach(
                group=group,
                kind=one.kind.name,
                resume_tokens=resume,
                next_tokens=next_tokens,
                missing_slices=missing,
            )
        )
    return PromptFound(
        num_tokens=tokens[-1] if tokens else 0,
        resume_tokens=_resumable(layout, tokens[:reach], bits[:reach]),
        is_certain=is_certain,
        is_retired=is_retired,
        groups=groups,
        boundaries=[
            FoundBoundary(
                tokens=tokens[index],
                prefix=boundaries[index].prefix.hex(),
                tiers=tiers_at[index],
                is_whole=bool(bits[index] == everything),
            )
            for index in sorted(tiers_at)[:_LISTED_MAX]
        ],
    )


def _resumable(layout: Layout, tokens: Sequence[int], bits: Numbers) -> int:
    cap = tokens[-1] if tokens else 0
    return longest_resumable(layout, tokens, bits, local_tokens=0, cap_tokens=cap, step_tokens=LINK_TOKENS)


def _next_index(resume_tokens: int, page_tokens: int, num_boundaries: int) -> int | None:
    """Index of the next boundary that is needed: the end of the page after the resume point, or the prompt's end."""
    whole = (resume_tokens // page_tokens + 1) * page_tokens // LINK_TOKENS
    index = min(whole, num_boundaries) - 1
    return index if (index + 1) * LINK_TOKENS > resume_tokens else None


def _slices_at(maps: dict[str, SliceMap], index: int, group: int) -> int:
    """The slices that all tiers together hold of a group's record, as bits."""
    bits = 0
    for held in maps.values():
        bits |= held.get((index, group), 0)
    return bits
