"""What a request may ask of the cache, and what becomes of what it may not."""

from __future__ import annotations

from typing import Any

import pytest

from connector.request_parameters import RequestFlags, read_flags
from kvstore.api import Retention


@pytest.mark.parametrize(
    ("parameters", "flags"),
    [
        (None, RequestFlags()),
        ({}, RequestFlags()),
        ({"kvstore": {}}, RequestFlags()),
        ({"kvstore": {"load": False}}, RequestFlags(load=False)),
        ({"kvstore": {"save": False, "load": True}}, RequestFlags(save=False)),
        ({"kvstore": {"retention": "short"}}, RequestFlags(retention=Retention.SHORT)),
        ({"do_remote_prefill": True, "save": False, "kvstore.load": False}, RequestFlags()),
        ({"do_remote_prefill": True, "kvstore": {"load": False, "save": False}}, RequestFlags(load=False, save=False)),
    ],
)
def test_flags(parameters: dict[str, Any] | None, flags: RequestFlags) -> None:
    """Our own object counts, what other connectors are told does not, and neither is complained about."""
    assert read_flags(parameters) == (flags, ())


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [
        ({"kvstore": {"laod": False}}, "kvstore.laod: unknown, did you mean 'load'"),
        ({"kvstore": {"colour": 1}}, "known are load, "),
        ({"kvstore": {"save": "no"}}, "kvstore.save: expected true or false, seen str"),
        ({"kvstore": {"retention": "long"}}, "kvstore.retention: expected one of normal, short, seen 'long'"),
        ({"kvstore": {"retention": ["short"]}}, "expected one of normal, short"),
        ({"kvstore": True}, "expected an object, seen bool"),
    ],
)
def test_what_is_not_understood_is_named(parameters: dict[str, Any], complaint: str) -> None:
    """The key and what was expected; the request goes on as if it were not there."""
    flags, (seen,) = read_flags(parameters)
    assert flags == RequestFlags()
    assert complaint in seen


def test_what_is_understood_counts_beside_what_is_not() -> None:
    """One wrong key does not take the others with it."""
    flags, complaints = read_flags({"kvstore": {"load": False, "x" * 500: 1}})
    assert flags == RequestFlags(load=False)
    assert len(complaints) == 1
    assert len(complaints[0]) < 200
