"""`/v1/quotas`: shares of the cold tier. Operators set them; a tenant sees its own."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from kvstore.catalog.entry import Level
from kvstore.errors import KVStoreError
from kvstore.eviction.holdings import Quota
from kvstore.service.admin.access import OperatorAdministrator, Reader
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.models import WHOLE_NUMBER
from kvstore.service.admin.problems import Refused, refusals
from kvstore.service.admin.prompt import body_of, read_fields
from kvstore.service.authentication import Grant

router = APIRouter(tags=["quotas"])

_BYTES_MAX = 1 << 60

TenantText = Annotated[
    str, Path(pattern="^[!-~]{1,128}$", examples=["team-a"], description="as in the credentials file")
]
ByteCount = Annotated[int, Field(strict=True, ge=0, le=_BYTES_MAX), WHOLE_NUMBER]


class NewQuota(BaseModel):
    """A quota to set."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"example": {"guaranteed_bytes": 10737418240, "maximum_bytes": 53687091200}},
    )

    guaranteed_bytes: ByteCount = Field(default=0, description="up to this size other tenants evict nothing of it")
    maximum_bytes: ByteCount | None = Field(
        default=None, description="above this size its data is evicted first; null: no limit of its own"
    )


class TenantQuota(BaseModel):
    """A tenant's quota and use."""

    tenant: str = Field(examples=["team-a"])
    guaranteed_bytes: int = Field(
        description="up to this size other tenants evict nothing of it", examples=[10737418240]
    )
    maximum_bytes: int | None = Field(
        description="above this size its data is evicted first; null: no such limit", examples=[53687091200]
    )
    is_ordered: bool = Field(description="true: set here, for all services; false: from this service's settings")
    used_bytes: int | None = Field(
        description="what it uses of the cold tier; null: the catalog does not answer", examples=[8589934592]
    )
    is_known: bool = Field(description="false: no credential and no stored namespace is of a tenant of this name")


class QuotaList(BaseModel):
    """Tenants with a quota."""

    quotas: list[TenantQuota]
    unread: str | None = Field(
        default=None,
        description="why the catalog, where quotas are kept, cannot be read now, so that these are the last known; "
        "null: it was read",
    )


@router.get("/quotas")
async def list_quotas(context: Context, grant: Reader) -> QuotaList:
    """The quotas in force, sorted by tenant. A tenant sees its own."""
    tenants = [tenant for tenant in sorted(context.rules.quotas) if grant.sees(tenant)]
    used, unread = await _used_bytes(context)
    return QuotaList(quotas=_quotas_of(context, tenants, used), unread=unread)


@router.get("/quotas/{tenant:path}", responses=refusals(404))
async def show_quota(context: Context, grant: Reader, tenant: TenantText) -> TenantQuota:
    """One tenant's quota."""
    return await _quota_of(context, grant, tenant)


@router.put("/quotas/{tenant:path}", responses=refusals(408, 413), openapi_extra=body_of(NewQuota))
async def set_quota(
    context: Context, grant: OperatorAdministrator, request: Request, tenant: TenantText
) -> TenantQuota:
    """Give a tenant a quota, in place of the one in the settings: within seconds on every service that shares the
    catalog, and after restarts.
    """
    quota = await read_fields(request, NewQuota)
    rules, wanted = context.rules, Quota(quota.guaranteed_bytes, quota.maximum_bytes)
    request.state.audit = {"tenant": tenant, **quota.model_dump()}
    request.state.changed = rules.ordered.get(tenant) != wanted
    if wanted.maximum_bytes is not None and not max(1, wanted.guaranteed_bytes) <= wanted.maximum_bytes:
        detail = "the maximum is 0, or less than the guaranteed bytes"
        raise Refused(422, detail, field="body.maximum_bytes", seen=wanted.maximum_bytes)
    await context.data_loop.call(lambda deadline: rules.set_quota(tenant, wanted, deadline=deadline))
    return await _quota_of(context, grant, tenant)


@router.delete("/quotas/{tenant:path}", status_code=204)
async def remove_quota(
    context: Context, grant: OperatorAdministrator, request: Request, tenant: TenantText
) -> Response:
    """Withdraw a quota that was set here. The one in the settings applies again. Without one nothing changes."""
    rules = context.rules
    if tenant not in rules.ordered:
        request.state.changed = False
        return Response(status_code=204)
    await context.data_loop.call(lambda deadline: rules.set_quota(tenant, None, deadline=deadline))
    return Response(status_code=204)


async def _quota_of(context: AdminContext, grant: Grant, tenant: str) -> TenantQuota:
    if tenant not in context.rules.quotas or not grant.sees(tenant):
        raise Refused(404, "the tenant has no such quota", field="tenant", seen=tenant)
    used, _ = await _used_bytes(context)
    return _quotas_of(context, [tenant], used)[0]


def _quotas_of(context: AdminContext, tenants: list[str], used: dict[str, int] | None) -> list[TenantQuota]:
    rules, watched = context.rules, context.service.credentials
    return [
        TenantQuota(
            tenant=tenant,
            **asdict(rules.quotas.get(tenant, Quota())),
            is_ordered=tenant in rules.ordered,
            used_bytes=None if used is None else used.get(tenant, 0),
            is_known=used is None or tenant in used or (watched is not None and watched.value.has_tenant(tenant)),
        )
        for tenant in tenants
    ]


async def _used_bytes(context: AdminContext) -> tuple[dict[str, int] | None, str | None]:
    """Bytes in the cold tier by tenant; `None` and why, if the catalog does not answer."""
    try:
        totals = await context.catalog.totals()
    except KVStoreError as error:
        return None, str(error)
    used: dict[str, int] = {}
    for held in totals.values():
        used[held.tenant] = used.get(held.tenant, 0) + held.levels[Level.COLD].num_bytes
    return used, None
