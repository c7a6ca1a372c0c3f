"""`/v1/history`: hits, bytes and reasons over the last hours."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.meters import Meters, name_and_labels
from kvstore.service.admin.access import Reader
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.authentication import Grant
from kvstore.service.history import Sample, Window, window_of
from kvstore.store.explain.explainer import count_request
from kvstore.store.explain.reasons import REASONS, UNKNOWN

router = APIRouter(tags=["history"])

_STEPS = 60
_HOURS_MAX = 6


class Word(BaseModel):
    """What a reason means, as in docs/explain.md."""

    model_config = ConfigDict(from_attributes=True)

    why: str = Field(description="what it means", examples=["nothing usable was found"])
    advice: str = Field(description="what to do about it; may be empty")


class ResultCounts(BaseModel):
    """Requests by how far they were resumed, step by step."""

    hit: list[float] = Field(description="from the furthest point", examples=[[5, 9]])
    part: list[float]
    miss: list[float]
    local: list[float] = Field(description="the engine's own cache held as much")


class TokenCounts(BaseModel):
    """Tokens of these requests' prompts, step by step."""

    prompt: list[float] = Field(description="all of them", examples=[[65536, 81920]])
    resumed: list[float] = Field(description="restored from this store")
    local: list[float] = Field(description="held by the engine itself")


class LookupCounts(BaseModel):
    """Lookups of engines at this service, step by step, also those without a report of the request."""

    all: list[float] = Field(description="lookups", examples=[[8, 10]])
    hits: list[float] = Field(description="lookups that found something to resume from")


class HistoryFound(BaseModel):
    """Equal steps, oldest first. Every list has a value for each step."""

    of: Literal["service", "tenant"] = Field(
        description="`service`: all that this service counted; `tenant`: the tenant's latest 2,048 requests, "
        "with only `requests`, `tokens` and `reasons`"
    )
    step_s: int
    at_s: list[int] = Field(
        description="ends of the steps, in seconds since the Unix epoch", examples=[[1763800020, 1763800080]]
    )
    requests: ResultCounts
    tokens: TokenCounts
    reasons: dict[str, list[float]] = Field(
        description="requests that were resumed no further, by a word of docs/explain.md",
        examples=[{"nothing_stored": [2, 1]}],
    )
    words: dict[str, Word] = Field(description="what these words mean")
    lookups: LookupCounts | None
    served_records: dict[str, list[float]] = Field(description="records by the tier that they were read from")
    evictions: dict[str, list[float]] = Field(description="boundaries evicted from the cold tier, by cause")
    tier_bytes: dict[str, list[int | None]] = Field(
        description="by tier, as it reports, for Redis including other users' data; S3 by the catalog; null: not known"
    )
    away: dict[str, list[int]] = Field(description="by tier, 1 where it did not answer or was not used")


@router.get("/history")
async def show_history(
    context: Context,
    grant: Reader,
    hours: Annotated[int, Query(ge=1, le=_HOURS_MAX, description="how far back; six hours are kept, in memory")] = 1,
) -> HistoryFound:
    """Hits, bytes by tier, and why requests were resumed no further, over the last hours, in sixty steps.

    Each service counts for itself, and forgets its counts when it ends. A tenant sees its own requests.
    """
    step_s = hours * 3600 // _STEPS
    is_all = grant.tenant is None
    samples = context.service.history.samples() if is_all else await _samples_of(context, grant)
    window = window_of(samples, now_ms=SYSTEM_CLOCK.wall_ms(), num_steps=_STEPS, step_s=step_s)
    results, reasons, nothing = _sums(window, "requests", "result"), _sums(window, "requests", "reason"), window.of("")
    return HistoryFound(
        of="service" if is_all else "tenant",
        step_s=step_s,
        at_s=window.at_s,
        requests=ResultCounts(**{name: results.get(name, nothing) for name in ResultCounts.model_fields}),
        tokens=TokenCounts(
            **{part: window.of(f'request_tokens{{part="{part}"}}') for part in TokenCounts.model_fields}
        ),
        reasons=reasons,
        words={reason: Word.model_validate(REASONS.get(reason, UNKNOWN)) for reason in reasons},
        lookups=LookupCounts(all=window.of("lookups"), hits=window.of("lookup_hits")) if is_all else None,
        served_records=_sums(window, "served_records", "tier"),
        evictions=_sums(window, "retention_boundaries", "reason"),
        tier_bytes=window.tier_bytes,
        away=window.away,
    )


async def _samples_of(context: AdminContext, grant: Grant) -> list[Sample]:
    """A tenant's own requests, as the service would have counted them."""
    outcomes = await context.data_loop.call_short(lambda: context.operations.outcomes(grant.tenant))
    samples = []
    for reported in outcomes:
        count_request(meters := Meters(), reported.outcome, reported.reason)
        samples.append(Sample(reported.at_ms, meters.snapshot()))
    return samples


def _sums(window: Window, meter: str, label: str) -> dict[str, list[float]]:
    """Counts of a meter, added up by a label that is not empty, sorted by it."""
    keys: dict[str, list[str]] = {}
    for key in window.counts:
        name, labels = name_and_labels(key)
        if name == meter and (value := labels.get(label)):
            keys.setdefault(value, []).append(key)
    return {value: window.sum_of(*listed) for value, listed in sorted(keys.items())}
