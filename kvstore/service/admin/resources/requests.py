"""`/v1/requests`: how far requests of engines were resumed, and why no further."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from kvstore.errors import InvalidRequest
from kvstore.service.admin.access import Reader
from kvstore.service.admin.context import Context
from kvstore.service.admin.problems import Refused, refusals

router = APIRouter(tags=["requests"])

_REQUEST_EXAMPLE = "chatcmpl-7f3a"


class RequestSummary(BaseModel):
    """How far one request was resumed, as its engine reported."""

    request: str = Field(description="vLLM's id", examples=[_REQUEST_EXAMPLE])
    tenant: str = Field(description="the tenant of the engine", examples=[""])
    at: str = Field(description="when, ISO 8601 in UTC", examples=["2026-11-22T07:54:33.120+00:00"])
    prompt_tokens: int = Field(examples=[8200])
    resume_tokens: int = Field(description="where it was resumed", examples=[4096])
    result: Literal["hit", "part", "miss", "local"] = Field(examples=["part"])
    reason: str = Field(
        description="a word of docs/explain.md; empty: it was resumed from the furthest point", examples=["evicted"]
    )


class Requests(BaseModel):
    """The latest requests, newest first."""

    requests: list[RequestSummary]


class Explanation(RequestSummary):
    """Why a request was resumed no further."""

    namespace: str = Field(
        description="the namespace of its lookup; empty: there was none", examples=["0123456789abcdef0123456789abcdef"]
    )
    namespace_name: str = Field(default="", description="its model and types; empty: not known to this service")
    cap_tokens: int = Field(description="the furthest point from which it could have been resumed", examples=[8192])
    local_tokens: int = Field(description="what the engine itself held", examples=[0])
    stopped_at_tokens: int | None = Field(
        description="the next boundary that was needed and could not be used", examples=[4352]
    )
    why: str = Field(
        description="what the reason means", examples=["it was stored, and was evicted when a byte budget was reached"]
    )
    advice: str = Field(description="what to do about it; may be empty", examples=["a larger budget, or a pin"])
    detail: dict[str, Any] = Field(
        description="the facts behind the reason: plain values",
        examples=[{"left": "evicted", "left_from": "cold", "in_s3": "not stored: evicted 60 s before the request"}],
    )
    hints: dict[str, Any] = Field(
        default_factory=dict,
        description="what its client asked for in hints, and what was done about each: docs/agents.md",
        examples=[{"retain_s": 60.0, "eviction": "priority 100 for 60 s up to token 8192"}],
    )


@router.get("/requests")
async def list_requests(context: Context, grant: Reader) -> Requests:
    """The latest requests that engines reported to this service, at most a hundred."""
    values: Any = await context.data_loop.call(
        lambda deadline: context.service.store.explain("", tenant=grant.tenant, deadline=deadline)
    )
    return Requests.model_validate(values)


@router.get("/requests/explain", responses=refusals(404))
async def explain_request(
    context: Context,
    grant: Reader,
    request: Annotated[
        str,
        Query(
            min_length=1,
            max_length=512,
            examples=[_REQUEST_EXAMPLE],
            description="vLLM's id, or a unique start of it; or the name that `POST /v1/hints` gave a prompt of tokens",
        ),
    ],
) -> Explanation:
    """How far a request was resumed, why no further, and what to do about it. See docs/explain.md."""
    try:
        values: Any = await context.data_loop.call(
            lambda deadline: context.service.store.explain(request, tenant=grant.tenant, deadline=deadline)
        )
    except InvalidRequest as error:
        raise Refused(404, str(error), field="query.request", seen=request) from error
    return Explanation.model_validate(values)
