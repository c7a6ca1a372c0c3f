"""`/v1/query`: how much of a prompt each connected engine would not have to compute, for routers.

Request and answer have the shape of the indexer API that Mooncake proposed (RFC 1403) and that Dynamo's indexer has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field

from kvstore.api import PrefixQuery
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.model.keys import Boundary, NamespaceId
from kvstore.model.namespace import NamespaceNotOpen
from kvstore.runtime.deadline import Deadline
from kvstore.service.admin.access import Reader
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.models import TokenId
from kvstore.service.admin.problems import refusals
from kvstore.service.admin.resources.matches import (
    TEXT_MAX,
    Asked,
    Matches,
    body_of,
    engines_asked,
    matches_of,
    parse_questions,
)
from kvstore.service.admin.resources.prompt import ANSWER_S, TOKEN_IDS, TOKENS_MAX, hash_prompt, read_json
from kvstore.service.authentication import Grant
from kvstore.service.session import ConnectedEngine
from kvstore.store.placement import Reach, ResumePoints

router = APIRouter(tags=["query"])


class Question(Asked):
    """A prompt, and for whom it is asked."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"example": {"model": "qwen", "token_ids": list(range(1, 33))}}
    )

    token_ids: list[TokenId] = Field(max_length=TOKENS_MAX, description="of the whole prompt")
    lora_name: str | None = Field(default=None, max_length=TEXT_MAX, description="null or empty: no adapter")
    cache_salt: str | None = Field(default=None, max_length=4096, description="the request's `cache_salt`")


@router.post("/query", responses=refusals(413), openapi_extra=body_of(Question))
async def query(context: Context, grant: Reader, request: Request) -> Matches | list[Matches]:
    """By tenant and engine, how much of a prompt without adapter, media and embeddings each engine that is connected to
    this service would resume; of a list of prompts a list. Nothing is fetched, and nothing counts as a use.
    """
    body = await read_json(request)
    async with context.queries.turn():
        recall = context.known_pieces.of(grant.tenant)
        questions, is_list = await parse_questions(body, grant, Question, replace(TOKEN_IDS, recall=recall), TOKENS_MAX)
        for index, (question, _) in enumerate(questions):
            _refuse_adapter(question, (index,) if is_list else ())
        deadline = context.soon(ANSWER_S)
        answers = [await _answer(context, grant, question, ids, deadline) for question, ids in questions]
    return answers if is_list else answers[0]


def _refuse_adapter(question: Question, where: Sequence[int]) -> None:
    if question.lora_name:
        raise InvalidRequest(
            "prompts with an adapter are not found: their pages are named by the adapter's files",
            field=".".join(["body", *map(str, where), "lora_name"]),
            expected="null or empty text",
            seen=question.lora_name,
        )


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
    def target_of(engine: ConnectedEngine) -> _Target:
        instance = engine.instance
        points = ResumePoints(instance.step_tokens, instance.cap_tokens(len(token_ids)))
        return _Target(engine.namespace, points)

    asked = engines_asked(context, grant, question, target_of)
    targets = {target for _, target in asked}
    step_tokens = gcd(*(target.points.step_tokens for target in targets))
    recall = context.known_pieces.of(grant.tenant)
    hashed = await hash_prompt(token_ids, question.cache_salt, step_tokens, recall) if targets else []
    reaches = await _reaches(context, targets, hashed, deadline)
    return matches_of(asked, reaches, question)


async def _reaches(
    context: AdminContext, targets: set[_Target], hashed: Sequence[Boundary], deadline: Deadline
) -> dict[_Target, Reach]:
    """How far the prompt can be resumed; without namespaces that the store has closed, because they were not used for
    long. Their engines open them again at their next lookup.

    Args:
        hashed: The prompt's boundaries at every step of a target.

    Raises:
        Unavailable: The deadline of all questions has passed.
    """
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
