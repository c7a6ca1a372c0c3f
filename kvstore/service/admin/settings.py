"""`/v1/settings`: the settings that this service works with, for tools that should look at the same store."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, Field

from kvstore.service.admin.access import Operator
from kvstore.service.admin.context import Context
from kvstore.service.admin.problems import refusals
from kvstore.settings import Source

__all__ = ["router"]

router = APIRouter(tags=["settings"])


class SettingStatus(BaseModel):
    """The value of one setting."""

    value: str | None = Field(
        description="as a flag spells it, `***` in place of a secret; null: not set",
        examples=["redis://:***@redis.internal:6379/0"],
    )
    source: Source = Field(description="where it came from")


class SettingsStatus(BaseModel):
    """All settings of a service."""

    settings: dict[str, SettingStatus] = Field(description="by name, as docs/settings.md lists them")
    credentials: list[str] = Field(
        description="variables of the service's environment with which it logs in to S3, by name only",
        examples=[["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]],
    )


@router.get("/settings", responses=refusals(401, 403, 422, 429, 503))
async def list_settings(context: Context, grant: Operator) -> SettingsStatus:
    """The settings that this service works with, without secrets, and where each came from. For operators."""
    return SettingsStatus.model_validate(context.settings)
