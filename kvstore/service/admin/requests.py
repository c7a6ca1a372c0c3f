"""`/v1/requests`: how far requests of engines were resumed, and why no further."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from kvstore.errors import InvalidRequest
from kvstore.service.admin.access import Reader
from kvstore.service.admin.context import Context
from kvstore.service.admin.problems import Refused, refusals

__all__ = ["router"]

router = APIRouter(tags=["requests"])

_SUMMARY: dict[str, int | str] = {
    "request": "chatcmpl-7f3a",
    "tenant": "",
    "at": "2026-11-22T07:54:33.120+00:00",
    "prompt_tokens": 8200,
    "resume_tokens": 4096,
    "result": "part",
    "reason": "nothing_stored",
}


class RequestSummary(BaseModel):
    """How far one request was resumed, as its engine told."""

    model_config = ConfigDict(json_schema_extra={"example": {**_SUMMARY}})

    request: str = Field(description="vLLM's id")
    tenant: str = Field(description="whose engine it was")
    at: str = Field(description="when it happened, ISO 8601 in UTC")
    prompt_tokens: int
    resume_tokens: int = Field(description="up to where it was resumed")
    result: Literal["hit", "part", "miss", "local"]
    reason: str = Field(description="a word of docs/explain.md; empty: it was resumed from the furthest point")


class Requests(BaseModel):
    """The latest requests, newest first."""

    requests: list[RequestSummary]


class Explanation(RequestSummary):
    """Why a request was resumed no further."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                **_SUMMARY,
                "namespace": "0123456789abcdef0123456789abcdef",
                "namespace_name": "LlamaForCausalLM bfloat16",
                "cap_tokens": 8192,
                "local_tokens": 0,
                "stopped_at_tokens": 4352,
                "reason": "evicted",
                "why": "it was stored, and left when a byte budget was reached",
                "advice": "a larger budget, or a pin",
                "detail": {"left": "evicted", "left_from": "cold", "left_before_s": 3600},
            }
        }
    )

    namespace: str = Field(description="where it was looked up; empty: it was not")
    namespace_name: str = Field(default="", description="its model and types; empty: not known here")
    cap_tokens: int = Field(description="the furthest point that it could have been resumed from")
    local_tokens: int = Field(description="what the engine held itself")
    stopped_at_tokens: int | None = Field(description="the next boundary that was needed and could not be used")
    why: str = Field(description="what the reason means")
    advice: str = Field(description="what to do about it; may be empty")
    detail: dict[str, Any] = Field(description="what the reason rests on: plain values")


@router.get("/requests", responses=refusals(401, 403, 422, 429, 503))
async def list_requests(context: Context, grant: Reader) -> Requests:
    """Up to a hundred requests that engines told this service of last."""
    deadline = context.soon()
    values: Any = await context.bridge.call(
        lambda: context.operations.explain("", tenant=grant.tenant, deadline=deadline), deadline=deadline
    )
    return Requests(requests=[RequestSummary(**one) for one in values["requests"]])


@router.get("/requests/explain", responses=refusals(401, 403, 404, 422, 429, 503))
async def explain_request(
    context: Context,
    grant: Reader,
    request: Annotated[
        str,
        Query(min_length=1, max_length=512, examples=[_SUMMARY["request"]], description="vLLM's id, or its only start"),
    ],
) -> Explanation:
    """How far a request was resumed, why no further, and what to do about it. See docs/explain.md."""
    deadline = context.soon()
    try:
        values: Any = await context.bridge.call(
            lambda: context.operations.explain(request, tenant=grant.tenant, deadline=deadline), deadline=deadline
        )
    except InvalidRequest as error:
        raise Refused(404, str(error), field="query.request", seen=request) from error
    return Explanation(**values)
