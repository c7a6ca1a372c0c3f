"""What engines call their requests, reasons and details comes from their own clients: it is cleaned at the door."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from kvstore.api import Outcome
from kvstore.client import ClientOptions, connect
from kvstore.errors import InvalidRequest
from kvstore.runtime.deadline import Deadline
from kvstore.service.server import Server
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.tiers.memory import MemoryTier
from kvstore.wire import convert, messages
from kvstore.wire.address import parse_address

PROMPT = Prompt(ATTENTION, "texts", 64)
NASTY = [chr(code) for code in (*range(32), *range(0x7F, 0xA0), 0xAD, 0x061C, 0x180E, *range(0x200B, 0x2010))]
NASTY += [chr(code) for code in (*range(0x2028, 0x202F), *range(0x2060, 0x2070), 0xFEFF, 0xFFF9, 0xE0001, 0xE007F)]


def message(**fields: Any) -> messages.Outcome:
    usual = {
        "request": "r",
        "namespace": b"",
        "prompt_tokens": 9,
        "cap_tokens": 8,
        "local_tokens": 0,
        "resume_tokens": 0,
    }
    return messages.Outcome(**{**usual, **fields})


def texts_in(value: object) -> Iterator[str]:
    """Every text in a value, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from texts_in(name)
            yield from texts_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from texts_in(one)


@pytest.mark.parametrize("field", ["request", "reason", "detail name", "detail value"])
def test_texts_are_printable(field: str) -> None:
    """No control character, line separator or mark of direction passes, and no text is longer than 256."""
    for nasty in (*NASTY, "\ud800", "\udfff", "x" * 5000, "\x1b[2J" * 300, "name\u202egpj.exe"):
        text = f"a{nasty}b"
        given = {"request": {"request": text}, "reason": {"reason": text}}.get(field)
        if given is None:
            given = {"detail": {text: 1} if field == "detail name" else {"name": text}}
        outcome = convert.parse_outcome(message(**given))
        for seen in texts_in([outcome.request, outcome.reason, outcome.detail]):
            assert seen.isprintable() and len(seen) <= 256, ascii(seen)
    plain = convert.parse_outcome(message(request="chatcmpl-é漢字 7", reason="stall", detail={"tier": "s3"}))
    assert (plain.request, plain.reason, plain.detail) == ("chatcmpl-é漢字 7", "stall", {"tier": "s3"})


def test_values_are_plain() -> None:
    """What JSON cannot write is left out, and no number is larger than a prompt may be."""
    detail = {
        "nan": math.nan,
        "inf": -math.inf,
        "list": [1],
        "map": {},
        "bytes": b"1",
        "none": None,
        "whole": 7,
        "half": 0.5,
    }
    outcome = convert.parse_outcome(message(detail=detail))
    assert json.loads(json.dumps(outcome.detail, allow_nan=False)) == {"whole": 7, "half": 0.5}
    for name in ("prompt_tokens", "cap_tokens", "local_tokens", "resume_tokens", "stop_tokens"):
        with pytest.raises(InvalidRequest, match=f"outcome.{name}"):
            convert.parse_outcome(message(**{name: 1 << 32}))


async def test_what_operators_see(folder: Any, caplog: pytest.LogCaptureFixture) -> None:
    """An engine with nasty names for itself, its requests, reasons and discards: nothing of that is in the status, the
    explanations, the meters or the log; the request is found by the name that its engine gave it."""
    nasty = "bad\x1b[2J\n\u2028\u202e"
    caplog.set_level(logging.INFO)
    store = TieredStore(MemoryTier(8 << 20))
    server = Server(store)
    await server.listen([parse_address(f"unix:{folder / 's'}")])
    client = connect(str(server.addresses[0]), options=ClientOptions(name=nasty))
    deadline = Deadline.after(20)
    await client.open_namespace(PROMPT.description, deadline=deadline)
    namespace = PROMPT.namespace
    for reason in (nasty, f"save_{nasty}", "stall"):
        client.report(Outcome(nasty, namespace, 64, 63, 0, 0, reason, {nasty: nasty}, PROMPT.boundary(64)))
    await client.discard(PROMPT.records()[0].key, nasty, deadline=deadline)
    told = await client.explain(nasty, deadline=deadline)
    listed = await client.explain("", deadline=deadline)
    status = await client.status(deadline=deadline)
    assert str(told["request"]).startswith("bad\\x1b[2J\\n\\u2028\\u202e")
    for seen in texts_in([told, listed, status, store.meters.snapshot(), server.describe()]):
        assert seen.isprintable(), ascii(seen)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("kvstore.s")]
    assert all(line.isprintable() for line in said), said
    await client.aclose()
    await server.aclose()
    await store.aclose()
