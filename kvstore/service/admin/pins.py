"""`/v1/pins`: boundaries that retention leaves alone until a time."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from kvstore.catalog.entry import PINNED_AT, EntryTable
from kvstore.service.admin.access import Administrator, Reader
from kvstore.service.admin.context import Context
from kvstore.service.admin.listing import Rows, some_of
from kvstore.service.admin.parameters import (
    FROM_WHOLE,
    NAMESPACE_EXAMPLE,
    NAMESPACE_PATTERN,
    PREFIX_EXAMPLE,
    PREFIX_PATTERN,
    Cursor,
    Limit,
    NamespaceText,
    PrefixText,
    namespace_id,
    prefix_hash,
)
from kvstore.service.admin.problems import Refused, refusals

__all__ = ["router"]

router = APIRouter(tags=["pins"])

_WALK_S = 10.0
_EXPIRES_S_MAX = 10 * 366 * 86_400
"""Ten years: what is pinned for longer is meant to stay, and the time of an entry has 32 bits."""


class NewPin(BaseModel):
    """What to pin, and for how long."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "example": {"namespace": NAMESPACE_EXAMPLE, "prefix": PREFIX_EXAMPLE, "expires_in_s": 86400}
        },
    )

    namespace: str = Field(pattern=NAMESPACE_PATTERN)
    prefix: str = Field(pattern=PREFIX_PATTERN, description="the last boundary of what shall stay")
    expires_in_s: Annotated[
        int,
        Field(strict=True, gt=0, le=_EXPIRES_S_MAX, description="seconds until the pin ends by itself"),
        FROM_WHOLE,
    ]


class Pin(BaseModel):
    """A boundary that stays, with all before it."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"namespace": NAMESPACE_EXAMPLE, "prefix": PREFIX_EXAMPLE, "pinned_until_s": 1763890000}
        }
    )

    namespace: str
    prefix: str
    pinned_until_s: int = Field(description="when it ends, in seconds since the Unix epoch")


class PinList(BaseModel):
    """A page of pins."""

    pins: list[Pin]
    next_cursor: str | None = Field(description="for the next page, which may be empty; null: there is none")
    is_complete: bool = Field(description="false: the time for one page was up; the cursor leads on")


@router.get("/pins", responses=refusals(401, 403, 404, 422, 429, 503))
async def list_pins(
    context: Context,
    grant: Reader,
    namespace: Annotated[str, Query(pattern=NAMESPACE_PATTERN, examples=[NAMESPACE_EXAMPLE], description="whose pins")],
    limit: Limit = 100,
    cursor: Cursor = "",
) -> PinList:
    """Pins of a namespace that have not ended, in no order. Looks at every entry."""
    found = await context.catalog.find(namespace_id(namespace), grant, deadline=context.soon())
    catalog, now_s = await context.catalog.open(), context.now_s()

    def wanted(table: EntryTable) -> Rows:
        return table.numbers(PINNED_AT) > now_s

    async with context.walks:
        deadline = context.soon(_WALK_S)
        listed = await some_of(catalog, found.id, cursor, limit=limit, deadline=deadline, wanted=wanted)
    pins = [
        Pin(namespace=namespace, prefix=entry.prefix.hex(), pinned_until_s=entry.pinned_until_s)
        for entry in listed.entries
    ]
    return PinList(pins=pins, next_cursor=listed.next_cursor, is_complete=listed.is_complete)


@router.post("/pins", status_code=201, responses=refusals(401, 403, 404, 413, 422, 429, 503))
async def create_pin(context: Context, grant: Administrator, request: Request, pin: NewPin) -> Pin:
    """Have retention leave a boundary, and all before it, alone until a time. Again: with another time."""
    request.state.audit = {"namespace": pin.namespace, "prefix": pin.prefix, "expires_in_s": pin.expires_in_s}
    until_s = context.now_s() + pin.expires_in_s
    await _set(context, grant, pin.namespace, pin.prefix, until_s)
    return Pin(namespace=pin.namespace, prefix=pin.prefix, pinned_until_s=until_s)


@router.delete("/pins/{namespace}/{prefix}", status_code=204, responses=refusals(401, 403, 404, 422, 429, 503))
async def delete_pin(context: Context, grant: Administrator, namespace: NamespaceText, prefix: PrefixText) -> Response:
    """End a pin now. A boundary that is not pinned stays as it is."""
    await _set(context, grant, namespace, prefix, 0)
    return Response(status_code=204)


async def _set(context: Context, grant: Administrator, namespace: str, prefix: str, until_s: int) -> None:
    found = await context.catalog.find(namespace_id(namespace), grant, deadline=context.soon())
    catalog = await context.catalog.open()
    if not await catalog.pin(found.id, [prefix_hash(prefix)], until_s, deadline=context.soon()):
        raise Refused(404, "nothing is stored at this boundary", field="prefix", seen=prefix)
