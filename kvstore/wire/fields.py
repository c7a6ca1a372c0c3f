"""Frozen dataclasses to msgpack maps and back; every type is checked, and every error names its field."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from typing import Any, TypeVar, get_origin, get_type_hints

from kvstore.errors import InvalidRequest

__all__ = ["from_map", "to_map"]

Value = TypeVar("Value")
_MAX_WHOLE = (1 << 63) - 1


def to_map(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def from_map(cls: type[Value], head: Mapping[str, Any]) -> Value:
    """Make a `cls` from a map; unknown fields are ignored, so that newer peers may add some.

    Raises:
        InvalidRequest: A field without a default is missing, or a value has the wrong type or is out of range.
    """
    schema = _schema(cls)  # type: ignore[arg-type]  # mypy does not see that classes are hashable
    return cls(**{field.name: _read(cls, field, hint, head) for field, hint in schema if _is_read(field, head)})


@cache
def _schema(cls: Any) -> tuple[tuple[Field[Any], type[Any]], ...]:
    hints = get_type_hints(cls)
    return tuple((field, get_origin(hints[field.name]) or hints[field.name]) for field in fields(cls))


def _is_read(field: Field[Any], head: Mapping[str, Any]) -> bool:
    """Whether a field is in the map, or must be."""
    return field.name in head or (field.default is MISSING and field.default_factory is MISSING)


def _read(cls: type[Any], field: Field[Any], hint: type[Any], head: Mapping[str, Any]) -> Any:
    where = f"{getattr(cls, 'type', cls.__name__)}.{field.name}"
    expected = "map" if hint is Mapping else hint.__name__
    if field.name not in head:
        raise InvalidRequest("a field is missing", field=where, expected=expected, seen="nothing")
    value = head[field.name]
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias) and _fits(value, hint):
        return float(value) if hint is float else value
    seen = value if isinstance(value, int | float) else type(value).__name__
    raise InvalidRequest("a field has the wrong type or range", field=where, expected=expected, seen=seen)


def _fits(value: object, hint: type[Any]) -> bool:
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_WHOLE
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
    return isinstance(value, hint)
