"""`/v1/events`: recent events of this service, as a list or as they happen (server-sent events)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, Field

from kvstore.errors import KVStoreError
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.events import Event, EventKind
from kvstore.service.admin.access import Reader
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.models import NAMESPACE_EXAMPLE, namespace_id
from kvstore.service.admin.problems import Refused
from kvstore.service.authentication import Grant

router = APIRouter(tags=["events"])

FOLLOWERS_MAX, _FOLLOWERS_OF_TOKEN_MAX = 64, 8
"""Of tenants in all, so that they keep no operator out, and of a token."""
_FOLLOW_S = 600.0
"""A response ends after this time, and the client continues with `Last-Event-ID`."""
_HEARTBEAT_S = 15.0
_POLL_S = 0.25
_RETRY_MS = 2000
_NEUTRAL_DETAIL = ("tier", "away_s", "release")
"""The details of a public event that a tenant sees: reasons can name machines and other tenants."""

Kind = Literal[
    "started", "tier_down", "tier_back", "quarantined", "evicted", "saves_dropped", "catalog", "settings", "admin"
]
Severity = Literal["info", "warning", "error"]


class OneEvent(BaseModel):
    """One event of this service."""

    id: str = Field(description="grows; the value for `Last-Event-ID`", examples=["1763800000123"])
    at: str = Field(description="when, ISO 8601 in UTC", examples=["2026-11-22T07:54:33.120+00:00"])
    kind: Kind
    severity: Severity
    text: str = Field(description="in words", examples=["tier redis failed; requests continue without it"])
    namespace: str = Field(
        description="the namespace that it concerns; empty: not a single one", examples=[NAMESPACE_EXAMPLE]
    )
    detail: dict[str, Any] = Field(
        description="plain values; for operators only where the event concerns all tenants",
        examples=[{"tier": "redis", "reason": "the server did not answer in time"}],
    )


class EventList(BaseModel):
    """Recent events, newest first."""

    events: list[OneEvent]
    last_id: str = Field(description="to follow from here on, send it as `Last-Event-ID`", examples=["1763800000123"])


_SEVERITY: dict[EventKind, Severity] = {
    EventKind.TIER_DOWN: "error",
    EventKind.QUARANTINED: "error",
    EventKind.SAVES_DROPPED: "warning",
    EventKind.CATALOG: "warning",
}
_SENT_EVENT = {
    "type": "object",
    "description": "each event; `data` is an event as in a list",
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
            "description": "events as they happen, or with `follow=false` a list",
            "content": {"text/event-stream": {"schema": _SENT_EVENT}},
        },
    },
)
async def list_events(
    context: Context,
    grant: Reader,
    *,
    follow: Annotated[bool, Query(description="true: as they happen, as server-sent events; false: a list")] = True,
    limit: Annotated[int, Query(ge=1, le=1000, description="events of a list at most")] = 100,
    last_event_id: Annotated[
        str, Header(pattern="^[0-9]{0,20}$", description="the last event that was seen: only later ones are sent")
    ] = "",
) -> Response:
    """Recent events of this service: tiers that failed and recovered, quarantined records, evictions, dropped saves,
    settings and administrative changes. The last 256 of each kind are kept, in memory.

    A tenant sees events of its own namespaces, and that a tier failed or recovered. With `follow` the response begins
    with the events that are kept and has a comment every 15 seconds. It ends after ten minutes, when the service stops,
    or within seconds when the token is revoked.
    """
    after = int(last_event_id or 0)
    if not follow:
        seen = await _visible(context, grant, after)
        last = context.service.store.events.last if grant.tenant is None else seen[-1].number if seen else after
        listed = EventList(events=[_shown(event, grant) for event in seen[: -limit - 1 : -1]], last_id=str(last))
        return Response(listed.model_dump_json(), media_type="application/json")
    followers = context.followers
    is_full = grant.tenant is not None and followers.total() >= FOLLOWERS_MAX
    if is_full or followers[grant.name] >= _FOLLOWERS_OF_TOKEN_MAX:
        raise Refused(503, "too many clients follow the events already", headers={"Retry-After": "10"})
    followers[grant.name] += 1
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_follow(context, grant, after), media_type="text/event-stream", headers=headers)


async def _follow(context: AdminContext, grant: Grant, after: int) -> AsyncIterator[str]:
    """Ends when the time is up, the service stops or the token is revoked. Cancelled when the client disconnects."""
    try:
        beat_s = SYSTEM_CLOCK.monotonic_s()
        end_s = beat_s + _FOLLOW_S
        seen_last = -1
        yield f"retry: {_RETRY_MS}\n\n"
        while not context.is_stopping() and (now_s := SYSTEM_CLOCK.monotonic_s()) < end_s and context.is_valid(grant):
            if (last := context.service.store.events.last) != seen_last:
                for event in await _visible(context, grant, after):
                    shown = _shown(event, grant)
                    yield f"id: {shown.id}\nevent: {shown.kind}\ndata: {shown.model_dump_json()}\n\n"
                    last = max(last, event.number)  # the store's thread may have added it since `last` was read
                after = seen_last = last
            if now_s - beat_s >= _HEARTBEAT_S:
                beat_s = now_s
                yield ": still here\n\n"
            await asyncio.sleep(_POLL_S)
    finally:
        context.followers[grant.name] -= 1
        if not context.followers[grant.name]:
            del context.followers[grant.name]


async def _visible(context: AdminContext, grant: Grant, after: int) -> list[Event]:
    """Events after a number that a token may see."""
    kept = context.service.store.events.after(after)
    if grant.tenant is None:
        return kept
    own: dict[str, bool] = {"": False}
    for namespace in {event.namespace for event in kept} - {""}:
        try:
            tenant = await context.catalog.tenant_of(namespace_id(namespace))
        except KVStoreError:
            tenant = None  # the owner is not known now, so no tenant sees it
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
        detail=detail,
    )
