"""A namespace: everything that must be equal for stored bytes to be interchangeable."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.model.keys import NAMESPACE_BYTES, NamespaceId
from kvstore.model.kinds import Keyed, check_fits, parse_kind
from kvstore.model.layout import GroupLayout, Layout

MAX_DESCRIPTION_BYTES = 256 << 10
"""Of a new description. A layout of 64 groups and 256 layers needs 26 KiB and 1,283 values. A model's configuration
needs a few KiB, and far more where it lists the layers of each expert that are not quantized. A description within this
and the bounds below is parsed in 5 to 15 ms, in which no other request is served."""
_VALUES_MAX = 16_384
_LEVELS_MAX = 16
_KEY_MAX = 256
_LONG_NUMBER = re.compile(rb"[:,\[]-?[0-9]{100}")
"""Long numbers take long to parse."""
_STORED_BYTES_MAX = 1 << 20
"""Of a stored description: earlier releases admitted as much."""
_NAME_MAX = 120
WEIGHTS_FIELD = "weights_id"
"""The field of a description that names the weights."""
ENGINE_FIELD = "engine"
"""The field that names the engine which names its pages itself, with its release."""


class NamespaceNotOpen(InvalidRequest):
    """The namespace must be opened, or opened again, before its records can be used; clients do that by themselves."""


@dataclass(frozen=True, slots=True)
class _Derived:
    """What is read from the fields of a description, once."""

    layout: Layout
    name: str
    weights_id: str
    door: str


@dataclass(frozen=True)
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
            InvalidRequest: A value is not plain JSON (floats are refused: their text is not canonical) or not valid
                Unicode, the layout is missing or wrong, or the whole is too large.
        """
        return cls._of(fields, tenant, is_stored=False)

    @classmethod
    def from_canonical(cls, canonical: bytes, tenant: str = "", *, is_stored: bool = False) -> NamespaceDescription:
        """Parse the canonical form, e.g. from the wire or a manifest.

        Args:
            canonical: The bytes.
            tenant: The owner of the records.
            is_stored: It is a manifest's. Earlier releases stored up to 1 MiB, and text that is not valid Unicode.

        Raises:
            InvalidRequest: The bytes are not the canonical form of a valid description.
        """
        _check_size(canonical, is_stored)
        try:
            fields = json.loads(canonical)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest("a namespace description must be JSON") from error
        if not isinstance(fields, dict):
            raise InvalidRequest("a namespace description must be a JSON object", seen=type(fields).__name__)
        description = cls._of(fields, tenant, is_stored)
        if description.canonical != canonical:
            raise InvalidRequest("a namespace description must be in canonical form")
        return description

    @classmethod
    def _of(cls, fields: Mapping[str, Any], tenant: str, is_stored: bool) -> NamespaceDescription:
        _check_values(fields, is_stored)
        try:
            canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest("a namespace description must be plain JSON", error=error) from error
        _check_size(canonical, is_stored)
        description = cls(canonical, tenant)
        # a cached property: the fields are not kept, since they need many times the memory of the canonical form
        description.__dict__["_derived"] = _derived_from(description.fields if is_stored else fields)
        return description

    @property
    def fields(self) -> dict[str, Any]:
        """The description as a new dictionary. Text that is not valid Unicode, which earlier releases stored, has `?`
        in place of each lone surrogate, so that it can be shown.
        """
        value: dict[str, Any] = json.loads(self.canonical)
        if b"\\ud" in self.canonical:
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
        return value

    @cached_property
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
        return self._derived.name

    @property
    def weights_id(self) -> str:
        """The weights that the pages were computed with; empty: the description does not say."""
        return self._derived.weights_id

    @property
    def door(self) -> str:
        """Which door writes the namespace: `connector`, an engine that names its pages itself, like `sglang 0.5.23`, or
        `own keys` for pages of a tool that does not say what it is.
        """
        return self._derived.door

    def layout(self) -> Layout:
        """The groups and slices that the store checks coverage against.

        Raises:
            InvalidRequest: `fields["layout"]` is missing or not a valid layout.
        """
        return self._derived.layout

    @cached_property
    def _derived(self) -> _Derived:
        return _derived_from(self.fields)


def _derived_from(fields: Mapping[str, Any]) -> _Derived:
    layout = _parse_layout(fields.get("layout"))
    is_keyed = any(isinstance(group.kind, Keyed) for group in layout.groups)
    door = str(fields.get(ENGINE_FIELD) or "own keys")[:_NAME_MAX] if is_keyed else "connector"
    return _Derived(layout, name_of(fields), str(fields.get(WEIGHTS_FIELD, "")), door)


def _parse_layout(layout: Any) -> Layout:
    try:
        page_tokens, groups = layout["page_tokens"], layout["groups"]
        parsed = tuple(
            GroupLayout(
                parse_kind({k: v for k, v in group.items() if k in _KIND_FIELDS}),
                _whole("num_slices", group["num_slices"]),
            )
            for group in groups
        )
        return Layout(_whole("page_tokens", page_tokens), parsed)
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


def _whole(field: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest("expected a whole number in layout", seen=value)
    check_fits(f"layout.{field}", value)
    return value


def _check_size(canonical: bytes, is_stored: bool) -> None:
    most = _STORED_BYTES_MAX if is_stored else MAX_DESCRIPTION_BYTES
    if len(canonical) > most:
        raise InvalidRequest(f"a namespace description has at most {most} bytes", seen=len(canonical))
    if not is_stored and (long := _LONG_NUMBER.search(canonical)):
        seen = long[0][1:21].decode() + "..."
        raise InvalidRequest("a number of a namespace description is too long", expected="below 100 digits", seen=seen)


_Path = tuple[Any, str | int] | None
"""The path to a value: its container's path, and its key or index there."""


def _check_values(fields: Mapping[str, Any], is_stored: bool) -> None:
    """Refuse floats and keys that are not text; of a description that is not stored yet also too many or too deeply
    nested values, long keys, and text that is not valid Unicode.
    """
    num_values = 0
    todo: list[tuple[object, _Path, int]] = [(fields, None, 1)]
    while todo:
        value, path, level = todo.pop()
        if isinstance(value, float):
            raise _refused("a namespace description holds no floats: write them as text", path, seen=value)
        if isinstance(value, dict | list | tuple | Mapping):
            num_values += len(value)
            if not is_stored and (num_values > _VALUES_MAX or level > _LEVELS_MAX):
                raise _refused(
                    "a namespace description has too many values, or they are nested too deeply",
                    path,
                    expected=f"at most {_VALUES_MAX} values on {_LEVELS_MAX} levels",
                    seen=f"{num_values} on {level} or more",
                )
            if not isinstance(value, list | tuple):
                for key in value:
                    _check_key(key, path, is_stored)
            for key, item in enumerate(value) if isinstance(value, list | tuple) else value.items():
                if isinstance(item, str):
                    if not item.isascii():
                        _check_text(item, (path, key), is_stored)
                elif item is not None and type(item) is not int:
                    todo.append((item, (path, key), level + 1))
        elif not isinstance(value, int):
            expected = "text, whole numbers, true, false, null, lists and objects"
            seen = f"a value of type {type(value).__name__}"
            raise _refused("values of a namespace description are plain", path, expected=expected, seen=seen)


def _check_key(key: object, path: _Path, is_stored: bool) -> None:
    if not isinstance(key, str):
        raise _refused("keys of a namespace description are text", path, seen=key)
    if len(key) > _KEY_MAX and not is_stored:
        raise _refused("a key of a namespace description is too long", path, expected=_KEY_MAX, seen=len(key))
    if not key.isascii():
        _check_text(key, path, is_stored)


def _check_text(text: str, path: _Path, is_stored: bool) -> None:
    if is_stored:
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        seen = ascii(text[error.start])
        raise _refused("text of a namespace description must be valid Unicode", path, seen=seen) from error


def _refused(problem: str, path: _Path, **details: object) -> InvalidRequest:
    parts: list[str] = []
    while path is not None:
        path, key = path
        parts.append(f"[{key}]" if isinstance(key, int) else f".{key}")
    field = "".join(reversed(parts)).removeprefix(".")[:_KEY_MAX]
    return InvalidRequest(problem, field=field.encode("ascii", "backslashreplace").decode(), **details)
