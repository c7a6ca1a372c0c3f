"""One save that names several records in shared memory, at services that are killed or full: each outcome is true."""

from __future__ import annotations

import asyncio
import gc
import struct
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.api import PageStore, SaveOutcome
from kvstore.client import ClientOptions, RemoteStore, connect
from kvstore.errors import KVStoreError, Unavailable
from kvstore.format.record import Record
from kvstore.model.kinds import FullAttention
from kvstore.model.layout import GroupLayout, Layout
from kvstore.runtime.deadline import Deadline
from kvstore.testing.prompts import Prompt
from kvstore.testing.serve import Service
from kvstore.testing.servers import redis_server
from kvstore.testing.waiting import soon, until
from kvstore.tiers.base import Tier
from kvstore.tiers.filesystem import FilesystemTier
from kvstore.tiers.redis import RedisTier
from kvstore.wire import messages
from tests.security.memory_peer import HEAD_BYTES, MemoryPeer
from tests.security.raw_peer import head_bytes

MIB = 1 << 20
RECORD_BYTES = 70_000
KILLS = 2
SAVERS = 5
DEADLINE_S = 5.0
BOUND_S = 30.0
"""No call takes longer, however busy the machine is: it has a deadline of a few seconds."""
MANY = Prompt(
    Layout(64, (GroupLayout(FullAttention(), 1),)),
    "several",
    64 * messages.SAVE_PLACES_MAX,
    step_tokens=64,
    payload_bytes=RECORD_BYTES,
)
"""As many records as one save may name, one of each page."""


def save_all(peer: MemoryPeer, records: Sequence[Record], ack: str) -> list[str]:
    """Make records in the peer's memory and save them with one request; returns what is said of each."""
    places, step_bytes = [], HEAD_BYTES + max(record.num_bytes for record in records)
    for number, record in enumerate(records):
        offset = HEAD_BYTES + number * step_bytes
        peer.put(record, offset, number + 1)
        places.append(struct.pack("<3Q", offset, record.num_bytes, number + 1))
    fields: dict[str, Any] = {"memory": peer.id, "num_bytes": sum(record.num_bytes for record in records)}
    answer = peer.ask(head_bytes(messages.Save(2, 30_000, ack, **fields, places=b"".join(places))))
    assert answer["type"] == "saved", answer
    assert answer["outcome"] == answer["outcomes"][0]
    outcomes: list[str] = answer["outcomes"]
    return outcomes


async def found(url: str, prompt: Prompt) -> list[bool]:
    """Which pages of a prompt a service has; those before the first that it lacks are read, and have their bytes."""
    client = connect(url)
    try:
        await client.wait_ready(deadline=Deadline.after(60))
        await client.open_namespace(prompt.description, deadline=soon())
        expected = {record.key: record.data for record in prompt.records()}
        async with asyncio.timeout(60):
            while True:  # a stage on a busy machine may end early
                present = [bool(bits) for bits in (await client.lookup(prompt.query(), deadline=soon())).groups_present]
                num_pages = present.index(False) if False in present else len(present)
                with suppress(Unavailable):
                    staged = await client.stage(prompt.query(), deadline=soon())
                    if len(staged.keys) == num_pages:
                        break
        for key in staged.keys:
            assert staged.lease is not None
            assert (await client.load(staged.lease, key, deadline=soon())).data == expected[key]
        return present
    finally:
        await client.aclose()


async def stored_in(tier: Tier, prompt: Prompt) -> list[bool]:
    """Which records of a prompt a tier has; these have the bytes that were saved."""
    try:
        stored = [await tier.get(record.key, deadline=soon()) for record in prompt.records()]
    finally:
        await tier.aclose()
    for found, record in zip(stored, prompt.records(), strict=True):
        assert found is None or found.data == record.data
    return [found is not None for found in stored]


@pytest.mark.servers
@pytest.mark.parametrize("ack", ["hot", "cold"])
async def test_what_was_acknowledged_outlives_its_service(tmp_path: Path, ack: str) -> None:
    """A save whose caller waits for a slower tier is answered when every record is there: the service is killed upon
    the answer, and that tier has them all."""
    with redis_server() as hot:
        flags = {"hot": hot.url, "cold": f"file://{tmp_path}/records", "memory_bytes": "64MiB"}
        with Service(tmp_path, flags) as service:
            peer = await asyncio.to_thread(MemoryPeer, service.url, prompt=MANY)
            outcomes = await asyncio.to_thread(save_all, peer, MANY.records(), ack)
            service.kill()
            peer.die()
        assert outcomes == ["stored"] * messages.SAVE_PLACES_MAX
        is_hot = ack == "hot"
        tier = RedisTier(hot.url) if is_hot else await FilesystemTier.open(tmp_path / "records", budget_bytes=1 << 30)
        assert all(await stored_in(tier, MANY))


@pytest.mark.servers
async def test_a_hot_tier_without_room_for_all(tmp_path: Path) -> None:
    """Redis refuses some of the records of one save: these are full, the others stored, and just these are there."""
    prompt = replace(MANY, name="without room", payload_bytes=260_000)
    with redis_server(maxmemory_bytes=6 * MIB) as hot:
        flags = {"hot": hot.url, "cold": f"file://{tmp_path}/records", "memory_bytes": "64MiB"}
        with Service(tmp_path, flags) as service:
            peer = await asyncio.to_thread(MemoryPeer, service.url, prompt=prompt)
            outcomes = await asyncio.to_thread(save_all, peer, prompt.records(), "hot")
            service.kill()
            peer.die()
        assert set(outcomes) == {"stored", "full"}
        assert await stored_in(RedisTier(hot.url), prompt) == [outcome == "stored" for outcome in outcomes]


@dataclass
class Told:
    """What the calls of some savers returned.

    Attributes:
        num_begun: Calls.
        num_failed: Calls that raised; of their records nothing is said.
        longest_s: The longest call.
        outcomes: Of each record of the others, how often.
    """

    num_begun: int = 0
    num_failed: int = 0
    num_answered: int = 0
    longest_s: float = 0.0
    outcomes: Counter[SaveOutcome] = field(default_factory=Counter)


async def save_until(ended: asyncio.Event, client: RemoteStore, name: str, told: Told) -> None:
    """Save prompts, each with one call, made in shared memory while there is some."""
    turn = 0
    while not ended.is_set():
        turn += 1
        prompt = replace(MANY, name=f"{name} {turn}", num_tokens=64 * 8)
        records = [made(client, record) for record in prompt.records()]
        told.num_begun, begun_s = told.num_begun + 1, time.monotonic()
        try:
            outcomes = await client.save_many(records, deadline=Deadline.after(DEADLINE_S))
        except KVStoreError:
            told.num_failed += 1
            await asyncio.sleep(0.01)
        else:
            told.num_answered += 1
            assert len(outcomes) == len(records)
            told.outcomes.update(outcomes)
        told.longest_s = max(told.longest_s, time.monotonic() - begun_s)


def made(client: PageStore, record: Record) -> Record:
    """The record, in shared memory if there is some."""
    buffer = client.shared_buffer(record.num_bytes)
    if buffer is None:
        return record
    buffer[:] = record.data
    return Record(record.header, buffer.toreadonly())


def num_free(client: PageStore) -> int:
    """How many buffers can be taken."""
    taken = []
    while (buffer := client.shared_buffer(RECORD_BYTES)) is not None:
        taken.append(buffer)
    return len(taken)


def num_mapped() -> int:
    """Memory files that are mapped here for writing."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("rw-s" in line and "/memfd:kvstore" in line for line in maps)


async def until_free(client: PageStore, expected: int) -> None:
    """Return when so many buffers can be taken: all."""
    await until(lambda: num_free(client) == expected)


async def test_services_that_are_killed_while_one_saves(tmp_path: Path) -> None:
    """SIGKILL in the middle of many calls, again and again: each call ends in time, with one outcome for each record or
    an error. The client finds the next service and has memory there, all of it, and that of before is gone."""
    flags = {"cold": f"file://{tmp_path}/records", "memory_bytes": "128MiB"}
    told = Told()
    with Service(tmp_path, flags) as service:
        client = connect(service.url, options=ClientOptions(save_memory_bytes=32 * MIB))
        try:
            await client.wait_ready(deadline=Deadline.after(60))
            await client.open_namespace(MANY.description, deadline=soon())
            all_free = await until(lambda: num_free(client))
            mapped = num_mapped()
            for kill in range(KILLS):
                ended = asyncio.Event()
                savers = [
                    asyncio.ensure_future(save_until(ended, client, f"{kill} {number}", told))
                    for number in range(SAVERS)
                ]
                before = told.num_answered
                async with asyncio.timeout(60):
                    while told.num_answered < before + SAVERS * 3:
                        await asyncio.sleep(0.001)
                before, failed = told.num_answered, told.num_failed
                await asyncio.to_thread(service.kill)
                async with asyncio.timeout(60):
                    while told.num_failed < failed + SAVERS:
                        await asyncio.sleep(0.001)
                await asyncio.to_thread(service.start)
                async with asyncio.timeout(60):
                    while told.num_answered < before + SAVERS * 3:
                        await asyncio.sleep(0.001)
                ended.set()
                async with asyncio.timeout(BOUND_S):
                    await asyncio.gather(*savers)
                del savers
                await until_free(client, all_free)
            assert told.num_begun == told.num_failed + told.num_answered
            assert told.outcomes.total() == 8 * told.num_answered
            assert told.outcomes[SaveOutcome.STORED] > told.outcomes.total() // 2
            assert told.longest_s < BOUND_S
            gc.collect()
            assert num_mapped() == mapped == 1
            records = [made(client, record) for record in MANY.records()]
            assert await client.save_many(records, deadline=soon()) == [SaveOutcome.STORED] * len(records)
        finally:
            await client.aclose()
        assert all(await found(service.url, MANY))
        for kill in range(KILLS):
            await found(service.url, replace(MANY, name=f"{kill} 0 1", num_tokens=64 * 8))
