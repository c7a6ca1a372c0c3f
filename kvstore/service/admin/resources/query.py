"""`/v1/query`: how much of a prompt each connected engine would not have to compute, for routers.

Request and answer have the shape of the indexer API that Mooncake proposed (RFC 1403) and that Dynamo's indexer has.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from kvstore.api import PrefixQuery
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.model.keys import NamespaceId
from kvstore.model.namespace import NamespaceNotOpen
from kvstore.runtime.deadline import Deadline
from kvstore.service.admin.access import Reader
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.models import NAMESPACE_EXAMPLE, TokenId, shown_tenant
from kvstore.service.admin.problems import Refused, refusals
from kvstore.service.admin.resources.prompt import (
    ANSWER_S,
    TOKENS_MAX,
    hash_prompt,
    read_json,
    split_objects,
    validated,
)
from kvstore.service.authentication import Grant
from kvstore.service.session import ConnectedEngine
from kvstore.store.placement import Reach, ResumePoints
from kvstore.wire.convert import plain_text

router = APIRouter(tags=["query"])

_QUESTIONS_MAX = 64
TARGETS_MAX = 32
"""Namespaces, and kinds of engines in them, of one tenant that a question is answered for: so a tenant with many cannot
make the questions of operators' routers too long."""
_TEXT_MAX = 256


class Question(BaseModel):
    """A prompt, and for whom it is asked."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"example": {"model": "qwen", "token_ids": list(range(1, 33))}}
    )

    model: str = Field(max_length=_TEXT_MAX, description="a name under which engines serve the model")
    token_ids: list[TokenId] = Field(max_length=TOKENS_MAX, description="of the whole prompt")
    block_size: int | None = Field(
        default=None, ge=1, description="the answer's tokens are rounded down to multiples of this; null: they are not"
    )
    lora_name: str | None = Field(default=None, max_length=_TEXT_MAX, description="null or empty: no adapter")
    tenant_id: str | None = Field(
        default=None,
        max_length=_TEXT_MAX,
        description="of this tenant's engines alone; `default`: of engines without a tenant; null: of all",
    )
    instance_id: str | None = Field(default=None, max_length=_TEXT_MAX, description="of this engine alone")
    cache_salt: str | None = Field(default=None, max_length=4096, description="the request's `cache_salt`")


class InstanceMatch(BaseModel):
    """How many tokens of the prompt one engine would resume."""

    longest_matched: int = Field(description="the hit that it would get now, if it has none itself", examples=[8192])
    cpu: int = Field(serialization_alias="CPU", description="what its node's memory alone restores", examples=[4096])
    storage: int = Field(
        serialization_alias="STORAGE",
        description="what memory, Redis and S3 restore together, so at least `CPU`",
        examples=[8192],
    )
    dp: dict[str, int] = Field(
        serialization_alias="DP", description="`longest_matched` of each data-parallel rank", examples=[{"0": 8192}]
    )
    address: str = Field(description="where it takes requests, if its operator set that", examples=["10.0.0.7:8000"])
    namespaces: list[str] = Field(description="where its pages are", examples=[[NAMESPACE_EXAMPLE]])
    silent: list[str] = Field(description="tiers that did not answer in time, and may hold more", examples=[[]])


Matches = dict[str, dict[str, InstanceMatch]]
"""By tenant and name of the engine."""

_SCHEMA = Question.model_json_schema()
_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"anyOf": [_SCHEMA, {"type": "array", "items": _SCHEMA, "maxItems": _QUESTIONS_MAX}]}
            }
        },
    }
}


@router.post("/query", responses=refusals(413), openapi_extra=_BODY)
async def query(context: Context, grant: Reader, request: Request) -> Matches | list[Matches]:
    """By tenant and engine, how much of a prompt without adapter, media and embeddings each engine that is connected to
    this service would resume; of a list of prompts a list. Nothing is fetched, and nothing counts as a use.
    """
    body = await read_json(request)
    async with context.queries.turn():
        questions, is_list = await _parse(body, grant)
        deadline = context.soon(ANSWER_S)
        answers = [await _answer(context, grant, question, ids, deadline) for question, ids in questions]
    return answers if is_list else answers[0]


async def _parse(body: bytes, grant: Grant) -> tuple[list[tuple[Question, Sequence[int]]], bool]:
    """The questions of a body, each with its token ids, and whether they are a list."""
    objects, lists = await split_objects(body, TOKENS_MAX)
    if len(objects) > _QUESTIONS_MAX:
        expected = f"at most {_QUESTIONS_MAX} prompts"
        raise InvalidRequest(expected, field="body", expected=expected, seen=len(objects))
    is_list = body.lstrip()[:1] == b"["
    questions: list[tuple[Question, Sequence[int]]] = []
    for index, fields in enumerate(objects):
        where = (index,) if is_list else ()
        question = validated(Question, fields if lists is None else {**fields, "token_ids": []}, *where)
        if question.lora_name:
            raise InvalidRequest(
                "prompts with an adapter are not found: their pages are named by the adapter's files",
                field=".".join(["body", *map(str, where), "lora_name"]),
                expected="null or empty text",
                seen=question.lora_name,
            )
        if question.tenant_id is not None and grant.tenant not in (None, question.tenant_id):
            raise Refused(403, "the token is another tenant's", field="body.tenant_id")  # whether or not it exists
        questions.append((question, array("I", question.token_ids) if lists is None else lists[index]))
    return questions, is_list


@dataclass(frozen=True, slots=True)
class _Target:
    """What the reach of a prompt depends on; engines that agree in it have one answer."""

    namespace: NamespaceId
    points: ResumePoints


async def _answer(
    context: AdminContext,
    grant: Grant,
    question: Question,
    token_ids: Sequence[int],
    deadline: Deadline,
) -> Matches:
    name = question.instance_id
    asked: list[tuple[ConnectedEngine, _Target]] = []
    targets: dict[str, set[_Target]] = defaultdict(set)  # by tenant
    for engine in context.engines(grant, plain_text(question.model), question.tenant_id):
        instance = engine.instance
        if name not in (None, instance.name):
            continue
        points = ResumePoints(instance.step_tokens, instance.cap_tokens(len(token_ids)))
        target, others = _Target(engine.namespace, points), targets[engine.tenant]
        if target in others or len(others) < TARGETS_MAX:
            others.add(target)
            asked.append((engine, target))
    reaches = await _reaches(context, set().union(*targets.values()), question, token_ids, deadline)
    ranks: dict[tuple[str, str], list[tuple[ConnectedEngine, Reach]]] = defaultdict(list)
    for engine, target in asked:
        if (reach := reaches.get(target)) is not None:
            ranks[shown_tenant(engine.tenant), engine.instance.name].append((engine, reach))
    matches: Matches = defaultdict(dict)
    for (tenant_shown, instance_name), found in sorted(ranks.items(), key=lambda item: item[0]):
        matches[tenant_shown][instance_name] = _match(found, question.block_size or 1)
    return matches


async def _reaches(
    context: AdminContext, targets: set[_Target], question: Question, token_ids: Sequence[int], deadline: Deadline
) -> dict[_Target, Reach]:
    """How far the prompt can be resumed; without namespaces that the store has closed, because they were not used for
    long. Their engines open them again at their next lookup.

    Raises:
        Unavailable: The deadline of all questions has passed.
    """
    step_tokens = gcd(*(target.points.step_tokens for target in targets))
    hashed = await hash_prompt(token_ids, question.cache_salt, step_tokens) if targets else []
    of_namespace: dict[NamespaceId, list[ResumePoints]] = defaultdict(list)
    for target in targets:
        of_namespace[target.namespace].append(target.points)
    store, reaches = context.service.store, dict[_Target, Reach]()
    for namespace, points in of_namespace.items():
        step_tokens = gcd(*(one.step_tokens for one in points))
        boundaries = tuple(boundary for boundary in hashed if boundary.tokens % step_tokens == 0)
        prompt = PrefixQuery(namespace, boundaries, 0, max(one.cap_tokens for one in points), step_tokens)

        async def reach(
            soon: Deadline, prompt: PrefixQuery = prompt, points: Sequence[ResumePoints] = points
        ) -> list[Reach]:
            return await store.reaches(prompt, points, deadline=soon)

        if deadline.expired:  # not passed on: a call that is cut short would make engines' lookups avoid the catalog
            raise Unavailable("the answer takes too long: ask about fewer prompts or engines at a time")
        try:
            found = await context.data_loop.call(reach)
        except NamespaceNotOpen:
            continue
        reaches |= {_Target(namespace, one): far for one, far in zip(points, found, strict=True)}
    return reaches


def _match(found: Sequence[tuple[ConnectedEngine, Reach]], block_size: int) -> InstanceMatch:
    """The answer for the engines of one name. Of two with one rank the smaller counts: either may get the request."""
    by_rank: dict[int, Reach] = {}
    for engine, reach in found:
        rank = engine.instance.dp_rank
        if rank not in by_rank or reach.resume_tokens < by_rank[rank].resume_tokens:
            by_rank[rank] = reach

    def rounded(tokens: int) -> int:
        return tokens // block_size * block_size

    longest = rounded(max(reach.resume_tokens for reach in by_rank.values()))
    return InstanceMatch(
        longest_matched=longest,
        cpu=rounded(max(reach.memory_tokens for reach in by_rank.values())),
        storage=longest,
        dp={str(rank): rounded(by_rank[rank].resume_tokens) for rank in sorted(by_rank)},
        address=next((engine.instance.address for engine, _ in found if engine.instance.address), ""),
        namespaces=sorted({engine.namespace.hex() for engine, _ in found}),
        silent=sorted({name for reach in by_rank.values() for name in reach.silent}),
    )
