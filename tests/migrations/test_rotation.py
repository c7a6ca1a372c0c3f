"""A change of keys on real Redis and S3, killed again and again: it ends complete, bit for bit, read throughout."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from redis.asyncio import Redis

from kvstore.api import Ack, SaveOutcome
from kvstore.catalog.entry import Level
from kvstore.compose import open_catalog, open_tier
from kvstore.compose_encryption import open_served_store
from kvstore.model.keys import RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.settings import Settings, load_settings
from kvstore.store.encrypted import EncryptedStore
from kvstore.testing.keys import tenant_key, write_keys
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.servers import CephRgw, RedisServer

pytestmark = pytest.mark.servers

BEFORE, AFTER = [("red", 1, 1)], [("red", 2, 2), ("red", 1, 1)]
BLUE = [("blue", 5, 5)]
SAVES_AT_ONCE = 16


def soon() -> Deadline:
    return Deadline.after(60.0)


@dataclass
class Fleet:
    """Redis, S3 and a key file, as services and runs find them.

    Attributes:
        environment: Settings of processes.
        keys: The key file.
        runs: The process that runs are forked from, once there was one.
    """

    environment: dict[str, str]
    keys: Path
    runs: asyncio.subprocess.Process | None = None

    @property
    def settings(self) -> Settings:
        names = {name.removeprefix("KVSTORE_").lower(): text for name, text in self.environment.items()}
        return load_settings({name: text for name, text in names.items() if name in Settings.model_fields})

    @asynccontextmanager
    async def service(self) -> AsyncIterator[EncryptedStore]:
        async with open_served_store(self.settings) as store:
            assert isinstance(store, EncryptedStore)
            yield store

    async def run(self, verb: str, count: int = 0) -> dict[str, object] | None:
        """A run of its own process; `None`: it was killed at that point."""
        if self.runs is None:
            command = (sys.executable, "-m", "tests.migrations.killed_run")
            pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
            self.runs = await asyncio.create_subprocess_exec(*command, env={**os.environ, **self.environment}, **pipes)
        assert self.runs.stdin is not None and self.runs.stdout is not None
        self.runs.stdin.write(f"{verb} {count}\n".encode())
        told = json.loads(await self.runs.stdout.readline())
        if told["code"] == -signal.SIGKILL:
            return None
        assert told["code"] == 0
        answer: dict[str, object] = told["answer"]
        return answer


@pytest.fixture
async def fleet(
    shared_redis: RedisServer, shared_rgw: CephRgw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Fleet]:
    async with Redis(host=shared_redis.host, port=shared_redis.port) as client:
        await client.flushall()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", shared_rgw.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", shared_rgw.secret_key)
    bucket = f"migration-{secrets.token_hex(4)}"
    shared_rgw.create_bucket(bucket)
    keys = write_keys(tmp_path / "keys.toml", BEFORE + BLUE)
    cold = f"s3://{bucket}/records?endpoint_url={shared_rgw.endpoint_url}&region={shared_rgw.region}"
    own = {"HOT": shared_redis.url, "COLD": cold, "MEMORY_BYTES": "256MiB", "ENCRYPTION_KEYS": str(keys)}
    own |= {"STALL_TIMEOUT_MS": "20000", "FETCH_TIMEOUT_MS": "20000"}
    fleet = Fleet({f"KVSTORE_{name}": text for name, text in own.items()}, keys)
    yield fleet
    if fleet.runs is not None:
        assert fleet.runs.stdin is not None
        fleet.runs.stdin.close()
        assert await fleet.runs.wait() == 0


async def save(store: EncryptedStore, prompts: Sequence[Prompt]) -> None:
    """All records of all prompts, at every tier."""
    turns = asyncio.Semaphore(SAVES_AT_ONCE)

    async def one(prompt: Prompt) -> None:
        async with turns:
            await store.lookup(prompt.query(), deadline=soon())
            for record in prompt.records():
                outcome = await store.save(record, ack=Ack.COLD, deadline=soon())
                assert outcome in (SaveOutcome.STORED, SaveOutcome.EXISTS)

    for prompt in prompts:
        await store.open_namespace(prompt.description, deadline=soon())
    async with asyncio.TaskGroup() as group:
        for prompt in prompts:
            group.create_task(one(prompt))
    assert await store.drain(soon()) == 0


async def check_exact(store: EncryptedStore, prompt: Prompt) -> None:
    """The whole prompt is a hit, read from the tiers anew, and each record is what was saved, to the last bit."""
    for key in store.generations(prompt.tenant):
        assert key is not None
        await store.operations.forget([key.named(record.key) for record in prompt.records()])
    async with asyncio.timeout(60):
        while (staged := await store.stage(prompt.query(), deadline=soon())).resume_tokens < prompt.num_tokens:
            # a machine that is busy with runs makes tiers slow, which cuts a hit short; nothing else may
            assert staged.cut.startswith(("stall", "deadline", "tier_failed")), staged
            await asyncio.sleep(0.2)
    assert staged.lease is not None
    saved = {record.key: bytes(record.data) for record in prompt.records()}
    for key in staged.keys:
        assert bytes((await store.load(staged.lease, key, deadline=soon())).data) == saved[key]
    await store.release(staged.lease)


async def read_on(store: EncryptedStore, prompts: Sequence[Prompt], stop: asyncio.Event) -> int:
    """Read prompts in some order until told to stop; returns how many were read, all of them exact."""
    numbers, count = np.random.default_rng(7), 0
    while not stop.is_set():
        await check_exact(store, prompts[numbers.integers(len(prompts))])
        count += 1
        await asyncio.sleep(0.2)  # the runs need the processors too
    return count


async def names_in(fleet: Fleet, level: Level) -> set[RecordKey]:
    location = fleet.settings.hot if level is Level.HOT else fleet.settings.cold
    async with open_tier(location, fleet.settings) as tier:
        return {entry.key async for entry in tier.scan()}


async def check_complete(fleet: Fleet, prompts: Sequence[Prompt], others: Sequence[Prompt]) -> None:
    """Every record stands under its new name at both levels and no other name is left; the catalog tells just that."""
    key, blue = tenant_key(2, "red"), tenant_key(5, "blue")
    expected = {key.named(record.key) for prompt in prompts for record in prompt.records()}
    expected |= {blue.named(record.key) for prompt in others for record in prompt.records()}
    for level in Level:
        assert await names_in(fleet, level) == expected
    async with open_catalog(fleet.settings) as catalog:
        told = {level: set[RecordKey]() for level in Level}
        for prompt in {prompt.namespace: prompt for prompt in (*prompts, *others)}.values():
            layout = prompt.description.layout()
            await catalog.register(prompt.namespace, layout, prompt.tenant, deadline=soon())
            async for entry in catalog.iterate(prompt.namespace):
                for level in Level:
                    told[level] |= set(entry.keys(level))
        assert told == dict.fromkeys(Level, expected)


def red_prompts(num_records: int) -> list[Prompt]:
    """Of eight records each, in two namespaces."""
    count = num_records // 8
    prompts = [Prompt(ATTENTION, f"prompt {number}", 256, tenant="red", payload_bytes=600) for number in range(count)]
    return [replace(prompt, model=f"model {number % 2}") for number, prompt in enumerate(prompts)]


async def rotate(
    fleet: Fleet, num_records: int, kill_points: Sequence[int], finish_points: Sequence[int]
) -> Counter[str]:
    """Save, change the keys, copy and finish with a kill at each of the points, read all the while.

    Args:
        kill_points: How many steps each run of the copying takes before it is killed.
        finish_points: Likewise of the removing.

    Returns:
        How often a run was killed in each verb, and how many prompts were read.
    """
    prompts = red_prompts(num_records)
    others = [Prompt(ATTENTION, f"other {number}", 128, tenant="blue", payload_bytes=600) for number in range(3)]
    seen: Counter[str] = Counter()
    async with fleet.service() as store:
        await save(store, prompts)
        await save(store, others)
        write_keys(fleet.keys, AFTER + BLUE)
        store._keys.refresh()
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(read_on(store, prompts, stop))
            for verb, points in (("copy", kill_points), ("finish", finish_points)):
                for count in points:
                    done = await fleet.run(verb, count)
                    if done is not None:
                        break
                    seen[f"killed in {verb}"] += 1
                done = await fleet.run(verb)
                assert done is not None
                assert done["phase"] == ("copied" if verb == "copy" else "done")
                totals = done["totals"]
                assert isinstance(totals, dict)
                assert not {"failed", "full", "busy", "unknown", "kept", "refused", "foreign"} & totals.keys(), totals
            stop.set()
        seen["read"] = reading.result()
    await check_complete(fleet, prompts, others)
    write_keys(fleet.keys, [("red", 2, 2), *BLUE])  # the old key is not needed any more, and nobody misses it
    async with fleet.service() as store:
        for prompt in (*prompts, *others):
            await store.open_namespace(prompt.description, deadline=soon())
            await check_exact(store, prompt)
        for record in others[0].records():
            assert await store.save(record, deadline=soon()) is SaveOutcome.EXISTS
    return seen


async def test_a_change_of_keys_that_is_killed_goes_on_and_is_read_throughout(fleet: Fleet) -> None:
    """Few records; runs killed at a first step, in the middle of copying, and in the middle of removing."""
    seen = await rotate(fleet, 64, [3, 150], [5])
    assert seen["killed in copy"] == 2
    assert seen["killed in finish"] == 1
    assert seen["read"] > 0


@pytest.mark.full
async def test_a_hundred_thousand_records_change_keys_over_fifty_kills(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same with 100,000 records: killed at each of the first steps, then all over the run, 60 times in all."""
    num_records = int(os.environ.get("KVSTORE_TEST_MIGRATION_RECORDS", "100000"))
    steps = [*range(1, 13), *np.linspace(13, num_records * 4 // 30, 38).astype(int).tolist()]
    seen = await rotate(fleet, num_records, steps, list(range(1, 14)))
    with capsys.disabled():
        print(f"\n{num_records:,} records: {dict(seen)}")
    assert seen["killed in copy"] + seen["killed in finish"] >= 50
