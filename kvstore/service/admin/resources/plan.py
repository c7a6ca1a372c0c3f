"""`/v1/plan`: the order of a prompt's documents that restores most of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import Enum
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from kvstore.errors import InvalidRequest
from kvstore.model.coverage import longest_resumable
from kvstore.model.keys import LINK_TOKENS, Boundary
from kvstore.model.layout import Layout
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.service.admin.access import Reader
from kvstore.service.admin.catalog_access import Namespace
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.documents import OrderSearch, expected_uses
from kvstore.service.admin.models import NAMESPACE_EXAMPLE, PREFIX_EXAMPLE, WHOLE_NUMBER, namespace_id
from kvstore.service.admin.problems import refusals
from kvstore.service.admin.resources.lookup import read_slices
from kvstore.service.admin.resources.prompt import Prompt, hash_prompt, read_prompt
from kvstore.store.placement import groups_present

router = APIRouter(tags=["plan"])

_DOCUMENTS_MAX = 64
_WITHIN_MS_MAX = 1000
_REQUESTS = 1000
_USES_MIN = 10.0
"""Of 1,000 requests: a beginning is worth retaining if at least these are likely to begin with it."""

Tokens = Annotated[int, Field(strict=True, ge=1, lt=1 << 32), WHOLE_NUMBER]
Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 32), WHOLE_NUMBER]


class AllowedOrder(Enum):
    """In which orders the documents may be sent."""

    ANY = "any"
    FIXED = "fixed"


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
    order: AllowedOrder = Field(default=AllowedOrder.ANY, description="`fixed`: the documents stay in this order")
    fixed_first: Count = Field(default=0, description="how many documents at the start stay where they are")
    fixed_last: Count = Field(default=0, description="how many documents at the end stay where they are")
    keep_duplicates: bool = Field(default=False, description="equal documents are sent as often as they are given")
    within_ms: Count = Field(
        default=3, le=_WITHIN_MS_MAX, description="no round of the search begins later than this after the first"
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
    search_ms: float = Field(description="how long the search took", examples=[3.1])
    is_certain: bool = Field(description="the catalog is complete; false: the tiers may hold more than this")
    retain: list[Beginning] = Field(
        description="beginnings of the planned prompt that are worth to be retained, the shortest first"
    )


_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": PromptOfDocuments.model_json_schema()}},
    }
}


@router.post("/plan", responses=refusals(404, 413), openapi_extra=_BODY)
async def make_plan(context: Context, grant: Reader, request: Request) -> Plan:
    """The order of a prompt's documents that restores most of it. The planned prompt is an ordinary one: the system
    prompt, the documents of `order`, and what follows. Nothing is fetched or saved, and nothing counts as a use.
    """
    prompt, token_ids = await read_prompt(request, PromptOfDocuments)
    pieces = _Pieces(prompt, token_ids)
    namespace = await context.catalog.find(namespace_id(prompt.namespace), grant)
    async with context.plans:
        return await _plan(context, namespace, pieces, prompt.compare)


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

    def __init__(self, prompt: PromptOfDocuments, token_ids: Sequence[int]) -> None:
        ids = array("I", token_ids)
        num_documents = len(prompt.document_tokens)
        end = prompt.system_tokens + sum(prompt.document_tokens)
        if end > len(ids):
            raise InvalidRequest(
                "the system prompt and the documents have more tokens than token_ids",
                field="body.document_tokens",
                expected=f"at most {len(ids)} in all",
                seen=end,
            )
        if prompt.fixed_first + prompt.fixed_last > num_documents:
            raise InvalidRequest(
                "more documents are fixed than there are",
                field="body.fixed_first",
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
        is_fixed = prompt.order is AllowedOrder.FIXED
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
        """The same up to the end of the last of these documents."""
        joined = self.system[:]
        for index in order:
            joined += self.documents[index]
        return joined


async def _plan(context: AdminContext, namespace: Namespace, pieces: _Pieces, is_compared: bool) -> Plan:
    layout = namespace.layout

    async def ask(boundaries: Sequence[Boundary]) -> Sequence[int]:
        named, held = await read_slices(context, namespace, boundaries)
        if not named:  # the tenant has no key
            return [0] * len(boundaries)
        return groups_present(layout, len(named), list(held.values()))

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
    boundaries, by_tier = await _hits(context, namespace, pieces, planned)
    given_hits = (await _hits(context, namespace, pieces, order))[1] if is_compared else None
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
        is_certain=await namespace.catalog.is_complete(deadline=context.soon()),
        retain=_worth_retaining(layout, boundaries, ends, uses, hit_tokens),
    )


async def _hits(
    context: AdminContext, namespace: Namespace, pieces: _Pieces, order: Sequence[int]
) -> tuple[Sequence[Boundary], dict[str, int]]:
    """The boundaries of a prompt, and by tier the tokens that it adds to those that faster tiers restore."""
    token_ids, layout = pieces.prompt(order), namespace.layout
    boundaries, held = await read_slices(context, namespace, await hash_prompt(token_ids, pieces.cache_salt))
    tokens, maps = [boundary.tokens for boundary in boundaries], list(held.values())
    cap_tokens = len(token_ids) - 1  # an engine computes at least one
    hits: dict[str, int] = {}
    reached = 0
    for number, name in enumerate(held, 1):
        bits = groups_present(layout, len(tokens), maps[:number])
        resume = longest_resumable(layout, tokens, bits, local_tokens=0, cap_tokens=cap_tokens, step_tokens=LINK_TOKENS)
        if resume > reached:
            hits[name] = resume - reached
            reached = resume
    return boundaries, hits


def _worth_retaining(
    layout: Layout, boundaries: Sequence[Boundary], ends: Sequence[int], uses: Sequence[float], hit_tokens: int
) -> list[Beginning]:
    """The beginnings that are likely to be used again, up to the last end of a page in each document."""
    prefix_at = {boundary.tokens: boundary.prefix for boundary in boundaries}
    found: list[Beginning] = []
    for num_documents, (end, likely) in enumerate(zip(ends, uses, strict=True)):
        tokens = end // layout.page_tokens * layout.page_tokens
        if likely < _USES_MIN or tokens not in prefix_at or (found and tokens == found[-1].tokens):
            continue
        found.append(
            Beginning(
                num_documents=num_documents,
                tokens=tokens,
                prefix=prefix_at[tokens].hex(),
                is_stored=tokens <= hit_tokens,
                uses_per_1000=round(likely, 1),
            )
        )
    return found
