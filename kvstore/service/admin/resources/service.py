"""The service as a whole: `/livez` and `/readyz` for a supervisor, `/metrics` for Prometheus, and `/v1/settings`."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, Field

from kvstore.catalog.entry import Level
from kvstore.errors import Unavailable, without_details
from kvstore.runtime.deadline import LATE
from kvstore.service.admin.access import Operator
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.problems import refusals
from kvstore.service.metrics import CONTENT_TYPE, render
from kvstore.service.reported_settings import reported_settings
from kvstore.settings import Source
from kvstore.store.upkeep.operations import TierState

health = APIRouter(tags=["health"])
router = APIRouter(tags=["settings"])

_ANSWER_S = 2.0


class Alive(BaseModel):
    """The event loop that answers engines runs."""

    status: Literal["alive"] = "alive"
    instance: str = Field(
        description="names this run of the service, as `service.instance` in the status of its data port",
        examples=["7f0c9a1be2d34855"],
    )


class TierReadiness(BaseModel):
    """Whether a tier can be used."""

    name: str = Field(examples=["redis"])
    ready: bool
    reason: str | None = Field(default=None, description="why not")


class Readiness(BaseModel):
    """Whether the whole service can be used. A service that is not ready still serves what it can."""

    ready: bool
    reason: str | None = Field(
        default=None, description="why not", examples=["s3: it failed and is not used until a probe succeeds"]
    )
    tiers: list[TierReadiness]


@health.get("/livez", responses=refusals(422, 503))
async def livez(context: Context) -> Alive:
    """Whether the event loop that answers engines runs. If this fails for long, restart the process."""
    await context.health_loop.call_short(lambda: None, _ANSWER_S)
    return Alive(instance=context.service.server.instance)


_NOT_READY: dict[int | str, dict[str, Any]] = {503: {"model": Readiness, "description": "not ready, and why"}}


@health.get("/readyz", response_model=Readiness, responses={**refusals(422), **_NOT_READY})
async def readyz(context: Context) -> JSONResponse:
    """Whether every tier can be used, and which cannot. A service that is not ready can still serve engines."""
    found = await _readiness(context)
    return JSONResponse(found.model_dump(), 200 if found.ready else 503)


async def _readiness(context: AdminContext) -> Readiness:
    try:
        states = await context.tier_states(_ANSWER_S, is_health=True)
    except Unavailable:
        return Readiness(ready=False, reason="the event loop that answers engines does not respond", tiers=[])
    tiers = [_tier_readiness(state) for state in states]
    reasons = [f"{tier.name}: {tier.reason}" for tier in tiers if not tier.ready]
    if (backlog := context.operations.backlog()) is not None and backlog.since_ms is not None:
        since = datetime.fromtimestamp(backlog.since_ms / 1000, UTC).isoformat(timespec="seconds")
        reasons.append(
            f"the catalog has taken no changes since {since}, and {backlog.num_changes} of this service wait"
        )
    if not context.service.server.describe()["addresses"]:
        reasons.insert(0, "the service does not listen for engines")
    return Readiness(ready=not reasons, reason="; ".join(reasons) or None, tiers=tiers)


def _tier_readiness(state: TierState) -> TierReadiness:
    """With reasons in fixed words: the route needs no token, so details of a tier's errors do not belong here.

    A cold tier that refuses writes is ready: a directory evicts within its budget, and what does not fit stays in the
    hot tier and in memory. A hot tier that refuses writes is not: it shares nothing new with other nodes.
    """
    reason = None
    if state.is_open:
        reason = f"it failed and is not used until a probe succeeds{_cause(state.reason)}"
    elif state.usage is None:
        reason = f"it does not answer{_cause(state.reason)}"
    elif state.level is Level.HOT and state.usage.refuses_writes:
        reason = f"it takes no writes: {state.usage.refuses_writes}"
    return TierReadiness(name=state.name, ready=reason is None, reason=reason)


def _cause(reason: str) -> str:
    """Cause and next step, behind a colon; empty if the error has none."""
    if LATE in reason:  # such a text may name a place in its message
        return ": its calls do not end in time"
    message = without_details(reason.partition(" reason=")[2] or reason)
    return f": {message}" if ": " in message else ""


class _MetricsText(PlainTextResponse):
    media_type = CONTENT_TYPE


@health.get(
    "/metrics",
    response_class=_MetricsText,
    responses={
        200: {"content": {CONTENT_TYPE: {"example": "kvstore_lookups_total 42\n"}}, "description": "metrics as text"},
        **refusals(401, 403, 422, 429, 503),
    },
)
async def metrics(context: Context, grant: Operator) -> _MetricsText:
    """All counters and gauges (docs/observing.md). They concern all tenants, so this needs an operator's token."""
    states: list[TierState] = []
    with suppress(Unavailable):  # the counters are reported without them
        states = await context.tier_states(_ANSWER_S)
    operations = context.operations
    own = {**context.service.server.describe(), "known_pieces_bytes": context.known_pieces.used_bytes}
    return _MetricsText(render(operations.meters.snapshot(), states, own, operations.quotas(), operations.backlog()))


class SettingStatus(BaseModel):
    """The value of one setting."""

    value: str | None = Field(
        description="as a flag spells it, with `***` in place of a secret; null: not set",
        examples=["redis://:***@redis.internal:6379/0"],
    )
    source: Source = Field(description="where it came from")


class SettingsStatus(BaseModel):
    """All settings of a service."""

    settings: dict[str, SettingStatus] = Field(description="by name, as in docs/settings.md")
    credentials: list[str] = Field(
        description="names of the environment variables with which the service logs in to S3",
        examples=[["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]],
    )


@router.get("/settings")
async def list_settings(context: Context, grant: Operator) -> SettingsStatus:
    """The settings of this service, without secrets, and where each came from. For operators."""
    return SettingsStatus.model_validate(reported_settings(context.service.settings))
