"""`/v1/events`: what happened lately at this service, as a list or as it happens (server-sent events)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from kvstore.errors import KVStoreError
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.events import Event, EventKind
from kvstore.service.admin.access import Reader
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.parameters import NAMESPACE_EXAMPLE, namespace_id
from kvstore.service.admin.problems import refusals
from kvstore.service.authentication import Grant

__all__ = ["router"]

router = APIRouter(tags=["events"])

_FOLLOW_S = 600.0
"""Then a follower asks again, with `Last-Event-ID`. One whose token is revoked is ended at once."""
_HEARTBEAT_S = 15.0
_LOOK_S = 0.25
_RETRY_MS = 2000
_NEUTRAL_DETAIL = ("tier", "away_s", "release")
"""Of what everybody may know: reasons may name machines and other tenants."""

Kind = Literal[
    "started", "tier_down", "tier_back", "quarantined", "evicted", "saves_dropped", "catalog", "settings", "admin"
]


class OneEvent(BaseModel):
    """One thing that happened at this service."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "id": "1763800000123",
                "at": "2026-11-22T07:54:33.120+00:00",
                "kind": "tier_down",
                "severity": "error",
                "text": "tier redis is off, requests go on without it",
                "namespace": "",
                "detail": {"tier": "redis", "reason": "the server did not answer in time"},
            }
        }
    )

    id: str = Field(description="grows; what `Last-Event-ID` takes")
    at: str = Field(description="when, ISO 8601 in UTC")
    kind: Kind
    severity: Literal["info", "warning", "error"]
    text: str = Field(description="in words")
    namespace: str = Field(
        description="what it is about; empty: nothing of one namespace", examples=[NAMESPACE_EXAMPLE]
    )
    detail: dict[str, Any] = Field(description="plain values; of what is about all tenants, to operators only")


class EventList(BaseModel):
    """Recent events, newest first."""

    events: list[OneEvent]
    last_id: str = Field(description="follow from here on: send it as `Last-Event-ID`", examples=["1763800000123"])


_SEVERITY: dict[EventKind, Literal["info", "warning", "error"]] = {
    EventKind.TIER_DOWN: "error",
    EventKind.QUARANTINED: "error",
    EventKind.SAVES_DROPPED: "warning",
    EventKind.CATALOG: "warning",
}
_SENT_EVENT = {
    "type": "object",
    "description": "each event; `data` is what a list has",
    "required": ["id", "event", "data"],
    "properties": {
        "id": {"type": "string"},
        "event": {"type": "string", "description": "its kind"},
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
    "example": {"id": "1763800000123", "event": "tier_down", "data": '{"id": "1763800000123", "kind": "tier_down"}'},
}


@router.get(
    "/events",
    response_model=EventList,
    responses={
        200: {
            "description": "as they happen, or with `follow=false` a list",
            "content": {"text/event-stream": {"schema": _SENT_EVENT}},
        },
        **refusals(401, 403, 422, 429, 503),
    },
)
async def list_events(
    context: Context,
    grant: Reader,
    *,
    follow: Annotated[bool, Query(description="as they happen, as server-sent events; else a list")] = True,
    limit: Annotated[int, Query(ge=1, le=1000, description="of a list, how many at most")] = 100,
    last_event_id: Annotated[
        str, Header(pattern="^[0-9]{0,20}$", description="the last one that was seen: only what is newer is told")
    ] = "",
) -> Response:
    """What happened lately at this service: tiers that went and came back, records put aside, evictions, saves that
    were dropped, settings and administrative actions that took effect. The last 256 of each kind are kept, in memory.

    A tenant is told of what is about its own namespaces, and that a tier went or came back. Followed, the answer begins
    with what is kept, has a comment every 15 seconds, and ends after ten minutes, when the service stops, or within
    seconds when the token is revoked.
    """
    after = int(last_event_id or 0)
    if not follow:
        seen = await _visible(context, grant, after)
        last = str(context.events.last if grant.tenant is None else seen[-1].number if seen else after)
        listed = EventList(events=[_shown(event, grant) for event in seen[: -limit - 1 : -1]], last_id=last)
        return Response(listed.model_dump_json(), media_type="application/json")
    context.followers.enter(grant.name)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_follow(context, grant, after), media_type="text/event-stream", headers=headers)


async def _follow(context: AdminContext, grant: Grant, after: int) -> AsyncIterator[str]:
    """Ends by itself when the time is up or the service stops, and by cancellation when the client leaves."""
    try:
        beat_s = SYSTEM_CLOCK.monotonic_s()
        end_s = beat_s + _FOLLOW_S
        looked_at = -1
        yield f"retry: {_RETRY_MS}\n\n"
        while not context.is_stopping() and (now_s := SYSTEM_CLOCK.monotonic_s()) < end_s and context.holds(grant):
            if (last := context.events.last) != looked_at:
                for event in await _visible(context, grant, after):
                    shown = _shown(event, grant)
                    yield f"id: {shown.id}\nevent: {shown.kind}\ndata: {shown.model_dump_json()}\n\n"
                after = looked_at = last
            if now_s - beat_s >= _HEARTBEAT_S:
                beat_s = now_s
                yield ": still here\n\n"
            await asyncio.sleep(_LOOK_S)
    finally:
        context.followers.leave(grant.name)


async def _visible(context: AdminContext, grant: Grant, after: int) -> list[Event]:
    kept = context.events.after(after)
    if grant.tenant is None:
        return kept
    own: dict[str, bool] = {"": False}
    for namespace in {event.namespace for event in kept} - {""}:
        try:
            tenant = await context.catalog.tenant_of(namespace_id(namespace), deadline=context.soon())
        except KVStoreError:
            tenant = None  # whose it is cannot be told now: then nobody's
        own[namespace] = tenant is not None and grant.sees(tenant)
    return [event for event in kept if event.is_public or event.tenant == grant.tenant or own[event.namespace]]


def _shown(event: Event, grant: Grant) -> OneEvent:
    detail = dict(event.detail)
    if event.is_public and grant.tenant is not None:
        detail = {name: detail[name] for name in _NEUTRAL_DETAIL if name in detail}
    elif grant.tenant is not None and event.tenant != grant.tenant:
        detail.pop("who", None)  # an operator's name
    return OneEvent(
        id=str(event.number),
        at=datetime.fromtimestamp(event.at_ms / 1000, UTC).isoformat(timespec="milliseconds"),
        kind=event.kind.value,
        severity=_SEVERITY.get(event.kind, "info"),
        text=event.text,
        namespace=event.namespace,
        detail=json.loads(json.dumps(detail)),
    )
