"""`/v1/tiers`: the state of each tier, and what it holds."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from kvstore.errors import KVStoreError
from kvstore.service.admin.access import Reader
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.models import Amount, amounts_of, sum_of
from kvstore.service.authentication import Grant
from kvstore.store.upkeep.operations import TierState

router = APIRouter(tags=["tiers"])

_ANSWER_S = 3.0


Problem = Literal["does not answer", "is not used until a probe succeeds", "takes no writes"]


class Usage(BaseModel):
    """What a tier holds, of all tenants."""

    num_records: int | None = Field(description="null: counting them would need a scan", examples=[40960])
    used_bytes: int | None = Field(description="null: likewise", examples=[85899345920])
    limit_bytes: int | None = Field(
        description="what it may hold, by its smallest limit; null: there is none", examples=[137438953472]
    )
    limit_name: str = Field(
        description="that limit: `memory_bytes`, `disk_bytes`, `cold_bytes`, or Redis' own `maxmemory`; empty: none"
    )
    num_quarantined: int = Field(description="corrupt records quarantined since the start", examples=[0])
    waiting_records: int = Field(description="records that this service has yet to write there", examples=[3])
    waiting_bytes: int = Field(description="their bytes", examples=[6291456])


class LastKnown(BaseModel):
    """What a tier held when that was last known."""

    at_s: int = Field(description="when that was, in seconds since the Unix epoch", examples=[1763800000])
    num_records: int | None = Field(description="as in `usage`")
    used_bytes: int | None = Field(description="likewise", examples=[85899345920])
    limit_bytes: int | None = Field(description="likewise")
    limit_name: str = Field(description="likewise")


class TierStatus(BaseModel):
    """A place that stores records."""

    name: str = Field(description="`memory`, `redis`, `s3`, `filesystem`", examples=["redis"])
    level: Literal["memory", "hot", "cold"]
    healthy: bool
    breaker: Literal["closed", "open"] = Field(description="open: it failed and is not used until a probe succeeds")
    problem: Problem | None = Field(description="what is wrong if it is not healthy")
    reason: str | None = Field(description="why; for operators")
    write_back: Literal["running", "paused"] = Field(description="paused: no background writes to it")
    usage: Usage | None = Field(description="for operators; null: it does not answer, or the token is a tenant's")
    last_known: LastKnown | None = Field(
        default=None,
        description="for operators, while it does not answer or its `used_bytes` are unknown; null: otherwise, or they "
        "were never known",
    )
    own: Amount | None = Field(
        description="what the token may see of it; null: this node's memory, or it is not known, as without a catalog "
        "or after the catalog was lost"
    )
    own_at_s: int | None = Field(
        default=None,
        description="when `own` was read, if it cannot be read now or the catalog may lack records; in seconds since "
        "the Unix epoch",
    )


class Tiers(BaseModel):
    """All tiers, the fastest first."""

    tiers: list[TierStatus]


@router.get("/tiers")
async def list_tiers(context: Context, grant: Reader) -> Tiers:
    """Health, breaker and usage of each tier. A tenant sees only its own bytes."""
    states, (own, own_at_s) = await asyncio.gather(context.tier_states(_ANSWER_S), _own(context, grant))
    return Tiers(tiers=[_status(state, grant, own.get(state.name), own_at_s) for state in states])


async def _own(context: AdminContext, grant: Grant) -> tuple[dict[str, Amount], int | None]:
    """What the token may see, by tier. If the catalog does not answer or may lack records: what was last known, and
    when.
    """
    try:
        totals, at_s = await context.catalog.whole_totals(_ANSWER_S)
    except KVStoreError:
        return {}, None
    seen = sum_of(held for held in totals.values() if grant.sees(held.tenant))
    return amounts_of(seen, context.operations.tier_names), at_s


def _status(state: TierState, grant: Grant, own: Amount | None, own_at_s: int | None) -> TierStatus:
    usage, is_operator = state.usage, grant.tenant is None
    refusal = usage.refuses_writes if usage is not None else ""
    shown = last = None
    if is_operator and usage is not None:
        waiting = {"waiting_records": state.waiting_records, "waiting_bytes": state.waiting_bytes}
        shown = Usage.model_validate({**asdict(usage), **waiting})
    if is_operator and state.last_usage is not None:
        last = LastKnown.model_validate({**asdict(state.last_usage), "at_s": state.last_at_ms // 1000})
    problem: Problem | None = None
    if state.is_open:
        problem = "is not used until a probe succeeds"
    elif usage is None:
        problem = "does not answer"
    elif refusal:
        problem = "takes no writes"
    return TierStatus(
        name=state.name,
        level="memory" if state.level is None else "hot" if state.level.name == "HOT" else "cold",
        healthy=problem is None,
        problem=problem,
        breaker="open" if state.is_open else "closed",
        reason=(state.reason or (f"it takes no writes: {refusal}" if refusal else None)) if is_operator else None,
        write_back="paused" if state.is_paused else "running",
        usage=shown,
        last_known=last,
        own=own,
        own_at_s=own_at_s if own is not None else None,
    )
