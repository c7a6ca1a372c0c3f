"""`/v1/weights`: which weights pages were computed with, and which of them are retired on all services at once."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from kvstore.catalog.base import NamespaceTotals
from kvstore.errors import Unavailable
from kvstore.model.keys import NamespaceId
from kvstore.service.admin.access import Administrator, Reader
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.models import Amount, amounts_of, sum_of
from kvstore.service.admin.parameters import Confirm
from kvstore.service.admin.problems import Refused, refusals
from kvstore.service.credentials import Grant
from kvstore.store.retention.operator_rules import WEIGHTS_FIELD, OperatorRules

__all__ = ["router", "weights_of"]

router = APIRouter(tags=["weights"])

_NAMESPACES_MAX = 4096
_WEIGHTS_CHARS_MAX = 1024
WEIGHTS_EXAMPLE = "2c26b46b68ffc68ff99b453c1d304134"

WeightsText = Annotated[
    str,
    Query(min_length=1, max_length=_WEIGHTS_CHARS_MAX, examples=[WEIGHTS_EXAMPLE], description="as the list tells"),
]


class WeightsSummary(BaseModel):
    """Pages that were computed with the same weights."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "weights_id": WEIGHTS_EXAMPLE,
                "tenants": ["team-a"],
                "namespaces": ["6b1f0c6d2f7e4a1b9c3d5e7f90a1b2c3"],
                "held": {"redis": {"num_boundaries": 512, "num_records": 4096, "num_bytes": 8589934592}},
                "is_retired": False,
                "retired_s": None,
            }
        }
    )

    weights_id: str = Field(description="a digest of their files, or the name that an operator gave them")
    tenants: list[str] = Field(description="whose namespaces these are, as far as the token sees")
    namespaces: list[str] = Field(description="which namespaces were computed with them; none: only the order is left")
    held: dict[str, Amount] = Field(description="what these hold together, by tier")
    is_retired: bool = Field(description="nothing of it is served on any service, for any tenant listed here")
    retired_s: int | None = Field(description="when, in seconds since the Unix epoch")


class WeightsList(BaseModel):
    """All weights that the token may see."""

    weights: list[WeightsSummary]
    is_complete: bool = Field(description="false: some namespaces are not described anywhere, or there are too many")


class Retired(BaseModel):
    """What was retired, or would be; or was taken back."""

    is_dry_run: bool = Field(description="nothing was changed: `confirm=true` does")
    weights: WeightsSummary


@router.get("/weights", responses=refusals(401, 403, 422, 429, 503))
async def list_weights(context: Context, grant: Reader) -> WeightsList:
    """Weights with what was computed with them, by their ids. A tenant sees its own."""
    found, is_complete = await _found(context, grant)
    orders = _orders(context)
    ordered = {one.weights_id for one in orders.retired.values() if one.tenant is None or grant.sees(one.tenant)}
    if grant.tenant is not None:  # an order for all tenants may be about weights of others
        ordered = {weights_id for weights_id in ordered if (grant.tenant, weights_id) in orders.retired}
    names = sorted({*found, *ordered})
    return WeightsList(
        weights=[_summary(context, orders, grant, name, found.get(name, {})) for name in names],
        is_complete=is_complete,
    )


@router.post("/weights/retired", responses=refusals(401, 403, 404, 422, 429, 503))
async def retire_weights(
    context: Context, grant: Administrator, request: Request, weights_id: WeightsText, confirm: Confirm = False
) -> Retired:
    """Make all that was computed with some weights unreachable: here at once, on every service that shares the catalog
    within seconds. Nothing is deleted: `POST /v1/gc` does that. A tenant retires its own; an operator everybody's.
    """
    return await _change(context, grant, request, weights_id, is_retired=True, confirm=confirm)


@router.delete("/weights/retired", responses=refusals(401, 403, 404, 422, 429, 503))
async def restore_weights(
    context: Context, grant: Administrator, request: Request, weights_id: WeightsText, confirm: Confirm = False
) -> Retired:
    """Take a retirement back: what has not been deleted meanwhile is served again. A tenant cannot take back what an
    operator retired.
    """
    return await _change(context, grant, request, weights_id, is_retired=False, confirm=confirm)


async def _change(
    context: AdminContext, grant: Grant, request: Request, weights_id: str, *, is_retired: bool, confirm: bool
) -> Retired:
    orders, (found, _) = _orders(context), await _found(context, grant)
    if weights_id not in found and (grant.tenant, weights_id) not in orders.retired:
        raise Refused(404, "nothing is known of these weights", field="weights_id", seen=weights_id)
    request.state.audit = {"dry_run": not confirm, "weights_id": repr(weights_id), "is_retired": is_retired}
    if confirm:
        deadline = context.soon()
        await context.bridge.call(
            lambda: orders.retire(grant.tenant, weights_id, is_retired=is_retired, deadline=deadline),
            deadline=deadline,
        )
    summary = _summary(context, orders, grant, weights_id, found.get(weights_id, {}))
    return Retired(is_dry_run=not confirm, weights=summary)


def _orders(context: AdminContext) -> OperatorRules:
    if context.operations.operator_rules is None:
        raise Unavailable("this service keeps no books: that needs a Redis as hot, or a directory as cold")
    return context.operations.operator_rules


async def weights_of(context: AdminContext, namespace: NamespaceId, grant: Grant) -> str | None:
    """With which weights a namespace was computed; empty: its description does not say; `None`: it has none."""
    try:
        found = await context.catalog.find(namespace, grant, deadline=context.soon())
    except Unavailable:
        return None
    return str(found.description.fields.get(WEIGHTS_FIELD, ""))[:_WEIGHTS_CHARS_MAX]


async def _found(context: AdminContext, grant: Grant) -> tuple[dict[str, dict[NamespaceId, NamespaceTotals]], bool]:
    """The namespaces of each weights id, and whether these are all."""
    totals = await context.catalog.totals(deadline=context.soon())
    seen = [namespace for namespace, held in totals.items() if grant.sees(held.tenant)]
    is_complete = len(seen) <= _NAMESPACES_MAX
    found: dict[str, dict[NamespaceId, NamespaceTotals]] = {}
    for namespace in seen[:_NAMESPACES_MAX]:
        weights_id = await weights_of(context, namespace, grant)
        if weights_id:
            found.setdefault(weights_id, {})[namespace] = totals[namespace]
        elif weights_id is None:
            is_complete = False
    return found, is_complete


def _summary(
    context: AdminContext,
    orders: OperatorRules,
    grant: Grant,
    weights_id: str,
    namespaces: dict[NamespaceId, NamespaceTotals],
) -> WeightsSummary:
    tenants = sorted({held.tenant for held in namespaces.values()})
    orders_of = [
        one
        for one in orders.retired.values()
        if one.weights_id == weights_id and (one.tenant is None or one.tenant in tenants or one.tenant == grant.tenant)
    ]
    is_retired = bool(orders_of) and all(orders.are_retired(tenant, weights_id) for tenant in tenants)
    return WeightsSummary(
        weights_id=weights_id,
        tenants=tenants,
        namespaces=sorted(namespace.hex() for namespace in namespaces),
        held=amounts_of(sum_of(namespaces.values()), context.operations.tier_names),
        is_retired=is_retired,
        retired_s=max(one.at_s for one in orders_of) if is_retired else None,
    )
