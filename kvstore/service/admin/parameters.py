"""Parameters that several routes have, and the refusal of those that none has."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Request
from fastapi.dependencies.utils import get_flat_dependant
from fastapi.routing import APIRoute
from pydantic import BeforeValidator

from kvstore.model.keys import NamespaceId, PrefixHash
from kvstore.service.admin.problems import Refused

__all__ = [
    "FROM_WHOLE",
    "Confirm",
    "Cursor",
    "Limit",
    "NamespaceText",
    "PrefixText",
    "namespace_id",
    "prefix_hash",
    "refuse_unknown_parameters",
]


def _as_whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


NAMESPACE_PATTERN, PREFIX_PATTERN = "^[0-9a-f]{32}$", "^[0-9a-f]{64}$"
NAMESPACE_EXAMPLE, PREFIX_EXAMPLE = "6b1f0c6d2f7e4a1b9c3d5e7f90a1b2c3", "9f86d081884c7d65" * 4

NamespaceText = Annotated[
    str, Path(pattern=NAMESPACE_PATTERN, examples=[NAMESPACE_EXAMPLE], description="32 hex digits, as the list tells")
]
PrefixText = Annotated[
    str, Path(pattern=PREFIX_PATTERN, examples=[PREFIX_EXAMPLE], description="64 hex digits: hash of a prompt's start")
]
FROM_WHOLE = BeforeValidator(_as_whole)
"""Behind a strict `Field` of a body: JSON knows no whole numbers, 5.0 is one; "5" and true are none."""
Limit = Annotated[int, Query(ge=1, le=1000, description="how many to list at most")]
Cursor = Annotated[
    str, Query(max_length=200, description="`next_cursor` of the answer before, for what comes behind it")
]
Confirm = Annotated[bool, Query(description="really delete; else only tell what would be deleted")]


def namespace_id(text: str) -> NamespaceId:
    """A namespace as it is spelled in addresses and answers."""
    return NamespaceId(bytes.fromhex(text))


def prefix_hash(text: str) -> PrefixHash:
    """A boundary as it is spelled in addresses and answers."""
    return PrefixHash(bytes.fromhex(text))


async def refuse_unknown_parameters(request: Request) -> None:
    """A dependency of every route: a parameter that it does not have, or one given twice, is a mistake to be told."""
    route = request.scope.get("route")
    fields = get_flat_dependant(route.dependant).query_params if isinstance(route, APIRoute) else []
    known = {field.alias for field in fields}
    given = [name for name, _ in request.query_params.multi_items()]
    for name in given:
        if name not in known:
            expected = f"one of {', '.join(sorted(known))}" if known else "none"
            raise Refused(422, "unknown parameter", field=f"query.{name}"[:100], expected=expected, seen=name)
        if given.count(name) > 1:
            raise Refused(422, "a parameter is given twice", field=f"query.{name}", expected="once")
