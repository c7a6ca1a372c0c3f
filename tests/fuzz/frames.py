"""What a peer may send: good, hostile, lying and damaged frames. All of it follows from one seed."""

from __future__ import annotations

import random
import struct
from dataclasses import MISSING, fields
from typing import Any

import msgpack

from kvstore.model.page_blocks import BlockGroup, PageBlocks
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.records import make_record
from kvstore.wire import convert, messages
from kvstore.wire.messages import encode
from kvstore.wire.page_names import blocks_message, names_messages
from tests.fuzz.inputs import mutated

PROMPT = Prompt(ATTENTION, "fuzz", 128)
TYPES: list[type[Any]] = [kind for kind in vars(messages).values() if getattr(kind, "type", "")]
HOSTILE = (0, 1, -1, 2**31, 2**63, 2**64 - 1, 0.5, float("inf"), float("nan"), "", "x" * 300, b"", b"\0" * 16)
HOSTILE += (b"\xff" * 32, b"\0" * 7, [], {}, {"a": {}}, None, True, [[[]]])
PAGES = [
    PageBlocks(
        namespace=PROMPT.description.id,
        boundary=PROMPT.boundary(tokens),
        group=0,
        model="m",
        hash_bytes=8,
        hashes=bytes(32),
        parent=bytes(8),
        block_tokens=16,
        groups=(BlockGroup(0, "full_attention"), BlockGroup(1, "sliding_window", 64)),
        tokens=bytes(256),
    )
    for tokens in (64, 128)
]
RECORD = bytes(make_record(1, 500).data)
SAVED = bytes(PROMPT.records()[0].data)


def frame(head: Any, payload: bytes = b"") -> bytes:
    packed = msgpack.packb(head, use_bin_type=True)
    return struct.pack("<4sIQ", b"KVW1", len(packed), len(payload)) + packed + payload


def valid_frames(choose: random.Random) -> list[bytes]:
    """A conversation that a good client might have, each request once."""
    namespace = PROMPT.description.id
    query = convert.query_fields(PROMPT.query())
    key = convert.key_fields(PROMPT.records()[0].key)
    lease = choose.randbytes(16)
    said = [
        (messages.OpenNamespace(1, 500, PROMPT.description.canonical), b""),
        (messages.Save(2, 500, "memory"), choose.choice((SAVED, RECORD, mutated(SAVED, choose), b""))),
        (messages.Lookup(3, 500, **query), b""),
        (messages.Stage(4, 500, **query), b""),
        (messages.Load(5, 500, lease, **key), b""),
        (messages.Renew(6, 500, lease), b""),
        (messages.Release(lease), b""),
        (messages.Discard(7, 500, **key, reason="a fuzz"), b""),
        (messages.Status(8, 500), b""),
        (messages.Ping(9, 500), b""),
        (messages.Cancel(choose.randrange(9)), b""),
        (messages.ShareArena(10, 500), b""),
        (messages.ShareSaveMemory(12, 500, choose.choice((0, 1, 1 << 62))), b""),
        (messages.Save(13, 500, "memory", memory=lease, offset=64, num_bytes=len(SAVED), stamp=1), b""),
        (messages.Locate(11, 500, lease, **convert.locate_fields([PROMPT.records()[0].key]), arena=lease), b""),
    ]
    said += [(message, b"") for message in names_messages(PAGES)]
    said.append((blocks_message(PAGES[0]), b""))
    assert namespace
    return [frame(encode(message), payload) for message, payload in said]


def hostile_frame(choose: random.Random) -> bytes:
    """A message of some type whose fields are missing, strange, or of another type; perhaps with a payload."""
    kind = choose.choice(TYPES)
    head: dict[Any, Any] = {"type": kind.type if choose.random() < 0.95 else choose.choice(HOSTILE)}
    for field in fields(kind):
        if choose.random() < 0.85 or field.default is not MISSING:
            usual = {"int": choose.randrange(9), "str": "memory", "bytes": b"\1" * 16, "float": 1.0, "bool": True}
            head[field.name] = choose.choice((usual.get(str(field.type), {}), choose.choice(HOSTILE)))
    if choose.random() < 0.1:
        head[choose.choice(("more", 7, b"x"))] = choose.choice(HOSTILE)
    return frame(
        choose.choice((head, head, head, list(head), 7)), choose.randbytes(choose.choice((0, 0, 1, 300, 20_000)))
    )


def lying_prefix(choose: random.Random) -> bytes:
    """Sixteen bytes that promise too much, nothing, or another protocol."""
    magic = choose.choice((b"KVW1", b"KVW1", b"KVW2", b"GET ", choose.randbytes(4)))
    sizes = (0, 1, 16, 5000, 4 << 20, (4 << 20) + 1, (1 << 32) - 1)
    payload = choose.choice((0, 1, 60_000, 64 << 10, (64 << 10) + 1, 1 << 40, (1 << 64) - 1))
    return struct.pack("<4sIQ", magic, choose.choice(sizes), payload) + choose.randbytes(choose.choice((0, 16, 100)))


def conversation(choose: random.Random) -> bytes:
    """What a peer sends: a hello mostly, then frames that are good, reordered, repeated, hostile, lying or damaged."""
    return counted_conversation(choose)[0]


def counted_conversation(choose: random.Random) -> tuple[bytes, int]:
    """A conversation, and the number of its frames."""
    hello = frame(encode(messages.Hello(choose.choice((1, 1, 1, 0, 2)), role=choose.choice(("control", "data")))))
    said = valid_frames(choose)
    if choose.random() < 0.5:
        choose.shuffle(said)
    said = said[: choose.randint(1, len(said))]
    for _ in range(choose.randrange(3)):
        said.insert(
            choose.randrange(len(said) + 1), choose.choice((hostile_frame, hostile_frame, lying_prefix))(choose)
        )
    if choose.random() < 0.3:
        said.append(choose.choice(said))
    if choose.random() < 0.9:
        said.insert(0, hello)
    stream = b"".join(said)
    return (stream if choose.random() < 0.6 else mutated(stream, choose)), len(said)
