"""Messages: each comes back as it was sent, and errors name the wrong field."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from typing import Any, get_type_hints

import msgpack
import pytest

from kvstore import errors
from kvstore.api import LeaseId, Lookup, Offer, Outcome, PrefixQuery, Staged
from kvstore.errors import InternalError, InvalidRequest, KVStoreError, Unavailable
from kvstore.model.keys import Boundary, NamespaceId, PrefixHash, RecordKey
from kvstore.model.prompt_hint import NO_WISHES, EndedPrompt, Wishes
from kvstore.runtime.arena import Place
from kvstore.wire import convert, messages
from kvstore.wire.frames import pack_head, unpack_head
from kvstore.wire.messages import SAVE_PLACES_MAX, decode, encode, error_of, raise_error
from kvstore.wire.places import located_reply, parse_located, parse_save_places, save_fields

ALL = list(messages.MESSAGE_TYPES.values())
SAMPLES: dict[str, Any] = {
    "int": 7,
    "str": "text",
    "bytes": b"\0\1",
    "bool": True,
    "float": 1.5,
    "Mapping": {"a": 1},
    "list": ["a"],
}
WRONG: dict[str, list[Any]] = {
    "int": [-1, "7", 1.0, True, None, 1 << 63],
    "str": [b"x", 7, None],
    "bytes": ["x", 7, None],
    "bool": [1, None],
    "float": ["1", True, float("nan"), float("inf"), -0.5],
    "Mapping": [[], 7, None],
    "list": [{}, "x", 7, None],
}
NAMESPACE = NamespaceId(bytes(range(16)))


def kind_of(cls: type[Any], name: str) -> str:
    hint = get_type_hints(cls)[name]
    return str(getattr(hint, "__name__", hint))


def sample(cls: type[messages.Message]) -> messages.Message:
    return cls(**{field.name: SAMPLES[kind_of(cls, field.name)] for field in fields(cls)})


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.type)
def test_messages_come_back_as_they_were_sent(cls: type[messages.Message]) -> None:
    """Over real msgpack, with a field this release does not know, which is ignored."""
    message = sample(cls)
    head = msgpack.unpackb(msgpack.packb({**encode(message), "of a later release": [1, {"x": None}]}))
    assert decode(head) == message


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.type)
def test_fields_that_are_missing_or_wrong_are_named(cls: type[messages.Message]) -> None:
    """Each field in turn is left out, then given every wrong type: the error names message, field and expectation."""
    for field in fields(cls):
        head = encode(sample(cls))
        kind = kind_of(cls, field.name)
        for value in WRONG[kind]:
            with pytest.raises(InvalidRequest, match=rf"{cls.type}\.{field.name}.*expected=.*seen="):
                decode({**head, field.name: value})
        del head[field.name]
        try:
            decode(head)
        except InvalidRequest as error:
            assert f"{cls.type}.{field.name}" in str(error)
        else:
            assert field.default is not MISSING or field.default_factory is not MISSING


@pytest.mark.parametrize("kind", [None, 7, "lookupp", "", b"lookup", ["lookup"]])
def test_unknown_types_are_refused(kind: object) -> None:
    """An unknown type is refused by name, also one that is not text."""
    with pytest.raises(InvalidRequest, match="type"):
        decode({"type": kind})


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name not in ("Closed", "KVStoreError")])
def test_errors_come_back_as_their_class(name: str) -> None:
    """The class and the whole text survive the wire."""
    error = getattr(errors, name)("what was seen", key="value")
    with pytest.raises(KVStoreError, match="what was seen key=value") as raised:
        raise_error(error_of(3, error))
    assert type(raised.value) is type(error)


def test_what_is_closed_in_a_service_is_unavailable_to_its_client() -> None:
    """An engine takes `Closed` for its own end, and would not be cached any more."""
    with pytest.raises(Unavailable, match="the tier is closed tier=s3"):
        raise_error(error_of(3, errors.Closed("the tier is closed", tier="s3")))


def test_errors_of_a_later_release_are_internal_errors() -> None:
    """A class this release does not know is not guessed."""
    with pytest.raises(InternalError, match="hm"):
        raise_error(messages.Error(1, "SomethingNew", "hm"))


def test_queries_come_back() -> None:
    """Boundaries travel as two byte strings."""
    query = PrefixQuery(
        NAMESPACE, tuple(Boundary(16 * n, PrefixHash(bytes([n]) * 32)) for n in range(1, 99)), 5, 90, 16
    )
    assert convert.parse_query(messages.Lookup(1, 2, **convert.query_fields(query))) == query


@pytest.mark.parametrize(
    "change",
    [{"tokens": b"\0"}, {"prefixes": bytes(31)}, {"namespace": b"short"}, {"step_tokens": 0}, {"tokens": bytes(8)}],
)
def test_queries_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    """Lengths that disagree, and values that no query has."""
    query = PrefixQuery(NAMESPACE, (Boundary(16, PrefixHash(bytes(32))),), 0, 16, 16)
    with pytest.raises(InvalidRequest):
        convert.parse_query(messages.Lookup(1, 2, **{**convert.query_fields(query), **change}))


def test_boundaries_beyond_32_bits_are_refused() -> None:
    """They would not fit the wire, nor a record's header."""
    with pytest.raises(InvalidRequest, match="tokens"):
        convert.query_fields(PrefixQuery(NAMESPACE, (Boundary(1 << 32, PrefixHash(bytes(32))),), 0, 16, 16))


def test_places_come_back() -> None:
    """Of many records of a namespace, in their order; a record without a place has none."""
    keys = [RecordKey(NAMESPACE, PrefixHash(bytes([n]) * 32), n % 3, n % 2) for n in range(9)]
    request = messages.Locate(1, 2, bytes(16), **convert.locate_fields(keys), arena=bytes(16))
    assert list(convert.parse_locate(request)) == keys
    places = [Place(64 + n, 1 << 30, (1 << 63) - 1) if n % 2 else None for n in range(9)]
    reply = located_reply(1, places)
    assert parse_located(reply, 9) == places
    for num_keys in (8, 10):
        with pytest.raises(InvalidRequest, match="length"):
            parse_located(reply, num_keys)


@pytest.mark.parametrize("num_places", [1, 2, SAVE_PLACES_MAX])
def test_places_of_saved_records_come_back(num_places: int) -> None:
    """Of one record as services of earlier releases read it, of several in one field."""
    places = [Place(64 + n, 192 + n, (1 << 63) - 1 - n) for n in range(num_places)]
    message = decode(encode(messages.Save(1, 2, "memory", **save_fields(bytes(16), places))))
    assert isinstance(message, messages.Save)
    assert parse_save_places(message) == places
    assert message.num_bytes == sum(place.num_bytes for place in places)
    assert bool(message.places) == (num_places > 1)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_bytes": 1}, "save.num_bytes"),
        ({"places": bytes(23)}, "save.places"),
        ({"places": bytes(24 * (SAVE_PLACES_MAX + 1))}, "save.places"),
    ],
)
def test_wrong_places_of_saved_records_are_refused(change: dict[str, object], field: str) -> None:
    """The error names the field."""
    fields = save_fields(bytes(16), [Place(64, 200, 7), Place(1024, 300, 8)])
    with pytest.raises(InvalidRequest) as caught:
        parse_save_places(messages.Save(1, 2, "memory", **{**fields, **change}))
    assert caught.value.details["field"] == field


@pytest.mark.parametrize("change", [{"parts": bytes(6)}, {"parts": bytes(8)}, {"prefixes": b""}, {"namespace": b""}])
def test_requests_for_places_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    """Lengths that disagree."""
    fields = convert.locate_fields([RecordKey(NAMESPACE, PrefixHash(bytes(32)), 0, 0)])
    with pytest.raises(InvalidRequest, match="length"):
        convert.parse_locate(messages.Locate(1, 2, bytes(16), **{**fields, **change}, arena=bytes(16)))


def test_a_request_for_more_places_than_a_client_asks_for_is_refused() -> None:
    number = messages.LOCATE_MAX + 1
    request = messages.Locate(1, 2, bytes(16), bytes(16), bytes(32 * number), bytes(4 * number), bytes(16))
    with pytest.raises(InvalidRequest, match=f"at most {messages.LOCATE_MAX}.*{number}"):
        convert.parse_locate(request)


@pytest.mark.parametrize("masks", [(), (0, 0), (1, 2, 3), (1 << 255, 0, 7)])
def test_lookups_come_back(masks: tuple[int, ...]) -> None:
    """Masks of up to 256 groups."""
    reply = convert.lookup_reply(4, Lookup(32, masks))
    assert convert.parse_lookup(reply, len(masks)) == Lookup(32, masks)
    with pytest.raises(InvalidRequest):
        convert.parse_lookup(reply, len(masks) + 1)


def test_offers_come_back() -> None:
    """What each tier adds, in the order of its resume points; a peer that says nothing offers nothing."""
    lookup = Lookup(96, (0,), (Offer(32, {"memory": 7}), Offer(96, {"memory": 7, "s3": 1 << 40})))
    reply = convert.lookup_reply(4, lookup)
    assert convert.parse_lookup(reply, 1) == lookup
    head = messages.encode(reply)
    del head["offers"]
    older = messages.decode(head)
    assert isinstance(older, messages.LookedUp)
    assert convert.parse_lookup(older, 1) == Lookup(96, (0,))


@pytest.mark.parametrize("offers", [{"x": {}}, {"-1": {}}, {"1": 2}, {"1": {"s3": "much"}}, {"1": {"s3": -1}}])
def test_offers_that_make_no_sense_are_refused(offers: dict[str, Any]) -> None:
    """Points that are no numbers, sizes that are none."""
    with pytest.raises(InvalidRequest, match="offers"):
        convert.parse_lookup(messages.LookedUp(1, 0, 1, b"", offers), 0)


def test_stages_come_back() -> None:
    """Empty and full."""
    keys = tuple(RecordKey(NAMESPACE, PrefixHash(bytes([n]) * 32), n, n + 1) for n in range(5))
    full = Staged(LeaseId(b"x" * 16), 80, keys, tuple((n, n + 9) for n in range(5)), {"s3": 2, "memory": 3}, 999, 30.0)
    for staged in (full, Staged(None, 32)):
        assert convert.parse_staged(convert.staged_reply(1, staged)) == staged
    reply = encode(convert.staged_reply(1, full))
    for change in ({"spans": bytes(8)}, {"prefixes": b""}, {"parts": bytes(2)}, {"sources": {"s3": "two"}}):
        with pytest.raises(InvalidRequest, match="staged"):
            convert.parse_staged(decode({**reply, **change}))  # type: ignore[arg-type]


def test_outcomes_come_back() -> None:
    """With everything there is to tell, and with next to nothing."""
    full = Outcome(
        request="chatcmpl-1",
        namespace=NAMESPACE,
        prompt_tokens=200,
        cap_tokens=192,
        local_tokens=16,
        resume_tokens=64,
        reason="nothing_stored",
        detail={"fetch_s": 0.5, "bytes": 7, "silent": "redis"},
        stop=Boundary(128, PrefixHash(bytes(32))),
        groups=1 << 63 | 5,
        first=PrefixHash(bytes([1]) * 32),
        content=bytes(16),
    )
    for outcome in (full, Outcome("a", None, 10, 0, 0, 0)):
        head = messages.encode(convert.outcome_message(outcome))
        message = messages.decode(head)
        assert isinstance(message, messages.Outcome)
        assert convert.parse_outcome(message) == outcome


@pytest.mark.parametrize("field", ["stop_prefix", "first", "content", "namespace"])
def test_outcomes_whose_hashes_are_none_are_refused(field: str) -> None:
    """Of another length than theirs."""
    message = convert.outcome_message(Outcome("a", None, 10, 0, 0, 0))
    with pytest.raises(InvalidRequest, match=field):
        convert.parse_outcome(replace(message, **{field: b"short"}))  # type: ignore[arg-type]


def test_an_outcome_takes_no_more_room_than_it_may() -> None:
    """Text is cut, and the number of plain values is bounded: the service keeps thousands of outcomes in memory."""
    message = convert.outcome_message(Outcome("a" * 9999, None, 10, 0, 0, 0))
    detail = {f"{number}": "b" * 9999 for number in range(99)} | {"0": ["no plain value"]}
    kept = convert.parse_outcome(replace(message, detail=detail, reason="c" * 9999))
    assert (len(kept.request), len(kept.reason), len(kept.detail)) == (256, 256, 15)
    assert {len(str(value)) for value in kept.detail.values()} == {256}


def test_an_outcome_fits_a_message_whatever_it_says() -> None:
    """A service reads no text of more than 64 KiB, and no map of more than 64 values, from a client."""
    long = "long " * 20_000
    outcome = Outcome(long, None, 10, 0, 0, 0, reason=long, detail={f"{number} {long}": long for number in range(99)})
    frame = pack_head(messages.encode(convert.outcome_message(outcome)))
    message = messages.decode(unpack_head(frame[16:], is_of_client=True))
    assert isinstance(message, messages.Outcome)
    kept = convert.parse_outcome(message)
    assert (len(kept.request), len(kept.reason), len(kept.detail)) == (256, 256, 16)


def test_what_did_not_answer_a_lookup_comes_back() -> None:
    """Names, or none; an older peer says nothing of it."""
    for silent in ((), ("redis",), ("catalog", "s3")):
        lookup = Lookup(0, (0,), silent=silent)
        assert convert.parse_lookup(convert.lookup_reply(1, lookup), 1) == lookup


ENDED = EndedPrompt(
    request="chatcmpl-1",
    namespace=NAMESPACE,
    boundaries=(Boundary(64, PrefixHash(bytes(32))), Boundary(80, PrefixHash(bytes(range(32))))),
    step_tokens=16,
    prompt_tokens=70,
    wishes=Wishes(retain_s=1.5, priority=80, prefetch=True, session="agent"),
)


@pytest.mark.parametrize("prompt", [ENDED, replace(ENDED, wishes=NO_WISHES), replace(ENDED, boundaries=())])
def test_an_ended_prompt_comes_back(prompt: EndedPrompt) -> None:
    """Over real msgpack, with wishes of a later release, which are ignored."""
    sent = convert.ended_message(prompt)
    head = msgpack.unpackb(msgpack.packb(encode(replace(sent, wishes={**sent.wishes, "colour": "red"}))))
    message = decode(head)
    assert isinstance(message, messages.PromptEnded)
    assert convert.parse_ended(message) == prompt


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": bytes(7)}, "prompt_ended.tokens"),
        ({"prefixes": bytes(32)}, "prompt_ended.prefixes"),
        ({"namespace": b"x"}, "prompt_ended.namespace"),
        ({"tokens": bytes(8)}, "boundaries must ascend"),
        ({"step_tokens": 0}, "step_tokens"),
        ({"wishes": {"retain_s": -1}}, "prompt_ended.wishes.retain_s"),
        ({"wishes": {"session": "x" * 257}}, "prompt_ended.wishes.session"),
    ],
)
def test_an_ended_prompt_that_makes_no_sense_is_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        convert.parse_ended(replace(convert.ended_message(ENDED), **change))


def test_users_texts_that_are_no_unicode_are_sent() -> None:
    """JSON may have lone surrogates in a request's id and in a session: neither stops an engine's reports."""
    prompt = EndedPrompt("r\ud800", NAMESPACE, (), 64, 64, Wishes(session="\udfff", release=True))
    sent = pack_head(encode(convert.ended_message(prompt)))
    message = decode(msgpack.unpackb(sent[16:], raw=False))
    assert isinstance(message, messages.PromptEnded)
    found = convert.parse_ended(message)
    assert (found.request, found.wishes.session, found.wishes.release) == ("r?", "?", True)
