"""A change of keys on real Redis and S3, killed again and again: it ends complete, bit for bit, read throughout."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from kvstore.api import Ack, SaveOutcome
from kvstore.catalog.entry import Level
from kvstore.compose import open_catalog, open_served_store, open_tier
from kvstore.model.keys import RecordKey
from kvstore.settings import Settings, load_settings
from kvstore.store.encryption.encrypted import EncryptedStore
from kvstore.testing.keys import tenant_key, write_keys
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.servers import CephRgw, RedisServer
from kvstore.testing.waiting import soon
from migrations.journal import num_sheets

pytestmark = pytest.mark.servers

BEFORE, AFTER = [("red", 1, 1)], [("red", 2, 2), ("red", 1, 1)]
BLUE = [("blue", 5, 5)]
SAVES_AT_ONCE = 16


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

    async def run(self, verb: str, count: int = 0, word: str = "") -> dict[str, object] | None:
        """A run of its own process; `None`: it was killed at its `count`th step, of those of that word."""
        if self.runs is None:
            command = (sys.executable, "-m", "tests.migrations.killed_run")
            pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
            self.runs = await asyncio.create_subprocess_exec(*command, env={**os.environ, **self.environment}, **pipes)
        assert self.runs.stdin is not None and self.runs.stdout is not None
        self.runs.stdin.write(f"{verb} {count} {word}\n".encode())
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
    shared_redis.flush()
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

    for description in {prompt.namespace: prompt.description for prompt in prompts}.values():
        await store.open_namespace(description, deadline=soon())
    async with asyncio.TaskGroup() as group:
        for prompt in prompts:
            group.create_task(one(prompt))
    while await store.drain(soon()):  # many take more than a minute
        pass


async def check_exact(store: EncryptedStore, prompt: Prompt) -> None:
    """The whole prompt is a hit, read from the tiers again, and each record is what was saved, to the last bit."""
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


async def check_same(fleet: Fleet, keys: Iterable[RecordKey]) -> None:
    """Redis and S3 hold the same bytes: those that a service reads in one are right in the other."""
    settings, waiting = fleet.settings, iter(keys)
    async with open_tier(settings.hot, settings) as hot, open_tier(settings.cold, settings) as cold:

        async def work() -> None:
            for key in waiting:
                quick, slow = await hot.get(key, deadline=soon()), await cold.get(key, deadline=soon())
                assert quick is not None and slow is not None
                assert bytes(quick.data) == bytes(slow.data)

        async with asyncio.TaskGroup() as group:
            for _ in range(SAVES_AT_ONCE):
                group.create_task(work())


async def check_complete(fleet: Fleet, prompts: Sequence[Prompt], others: Sequence[Prompt]) -> None:
    """Every record stands under its new name at both levels, in the same bytes, and no other name is left; the catalog
    tells just that.
    """
    key, blue = tenant_key(2, "red"), tenant_key(5, "blue")
    expected = {key.named(record.key) for prompt in prompts for record in prompt.records()}
    expected |= {blue.named(record.key) for prompt in others for record in prompt.records()}
    for level in Level:
        assert await names_in(fleet, level) == expected
    await check_same(fleet, expected)
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


Point = tuple[int, str]
"""Where a run is killed: at its so manieth step of that word; of any, where there is none."""


async def run_over_kills(fleet: Fleet, verb: str, points: Sequence[Point], seen: Counter[str]) -> dict[str, object]:
    """Runs of one verb: one is killed at each of the points, the last one ends. Returns what that one says."""
    for count, word in points:
        done = await fleet.run(verb, count, word)
        if done is not None:
            return done
        seen[f"{verb} killed at {word}".removesuffix(" at ")] += 1
    return await told(fleet, verb)


async def told(fleet: Fleet, verb: str) -> dict[str, object]:
    """What a run says that is not killed."""
    done = await fleet.run(verb)
    assert done is not None
    return done


async def rotate(
    fleet: Fleet, num_records: int, copy_points: Sequence[Point], finish_points: Sequence[Point]
) -> Counter[str]:
    """Save, change the keys, copy and finish with a kill at each of the points, read all the while.

    Returns:
        How often a run was killed, by verb and word, how many prompts were read during it, and seconds.
    """
    prompts = red_prompts(num_records)
    others = [Prompt(ATTENTION, f"other {number}", 128, tenant="blue", payload_bytes=600) for number in range(3)]
    seen: Counter[str] = Counter()
    async with fleet.service() as store:
        with timed(seen, "save"):
            await save(store, prompts)
            await save(store, others)
        write_keys(fleet.keys, AFTER + BLUE)
        store.keys.poll()
        store.keys.poll()  # a change counts when it is seen twice
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(read_on(store, prompts, stop))
            for verb, points, phase in (("copy", copy_points, "copied"), ("finish", finish_points, "done")):
                with timed(seen, verb):
                    done = await run_over_kills(fleet, verb, points, seen)
                assert done["phase"] == phase
                totals = done["totals"]
                assert isinstance(totals, dict)
                assert not {"failed", "full", "busy", "unknown", "kept", "refused", "foreign"} & totals.keys(), totals
            stop.set()
        seen["read"] = reading.result()
    with timed(seen, "check"):
        await check_complete(fleet, prompts, others)
        write_keys(fleet.keys, [("red", 2, 2), *BLUE])  # the old key is not needed any more
        async with fleet.service() as store:
            for description in {prompt.namespace: prompt.description for prompt in (*prompts, *others)}.values():
                await store.open_namespace(description, deadline=soon())
            for prompt in (*prompts, *others):
                await check_exact(store, prompt)
            for record in others[0].records():
                assert await store.save(record, deadline=soon()) is SaveOutcome.EXISTS
    return seen


@contextmanager
def timed(seen: Counter[str], what: str) -> Iterator[None]:
    """Note how long a part took; it is said at once too, for who waits for a long one."""
    started_s = time.monotonic()
    yield
    seen[f"{what}_s"] = round(time.monotonic() - started_s)
    print(f"{what}: {seen[f'{what}_s']} s", file=sys.__stderr__, flush=True)


async def test_a_change_of_keys_that_is_killed_goes_on_and_is_read_throughout(fleet: Fleet) -> None:
    """Few records; runs killed at a first step, in the middle of copying, and in the middle of removing."""
    seen = await rotate(fleet, 64, [(3, ""), (150, "")], [(5, "")])
    assert seen["copy killed"] == 2
    assert seen["finish killed"] == 1
    assert seen["read"] > 0


async def test_what_stands_in_redis_alone_is_kept_until_s3_has_its_copy(fleet: Fleet) -> None:
    """Redis may let a copy go, so the old record stays beside it; `finish` removes it when the copy is in S3 too."""
    (prompt,) = red_prompts(8)
    async with fleet.service() as store:
        await save(store, [prompt])
    old = [tenant_key(1, "red").named(record.key) for record in prompt.records()]
    new = [tenant_key(2, "red").named(record.key) for record in prompt.records()]
    settings = fleet.settings
    async with open_tier(settings.hot, settings) as hot, open_tier(settings.cold, settings) as cold:
        await cold.delete_all(old, deadline=soon())
        write_keys(fleet.keys, AFTER + BLUE)
        assert (await told(fleet, "copy"))["totals"] == {"rewritten": 8}
        done = await told(fleet, "finish")
        assert (done["phase"], done["totals"]) == ("removing", {"copied_before": 8, "kept": 8})
        assert None not in await hot.head([*old, *new], deadline=soon())
        for key in new:
            record = await hot.get(key, deadline=soon())
            assert record is not None
            await cold.put(record, deadline=soon())
    done = await told(fleet, "finish")
    assert (done["phase"], done["totals"]) == ("done", {"copied_before": 8, "current": 8, "removed": 8})
    assert await names_in(fleet, Level.HOT) == await names_in(fleet, Level.COLD) == set(new)


@pytest.mark.full
async def test_a_hundred_thousand_records_change_keys_over_fifty_kills(
    fleet: Fleet, tell: Callable[[str], None]
) -> None:
    """The same with 100,000 records: killed at each kind of step, all over the copying and the removing."""
    num_records = int(os.environ.get("KVSTORE_TEST_MIGRATION_RECORDS", "100000"))
    copy_points, finish_points = points_for(num_records)
    seen = await rotate(fleet, num_records, copy_points, finish_points)
    kills = {name: number for name, number in seen.items() if " killed at " in name}
    tell(f"{num_records:,} records, {sum(kills.values())} kills: {dict(seen)}")
    assert {name.partition(" killed at ")[2] for name in kills} == {*ONCE, *EACH, *TOGETHER, *REMOVING}
    assert sum(kills.values()) == len(copy_points) + len(finish_points)


ONCE = ("state copying", "sheets planned")
EACH = ("read", "put", "verified")
TOGETHER = ("catalog added", "sheet")
REMOVING = ("state removing", "catalog removed", "deleted", "sheet emptied")


def points_for(num_records: int) -> tuple[list[Point], list[Point]]:
    """About forty points of the copying, each as far from the one before, and a dozen of the removing."""
    copied = 2 * num_records // 42  # by each run: there are two levels
    counts = dict.fromkeys(EACH, copied) | dict.fromkeys(TOGETHER, max(1, copied // 128))
    cycle = [(counts[word], word) for word in (*EACH, *TOGETHER)]
    removed = 4 * num_sheets(num_records // 2) // 10  # sheets of two levels of two namespaces
    finish = [(1, "state removing"), (1, "catalog removed"), (1, "deleted"), (2, "deleted"), (1, "sheet emptied")]
    for part in (2, 4, 6) if removed else ():
        finish[-2:-2] = [(removed * part, "catalog removed"), (removed, "deleted")]
    return [(1, word) for word in ONCE] + cycle * 8, finish
