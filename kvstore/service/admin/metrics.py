"""`/metrics`: for Prometheus."""

from __future__ import annotations

from contextlib import suppress

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from kvstore.errors import Unavailable
from kvstore.service.admin.access import Operator
from kvstore.service.admin.context import Context
from kvstore.service.admin.problems import refusals
from kvstore.service.metrics import CONTENT_TYPE, render
from kvstore.store.upkeep.operations import TierState

__all__ = ["router"]

router = APIRouter(tags=["health"])

_ANSWER_S = 2.0


class _Text(PlainTextResponse):
    media_type = CONTENT_TYPE


@router.get(
    "/metrics",
    response_class=_Text,
    responses={
        200: {"content": {CONTENT_TYPE: {"example": "kvstore_lookups_total 42\n"}}, "description": "metrics as text"},
        **refusals(401, 403, 422, 429),
    },
)
async def metrics(context: Context, grant: Operator) -> _Text:
    """All counters and gauges (docs/observing.md). They are about all tenants: an operator's token is needed."""
    deadline = context.soon(_ANSWER_S)
    states: list[TierState] = []
    with suppress(Unavailable):  # the counters are told all the same
        states = await context.bridge.call(
            lambda: context.operations.tiers(deadline=deadline.earlier(_ANSWER_S / 2)), deadline=deadline
        )
    operations = context.operations
    return _Text(render(operations.meters.snapshot(), states, context.describe(), operations.quotas()))
