"""`/v1/namespaces`: which namespaces there are, what each holds, and the deletion of all of one."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from kvstore.catalog.base import NamespaceTotals
from kvstore.errors import Unavailable
from kvstore.model.keys import NAMESPACE_BYTES, NamespaceId
from kvstore.model.namespace import NamespaceDescription
from kvstore.service.admin.access import Administrator, Reader
from kvstore.service.admin.context import AdminContext, Context, NamedNamespace
from kvstore.service.admin.jobs.deletions import Deleted, audit_deletion, delete_namespace
from kvstore.service.admin.listing import cursor_behind, place_of
from kvstore.service.admin.models import (
    NAMESPACE_EXAMPLE,
    Amount,
    Confirm,
    Cursor,
    Limit,
    NamespaceText,
    amounts_of,
    namespace_id,
    sum_of,
)
from kvstore.service.admin.problems import refusals

router = APIRouter(tags=["namespaces"])

_DESCRIBED_S = 2.0


class NamespaceSummary(BaseModel):
    """Everything that must be equal for pages to be interchangeable: model, types, layout, weights, tenant."""

    namespace: str = Field(description="digest of its description and tenant", examples=[NAMESPACE_EXAMPLE])
    name: str = Field(
        description="its model and types, which need not be unique; empty: its description cannot be read now",
        examples=["LlamaForCausalLM bfloat16"],
    )
    door: str = Field(
        description="what writes it: `connector`, an engine that names its pages itself, or `own keys` for another"
        " program; empty: its description cannot be read now",
        examples=["connector", "sglang 0.5.23", "vllm 0.32.0 offloading"],
    )
    tenant: str = Field(description="its tenant; empty: engines without a credential", examples=["team-a"])
    num_boundaries: int = Field(description="boundaries with records in any tier", examples=[512])
    held: dict[str, Amount] = Field(description="what it holds, by tier, of all services")


class NamespaceList(BaseModel):
    """A page of namespaces, and what all namespaces that the token may see hold."""

    namespaces: list[NamespaceSummary]
    next_cursor: str | None = Field(description="for the next page; null: there is none")
    total: dict[str, Amount] = Field(description="what the namespaces of all pages hold together, by tier")
    is_complete: bool = Field(
        description="false: the catalog may lack records that are stored, until a service has added them"
    )


class NamespaceDetail(NamespaceSummary):
    """One namespace with its description."""

    is_retired: bool = Field(description="its weights are retired: no service serves anything of it")
    description: dict[str, Any] | None = Field(
        description="all fields that identify it; null: no tier has its manifest",
        examples=[{"model": "llama", "layout": {"page_tokens": 256, "groups": []}}],
    )


@router.get("/namespaces")
async def list_namespaces(
    context: Context,
    grant: Reader,
    limit: Limit = 100,
    cursor: Cursor = "",
    order: Annotated[Literal["id", "bytes"], Query(description="`bytes`: the largest in any tier first")] = "id",
) -> NamespaceList:
    """Namespaces that hold something. A tenant sees its own."""
    totals = await context.catalog.totals()
    seen = {namespace: held for namespace, held in totals.items() if grant.sees(held.tenant) and held.num_boundaries}

    def key(held: NamespaceTotals) -> int:
        return -max(level.num_bytes for level in held.levels) if order == "bytes" else 0

    after = place_of(cursor, NAMESPACE_BYTES)
    places = sorted((key(held), namespace) for namespace, held in seen.items())
    behind = [place for place in places if after is None or place > after]
    page = [namespace for _, namespace in behind[:limit]]
    described = await context.catalog.described(page, _DESCRIBED_S)
    return NamespaceList(
        namespaces=[
            NamespaceSummary(**_summary(context, namespace, seen[namespace], described.get(namespace)))
            for namespace in page
        ],
        next_cursor=cursor_behind(*behind[limit - 1]) if len(behind) > limit else None,
        total=amounts_of(sum_of(seen.values()), context.operations.tier_names),
        is_complete=context.catalog.is_complete,
    )


@router.get("/namespaces/{namespace}", responses=refusals(404))
async def show_namespace(context: Context, grant: Reader, namespace: NamespaceText) -> NamespaceDetail:
    """One namespace with its full description. Compare two descriptions to see why engines do not share pages."""
    wanted = namespace_id(namespace)
    await context.catalog.check(wanted, grant)
    totals = await context.catalog.totals()
    description: NamespaceDescription | None = None
    is_retired = False
    try:
        found = await context.catalog.find(wanted, grant)
    except Unavailable:
        pass  # the totals are known without the description
    else:
        description, is_retired = found.description, context.is_retired(found)
    return NamespaceDetail(
        **_summary(context, wanted, totals.get(wanted, NamespaceTotals()), description),
        is_retired=is_retired,
        description=description.fields if description is not None else None,
    )


@router.delete("/namespaces/{namespace}", responses=refusals(404))
async def remove_namespace(
    context: Context, grant: Administrator, request: Request, namespace: NamedNamespace, confirm: Confirm = False
) -> Deleted:
    """Delete everything that a namespace holds, except pinned boundaries. Without `confirm` nothing is deleted, and the
    response says what would be. A large namespace takes several calls: repeat until `is_complete`.
    """
    deleted = await delete_namespace(context, namespace, confirm=confirm)
    audit_deletion(request, deleted)
    return deleted


def _summary(
    context: AdminContext, namespace: NamespaceId, held: NamespaceTotals, description: NamespaceDescription | None
) -> dict[str, Any]:
    return {
        "namespace": namespace.hex(),
        "name": description.name if description is not None else "",
        "door": description.door if description is not None else "",
        "tenant": held.tenant,
        "num_boundaries": held.num_boundaries,
        "held": amounts_of(held, context.operations.tier_names),
    }
