"""`/v1/history`: hits, bytes and reasons over the last hours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from kvstore.service.admin.access import Reader
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.problems import refusals
from kvstore.service.credentials import Grant
from kvstore.service.history import STEP_S, Sample, Window, window_of
from kvstore.store.explain.explainer import ReportedOutcome
from kvstore.store.explain.reasons import REASONS, UNKNOWN, result_of

__all__ = ["router"]

router = APIRouter(tags=["history"])

_STEPS = 60
_HOURS_MAX = 6
_REQUESTS = re.compile(r'requests\{reason="([a-z_]*)",result="([a-z]+)"\}')
_EVICTED = re.compile(r'retention_boundaries\{reason="([a-z_]+)",tier="[a-z0-9_]+"\}')
_TIER = re.compile(r'served_records\{tier="([a-z0-9_]+)"\}')


class Word(BaseModel):
    """What a reason means, as docs/explain.md has it."""

    why: str = Field(description="what it means", examples=["nothing usable was found"])
    advice: str = Field(description="what to do about it; may be empty")


class ResultCounts(BaseModel):
    """ResultCounts by how far they were resumed, step by step."""

    hit: list[float] = Field(description="from the furthest point", examples=[[5, 9]])
    part: list[float]
    miss: list[float]
    local: list[float] = Field(description="the engine's own cache held as much")


class TokenCounts(BaseModel):
    """TokenCounts of these requests' prompts, step by step."""

    prompt: list[float] = Field(description="all of them", examples=[[65536, 81920]])
    resumed: list[float] = Field(description="restored from this store")
    local: list[float] = Field(description="held by the engine itself")


class LookupCounts(BaseModel):
    """What engines asked of this service, told or not what came of it; step by step."""

    all: list[float] = Field(description="lookups", examples=[[8, 10]])
    hits: list[float] = Field(description="found something to resume from")


class HistoryFound(BaseModel):
    """Equal steps, oldest first; every list has a value for each."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "of": "service",
                "step_s": 60,
                "at_s": [1763800020, 1763800080],
                "requests": {"hit": [5, 9], "part": [1, 0], "miss": [2, 1], "local": [0, 0]},
                "tokens": {"prompt": [65536, 81920], "resumed": [40960, 73728], "local": [0, 0]},
                "reasons": {"nothing_stored": [2, 1]},
                "words": {"nothing_stored": {"why": "nothing usable was found", "advice": ""}},
                "lookups": {"all": [8, 10], "hits": [6, 9]},
                "served_records": {"memory": [96, 180], "redis": [24, 12]},
                "evictions": {"evicted": [0, 12], "quota": [3, 0]},
                "tier_bytes": {"memory": [1073741824, 1073741824], "redis": [None, 8589934592]},
                "away": {"redis": [1, 0]},
            }
        }
    )

    of: Literal["service", "tenant"] = Field(
        description="`service`: all that this service counted; `tenant`: the tenant's latest 2,048 requests, "
        "where only `requests`, `tokens` and `reasons` are told"
    )
    step_s: int
    at_s: list[int] = Field(description="ends of the steps, in seconds since the Unix epoch")
    requests: ResultCounts
    tokens: TokenCounts
    reasons: dict[str, list[float]] = Field(description="by a word of docs/explain.md, requests resumed no further")
    words: dict[str, Word] = Field(description="what these words mean")
    lookups: LookupCounts | None
    served_records: dict[str, list[float]] = Field(description="by the tier that they were read from")
    evictions: dict[str, list[float]] = Field(description="by cause, boundaries that left the cold tier")
    tier_bytes: dict[str, list[int | None]] = Field(
        description="by tier, as it tells, a Redis with what others keep there; S3 by the catalog; null: not known"
    )
    away: dict[str, list[int]] = Field(description="by tier, 1 where it did not answer or was left alone")


@router.get("/history", responses=refusals(401, 403, 422, 429, 503))
async def show_history(
    context: Context,
    grant: Reader,
    hours: Annotated[int, Query(ge=1, le=_HOURS_MAX, description="how far back; six hours are kept, in memory")] = 1,
) -> HistoryFound:
    """Hits, bytes by tier, and why requests were resumed no further, over the last hours, in sixty steps.

    This service counts for itself, and what it counted ends with it. A tenant is told of its own requests.
    """
    step_s = hours * 3600 // _STEPS
    samples = context.history.samples() if grant.tenant is None else await _told(context, grant)
    window = window_of(samples, now_ms=context.clock.wall_ms(), num_steps=_STEPS, step_s=max(step_s, STEP_S))
    is_all = grant.tenant is None
    reasons = _reasons(window)
    return HistoryFound(
        of="service" if is_all else "tenant",
        step_s=step_s,
        at_s=window.at_s,
        requests=_requests(window),
        tokens=TokenCounts(
            **{part: window.of(f'request_tokens{{part="{part}"}}') for part in TokenCounts.model_fields}
        ),
        reasons=reasons,
        words={reason: Word(**_word(reason)) for reason in reasons},
        lookups=LookupCounts(all=window.of("lookups"), hits=window.of("lookup_hits")) if is_all else None,
        served_records={match[1]: counts for name, counts in window.counts.items() if (match := _TIER.fullmatch(name))},
        evictions=_evictions(window),
        tier_bytes=window.tier_bytes,
        away=window.away,
    )


async def _told(context: AdminContext, grant: Grant) -> list[Sample]:
    """A tenant's own requests, as the service would have counted them."""
    deadline = context.soon()

    async def ask() -> list[ReportedOutcome]:
        return context.operations.outcomes(grant.tenant)

    return [_sample(told) for told in await context.bridge.call(ask, deadline=deadline)]


def _sample(told: ReportedOutcome) -> Sample:
    outcome = told.outcome
    reason = told.reason if told.reason in REASONS else "other"
    local = min(outcome.local_tokens, outcome.resume_tokens)
    counts = {
        f'requests{{reason="{reason}",result="{result_of(outcome)}"}}': 1.0,
        'request_tokens{part="prompt"}': float(outcome.prompt_tokens),
        'request_tokens{part="resumed"}': float(outcome.resume_tokens - local),
        'request_tokens{part="local"}': float(local),
    }
    return Sample(told.at_ms, counts)


def _requests(window: Window) -> ResultCounts:
    by_result: dict[str, list[str]] = {result: [] for result in ResultCounts.model_fields}
    for name in window.counts:
        if (match := _REQUESTS.fullmatch(name)) is not None:
            by_result[match[2]].append(name)
    return ResultCounts(**{result: window.sum_of(*names) or window.of("") for result, names in by_result.items()})


def _reasons(window: Window) -> dict[str, list[float]]:
    by_reason: dict[str, list[str]] = {}
    for name in window.counts:
        if (match := _REQUESTS.fullmatch(name)) is not None and match[1]:
            by_reason.setdefault(match[1], []).append(name)
    return {reason: window.sum_of(*names) for reason, names in sorted(by_reason.items())}


def _evictions(window: Window) -> dict[str, list[float]]:
    by_cause: dict[str, list[str]] = {}
    for name in window.counts:
        if (match := _EVICTED.fullmatch(name)) is not None:
            by_cause.setdefault(match[1], []).append(name)
    return {cause: window.sum_of(*names) for cause, names in sorted(by_cause.items())}


def _word(reason: str) -> Mapping[str, str]:
    known = REASONS.get(reason, UNKNOWN)
    return {"why": known.why, "advice": known.advice}
