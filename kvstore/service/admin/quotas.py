"""`/v1/quotas`: what tenants get of the cold tier: looked at by them, ordered by operators."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from kvstore.catalog.entry import Level
from kvstore.errors import KVStoreError, Unavailable
from kvstore.eviction.holdings import Quota
from kvstore.service.admin.access import OperatorAdministrator, Reader
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.parameters import FROM_WHOLE
from kvstore.service.admin.problems import Refused, refusals
from kvstore.service.credentials import Grant
from kvstore.store.retention.operator_rules import OperatorRules

__all__ = ["router"]

router = APIRouter(tags=["quotas"])

_BYTES_MAX = 1 << 60

TenantText = Annotated[
    str, Path(pattern="^[!-~]{1,128}$", examples=["team-a"], description="as the credentials file names it")
]
ByteCount = Annotated[int, Field(strict=True, ge=0, le=_BYTES_MAX), FROM_WHOLE]


class NewQuota(BaseModel):
    """What a tenant shall get."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"example": {"guaranteed_bytes": 10737418240, "maximum_bytes": 53687091200}},
    )

    guaranteed_bytes: ByteCount = Field(default=0, description="within these nothing of it leaves on behalf of others")
    maximum_bytes: ByteCount | None = Field(
        default=None, description="beyond these it leaves before all others; null: no limit of its own"
    )


class TenantQuota(BaseModel):
    """What a tenant gets, and takes."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "tenant": "team-a",
                "guaranteed_bytes": 10737418240,
                "maximum_bytes": 53687091200,
                "is_ordered": True,
                "used_bytes": 8589934592,
            }
        }
    )

    tenant: str
    guaranteed_bytes: int = Field(description="within these nothing of it leaves on behalf of others")
    maximum_bytes: int | None = Field(description="beyond these it leaves before all others; null: no such limit")
    is_ordered: bool = Field(description="by this interface, for all services; else by the settings of this service")
    used_bytes: int | None = Field(description="what it takes of the cold tier; null: the catalog does not answer")


class QuotaList(BaseModel):
    """Tenants with a quota."""

    quotas: list[TenantQuota]


@router.get("/quotas", responses=refusals(401, 403, 422, 429, 503))
async def list_quotas(context: Context, grant: Reader) -> QuotaList:
    """Quotas that hold now, by tenant. A tenant sees its own."""
    orders = _orders(context)
    used = await _used(context)
    listed = [tenant for tenant in sorted(orders.quotas) if grant.sees(tenant)]
    return QuotaList(quotas=[_told(orders, tenant, used) for tenant in listed])


@router.get("/quotas/{tenant:path}", responses=refusals(401, 403, 404, 422, 429, 503))
async def show_quota(context: Context, grant: Reader, tenant: TenantText) -> TenantQuota:
    """One tenant's quota."""
    return await _one(context, grant, tenant)


@router.put("/quotas/{tenant:path}", responses=refusals(401, 403, 413, 422, 429, 503))
async def set_quota(
    context: Context, grant: OperatorAdministrator, request: Request, tenant: TenantText, quota: NewQuota
) -> TenantQuota:
    """Give a tenant a quota, instead of what the settings say: on every service that shares the catalog, within
    seconds, and after restarts.
    """
    request.state.audit = {"tenant": tenant, **quota.model_dump()}
    orders, wanted = _orders(context), Quota(quota.guaranteed_bytes, quota.maximum_bytes)
    if wanted.maximum_bytes is not None and not max(1, wanted.guaranteed_bytes) <= wanted.maximum_bytes:
        detail = "the maximum is less than what is guaranteed, or nothing"
        raise Refused(422, detail, field="body.maximum_bytes", seen=wanted.maximum_bytes)
    deadline = context.soon()
    await context.bridge.call(lambda: orders.set_quota(tenant, wanted, deadline=deadline), deadline=deadline)
    return await _one(context, grant, tenant)


@router.delete("/quotas/{tenant:path}", status_code=204, responses=refusals(401, 403, 404, 422, 429, 503))
async def remove_quota(context: Context, grant: OperatorAdministrator, tenant: TenantText) -> Response:
    """Withdraw a quota that was set here: what the settings say counts again."""
    orders = _orders(context)
    if tenant not in orders.ordered:
        raise _unknown(tenant)
    deadline = context.soon()
    await context.bridge.call(lambda: orders.set_quota(tenant, None, deadline=deadline), deadline=deadline)
    return Response(status_code=204)


def _orders(context: AdminContext) -> OperatorRules:
    if context.operations.operator_rules is None:
        raise Unavailable("this service keeps no books: that needs a Redis as hot, or a directory as cold")
    return context.operations.operator_rules


async def _one(context: AdminContext, grant: Grant, tenant: str) -> TenantQuota:
    orders = _orders(context)
    if tenant not in orders.quotas or not grant.sees(tenant):
        raise _unknown(tenant)
    return _told(orders, tenant, await _used(context))


async def _used(context: AdminContext) -> dict[str, int] | None:
    """Bytes in the cold tier by tenant."""
    try:
        totals = await context.catalog.totals(deadline=context.soon())
    except KVStoreError:
        return None
    used: dict[str, int] = {}
    for held in totals.values():
        used[held.tenant] = used.get(held.tenant, 0) + held.levels[Level.COLD].num_bytes
    return used


def _told(orders: OperatorRules, tenant: str, used: dict[str, int] | None) -> TenantQuota:
    quota = orders.quotas.get(tenant, Quota())
    return TenantQuota(
        tenant=tenant,
        guaranteed_bytes=quota.guaranteed_bytes,
        maximum_bytes=quota.maximum_bytes,
        is_ordered=tenant in orders.ordered,
        used_bytes=None if used is None else used.get(tenant, 0),
    )


def _unknown(tenant: str) -> Refused:
    return Refused(404, "the tenant has no such quota", field="tenant", seen=tenant)
