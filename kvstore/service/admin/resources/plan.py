"""`/v1/plan`: the order of a prompt's documents that restores most of it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Collection, Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from kvstore.errors import InvalidRequest
from kvstore.model.coverage import longest_resumable
from kvstore.model.keys import LINK_TOKENS, Boundary, PlainChain, PrefixHash
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.service.admin.access import Reader
from kvstore.service.admin.catalog_access import Namespace
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.documents import OrderSearch, expected_uses
from kvstore.service.admin.models import NAMESPACE_EXAMPLE, PREFIX_EXAMPLE, WHOLE_NUMBER, namespace_id
from kvstore.service.admin.problems import refusals
from kvstore.service.admin.prompt import ANSWER_S, Prompt, body_of, parse_prompt, read_json
from kvstore.service.admin.resources.lookup import READ_AT_ONCE, names_to_save, read_slices
from kvstore.store.presence import groups_present

router = APIRouter(tags=["plan"])

_DOCUMENTS_MAX = 64
_WITHIN_MS_MAX = 1000
_REQUESTS = 1000
_USES_MIN = 10.0
"""Of 1,000 requests: a beginning is worth retaining if at least these are likely to begin with it."""

Tokens = Annotated[int, Field(strict=True, ge=1, lt=1 << 32), WHOLE_NUMBER]
Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 32), WHOLE_NUMBER]


class PromptOfDocuments(Prompt):
    """A prompt that has documents: token ids of the system prompt, of each document, and of what follows."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "example": {
                "namespace": NAMESPACE_EXAMPLE,
                "token_ids": list(range(1, 65)),
                "system_tokens": 8,
                "document_tokens": [20, 24],
            }
        },
    )

    system_tokens: Count = Field(description="how many of the tokens come before the first document")
    document_tokens: list[Tokens] = Field(
        max_length=_DOCUMENTS_MAX, description="the length of each document, in the order of `token_ids`"
    )
    order: Literal["any", "fixed"] = Field(default="any", description="`fixed`: the documents stay in this order")
    fixed_first: Count = Field(default=0, description="how many documents at the start stay where they are")
    fixed_last: Count = Field(default=0, description="how many documents at the end stay where they are")
    keep_duplicates: bool = Field(default=False, description="equal documents are sent as often as they are given")
    within_ms: Count = Field(
        default=4,
        le=_WITHIN_MS_MAX,
        description="no round of the search begins later than this after the search began",
    )
    compare: bool = Field(default=False, description="also report the hit of the order that was given")


class Beginning(BaseModel):
    """The start of the planned prompt, up to the last end of a page in a document."""

    num_documents: int = Field(description="documents that it has at least a part of", examples=[3])
    tokens: int = Field(examples=[1792])
    prefix: str = Field(description="for `POST /v1/pins`, once it is stored", examples=[PREFIX_EXAMPLE])
    is_stored: bool
    uses_per_1000: float = Field(
        description="how many of 1,000 requests are likely to begin with it, by the plans that this service was asked "
        "for before, as if documents were asked for independently of each other",
        examples=[82.5],
    )


class Plan(BaseModel):
    """An order of the documents, and what it restores."""

    order: list[int] = Field(description="the documents to send, by their place in the request", examples=[[1, 0]])
    left_out: list[int] = Field(description="documents that equal one in `order`")
    num_tokens: int = Field(description="tokens of the planned prompt", examples=[7300])
    hit_tokens: int = Field(
        description="how many of them the store can restore; an engine's block size can reduce it", examples=[3584]
    )
    hit_by_tier: dict[str, int] = Field(
        description="the same by tier: tokens that it adds to what faster tiers restore", examples=[{"redis": 3584}]
    )
    given_hit_tokens: int | None = Field(
        description="the hit of the documents of `order` in the order that was given; null: `compare` is false",
        examples=[512],
    )
    search_ms: float = Field(description="how long the search for the order took", examples=[3.1])
    total_ms: float = Field(
        default=0.0,
        description="from the arrival of the request to this answer: also the wait for a turn, reading the token ids "
        "and looking up the hits",
        examples=[9.4],
    )
    is_certain: bool = Field(description="the catalog is complete; false: the tiers may hold more than this")
    retain: list[Beginning] = Field(
        description="beginnings of the planned prompt that are worth to be retained, the shortest first"
    )


@router.post("/plan", responses=refusals(404, 408, 413), openapi_extra=body_of(PromptOfDocuments))
async def make_plan(context: Context, grant: Reader, request: Request) -> Plan:
    """The order of a prompt's documents that restores most of it. The planned prompt is an ordinary one: the system
    prompt, the documents of `order`, and what follows. Nothing is fetched or saved, and nothing counts as a use.
    """
    body = await read_json(request)
    started_s = SYSTEM_CLOCK.monotonic_s()
    async with context.prompts.turn():
        prompt, text = await parse_prompt(body, PromptOfDocuments)
        pieces = _Pieces(prompt, await text.ids())
        namespace = await context.catalog.find(namespace_id(prompt.namespace), grant)
        plan = await _plan(context, namespace, pieces, prompt.compare)
    plan.total_ms = round((SYSTEM_CLOCK.monotonic_s() - started_s) * 1000, 3)
    return plan


class _Pieces:
    """A prompt's token ids, divided.

    Attributes:
        documents: All of them.
        order: Those to send, in the order given: without duplicates, unless these are to be kept.
        left_out: The others.
        first: How many of `order` stay at its start.
        last: How many stay at its end.
        cache_salt, within_ms: As in the request.

    Raises:
        InvalidRequest: The lengths do not fit the token ids, or each other.
    """

    def __init__(self, prompt: PromptOfDocuments, ids: array[int]) -> None:
        num_documents = len(prompt.document_tokens)
        end = prompt.system_tokens + sum(prompt.document_tokens)
        if end > len(ids):
            is_system = prompt.system_tokens > len(ids)
            raise InvalidRequest(
                "the system prompt and the documents have more tokens than token_ids",
                field="body.system_tokens" if is_system else "body.document_tokens",
                expected=f"at most {len(ids)} in all",
                seen=end,
            )
        if prompt.fixed_first + prompt.fixed_last > num_documents:
            is_first = prompt.fixed_first > num_documents
            raise InvalidRequest(
                "more documents are fixed than there are",
                field="body.fixed_first" if is_first else "body.fixed_last",
                expected=f"fixed_first and fixed_last of at most {num_documents} together",
                seen=prompt.fixed_first + prompt.fixed_last,
            )
        self.cache_salt, self.within_ms = prompt.cache_salt, prompt.within_ms
        self.system, self.following = ids[: prompt.system_tokens], ids[end:]
        self.documents: list[array[int]] = []
        at = prompt.system_tokens
        for num_tokens in prompt.document_tokens:
            self.documents.append(ids[at : at + num_tokens])
            at += num_tokens
        is_fixed = prompt.order == "fixed"
        first = num_documents if is_fixed else prompt.fixed_first
        last = range(num_documents - (0 if is_fixed else prompt.fixed_last), num_documents)
        kept = self._kept([*range(first), *last, *range(first, last.start)], prompt.keep_duplicates)
        self.order = sorted(kept)
        self.left_out = sorted(set(range(num_documents)) - kept)
        self.first = sum(index < first for index in kept)
        self.last = sum(index in last for index in kept)

    def _kept(self, by_importance: Sequence[int], keep_duplicates: bool) -> set[int]:
        """The documents to send: of equal ones that which stays where it is, or else the first."""
        if keep_duplicates:
            return set(by_importance)
        kept: dict[bytes, int] = {}
        for index in by_importance:
            kept.setdefault(self.documents[index].tobytes(), index)
        return set(kept.values())

    def prompt(self, order: Sequence[int]) -> array[int]:
        """The token ids of a prompt with these documents."""
        return self.head(order) + self.following

    def head(self, order: Sequence[int]) -> array[int]:
        """The beginning of that prompt, up to the end of the last of these documents."""
        joined = self.system[:]
        for index in order:
            joined += self.documents[index]
        return joined


async def _plan(context: AdminContext, namespace: Namespace, pieces: _Pieces, is_compared: bool) -> Plan:
    layout, deadline = namespace.layout, context.soon(ANSWER_S)

    async def ask(boundaries: Sequence[Boundary]) -> Sequence[int]:
        named, held = await read_slices(context, namespace, boundaries, deadline)
        if not named:  # the tenant has no key
            return [0] * len(boundaries)
        present: list[int] = groups_present(layout, len(named), list(held.values())).tolist()
        return present

    order = pieces.order
    usual, shares = context.document_uses.note(
        namespace.description.tenant, namespace.id, pieces.cache_salt, [pieces.documents[index] for index in order]
    )
    share_of = dict(zip(order, shares, strict=True))
    stop = len(order) - pieces.last
    movable = order[pieces.first : stop]
    started_s = SYSTEM_CLOCK.monotonic_s()
    found = await OrderSearch(layout, ask, within_s=pieces.within_ms / 1000).run(
        pieces.head(order[: pieces.first]),
        [pieces.documents[index] for index in movable],
        usual=[place - pieces.first for place in usual if pieces.first <= place < stop],
        given=range(len(movable)),
        cache_salt=pieces.cache_salt,
    )
    search_s = SYSTEM_CLOCK.monotonic_s() - started_s
    planned = [*order[: pieces.first], *(movable[place] for place in found.documents), *order[stop:]]
    prompt = _StoredPrompt(context, namespace, pieces.prompt(planned), pieces.cache_salt)
    by_tier = await prompt.hits(deadline)
    given_hits = by_tier if is_compared else None
    if is_compared and planned != order:
        given = _StoredPrompt(context, namespace, pieces.prompt(order), pieces.cache_salt)
        given_hits = await given.hits(deadline)
    ends = [len(pieces.system)]
    for index in planned:
        ends.append(ends[-1] + len(pieces.documents[index]))
    uses = expected_uses([share_of[index] for index in planned], _REQUESTS)
    hit_tokens = sum(by_tier.values())
    return Plan(
        order=planned,
        left_out=pieces.left_out,
        num_tokens=ends[-1] + len(pieces.following),
        hit_tokens=hit_tokens,
        hit_by_tier=by_tier,
        given_hit_tokens=None if given_hits is None else sum(given_hits.values()),
        search_ms=round(search_s * 1000, 3),
        is_certain=await namespace.catalog.is_complete(deadline=deadline),
        retain=await _worth_retaining(prompt, layout.page_tokens, ends, uses, hit_tokens),
    )


class _StoredPrompt:
    """What is stored of a prompt, read from its start as long as the prompt could be resumed further on."""

    def __init__(
        self, context: AdminContext, namespace: Namespace, token_ids: array[int], cache_salt: str | None
    ) -> None:
        self._context, self._namespace, self._token_ids = context, namespace, token_ids
        self._chain = PlainChain(cache_salt)
        self._boundaries: list[Boundary] = []  # under the names that their records have

    async def hits(self, deadline: Deadline) -> dict[str, int]:
        """By tier the tokens that it adds to those that faster tiers restore."""
        layout = self._namespace.layout
        needed = sum(1 << index for index, group in enumerate(layout.groups) if group.kind.needs_all)
        bits: dict[str, list[int]] = {}  # by tier: of each boundary what it and faster tiers have
        while piece := self._next():
            named, held = await read_slices(self._context, self._namespace, piece, deadline)
            maps, masks = list(held.values()), [0] * len(named)
            for number, name in enumerate(held, 1):
                masks = groups_present(layout, len(named), maps[:number]).tolist()
                bits.setdefault(name, []).extend(masks)
            self._boundaries += named
            ends = (mask for one, mask in zip(named, masks, strict=True) if one.tokens % layout.page_tokens == 0)
            if not held or not named or any(mask & needed != needed for mask in ends):
                break
        hits: dict[str, int] = {}
        reached = 0
        tokens = [boundary.tokens for boundary in self._boundaries]
        cap_tokens = len(self._token_ids) - 1  # an engine computes at least one
        for name, found in bits.items():
            await asyncio.sleep(0)
            resume = longest_resumable(
                layout, tokens[: len(found)], found, local_tokens=0, cap_tokens=cap_tokens, step_tokens=LINK_TOKENS
            )
            if resume > reached:
                hits[name] = resume - reached
                reached = resume
        return hits

    async def prefixes(self, ends: Collection[int]) -> dict[int, PrefixHash]:
        """The names of boundaries after these numbers of tokens; none if the tenant has no key."""
        named = [boundary for boundary in self._boundaries if boundary.tokens in ends]
        while self._chain.tokens < max(ends, default=0) and (piece := self._next()):
            more = [boundary for boundary in piece if boundary.tokens in ends]
            named += await names_to_save(self._context, self._namespace, more)
            await asyncio.sleep(0)
        return {boundary.tokens: boundary.prefix for boundary in named}

    def _next(self) -> list[Boundary]:
        start = self._chain.tokens
        return self._chain.extend(self._token_ids[start : start + READ_AT_ONCE * LINK_TOKENS])


async def _worth_retaining(
    prompt: _StoredPrompt, page_tokens: int, ends: Sequence[int], uses: Sequence[float], hit_tokens: int
) -> list[Beginning]:
    """The beginnings that are likely to be used again, up to the last end of a page in each document."""
    likely: dict[int, tuple[int, float]] = {}
    for num_documents, (end, uses_per_1000) in enumerate(zip(ends, uses, strict=True)):
        if uses_per_1000 >= _USES_MIN:
            likely.setdefault(end // page_tokens * page_tokens, (num_documents, uses_per_1000))
    prefixes = await prompt.prefixes(likely.keys())
    return [
        Beginning(
            num_documents=num_documents,
            tokens=tokens,
            prefix=prefixes[tokens].hex(),
            is_stored=tokens <= hit_tokens,
            uses_per_1000=round(uses_per_1000, 1),
        )
        for tokens, (num_documents, uses_per_1000) in likely.items()
        if tokens in prefixes
    ]
