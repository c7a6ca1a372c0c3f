"""What a request may ask of the cache, and what becomes of what it may not."""

from __future__ import annotations

from typing import Any

import pytest

from connector.request_parameters import Handoff, RequestFlags, read_flags, read_handoff, wants_receipt, write_receipt
from kvstore.api import Retention
from kvstore.model.prompt_hint import Wishes


@pytest.mark.parametrize(
    ("parameters", "flags"),
    [
        (None, RequestFlags()),
        ({}, RequestFlags()),
        ({"kvstore": {}}, RequestFlags()),
        ({"kvstore": {"load": False}}, RequestFlags(load=False)),
        ({"kvstore": {"save": False, "load": True}}, RequestFlags(save=False)),
        ({"kvstore": {"retention": "short"}}, RequestFlags(retention=Retention.SHORT)),
        ({"kvstore": {"blend": {"documents": 5}}}, RequestFlags(blend={"documents": 5})),
        ({"kvstore": {"release": True}}, RequestFlags(wishes=Wishes(release=True))),
        (
            {"kvstore": {"retain_s": 60, "priority": 80, "prefetch": True, "demote": False, "session": "a"}},
            RequestFlags(wishes=Wishes(retain_s=60.0, priority=80, prefetch=True, session="a")),
        ),
        ({"do_remote_prefill": True, "save": False, "kvstore.load": False}, RequestFlags()),
        ({"do_remote_prefill": True, "kvstore": {"load": False, "save": False}}, RequestFlags(load=False, save=False)),
    ],
)
def test_flags(parameters: dict[str, Any] | None, flags: RequestFlags) -> None:
    """Our own object counts, other connectors' parameters do not, and neither causes a complaint."""
    assert read_flags(parameters) == (flags, ())


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [
        ({"kvstore": {"laod": False}}, "kvstore.laod: unknown, did you mean 'load'"),
        ({"kvstore": {"colour": 1}}, "known are blend, demote, load, prefetch, "),
        ({"kvstore": {"save": "no"}}, "kvstore.save: expected true or false, seen str"),
        ({"kvstore": {"retention": "long"}}, "kvstore.retention: expected one of normal, short, seen 'long'"),
        ({"kvstore": {"retention": ["short"]}}, "expected one of normal, short"),
        ({"kvstore": {"retain_s": "long"}}, "kvstore.retain_s: expected seconds from 0 to 604800, seen str"),
        ({"kvstore": {"priority": 101}}, "kvstore.priority: expected a whole number from 0 to 100, seen 101"),
        ({"kvstore": {"relase": True}}, "kvstore.relase: unknown, did you mean 'release'"),
        ({"kvstore": True}, "expected an object, seen bool"),
    ],
)
def test_what_is_not_understood_is_named(parameters: dict[str, Any], complaint: str) -> None:
    """The key and what was expected; the request continues as if it were not there."""
    flags, (seen,) = read_flags(parameters)
    assert flags == RequestFlags()
    assert complaint in seen


@pytest.mark.parametrize(
    ("flags", "retention"),
    [
        ({}, Retention.NORMAL),
        ({"release": True}, Retention.RELEASED),
        ({"retain_s": 5}, Retention.RETAINED),
        ({"priority": 90}, Retention.RETAINED),
        ({"priority": 10}, Retention.NORMAL),
        ({"priority": 10, "retain_s": 60}, Retention.NORMAL),
        ({"release": True, "retention": "short"}, Retention.SHORT),
        ({"prefetch": True, "session": "a"}, Retention.NORMAL),
    ],
)
def test_pages_are_saved_as_their_prompt_is_expected_back(flags: dict[str, Any], retention: Retention) -> None:
    """What its client asks for by name comes first."""
    read, complaints = read_flags({"kvstore": flags})
    assert (read.save_retention, complaints) == (retention, ())


def test_what_is_understood_counts_beside_what_is_not() -> None:
    """One wrong key does not take the others with it."""
    flags, complaints = read_flags({"kvstore": {"load": False, "x" * 500: 1}})
    assert flags == RequestFlags(load=False)
    assert len(complaints) == 1
    assert len(complaints[0]) < 200


def test_a_request_is_read_in_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's steps wait meanwhile: of 100,000 unknown keys, and of a long one, little is looked at."""
    compared: list[str] = []

    def compare(word: str, *_: Any, **__: Any) -> list[str]:
        compared.append(word)
        return []

    monkeypatch.setattr("difflib.get_close_matches", compare)
    flags, complaints = read_flags({"kvstore": {"k" * 1_000_000: 1, **dict.fromkeys(range(100_000), 1), "load": False}})
    assert flags == RequestFlags(load=False)
    assert len(complaints) == len(compared) == 4 and max(map(len, compared)) == 64
    _, (complaint,) = read_flags({"kvstore": {"retention": [1] * 100_000}})
    assert len(complaint) < 200


def test_a_receipt_is_read_as_it_was_written() -> None:
    """What a prefill engine writes, a decode engine reads, beside keys of others and after a way through JSON."""
    import json

    params = json.loads(json.dumps({"do_remote_prefill": True, **write_receipt(2432)}))
    assert read_handoff(params, most_s=10.0) == Handoff(2432)


def test_a_proxy_may_set_the_time() -> None:
    """`wait_ms` beside the tokens is how long to wait, up to what the operator allows."""
    assert read_handoff({"kvstore_handoff": {"tokens": 128, "wait_ms": 500}}, most_s=10.0) == Handoff(128, 0.5)
    assert read_handoff({"kvstore_handoff": {"tokens": 128, "wait_ms": 10**9}}, most_s=10.0) == Handoff(128, 10.0)
    assert read_handoff({"kvstore_handoff": {"tokens": 128, "wait_ms": 10**400}}, most_s=10.0) == Handoff(128, 10.0)


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"kvstore_handoff": None},
        {"kvstore_handoff": 2432},
        {"kvstore_handoff": {"tokens": 0}},
        {"kvstore_handoff": {"tokens": -1}},
        {"kvstore_handoff": {"tokens": "2432"}},
        {"kvstore_handoff": {"tokens": True}},
        {"kvstore_handoff": {"tokens": 128, "wait_ms": "soon"}},
    ],
)
def test_nonsense_is_no_receipt(params: Any) -> None:
    """A receipt comes from outside the engine: what is not one is ignored."""
    assert read_handoff(params, most_s=10.0) is None


def test_who_wants_a_receipt() -> None:
    """vLLM's proxies say to a prefill engine that another engine will decode."""
    assert wants_receipt({"do_remote_decode": True})
    assert not any(wants_receipt(params) for params in (None, {}, {"do_remote_decode": False}, {"do_remote_decode": 1}))
