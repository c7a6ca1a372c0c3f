"""Processes that die while they put or remove striped records: a record is whole and stays, or it is not there and
leaves nothing that stays."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from kvstore.errors import Unavailable
from kvstore.format.names import format_name
from kvstore.format.record import Record
from kvstore.runtime.deadline import Deadline
from kvstore.testing.records import flipped, make_key, make_record
from kvstore.testing.servers import RedisCluster, RedisServer, redis_server
from kvstore.testing.waiting import soon
from kvstore.tiers.base import PutOutcome, Tier
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis.connection import Connection
from kvstore.tiers.redis.reading import is_striped, stripe_names, stripe_ranges
from tests.contract.media import RedisMedium, raw_cluster
from tests.integration import striped_writer

pytestmark = pytest.mark.servers

PAYLOAD_BYTES = 5 << 20
PAGE_BYTES = 4 << 20
"""With its header a little longer than one value."""
ORPHAN_S = 600
EVICTABLE_S_MIN = 24 * 3600
ALIVE = 1_000_000
NUM_KILLS = 12


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def medium(request: pytest.FixtureRequest) -> Iterator[RedisMedium]:
    """Of the server that the test names, or of one alone; nothing is stored there."""
    group = request.getfixturevalue(getattr(request, "param", "server"))
    raw = raw_cluster(group) if isinstance(group, RedisCluster) else None
    medium = RedisMedium(group.url, raw)
    for name in medium.raw.scan_iter(match="*", count=10_000):
        medium.raw.delete(name)
    yield medium
    medium.raw.close()


class Mortal:
    """Lets a number of commands be sent, and none after them, as if the process had been killed then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_left = ALIVE
        run = Connection.run

        async def run_while_alive(connection: Connection, commands: Sequence[Any], *, deadline: Deadline) -> Any:
            sent = commands[: self.num_left]
            self.num_left -= len(sent)
            if sent:
                replies = await run(connection, sent, deadline=deadline)
            if len(sent) < len(commands):
                raise Unavailable("this writer is dead")
            return replies

        monkeypatch.setattr(Connection, "run", run_while_alive)

    async def dies(self, url: str, call: Callable[[Tier], Awaitable[object]], num_steps: int) -> bool:
        """Make a call of a tier that dies after `num_steps` commands. False: it lived long enough."""
        tier = RedisTier(url)
        self.num_left = ALIVE
        await tier.head([make_key(0)], deadline=soon())  # its connections and the map of a cluster are there
        self.num_left = num_steps
        try:
            await call(tier)
        except Unavailable:
            return True
        else:
            return False
        finally:
            self.num_left = ALIVE
            await asyncio.sleep(0.05)  # what was sent is executed
            await tier.aclose()


async def stored_of(medium: RedisMedium, candidates: Sequence[Record]) -> Record | None:
    """Which of some records of one name is stored; `None`: none is.

    What is stored is there as a whole, and all of it stays, or may be evicted, as long as its header. Whatever else has
    such a name expires soon.
    """
    name = format_name(candidates[0].key)
    pattern = name.replace("{", "\\{") + "*"
    seen = {found.decode(): medium.raw.ttl(found) for found in medium.raw.scan_iter(match=pattern, count=10_000)}
    tier = RedisTier(medium.url)
    stored = await tier.get(candidates[0].key, deadline=soon())
    await tier.aclose()
    whole: set[str] = set()
    record = None
    if stored is not None:
        record = next(record for record in candidates if record.data == stored.data)
        whole = {name, *(stripe_names(record.header) if is_striped(record.header) else ())}
        is_evictable = seen[name] > EVICTABLE_S_MIN
        assert all(seen[part] > EVICTABLE_S_MIN if is_evictable else seen[part] == -1 for part in whole), seen
    assert all(0 < ttl <= ORPHAN_S for part, ttl in seen.items() if part not in whole), seen
    return record


async def prepare(medium: RedisMedium, before: str, record: Record, other: Record) -> Record | None:
    """Put what is there before a writer begins; returns the record that is there."""
    start, stop = stripe_ranges(record.header)[0]
    stripe = bytes(record.data[start:stop])
    if before == "left stripe":
        medium.raw.set(stripe_names(record.header)[0], stripe, ex=300)
    if before == "damaged stripe":
        medium.raw.set(stripe_names(record.header)[0], flipped(stripe, 77), ex=300)
    if before not in ("same", "other"):
        return None
    there = record if before == "same" else other
    tier = RedisTier(medium.url)
    assert await tier.put(there, deadline=soon()) is PutOutcome.STORED
    await tier.aclose()
    return there


async def dies_at_each_step(
    medium: RedisMedium,
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    verb: str = "put",
    payload_bytes: int = PAYLOAD_BYTES,
) -> None:
    """Let a writer die after each command in turn, until it lives long enough; a living writer follows each."""
    mortal = Mortal(monkeypatch)
    num_deaths = 0
    for number in range(100):
        record, other = (make_record(number, payload_bytes, seed=seed) for seed in (1, 2))
        there = await prepare(medium, before, record, other)
        put = getattr(RedisTier, verb)
        has_died = await mortal.dies(medium.url, partial(put, record=record, deadline=soon()), number)
        found = await stored_of(medium, [record, other])
        assert found is there or (there is None and found is record)
        tier = RedisTier(medium.url)
        outcome = await tier.put(record, deadline=soon())
        assert outcome is (PutOutcome.STORED if found is None else PutOutcome.EXISTS)
        assert await stored_of(medium, [record, other]) is (found or record)
        assert await tier.delete(record.key, deadline=soon())
        await tier.aclose()
        if not has_died:
            break
        num_deaths += 1
    assert has_died is False and num_deaths >= 2


@pytest.mark.parametrize("before", ["nothing", "same", "other", "left stripe", "damaged stripe"])
@pytest.mark.parametrize(
    ("verb", "payload_bytes"), [("put", PAYLOAD_BYTES), ("put", PAGE_BYTES), ("put_evictable", PAGE_BYTES)]
)
async def test_a_writer_dies(
    medium: RedisMedium, monkeypatch: pytest.MonkeyPatch, before: str, verb: str, payload_bytes: int
) -> None:
    """Whatever is there before, and after whichever command it dies."""
    await dies_at_each_step(medium, monkeypatch, before, verb, payload_bytes)


@pytest.mark.parametrize("medium", ["cluster"], indirect=True)
@pytest.mark.parametrize("before", ["nothing", "same", "left stripe"])
async def test_a_writer_to_a_cluster_dies(medium: RedisMedium, monkeypatch: pytest.MonkeyPatch, before: str) -> None:
    """The same in a cluster."""
    await dies_at_each_step(medium, monkeypatch, before)


@pytest.mark.parametrize("medium", ["server", "cluster"], indirect=True)
@pytest.mark.parametrize("payload_bytes", [0, 1000, PAYLOAD_BYTES])
async def test_a_remover_dies(medium: RedisMedium, monkeypatch: pytest.MonkeyPatch, payload_bytes: int) -> None:
    """The record is whole, or it is gone and nothing of it stays."""
    mortal = Mortal(monkeypatch)
    for number in range(100):
        record = make_record(number, payload_bytes)
        tier = RedisTier(medium.url)
        assert await tier.put(record, deadline=soon()) is PutOutcome.STORED
        has_died = await mortal.dies(medium.url, partial(RedisTier.delete, key=record.key, deadline=soon()), number)
        found = await stored_of(medium, [record])
        assert await tier.delete(record.key, deadline=soon()) is (found is not None)
        await tier.aclose()
        if not has_died:
            assert found is None and number >= 1
            break
    assert not list(medium.raw.scan_iter(match="*", count=10_000))


async def test_writers_are_killed(medium: RedisMedium) -> None:
    """Two processes put records of the same names, of the same and of other bytes, and are killed at any moment."""
    chance = random.Random(19)
    num_stored = 0
    for _ in range(NUM_KILLS):
        command = [sys.executable, "-m", striped_writer.__name__, medium.url]
        writers = [
            subprocess.Popen([*command, str(seed)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for seed in (1, 2)
        ]
        try:
            for writer in writers:
                assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
            for writer in writers:
                assert writer.stdin is not None
                writer.stdin.write(b"go\n")
                writer.stdin.flush()
            for writer in writers:
                time.sleep(chance.uniform(0.0, 0.1))
                writer.kill()
        finally:
            for writer in writers:
                writer.kill()
                writer.communicate()
        await asyncio.sleep(0.1)
        for number in range(striped_writer.NUM_RECORDS):
            seeds = (1, 2) if number % 2 else (0,)
            candidates = [make_record(number, striped_writer.payload_bytes(number), seed=seed) for seed in seeds]
            num_stored += await stored_of(medium, candidates) is not None
        medium.raw.flushall()
    print(f"{num_stored} records stored of {NUM_KILLS * striped_writer.NUM_RECORDS}")
    assert 0 < num_stored < NUM_KILLS * striped_writer.NUM_RECORDS
