"""`/v1/pins`: boundaries that retention keeps until a time."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from kvstore.catalog.entry import PINNED_AT, EntryTable
from kvstore.model.keys import PrefixHash
from kvstore.service.admin.access import Administrator, Reader
from kvstore.service.admin.catalog_access import Namespace
from kvstore.service.admin.context import AdminContext, Context, NamedNamespace, QueriedNamespace
from kvstore.service.admin.listing import Rows, list_entries
from kvstore.service.admin.models import (
    NAMESPACE_EXAMPLE,
    NAMESPACE_PATTERN,
    PREFIX_EXAMPLE,
    PREFIX_PATTERN,
    WHOLE_NUMBER,
    Cursor,
    Limit,
    PrefixText,
    namespace_id,
    prefix_hash,
)
from kvstore.service.admin.problems import Refused, refusals
from kvstore.service.admin.prompt import body_of, read_fields

router = APIRouter(tags=["pins"])

ALONE = (
    "not all that comes before this boundary is stored and known to the catalog, and what is not known is not kept: "
    "have an engine resume or save the prompt, then pin it again"
)
_EXPIRES_S_MAX = 10 * 366 * 86_400
"""Ten years. The time in a catalog entry has 32 bits."""


class NewPin(BaseModel):
    """What to pin, and for how long."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "example": {"namespace": NAMESPACE_EXAMPLE, "prefix": PREFIX_EXAMPLE, "expires_in_s": 86400}
        },
    )

    namespace: str = Field(pattern=NAMESPACE_PATTERN)
    prefix: str = Field(pattern=PREFIX_PATTERN, description="the last boundary to keep")
    expires_in_s: Annotated[
        int,
        Field(strict=True, gt=0, le=_EXPIRES_S_MAX, description="seconds until the pin ends by itself"),
        WHOLE_NUMBER,
    ]


class Pin(BaseModel):
    """A boundary that is kept, with all before it."""

    namespace: str = Field(examples=[NAMESPACE_EXAMPLE])
    prefix: str = Field(examples=[PREFIX_EXAMPLE])
    pinned_until_s: int = Field(description="when it ends, in seconds since the Unix epoch", examples=[1763890000])


class NewlyPinned(Pin):
    """A pin as it was set."""

    notes: list[str] = Field(
        description="what is not kept: nothing protects a boundary that the catalog does not know to come before",
        examples=[[]],
        max_length=1,
    )


class PinList(BaseModel):
    """A page of pins."""

    pins: list[Pin]
    next_cursor: str | None = Field(description="for the next page, which may be empty; null: there is none")
    is_complete: bool = Field(description="false: the time for one page was up; the cursor continues")


@router.get("/pins", responses=refusals(404))
async def list_pins(
    context: Context, grant: Reader, namespace: QueriedNamespace, limit: Limit = 100, cursor: Cursor = ""
) -> PinList:
    """Pins of a namespace that have not ended, in no order. Reads every entry."""
    now_s = context.now_s()

    def is_pinned(table: EntryTable) -> Rows:
        return table.numbers(PINNED_AT) > now_s

    page = await list_entries(context, namespace, limit=limit, cursor=cursor, wanted=is_pinned)
    pins = [
        Pin(namespace=namespace.id.hex(), prefix=entry.prefix.hex(), pinned_until_s=entry.pinned_until_s)
        for entry in page.entries
    ]
    return PinList(pins=pins, next_cursor=page.next_cursor, is_complete=page.is_complete)


@router.post("/pins", status_code=201, responses=refusals(404, 408, 409, 413), openapi_extra=body_of(NewPin))
async def create_pin(context: Context, grant: Administrator, request: Request) -> NewlyPinned:
    """Have retention keep a boundary, and all before it, until a time. A second call changes the time."""
    pin = await read_fields(request, NewPin)
    request.state.audit = {"namespace": pin.namespace, "prefix": pin.prefix, "expires_in_s": pin.expires_in_s}
    until_s = context.now_s() + pin.expires_in_s
    namespace = await context.catalog.find(namespace_id(pin.namespace), grant)
    await _set(context, namespace, pin.prefix, until_s)
    notes = [] if await _is_known_from_start(context, namespace, prefix_hash(pin.prefix)) else [ALONE]
    return NewlyPinned(namespace=pin.namespace, prefix=pin.prefix, pinned_until_s=until_s, notes=notes)


@router.delete("/pins/{namespace}/{prefix}", status_code=204, responses=refusals(404, 409))
async def delete_pin(
    context: Context, grant: Administrator, request: Request, namespace: NamedNamespace, prefix: PrefixText
) -> Response:
    """End a pin now. A boundary that is not pinned stays as it is."""
    entry = await namespace.catalog.get(namespace.id, prefix_hash(prefix), deadline=context.soon())
    if entry is None:
        raise _nothing_stored(prefix)
    if entry.pinned_until_s > context.now_s():
        await _set(context, namespace, prefix, 0)
    else:
        request.state.changed = False
    return Response(status_code=204)


async def _is_known_from_start(context: AdminContext, namespace: Namespace, prefix: PrefixHash) -> bool:
    """Whether the catalog knows each boundary before one, back to the start of the prompt."""
    deadline = context.soon()
    while True:
        entry = await namespace.catalog.get(namespace.id, prefix, deadline=deadline)
        if entry is None or entry.parent is None:
            return entry is not None and 0 < entry.tokens <= namespace.layout.page_tokens
        prefix = entry.parent


async def _set(context: AdminContext, namespace: Namespace, prefix: str, until_s: int) -> None:
    prefix_ = prefix_hash(prefix)
    if await namespace.catalog.pin(namespace.id, [prefix_], until_s, deadline=context.soon()):
        return
    if await namespace.catalog.get(namespace.id, prefix_, deadline=context.soon()) is None:
        raise _nothing_stored(prefix)
    detail = "this boundary is being deleted: its pin can be changed once it is stored again"
    raise Refused(409, detail, field="prefix", seen=prefix)


def _nothing_stored(prefix: str) -> Refused:
    return Refused(404, "nothing is stored at this boundary", field="prefix", seen=prefix)
