"""`/livez` and `/readyz`: for whoever supervises the process. Nothing of what is stored is told."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from kvstore.catalog.entry import Level
from kvstore.errors import Unavailable
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.problems import refusals
from kvstore.store.upkeep.operations import TierState

__all__ = ["readiness", "router"]

router = APIRouter(tags=["health"])

_ANSWER_S = 2.0


class Alive(BaseModel):
    """The loop that answers engines runs."""

    status: Literal["alive"] = "alive"


class TierReadiness(BaseModel):
    """Whether a tier can be used."""

    name: str = Field(examples=["redis"])
    ready: bool
    reason: str | None = Field(default=None, description="why not")


class Readiness(BaseModel):
    """Whether all of the service can be used. One that is not ready serves what it has."""

    ready: bool
    reason: str | None = Field(default=None, description="why not, where it is not a tier")
    tiers: list[TierReadiness]


@router.get("/livez", responses=refusals(422, 503))
async def livez(context: Context) -> Alive:
    """Whether the process should go on: the loop that answers engines runs. If not for long, restart it."""
    await (context.health_bridge or context.bridge).call(_nothing, deadline=context.soon(_ANSWER_S))
    return Alive()


async def _nothing() -> None:
    pass


_NOT_READY: dict[int | str, dict[str, Any]] = {503: {"model": Readiness, "description": "not ready, and why"}}


@router.get("/readyz", response_model=Readiness, responses={**refusals(422), **_NOT_READY})
async def readyz(context: Context) -> JSONResponse:
    """Whether every tier can be used, and which cannot. Engines need not be kept away from one that is not ready."""
    found = await readiness(context)
    return JSONResponse(found.model_dump(), 200 if found.ready else 503)


async def readiness(context: AdminContext) -> Readiness:
    """As `/readyz` tells it."""
    deadline = context.soon(_ANSWER_S)
    try:
        states = await (context.health_bridge or context.bridge).call(
            lambda: context.operations.tiers(deadline=deadline.earlier(_ANSWER_S / 2)), deadline=deadline
        )
    except Unavailable:
        return Readiness(ready=False, reason="the loop that answers engines does not answer", tiers=[])
    tiers = [_tier(state) for state in states]
    listens = bool(context.describe()["addresses"])
    reason = None if listens else "it does not listen for engines"
    return Readiness(ready=listens and all(tier.ready for tier in tiers), reason=reason, tiers=tiers)


def _tier(state: TierState) -> TierReadiness:
    """In fixed words: what a medium says of itself is not for everybody.

    A cold tier that takes no writes is no reason: a directory within its budget makes room by itself, and what finds
    none stays in the hot tier and in memory. A hot one that takes none shares nothing new with other nodes.
    """
    reason = None
    if state.is_open:
        reason = "it failed, and is left alone until a probe succeeds"
    elif state.usage is None:
        reason = "it does not answer"
    elif state.level is Level.HOT and state.usage.refuses_writes:
        reason = f"it takes no writes: {state.usage.refuses_writes}"
    return TierReadiness(name=state.name, ready=reason is None, reason=reason)
