"""Namespaces: equal things have equal ids on every machine, different things never do, and nonsense has none."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest
from kvstore.model.kinds import FullAttention, KeyedAlone, Recurrent, SlidingWindow
from kvstore.model.layout import GroupLayout, Layout
from kvstore.model.namespace import MAX_DESCRIPTION_BYTES, NamespaceDescription, describe_layout

GROUPS = (GroupLayout(FullAttention(), 8), GroupLayout(SlidingWindow(128, 3), 8), GroupLayout(Recurrent(), 1))
LAYOUT = Layout(256, GROUPS)
FIELDS: dict[str, Any] = {"model": "tiny", "rope": {"theta": "1e6", "scaling": None}, "layout": describe_layout(LAYOUT)}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


def shuffled(value: Any) -> Any:
    """The same value with every mapping's keys in the opposite order."""
    if isinstance(value, dict):
        return {key: shuffled(value[key]) for key in reversed(value)}
    return [shuffled(item) for item in value] if isinstance(value, list) else value


@given(st.dictionaries(st.text(max_size=8), JSON, max_size=5), st.text(max_size=8))
def test_a_description_is_canonical(extra: dict[str, Any], tenant: str) -> None:
    """Any plain description has one spelling for every order of its keys, and reads back from it."""
    fields = {**extra, "layout": FIELDS["layout"]}
    description = NamespaceDescription.from_fields(fields, tenant)
    assert NamespaceDescription.from_fields(shuffled(fields), tenant) == description
    assert NamespaceDescription.from_canonical(description.canonical, tenant) == description
    assert description.fields == fields
    assert description.canonical.isascii()


def test_the_id_is_the_documented_digest() -> None:
    """The id can be computed from the words of the specification, by any program."""
    description = NamespaceDescription.from_fields(FIELDS, "ü")
    tenant = "ü".encode()
    expected = hashlib.sha256(
        b"kvstore namespace v1" + b"\0" + len(tenant).to_bytes(4, "little") + tenant + description.canonical
    ).digest()[:16]
    assert description.id == expected


def test_tenant_and_every_field_change_the_id() -> None:
    """Nothing crosses tenants, and nothing that was described is ignored; where a tenant ends is part of it."""
    base = NamespaceDescription.from_fields(FIELDS)
    others = [
        NamespaceDescription.from_fields(FIELDS, "a"),
        NamespaceDescription.from_fields(FIELDS, "b"),
        NamespaceDescription.from_fields({**FIELDS, "model": "tiny2"}),
        NamespaceDescription.from_fields({**FIELDS, "rope": {"theta": "1e6", "scaling": 0}}),
        NamespaceDescription.from_fields({**FIELDS, "new": None}),
        NamespaceDescription(base.canonical[1:], "{"),
    ]
    assert len({base.id, *(other.id for other in others)}) == 1 + len(others)
    assert NamespaceDescription.from_fields(dict(reversed(FIELDS.items()))).id == base.id


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"x": 1.5}, "no floats.*field=x"),
        ({"x": [{"deep": [0, float("nan")]}]}, r"no floats.*field=x\[0\].deep\[1\]"),
        ({"x": {1: 2}}, "keys of a namespace description are text"),
        ({"x": b"bytes"}, "are plain field=x expected=.* seen=a value of type bytes"),
        ({"x": "y" * (1 << 20)}, "at most"),
        ({"layout": None}, "layout must be"),
        ({"layout": {"page_tokens": 256}}, "layout must be"),
        ({"layout": {"page_tokens": 256, "groups": []}}, "layout.groups expected=1 to 64"),
        ({"layout": {"page_tokens": 256, "groups": ["full_attention"]}}, "layout must be"),
        ({"layout": {"page_tokens": 0, "groups": [{"kind": "latent", "num_slices": 1}]}}, "page_tokens"),
        ({"layout": {"page_tokens": True, "groups": [{"kind": "latent", "num_slices": 1}]}}, "whole number"),
        ({"layout": {"page_tokens": 1, "groups": [{"kind": "latent", "num_slices": "1"}]}}, "whole number"),
        (
            {"layout": {"page_tokens": 1, "groups": [{"kind": "latent", "num_slices": 5000}]}},
            "num_slices expected=1 to 512",
        ),
        ({"layout": {"page_tokens": 1, "groups": [{"kind": "dense", "num_slices": 1}]}}, "kind of group"),
    ],
)
def test_nonsense_is_refused_and_named(fields: dict[str, Any], message: str) -> None:
    """What is not canonical, not JSON, too large or no layout is refused with what is wrong."""
    with pytest.raises(InvalidRequest, match=message):
        NamespaceDescription.from_fields({**FIELDS, **fields})


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def with_layout(**changed: Any) -> dict[str, Any]:
    group = {"kind": "sliding_window", "window_tokens": 9, "extra_tokens": 0, "num_slices": 1}
    group |= {name: value for name, value in changed.items() if name in group}
    return {"layout": {"page_tokens": changed.get("page_tokens", 16), "groups": [group]}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"x": "y" * MAX_DESCRIPTION_BYTES}, f"at most {MAX_DESCRIPTION_BYTES} bytes seen=26"),
        ({"x": [[]] * 20_000}, "at most 16384 values on 16 levels"),
        ({"x": nested(16)}, "at most 16384 values on 16 levels"),
        ({"x": {"k" * 257: 0}}, "key of a namespace description is too long field=x expected=256 seen=257"),
        ({"x": 10**100}, "number of a namespace description is too long expected=below 100 digits"),
        ({"model": "\ud800"}, r"valid Unicode field=model seen='\\ud800'"),
        ({"x": [{"a": ["é", "b\udfff"]}]}, r"valid Unicode field=x\[0\].a\[1\] seen='\\udfff'"),
        ({"x": {"\ud800": {"\udc00": 0}}}, "valid Unicode field=x"),
        (with_layout(page_tokens=1 << 32), "field=layout.page_tokens expected=at most 4294967295 seen=a number of 33"),
        (with_layout(page_tokens=10**90), "at most 4294967295 seen=a number of"),
        (with_layout(page_tokens=10**4000), "below 100 digits"),
        (with_layout(window_tokens=1 << 32), "field=window_tokens expected=at most 4294967295"),
        (with_layout(extra_tokens=1 << 63), "field=extra_tokens expected=at most 4294967295"),
        (with_layout(num_slices=1 << 63), "at most 4294967295 seen=a number of 64 bits"),
    ],
)
def test_what_is_too_much_is_refused(fields: dict[str, Any], message: str) -> None:
    """Bytes, values, levels, keys, numbers and text have bounds, of fields and of bytes. The error can be sent."""
    fields = {**FIELDS, **fields}
    with pytest.raises(InvalidRequest, match=message) as refused:
        NamespaceDescription.from_fields(fields)
    assert str(refused.value).encode() and len(str(refused.value)) < 500
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(InvalidRequest):
        NamespaceDescription.from_canonical(canonical)


def test_what_just_fits_is_read() -> None:
    """The largest numbers, the deepest nesting and the longest keys that are admitted, and text beyond 16 bits."""
    fields = {"a": nested(15), "k" * 256: "\U0001f600é", **with_layout(page_tokens=(1 << 32) - 1)}
    description = NamespaceDescription.from_fields(fields)
    assert NamespaceDescription.from_canonical(description.canonical) == description
    assert description.fields == fields and description.layout().page_tokens == (1 << 32) - 1


def test_what_earlier_releases_stored_is_read() -> None:
    """Larger descriptions, and text that is not valid Unicode: its bytes and its id are kept, and it can be shown."""
    fields = {**FIELDS, "model": "a\ud800b", "weights_id": "\udfff", "m": [[]] * 300_000, "\ud800": "\\ud800é"}
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    stored = NamespaceDescription.from_canonical(canonical, is_stored=True)
    assert (stored.canonical, stored.layout()) == (canonical, LAYOUT)
    assert stored.id == NamespaceDescription(canonical).id
    assert (stored.name, stored.weights_id, stored.fields["?"]) == ("a?b", "?", "\\ud800é")
    assert json.dumps(stored.fields, ensure_ascii=False).encode()
    with pytest.raises(InvalidRequest, match="at most"):
        NamespaceDescription.from_canonical(b" " * ((1 << 20) + 1), is_stored=True)


def test_only_the_canonical_spelling_is_read() -> None:
    """Bytes from outside are read only if they are exactly what we would write; two spellings never share meaning."""
    canonical = NamespaceDescription.from_fields(FIELDS).canonical
    assert NamespaceDescription.from_canonical(canonical).layout() == LAYOUT
    spellings = [
        json.dumps(FIELDS).encode(),
        canonical + b"\n",
        canonical.replace(b'"model":"tiny"', b'"model":"tiny","model":"tiny"'),
        canonical.replace(b'"tiny"', b'"t\\u0069ny"'),
        canonical[:-1],
        b"[]",
        b"",
        b"\xff",
        b"[" * 100_000,
        b'{"layout":' + b"[" * 900 + b"]" * 900 + b"}",
        b" " * ((1 << 20) + 1),
        b'{"x":NaN}',
        b'{"x":' + b"9" * 5000 + b"}",
    ]
    for spelling in spellings:
        with pytest.raises(InvalidRequest):
            NamespaceDescription.from_canonical(spelling)


def test_a_namespace_names_its_door() -> None:
    """Ours has canonical groups; an engine with keys of its own names itself, and a tool need not."""
    keyed = describe_layout(Layout(64, (GroupLayout(KeyedAlone(), 1),)))
    doors = [
        NamespaceDescription.from_fields(fields).door
        for fields in (
            {**FIELDS, "engine": "not asked"},
            {"engine": "sglang 0.5.23", "layout": keyed},
            {"layout": keyed},
            {"engine": "x" * 1000, "layout": keyed},
        )
    ]
    assert doors[:3] == ["connector", "sglang 0.5.23", "own keys"] and len(doors[3]) < 200


def test_a_layout_reads_back_from_its_description() -> None:
    """Groups with all their fields survive the way through words, and notes beside them change nothing."""
    notes = ({"layers": [0]}, {"layers": [1], "dtype": "bfloat16"}, {"shape": "[4,8]"})
    described = describe_layout(LAYOUT, notes)
    assert NamespaceDescription.from_fields({"layout": described}).layout() == LAYOUT
    assert described["groups"][1] == {
        "layers": [1], "dtype": "bfloat16", "kind": "sliding_window",
        "window_tokens": 128, "extra_tokens": 3, "num_slices": 8,
    }  # fmt: skip
