"""`/v1/lookup`: what is stored for a prompt, and where it stops."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvstore.catalog.base import Catalog
from kvstore.catalog.entry import EntryShape, Level
from kvstore.model.coverage import longest_resumable
from kvstore.model.keys import Boundary
from kvstore.model.layout import Layout
from kvstore.model.prefix_chain import LINK_TOKENS, PlainChain
from kvstore.service.admin.access import Reader
from kvstore.service.admin.catalog_access import Namespace
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.memory import held_at
from kvstore.service.admin.parameters import FROM_WHOLE, NAMESPACE_EXAMPLE, NAMESPACE_PATTERN, namespace_id
from kvstore.service.admin.problems import Refused, refusals
from kvstore.service.admin.token_ids import split_token_ids
from kvstore.store.encryption.key_ring import Generation
from kvstore.store.placement import PackedSlices, SliceMap, groups_present

__all__ = ["router"]

router = APIRouter(tags=["lookup"])

_TOKENS_MAX = 262_144
_HASHED_AT_ONCE = 512 * LINK_TOKENS
"""Tokens that are hashed before others get a turn."""
_LISTED_MAX = 1024
_READ_AT_ONCE = 1024
"""Boundaries that are read from the catalog in one call."""

TokenId = Annotated[int, Field(strict=True, ge=0, lt=1 << 32), FROM_WHOLE]


class Prompt(BaseModel):
    """A prompt as an engine sees it: token ids, no text."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"example": {"namespace": NAMESPACE_EXAMPLE, "token_ids": list(range(1, 33))}},
    )

    namespace: str = Field(pattern=NAMESPACE_PATTERN)
    token_ids: list[TokenId] = Field(
        max_length=_TOKENS_MAX, description="of the whole prompt; what is behind the last multiple of 16 does not count"
    )
    cache_salt: str | None = Field(default=None, max_length=4096, description="the request's `cache_salt`")


class FoundBoundary(BaseModel):
    """A boundary of the prompt with something stored."""

    tokens: int = Field(examples=[256])
    prefix: str
    tiers: list[str] = Field(description="tiers that hold at least one slice", examples=[["redis", "s3"]])
    is_whole: bool = Field(description="every slice of every group is somewhere")


class GroupReach(BaseModel):
    """How far one group alone would carry the prompt."""

    group: int
    kind: str = Field(examples=["full_attention"])
    resume_tokens: int = Field(description="the longest resume point, if all other groups were whole")
    next_tokens: int | None = Field(description="the boundary whose record it lacks; null: none, or a state's")
    missing_slices: list[int] = Field(description="which slices that record lacks; all of them: it is not stored")


class PromptFound(BaseModel):
    """What is there for a prompt, and where it stops."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "num_tokens": 4096,
                "resume_tokens": 1024,
                "is_certain": True,
                "is_retired": False,
                "groups": [
                    {
                        "group": 0,
                        "kind": "full_attention",
                        "resume_tokens": 1024,
                        "next_tokens": 1280,
                        "missing_slices": [3],
                    }
                ],
                "boundaries": [{"tokens": 256, "prefix": "9f" * 32, "tiers": ["redis", "s3"], "is_whole": True}],
            }
        }
    )

    num_tokens: int = Field(description="tokens that were looked at: a multiple of 16")
    resume_tokens: int = Field(
        description="where an engine could resume; an engine's block size and its last token may make it less"
    )
    is_certain: bool = Field(
        description="the catalog knows of everything that is stored; else the tiers may hold more than is told here"
    )
    is_retired: bool = Field(default=False, description="the namespace's weights are retired: nothing of it is served")
    groups: list[GroupReach]
    boundaries: list[FoundBoundary] = Field(
        description="in the prompt's order, the first 1,024; those with nothing are left out"
    )


_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": Prompt.model_json_schema()}}}}


@router.post("/lookup", responses=refusals(401, 403, 404, 413, 422, 429, 503), openapi_extra=_BODY)
async def look_up(context: Context, grant: Reader, request: Request) -> PromptFound:
    """What the hot and the cold tier and this node's memory hold of a prompt without adapter, media and embeddings.
    Nothing is fetched, and nothing counts as a use.
    """
    prompt, token_ids = await _read_prompt(request)
    found = await context.catalog.find(namespace_id(prompt.namespace), grant, deadline=context.soon())
    catalog = await context.catalog.open()
    async with context.walks:
        hashed = await _hash(token_ids, prompt.cache_salt)
        boundaries, hot, cold = await _read_named(context, catalog, found, hashed)
        indexes = _worth_a_look(boundaries, found.layout.page_tokens, {*_indexes(hot), *_indexes(cold)})
        prefixes = [boundary.prefix for boundary in boundaries]
        memory: SliceMap = dict(await held_at(context, found, prefixes, indexes))
        is_certain = await catalog.is_complete(deadline=context.soon())
        maps = {context.operations.tier_names[None]: memory}
        for level, held in ((Level.HOT, hot), (Level.COLD, cold)):
            if level in context.operations.tier_names:
                maps[context.operations.tier_names[level]] = held
        if is_retired := context.is_retired(found):
            maps = {}
        told = await _found(found.layout, boundaries, maps, is_certain=is_certain)
        return told.model_copy(update={"is_retired": is_retired})


async def _read_prompt(request: Request) -> tuple[Prompt, Sequence[int]]:
    """The body without its token ids, and these."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(422, "the body is not sent as JSON", field="body", expected="Content-Type: application/json")
    fields, token_ids = await split_token_ids(await request.body(), _TOKENS_MAX)
    try:
        prompt = Prompt.model_validate(fields if token_ids is None else {**fields, "token_ids": []})
    except ValidationError as error:
        problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]
        raise RequestValidationError(problems) from error
    return prompt, prompt.token_ids if token_ids is None else token_ids


async def _hash(token_ids: Sequence[int], cache_salt: str | None) -> list[Boundary]:
    chain, boundaries = PlainChain(cache_salt), []
    for start in range(0, len(token_ids), _HASHED_AT_ONCE):
        boundaries += chain.extend(token_ids[start : start + _HASHED_AT_ONCE])
        await asyncio.sleep(0)
    return boundaries


async def _read_named(
    context: AdminContext, catalog: Catalog, namespace: Namespace, boundaries: Sequence[Boundary]
) -> tuple[Sequence[Boundary], SliceMap, SliceMap]:
    """The boundaries under the names that their records stand under, and what the catalog has: of each under the first
    name that has something, the current key's before those of earlier ones.
    """
    generations = context.generations(namespace.description.tenant)
    named = await _named(boundaries, generations[0]) if generations else []
    hot, cold = await _read(context, catalog, namespace, named)
    for generation in generations[1:]:
        others = await _named(boundaries, generation)
        has_some = {*_indexes(hot), *_indexes(cold)}
        has_more = {index for held in await _read(context, catalog, namespace, others) for index in _indexes(held)}
        if chosen := has_more - has_some:
            named = [others[index] if index in chosen else boundary for index, boundary in enumerate(named)]
            hot, cold = await _read(context, catalog, namespace, named)
    return named, hot, cold


async def _named(boundaries: Sequence[Boundary], generation: Generation) -> list[Boundary]:
    if generation is None:
        return list(boundaries)
    named = []
    for start in range(0, len(boundaries), _READ_AT_ONCE):
        some = boundaries[start : start + _READ_AT_ONCE]
        named += [Boundary(boundary.tokens, generation.name_of(boundary.prefix)) for boundary in some]
        await asyncio.sleep(0)
    return named


async def _read(
    context: AdminContext, catalog: Catalog, namespace: Namespace, boundaries: Sequence[Boundary]
) -> tuple[SliceMap, SliceMap]:
    """What the catalog has at the hot and at the cold level."""
    parts: list[list[np.ndarray[tuple[int, int], np.dtype[np.uint8]]]] = [[] for _ in Level]
    for start in range(0, len(boundaries), _READ_AT_ONCE):
        prefixes = [boundary.prefix for boundary in boundaries[start : start + _READ_AT_ONCE]]
        table = await catalog.lookup(namespace.id, prefixes, deadline=context.soon())
        for level in Level:
            parts[level].append(table.rows(level))
    blank = np.zeros((0, EntryShape.of(namespace.layout).row_bytes), dtype=np.uint8)
    hot, cold = (PackedSlices(namespace.layout, np.concatenate([blank, *parts[level]])) for level in Level)
    return hot, cold


def _worth_a_look(boundaries: Sequence[Boundary], page_tokens: int, stored: set[int]) -> list[int]:
    """Boundaries that this node's memory is asked about: ends of pages, the prompt's own end, and what a tier has."""
    last = boundaries[-1].tokens // page_tokens * page_tokens if boundaries else 0
    return [
        index
        for index, boundary in enumerate(boundaries)
        if index in stored or boundary.tokens % page_tokens == 0 or boundary.tokens > last
    ]


async def _found(
    layout: Layout, boundaries: Sequence[Boundary], maps: dict[str, SliceMap], *, is_certain: bool
) -> PromptFound:
    tiers_at: dict[int, list[str]] = {}
    for name, held in maps.items():
        for index in _indexes(held):
            tiers_at.setdefault(index, []).append(name)
    bits = groups_present(layout, len(boundaries), list(maps.values()))
    everything = (1 << len(layout.groups)) - 1
    reach = max(tiers_at, default=-1) + 1  # nothing behind the last boundary that has something can be resumed
    tokens = [boundary.tokens for boundary in boundaries]
    groups = []
    for group, one in enumerate(layout.groups):
        await asyncio.sleep(0)
        alone = [mask >> group & 1 for mask in bits[:reach]]
        resume = _resumable(Layout(layout.page_tokens, (one,)), tokens[:reach], alone)
        lacks = None if one.is_state else _next_index(resume, layout.page_tokens, len(boundaries))
        held_slices = 0 if lacks is None else _held_bits(maps, lacks, group)
        groups.append(
            GroupReach(
                group=group,
                kind=one.kind.name,
                resume_tokens=resume,
                next_tokens=None if lacks is None else tokens[lacks],
                missing_slices=[]
                if lacks is None
                else [slice_ for slice_ in range(one.num_slices) if not held_slices >> slice_ & 1],
            )
        )
    return PromptFound(
        num_tokens=tokens[-1] if tokens else 0,
        resume_tokens=_resumable(layout, tokens[:reach], bits[:reach]),
        is_certain=is_certain,
        groups=groups,
        boundaries=[
            FoundBoundary(
                tokens=tokens[index],
                prefix=boundaries[index].prefix.hex(),
                tiers=tiers_at[index],
                is_whole=bits[index] == everything,
            )
            for index in sorted(tiers_at)[:_LISTED_MAX]
        ],
    )


def _indexes(held: SliceMap) -> list[int]:
    """Boundaries with something, ascending."""
    if isinstance(held, PackedSlices):
        found: list[int] = np.flatnonzero(held.rows.any(axis=1)).tolist()
        return found
    return sorted({index for index, _ in held})


def _resumable(layout: Layout, tokens: Sequence[int], bits: Sequence[int]) -> int:
    cap = tokens[-1] if tokens else 0
    return longest_resumable(layout, tokens, bits, local_tokens=0, cap_tokens=cap, step_tokens=LINK_TOKENS)


def _next_index(resume_tokens: int, page_tokens: int, num_boundaries: int) -> int | None:
    """Index of the boundary that would carry further: the end of the page it goes on in, or the prompt's end."""
    whole = (resume_tokens // page_tokens + 1) * page_tokens // LINK_TOKENS
    index = min(whole, num_boundaries) - 1
    return index if (index + 1) * LINK_TOKENS > resume_tokens else None


def _held_bits(maps: dict[str, SliceMap], index: int, group: int) -> int:
    bits = 0
    for held in maps.values():
        bits |= held.get((index, group), 0)
    return bits
