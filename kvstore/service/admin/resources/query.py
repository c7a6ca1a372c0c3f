"""`/v1/query`: how much of a prompt each connected engine would not have to compute, for routers.

Request and answer have the shape of the indexer API that Mooncake proposed (RFC 1403) and that Dynamo's indexer has.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from math import gcd
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import AfterValidator, ConfigDict, Field

from kvstore.api import PrefixQuery
from kvstore.model.keys import LINK_TOKENS, NamespaceId
from kvstore.runtime.deadline import Deadline
from kvstore.service.admin.access import Reader
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.models import TokenId
from kvstore.service.admin.problems import refusals
from kvstore.service.admin.prompt import TOKEN_IDS, TOKENS_MAX, PromptText, body_of, read_json
from kvstore.service.admin.resources.matches import (
    QUESTIONS_MAX,
    TEXT_MAX,
    Asked,
    Matches,
    answer_questions,
    engines_asked,
    matches_of,
    reaches_of,
)
from kvstore.service.authentication import Grant
from kvstore.service.session import ConnectedEngine
from kvstore.store.presence import Reach, ResumePoints

router = APIRouter(tags=["query"])


def _no_adapter(name: str | None) -> str | None:
    if name:
        text = "expected null or empty text: prompts with an adapter are not found, since its files name their pages"
        raise ValueError(text)
    return name


class Question(Asked):
    """A prompt, and for whom it is asked."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"example": {"model": "qwen", "token_ids": list(range(1, 33))}}
    )

    token_ids: list[TokenId] = Field(max_length=TOKENS_MAX, description="of the whole prompt")
    lora_name: Annotated[str | None, AfterValidator(_no_adapter)] = Field(
        default=None, max_length=TEXT_MAX, description="null or empty: no adapter"
    )
    cache_salt: str | None = Field(default=None, max_length=4096, description="the request's `cache_salt`")


@router.post("/query", responses=refusals(408, 413), openapi_extra=body_of(Question, QUESTIONS_MAX))
async def query(context: Context, grant: Reader, request: Request) -> Matches | list[Matches]:
    """By tenant and engine, how much of a prompt without adapter, media and embeddings each engine that is connected to
    this service would resume; of a list of prompts a list. Nothing is fetched, and nothing counts as a use.
    """
    answer = partial(_answer, context, grant)
    return await answer_questions(context, grant, await read_json(request), Question, TOKEN_IDS, answer=answer)


async def _answer(
    context: AdminContext,
    grant: Grant,
    question: Question,
    text: PromptText,
    deadline: Deadline,
) -> Matches:
    def points_of(engine: ConnectedEngine) -> ResumePoints:
        return ResumePoints(engine.instance.step_tokens, engine.instance.cap_tokens(len(text)))

    asked = engines_asked(context, grant, question, points_of)
    targets = {target for _, target in asked}
    hashed_tokens = gcd(*(points.step_tokens for _, points in targets)) or LINK_TOKENS
    recall = context.known_pieces.of(grant.tenant)
    hashed = await text.boundaries(question.cache_salt, hashed_tokens, recall)  # without engines too: it checks the ids

    def work_of(
        namespace: NamespaceId, points: Sequence[ResumePoints]
    ) -> Callable[[Deadline], Coroutine[Any, Any, list[Reach]]]:
        step_tokens = gcd(*(one.step_tokens for one in points))
        boundaries = tuple(hashed[step_tokens // hashed_tokens - 1 :: step_tokens // hashed_tokens])
        prompt = PrefixQuery(namespace, boundaries, 0, max(one.cap_tokens for one in points), step_tokens)
        return lambda soon: context.service.store.reaches(prompt, points, deadline=soon)

    reaches, _ = await reaches_of(context, targets, work_of, deadline)
    return matches_of(asked, reaches, question)
