"""Namespaces: equal things have equal ids on every machine, different things never do, and nonsense has none."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest
from kvstore.model.kinds import FullAttention, Recurrent, SlidingWindow
from kvstore.model.layout import GroupLayout, Layout
from kvstore.model.namespace import NamespaceDescription, describe_layout

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
        ({"x": b"bytes"}, "plain JSON"),
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


def test_a_layout_reads_back_from_its_description() -> None:
    """Groups with all their fields survive the way through words, and notes beside them change nothing."""
    notes = ({"layers": [0]}, {"layers": [1], "dtype": "bfloat16"}, {"shape": "[4,8]"})
    described = describe_layout(LAYOUT, notes)
    assert NamespaceDescription.from_fields({"layout": described}).layout() == LAYOUT
    assert described["groups"][1] == {
        "layers": [1], "dtype": "bfloat16", "kind": "sliding_window",
        "window_tokens": 128, "extra_tokens": 3, "num_slices": 8,
    }  # fmt: skip
