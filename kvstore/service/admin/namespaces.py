"""`/v1/namespaces`: what is kept apart from what, what each holds, and the removal of all of one."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from kvstore.catalog.base import NamespaceTotals
from kvstore.errors import Unavailable
from kvstore.model.keys import NamespaceId
from kvstore.service.admin.access import Administrator, Reader
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.deletion import Deleted, delete_namespace, told
from kvstore.service.admin.models import Amount, amounts_of, sum_of
from kvstore.service.admin.parameters import NAMESPACE_EXAMPLE, Confirm, Limit, NamespaceText, namespace_id
from kvstore.service.admin.problems import refusals

__all__ = ["router"]

router = APIRouter(tags=["namespaces"])

_NAMES_S = 2.0


class NamespaceSummary(BaseModel):
    """Everything that must be equal for pages to be interchangeable: model, types, layout, weights, tenant."""

    namespace: str = Field(description="digest of its description and tenant", examples=[NAMESPACE_EXAMPLE])
    name: str = Field(
        description="its model and types; several may have one name; empty: its description cannot be read now",
        examples=["LlamaForCausalLM bfloat16"],
    )
    tenant: str = Field(description="whose it is; empty: of engines without a credential", examples=["team-a"])
    num_boundaries: int = Field(description="boundaries with records at any tier", examples=[512])
    held: dict[str, Amount] = Field(description="what is held, by tier, of all services")


class NamespaceList(BaseModel):
    """A page of namespaces, and what all of them hold that the token may see."""

    namespaces: list[NamespaceSummary]
    next_cursor: str | None = Field(description="for the next page; null: there is none")
    total: dict[str, Amount] = Field(description="what all of them hold together, on all pages, by tier")


class NamespaceDetail(NamespaceSummary):
    """One namespace with its description."""

    is_retired: bool = Field(description="its weights are retired: nothing of it is served on any service")
    description: dict[str, Any] | None = Field(
        description="all fields that make it this one; null: its manifest is nowhere",
        examples=[{"model": "llama", "layout": {"page_tokens": 256, "groups": []}}],
    )


@router.get("/namespaces", responses=refusals(401, 403, 422, 429, 503))
async def list_namespaces(
    context: Context,
    grant: Reader,
    limit: Limit = 100,
    cursor: Annotated[str, Query(pattern="^([0-9a-f]{32})?$", description="`next_cursor` of the answer before")] = "",
) -> NamespaceList:
    """Namespaces that hold something, by their ids. A tenant sees its own."""
    totals = await context.catalog.totals(deadline=context.soon())
    seen = {namespace: held for namespace, held in totals.items() if grant.sees(held.tenant) and held.num_boundaries}
    behind = sorted(namespace for namespace in seen if namespace.hex() > cursor)
    page = behind[:limit]
    names = await context.catalog.names(page, deadline=context.soon(_NAMES_S))
    return NamespaceList(
        namespaces=[
            NamespaceSummary(**_summary(context, namespace, seen[namespace], names.get(namespace, "")))
            for namespace in page
        ],
        next_cursor=page[-1].hex() if len(behind) > len(page) else None,
        total=amounts_of(sum_of(seen.values()), context.operations.tier_names),
    )


@router.get("/namespaces/{namespace}", responses=refusals(401, 403, 404, 422, 429, 503))
async def show_namespace(context: Context, grant: Reader, namespace: NamespaceText) -> NamespaceDetail:
    """One namespace with its full description: compare two of them to see why engines do not share pages."""
    wanted = namespace_id(namespace)
    await context.catalog.check(wanted, grant, deadline=context.soon())
    totals = await context.catalog.totals(deadline=context.soon())
    description: dict[str, Any] | None = None
    is_retired, name = False, ""
    try:
        found = await context.catalog.find(wanted, grant, deadline=context.soon())
        description, is_retired = found.description.fields, context.is_retired(found)
        name = found.description.name
    except Unavailable:
        pass  # what it holds is told all the same
    held = totals.get(wanted, NamespaceTotals())
    return NamespaceDetail(**_summary(context, wanted, held, name), is_retired=is_retired, description=description)


@router.delete("/namespaces/{namespace}", responses=refusals(401, 403, 404, 422, 429, 503))
async def remove_namespace(
    context: Context, grant: Administrator, request: Request, namespace: NamespaceText, confirm: Confirm = False
) -> Deleted:
    """Delete everything that a namespace holds, but for what is pinned. Without `confirm` nothing is deleted, and the
    answer tells what would be. A large namespace takes several calls: repeat until `is_complete`.
    """
    found = await context.catalog.find(namespace_id(namespace), grant, deadline=context.soon())
    deleted = await delete_namespace(context, found, confirm=confirm)
    told(request, deleted)
    return deleted


def _summary(context: AdminContext, namespace: NamespaceId, held: NamespaceTotals, name: str) -> dict[str, Any]:
    return {
        "namespace": namespace.hex(),
        "name": name,
        "tenant": held.tenant,
        "num_boundaries": held.num_boundaries,
        "held": amounts_of(held, context.operations.tier_names),
    }
