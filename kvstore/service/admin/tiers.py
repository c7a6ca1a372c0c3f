"""`/v1/tiers`: how each tier is, and what it holds."""

from __future__ import annotations

import asyncio
from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from kvstore.errors import KVStoreError
from kvstore.service.admin.access import Reader
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.models import Amount, amounts_of, sum_of
from kvstore.service.admin.problems import refusals
from kvstore.service.credentials import Grant
from kvstore.store.upkeep.operations import TierState

__all__ = ["router"]

router = APIRouter(tags=["tiers"])

_ANSWER_S = 3.0


class Usage(BaseModel):
    """What a tier holds, of all tenants."""

    num_records: int | None = Field(description="null: counting them would mean a scan")
    used_bytes: int | None = Field(description="null: likewise")
    limit_bytes: int | None = Field(description="what it may hold, by the smallest bound; null: there is none")
    limit_name: str = Field(
        description="that bound: `memory_bytes`, `disk_bytes`, `cold_bytes`, or Redis' own `maxmemory`; empty: none"
    )
    num_quarantined: int = Field(description="corrupt records put aside since the start")
    waiting_records: int = Field(description="records that this service has still to write there", examples=[3])
    waiting_bytes: int = Field(description="their bytes")


class LastKnown(BaseModel):
    """What a tier held when it answered last."""

    at_s: int = Field(description="when that was, in seconds since the Unix epoch", examples=[1763800000])
    num_records: int | None = Field(description="as in `usage`")
    used_bytes: int | None = Field(description="likewise", examples=[85899345920])
    limit_bytes: int | None = Field(description="likewise")


class TierStatus(BaseModel):
    """A place that stores records."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "name": "redis",
                "level": "hot",
                "healthy": True,
                "breaker": "closed",
                "reason": None,
                "write_back": "running",
                "usage": {
                    "num_records": 40960,
                    "used_bytes": 85899345920,
                    "limit_bytes": 137438953472,
                    "limit_name": "maxmemory",
                    "num_quarantined": 0,
                    "waiting_records": 3,
                    "waiting_bytes": 6291456,
                },
                "own": {"num_boundaries": 512, "num_records": 4096, "num_bytes": 8589934592},
            }
        }
    )

    name: str = Field(description="`memory`, `redis`, `s3`, `filesystem`")
    level: Literal["memory", "hot", "cold"]
    healthy: bool
    breaker: Literal["closed", "open"] = Field(description="open: it failed, and is left alone until a probe succeeds")
    reason: str | None = Field(description="why it is not healthy; to operators")
    write_back: Literal["running", "paused"] = Field(description="paused: nothing is written there in the background")
    usage: Usage | None = Field(description="to operators; null: it does not answer, or to a tenant")
    last_known: LastKnown | None = Field(
        default=None, description="to operators, while it does not answer; null: it answers, or never has"
    )
    own: Amount | None = Field(description="what the token may see of it; null: this node's memory, or no books")
    own_at_s: int | None = Field(
        default=None, description="when `own` was read, if that cannot be read now; in seconds since the Unix epoch"
    )


class Tiers(BaseModel):
    """All tiers, the quickest first."""

    tiers: list[TierStatus]


@router.get("/tiers", responses=refusals(401, 403, 422, 429, 503))
async def list_tiers(context: Context, grant: Reader) -> Tiers:
    """Health, breaker and usage of each tier. A tenant is told of its own bytes only."""
    deadline = context.soon(_ANSWER_S)
    asking = context.bridge.call(
        lambda: context.operations.tiers(deadline=deadline.earlier(_ANSWER_S / 2)), deadline=deadline
    )
    states, (own, own_at_s) = await asyncio.gather(asking, _own(context, grant))
    return Tiers(tiers=[_status(state, grant, own.get(state.name), own_at_s) for state in states])


async def _own(context: AdminContext, grant: Grant) -> tuple[dict[str, Amount], int | None]:
    """By tier; where the catalog does not answer, what it told last, and when."""
    at_s = None
    try:
        totals = await context.catalog.totals(deadline=context.soon(_ANSWER_S))
    except KVStoreError:
        known = context.catalog.last_totals()
        if known is None:
            return {}, None
        totals, at_s = known
    seen = sum_of(held for held in totals.values() if grant.sees(held.tenant))
    return amounts_of(seen, context.operations.tier_names), at_s


def _status(state: TierState, grant: Grant, own: Amount | None, own_at_s: int | None) -> TierStatus:
    usage, is_operator = state.usage, grant.tenant is None
    healthy = usage is not None and not state.is_open and not usage.refuses_writes
    reason = state.reason or (f"it takes no writes: {usage.refuses_writes}" if usage and usage.refuses_writes else None)
    last = state.last_usage if usage is None and is_operator else None
    return TierStatus(
        name=state.name,
        level="memory" if state.level is None else "hot" if state.level.name == "HOT" else "cold",
        healthy=healthy,
        breaker="open" if state.is_open else "closed",
        reason=reason if is_operator else None,
        write_back="paused" if state.is_paused else "running",
        usage=Usage(
            num_records=usage.num_records,
            used_bytes=usage.used_bytes,
            limit_bytes=usage.limit_bytes,
            limit_name=usage.limit_name,
            num_quarantined=usage.num_quarantined,
            waiting_records=state.waiting_records,
            waiting_bytes=state.waiting_bytes,
        )
        if usage is not None and is_operator
        else None,
        last_known=LastKnown(
            at_s=state.last_at_ms // 1000,
            num_records=last.num_records,
            used_bytes=last.used_bytes,
            limit_bytes=last.limit_bytes,
        )
        if last is not None
        else None,
        own=own,
        own_at_s=own_at_s if own is not None else None,
    )
