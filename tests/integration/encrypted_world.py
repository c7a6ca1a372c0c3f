"""Stores with encryption over real tiers, and a search through every byte that they keep."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import boto3
from redis import Redis

from kvstore.api import Ack, SaveOutcome, Staged
from kvstore.compose import open_served_store
from kvstore.settings import load_settings
from kvstore.store.encryption.encrypted import EncryptedStore
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, HYBRID, Prompt
from kvstore.testing.servers import CephRgw, RedisServer
from kvstore.testing.waiting import soon

RED = Prompt(HYBRID, "red's prompt", 64 * 4 + 16, tenant="red", payload_bytes=3000)
BLUE = Prompt(ATTENTION, "blue's prompt", 64 * 3, tenant="blue", payload_bytes=3000)
KEYS = [("red", 1, 1), ("blue", 1, 2)]


@dataclass
class Place:
    """Where records are kept, and how to see every byte there.

    Attributes:
        flags: Settings.
        contents: Yields (where, name, bytes) of everything.
    """

    flags: dict[str, str]
    contents: Callable[[], Iterator[tuple[str, bytes, bytes]]]


def directory_place(folder: Path) -> Place:
    def contents() -> Iterator[tuple[str, bytes, bytes]]:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                yield "file", str(path.relative_to(folder)).encode(), path.read_bytes()

    return Place({"cold": f"file://{folder / 'records'}", "disk_bytes": "1GiB"}, contents)


def fleet_place(redis: RedisServer, rgw: CephRgw, bucket: str) -> Place:
    client = Redis(host=redis.host, port=redis.port)
    client.flushall()
    rgw.create_bucket(bucket)
    s3 = boto3.client(
        "s3",
        endpoint_url=rgw.endpoint_url,
        region_name=rgw.region,
        aws_access_key_id=rgw.access_key,
        aws_secret_access_key=rgw.secret_key,
    )

    def contents() -> Iterator[tuple[str, bytes, bytes]]:
        for name in client.scan_iter(count=1000):
            yield f"redis {client.type(name).decode()}", name, client.dump(name) + b"".join(_values(client, name))
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket):
            for item in page.get("Contents", []):
                body = s3.get_object(Bucket=bucket, Key=item["Key"])
                yield "s3", item["Key"].encode() + repr(body["Metadata"]).encode(), body["Body"].read()
        client.close()

    cold = f"s3://{bucket}/records?endpoint_url={rgw.endpoint_url}&region={rgw.region}"
    return Place({"hot": redis.url, "cold": cold}, contents)


def _values(client: Redis, name: bytes) -> Iterator[bytes]:
    """All that stands in a key, uncompressed as the server's dump need not be."""
    match client.type(name).decode():
        case "string":
            yield client.get(name)
        case "hash":
            for field, value in client.hgetall(name).items():
                yield field + b"=" + value
        case "set":
            yield from client.smembers(name)
        case "zset":
            yield from (member for member, _ in client.zrange(name, 0, -1, withscores=True))
        case "list":
            yield from client.lrange(name, 0, -1)
        case "stream":
            yield repr(client.xrange(name)).encode()
        case other:
            raise AssertionError(f"a kind of key that this test does not know: {other}")


@asynccontextmanager
async def opened(place: Place, keys: Path | None) -> AsyncIterator[EncryptedStore | TieredStore]:
    own = {
        "memory_bytes": "64MiB",
        "stall_timeout_ms": 5000,
        "encryption_keys": str(keys) if keys is not None else None,
    }
    async with open_served_store(load_settings({**place.flags, **own})) as store:
        yield store


async def save(store: EncryptedStore | TieredStore, prompt: Prompt) -> None:
    """All records, at every tier, after a lookup as an engine makes it: the catalog learns parents."""
    await store.open_namespace(prompt.description, deadline=soon())
    await store.lookup(prompt.query(), deadline=soon())
    for record in prompt.records():
        assert await store.save(record, ack=Ack.COLD, deadline=soon()) is SaveOutcome.STORED
    assert await store.drain(soon()) == 0


async def stage(store: EncryptedStore | TieredStore, prompt: Prompt) -> Staged:
    await store.open_namespace(prompt.description, deadline=soon())
    return await store.stage(prompt.query(), deadline=soon())


async def check_exact(store: EncryptedStore | TieredStore, prompt: Prompt) -> None:
    """The whole prompt is staged, and each record loads as it was saved, to the last bit."""
    staged = await stage(store, prompt)
    assert staged.resume_tokens == prompt.num_tokens
    assert staged.lease is not None
    saved = {record.key: bytes(record.data) for record in prompt.records()}
    assert len(staged.keys) >= prompt.num_tokens // 64
    for key in staged.keys:
        record = await store.load(staged.lease, key, deadline=soon())
        assert bytes(record.data) == saved[key]
    await store.release(staged.lease)


def spellings(data: bytes) -> dict[str, bytes]:
    """How bytes could be read: raw, in hex, and in base64 at each of its three alignments."""
    coded = {f"base64 {skip}": base64.b64encode(data[skip : len(data) // 3 * 3])[:20] for skip in range(3)}
    return {"raw": data, "hex": data.hex().encode(), **coded}


def find_readable(place: Place, prompts: list[Prompt]) -> tuple[int, list[str]]:
    """How much was looked through, and where a prefix hash, or 24 bytes in a row of a page's start, can be read."""
    secrets_: dict[str, bytes] = {}
    for prompt in prompts:
        for boundary in prompt.query().boundaries:
            for how, spelled in spellings(boundary.prefix).items():
                secrets_[f"prefix {boundary.tokens} of {prompt.name}, {how}"] = spelled
        for record in prompt.records():
            for at in (0, 1000, len(record.payload) - 24):
                for how, spelled in spellings(bytes(record.payload[at : at + 24])).items():
                    secrets_[f"page {record.key} of {prompt.name} at {at}, {how}"] = spelled
    num_bytes, found = 0, []
    for kind, name, data in place.contents():
        num_bytes += len(name) + len(data)
        found += [f"{what} in {kind} {name!r}" for what, spelled in secrets_.items() if spelled in name + b"\0" + data]
    return num_bytes, found
