"""`/v1/weights`: the weights that pages were computed with, and their retirement on all services."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from kvstore.catalog.base import NamespaceTotals
from kvstore.model.keys import NamespaceId
from kvstore.service.admin.access import Administrator, Reader
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.models import NAMESPACE_EXAMPLE, Amount, Confirm, amounts_of, sum_of
from kvstore.service.admin.problems import Refused, refusals
from kvstore.service.authentication import Grant

router = APIRouter(tags=["weights"])

_NAMESPACES_MAX = 4096
_DESCRIBED_S = 10.0
_WEIGHTS_CHARS_MAX = 1024
WEIGHTS_EXAMPLE = "2c26b46b68ffc68ff99b453c1d304134"

WeightsText = Annotated[
    str,
    Query(min_length=1, max_length=_WEIGHTS_CHARS_MAX, examples=[WEIGHTS_EXAMPLE], description="as in the list"),
]
Namespaces = dict[NamespaceId, NamespaceTotals]


class WeightsSummary(BaseModel):
    """Pages that were computed with the same weights."""

    weights_id: str = Field(
        description="a digest of the weights' files, or the name that an operator gave them", examples=[WEIGHTS_EXAMPLE]
    )
    tenants: list[str] = Field(description="tenants of the namespaces that the token may see", examples=[["team-a"]])
    namespaces: list[str] = Field(
        description="namespaces computed with them; empty: only the retirement is left", examples=[[NAMESPACE_EXAMPLE]]
    )
    held: dict[str, Amount] = Field(description="what these hold together, by tier")
    is_retired: bool = Field(description="no service serves anything of it to the tenants listed here")
    retired_s: int | None = Field(description="when, in seconds since the Unix epoch")


class WeightsList(BaseModel):
    """All weights that the token may see."""

    weights: list[WeightsSummary]
    is_complete: bool = Field(description="false: some namespaces have no description, or there are too many")


class Retired(BaseModel):
    """A retirement, or the end of one."""

    is_dry_run: bool = Field(description="nothing was changed; `confirm=true` changes it")
    is_change: bool = Field(description="false: it was so before")
    weights: WeightsSummary


@router.get("/weights")
async def list_weights(context: Context, grant: Reader) -> WeightsList:
    """Weights with the namespaces that were computed with them, sorted by id. A tenant sees its own."""
    found, is_complete = await _found(context, grant)
    retired = context.rules.retired
    visible = {one.weights_id for one in retired.values() if one.tenant is None or grant.sees(one.tenant)}
    if grant.tenant is not None:  # a retirement for all tenants can concern weights of others only
        visible = {weights_id for weights_id in visible if (grant.tenant, weights_id) in retired}
    return WeightsList(
        weights=[_summary(context, grant, name, found.get(name, {})) for name in sorted({*found, *visible})],
        is_complete=is_complete,
    )


@router.post("/weights/retired", responses=refusals(404))
async def retire_weights(
    context: Context, grant: Administrator, request: Request, weights_id: WeightsText, confirm: Confirm = False
) -> Retired:
    """Stop serving everything that was computed with some weights: at once on this service, within seconds on every
    service that shares the catalog. Nothing is deleted; `POST /v1/gc` does that. A tenant's token retires weights for
    that tenant, an operator's for all.
    """
    return await _change(context, grant, request, weights_id, is_retired=True, confirm=confirm)


@router.delete("/weights/retired", responses=refusals(404))
async def restore_weights(
    context: Context, grant: Administrator, request: Request, weights_id: WeightsText, confirm: Confirm = False
) -> Retired:
    """Undo a retirement: what was not deleted since then is served again. A tenant cannot undo an operator's."""
    return await _change(context, grant, request, weights_id, is_retired=False, confirm=confirm)


async def _change(
    context: AdminContext, grant: Grant, request: Request, weights_id: str, *, is_retired: bool, confirm: bool
) -> Retired:
    rules, (found, _) = context.rules, await _found(context, grant)
    if weights_id not in found and (grant.tenant, weights_id) not in rules.retired:
        raise Refused(404, "these weights are unknown", field="weights_id", seen=weights_id)
    request.state.audit = {"dry_run": not confirm, "weights_id": repr(weights_id), "is_retired": is_retired}
    request.state.changed = is_retired != ((grant.tenant, weights_id) in rules.retired)
    if confirm:
        await context.data_loop.call(
            lambda deadline: rules.retire(grant.tenant, weights_id, is_retired=is_retired, deadline=deadline)
        )
    summary = _summary(context, grant, weights_id, found.get(weights_id, {}))
    return Retired(is_dry_run=not confirm, is_change=request.state.changed, weights=summary)


async def _found(context: AdminContext, grant: Grant) -> tuple[dict[str, Namespaces], bool]:
    """The namespaces of each weights id, and whether these are all."""
    totals = await context.catalog.totals()
    seen = [namespace for namespace, held in totals.items() if grant.sees(held.tenant)]
    described = await context.catalog.described(seen[:_NAMESPACES_MAX], _DESCRIBED_S)
    found: dict[str, Namespaces] = {}
    for namespace, description in described.items():
        if (weights_id := description.weights_id[:_WEIGHTS_CHARS_MAX]) and grant.sees(description.tenant):
            found.setdefault(weights_id, {})[namespace] = totals[namespace]
    return found, len(described) == len(seen)


def _summary(context: AdminContext, grant: Grant, weights_id: str, namespaces: Namespaces) -> WeightsSummary:
    rules, tenants = context.rules, sorted({held.tenant for held in namespaces.values()})
    retirements = [
        one
        for one in rules.retired.values()
        if one.weights_id == weights_id and (one.tenant is None or one.tenant in (*tenants, grant.tenant))
    ]
    is_retired = bool(retirements) and all(rules.are_retired(tenant, weights_id) for tenant in tenants)
    return WeightsSummary(
        weights_id=weights_id,
        tenants=tenants,
        namespaces=sorted(namespace.hex() for namespace in namespaces),
        held=amounts_of(sum_of(namespaces.values()), context.operations.tier_names),
        is_retired=is_retired,
        retired_s=max(one.at_s for one in retirements) if is_retired else None,
    )
