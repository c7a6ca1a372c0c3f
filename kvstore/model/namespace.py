"""A namespace: everything that must be equal for stored bytes to be interchangeable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.model.keys import NAMESPACE_BYTES, NamespaceId
from kvstore.model.kinds import parse_kind
from kvstore.model.layout import GroupLayout, Layout

__all__ = ["NamespaceDescription", "NamespaceNotOpen", "describe_layout", "field_differences", "flat_fields", "name_of"]

_MAX_BYTES = 1 << 20
_NAME_MAX = 120


class NamespaceNotOpen(InvalidRequest):
    """The namespace must be opened, or opened again, before its records can be used; clients do that by themselves."""


@dataclass(frozen=True, slots=True)
class NamespaceDescription:
    """The description of a namespace as canonical JSON: equal descriptions are equal bytes on every machine.

    `fields["layout"]` must be `{"page_tokens": int, "groups": [{"kind": ..., "num_slices": int, ...}]}`, as
    `describe_layout` writes it. Every other field is free and only compared; all are stored beside the records, so that
    the differences between two namespaces can be listed field by field.

    Attributes:
        canonical: UTF-8 JSON with sorted keys and no white space.
        tenant: The owner of the records; the service sets it from the verified credential.
    """

    canonical: bytes
    tenant: str = ""

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], tenant: str = "") -> NamespaceDescription:
        """Make a description.

        Raises:
            InvalidRequest: A value is not plain JSON (floats are refused: their text is not canonical), the layout
                is missing or wrong, or the whole is over 1 MiB.
        """
        try:
            _refuse_floats(fields, "")
            canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest("a namespace description must be plain JSON", error=error) from error
        if len(canonical) > _MAX_BYTES:
            raise InvalidRequest(f"a namespace description has at most {_MAX_BYTES} bytes", seen=len(canonical))
        description = cls(canonical, tenant)
        description.layout()
        return description

    @classmethod
    def from_canonical(cls, canonical: bytes, tenant: str = "") -> NamespaceDescription:
        """Parse the canonical form, e.g. from the wire or a manifest.

        Raises:
            InvalidRequest: The bytes are not the canonical form of a valid description.
        """
        if len(canonical) > _MAX_BYTES:
            raise InvalidRequest(f"a namespace description has at most {_MAX_BYTES} bytes", seen=len(canonical))
        try:
            fields = json.loads(canonical)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest("a namespace description must be JSON") from error
        if not isinstance(fields, dict):
            raise InvalidRequest("a namespace description must be a JSON object", seen=type(fields).__name__)
        description = cls.from_fields(fields, tenant)
        if description.canonical != canonical:
            raise InvalidRequest("a namespace description must be in canonical form")
        return description

    @property
    def fields(self) -> dict[str, Any]:
        """The description as a new dictionary."""
        value: dict[str, Any] = json.loads(self.canonical)
        return value

    @property
    def id(self) -> NamespaceId:
        """The first 16 bytes of SHA-256 over a fixed label, the tenant's length, the tenant and the description."""
        tenant = self.tenant.encode()
        digest = hashlib.sha256(b"kvstore namespace v1\0" + len(tenant).to_bytes(4, "little") + tenant + self.canonical)
        return NamespaceId(digest.digest()[:NAMESPACE_BYTES])

    @property
    def name(self) -> str:
        """A name for operators: the model and its types, like `LlamaForCausalLM bfloat16, cache fp8`. Two namespaces
        may have the same name, but not the same id.
        """
        return name_of(self.fields)

    def layout(self) -> Layout:
        """The groups and slices that the store checks coverage against.

        Raises:
            InvalidRequest: `fields["layout"]` is missing or not a valid layout.
        """
        layout = self.fields.get("layout")
        try:
            page_tokens, groups = layout["page_tokens"], layout["groups"]  # type: ignore[index]
            parsed = tuple(
                GroupLayout(
                    parse_kind({k: v for k, v in group.items() if k in _KIND_FIELDS}),
                    _whole(group["num_slices"]),
                )
                for group in groups
            )
            return Layout(_whole(page_tokens), parsed)
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidRequest("layout must be an object with page_tokens and groups", field="layout") from error


def name_of(fields: Mapping[str, Any]) -> str:
    """As `NamespaceDescription.name`, of the fields of a description."""
    model = str(fields.get("architecture") or fields.get("model") or "")
    dtype, cache = (str(fields.get(name, "")) for name in ("compute_dtype", "cache_dtype"))
    name = f"{model} {dtype}".strip() or "a model without a name"
    return f"{name}, cache {cache}"[:_NAME_MAX] if cache not in ("", "auto", dtype) else name[:_NAME_MAX]


_KIND_FIELDS = ("kind", "window_tokens", "extra_tokens", "chunk_tokens")


def describe_layout(layout: Layout, notes: tuple[Mapping[str, Any], ...] | None = None) -> dict[str, Any]:
    """The `layout` field of a description; `notes` adds a mapping of further facts (shapes, layers) per group."""
    notes = notes or tuple({} for _ in layout.groups)
    return {
        "page_tokens": layout.page_tokens,
        "groups": [
            {**note, **group.kind.describe(), "num_slices": group.num_slices}
            for group, note in zip(layout.groups, notes, strict=True)
        ],
    }


def field_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[object, object]]:
    """The differences between two descriptions: path (like `layout.groups[0].num_slices`) to the values in `one` and
    `other`; `None` where a description lacks the field. A list of plain values counts as one value.
    """
    ours, theirs = dict(flat_fields(one)), dict(flat_fields(other))
    paths = {**ours, **theirs}
    return {path: (ours.get(path), theirs.get(path)) for path in paths if ours.get(path) != theirs.get(path)}


def flat_fields(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """The fields of a description, nested ones by their path (like `layout.groups[0].num_slices`), with their values. A
    list of plain values is one value.
    """
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flat_fields(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from flat_fields(item, f"{path}[{index}]")
    else:
        yield path, value


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest("expected a whole number in layout", seen=value)
    return value


def _refuse_floats(value: object, path: str) -> None:
    if isinstance(value, float):
        raise InvalidRequest("a namespace description holds no floats: write them as text", field=path, seen=value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidRequest("keys of a namespace description are text", field=path, seen=key)
            _refuse_floats(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _refuse_floats(item, f"{path}[{index}]")
