"""Encryption at rest over real tiers: nothing readable stands anywhere, and a wrong key is a miss and no more."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import secrets
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstore.api import Ack, Outcome, SaveOutcome
from kvstore.client import EmbeddedOptions, connect
from kvstore.compose import open_served_store
from kvstore.doctor.check import Verdict
from kvstore.doctor.service import judge_encryption
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.format.encrypted import ENCRYPTION_BYTES, encrypt_record
from kvstore.format.header_v1 import HEADER_BYTES
from kvstore.format.record import seal
from kvstore.model.keys import RecordKey
from kvstore.service.authentication import Grant
from kvstore.service.server import Server
from kvstore.settings import load_settings
from kvstore.store.encryption.encrypted import EncryptedStore
from kvstore.testing.keys import tenant_key, write_keys
from kvstore.testing.tokens import credentials_of
from kvstore.testing.waiting import soon, until
from kvstore.tiers.base import PutOutcome
from kvstore.wire.address import parse_address
from tests.integration.encrypted_world import (
    BLUE,
    KEYS,
    RED,
    Place,
    check_exact,
    directory_place,
    find_readable,
    fleet_place,
    opened,
    save,
    stage,
)


@pytest.fixture(params=["directory", pytest.param("redis and s3", marks=pytest.mark.servers)])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    if request.param == "directory":
        return directory_place(tmp_path / "store")
    redis, rgw = request.getfixturevalue("shared_redis"), request.getfixturevalue("shared_rgw")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", rgw.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", rgw.secret_key)
    return fleet_place(redis, rgw, f"encryption-{secrets.token_hex(4)}")


async def test_nothing_readable_is_stored_and_all_comes_back_bit_for_bit(place: Place, tmp_path: Path) -> None:
    """Two tenants with keys of their own: no page byte and no prefix hash stands in any name, value, object or file,
    while a store without encryption shows both in each kind of place. Another process reads every bit.
    """
    keys = write_keys(tmp_path / "keys.toml", KEYS)
    async with opened(place, keys) as store:
        await save(store, RED)
        await save(store, BLUE)
        while_open, found = find_readable(place, [RED, BLUE])
        assert found == []
        await check_exact(store, RED)
        assert store.meters.get("encrypted_records") == len(RED.records()) + len(BLUE.records())
    num_bytes, found = find_readable(place, [RED, BLUE])
    assert found == []
    assert min(while_open, num_bytes) > sum(record.num_bytes for record in RED.records() + BLUE.records())
    async with opened(place, keys) as store:
        await check_exact(store, RED)
        await check_exact(store, BLUE)
        assert store.meters.get("encryption_misses", reason="tampered") == 0
    plain = replace(RED, name="plain")
    async with opened(place, None) as store:  # the search itself works
        await save(store, plain)
        _, found = find_readable(place, [plain])
    kinds = {"file"} if "hot" not in place.flags else {"redis string", "s3"}
    for kind in kinds:
        assert any(f" in {kind} " in text and text.startswith("page") for text in found)
        assert any(f" in {kind} " in text and text.startswith("prefix") for text in found)
    if "hot" in place.flags:
        catalog = [text for text in found if " in redis " in text and "b'v1/" not in text]
        assert any(text.startswith("prefix") for text in catalog)


async def test_a_wrong_or_missing_key_is_a_counted_miss_and_destroys_nothing(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another secret under the same id, another id, no key at all, no encryption at all: each time a miss with its
    count, and a warning with the next step; what is there stays there for the right key.
    """
    right = write_keys(tmp_path / "keys.toml", KEYS)
    async with opened(place, right) as store:
        await save(store, RED)
    before = sorted((name, len(data)) for kind, name, data in place.contents() if b"manifest" not in name)
    cases = {
        "wrong_key": ([("red", 1, 9)], "give key 1 its old secret back"),
        "missing_key": ([("red", 2, 2)], "put key 1 back"),
        "no_key": ([("blue", 1, 2)], "add one to encryption_keys"),
    }
    for reason, (keys, words) in cases.items():
        path = write_keys(tmp_path / f"{reason}.toml", keys)
        async with opened(place, path) as store:
            assert isinstance(store, EncryptedStore)
            await store.open_namespace(RED.description, deadline=soon())
            await store.tenant_keys.check("red")
            assert (await store.lookup(RED.query(), deadline=soon())).resume_tokens == 0
            assert (await stage(store, RED)).lease is None
            assert store.meters.get("encryption_misses", reason=reason) == 1
            assert words in caplog.text
            stop = RED.boundary(64)
            outcome = Outcome("request", RED.namespace, 272, 272, 0, 0, "nothing_stored", stop=stop, tenant="red")
            store.report(outcome)
            told = await store.explain("request", deadline=soon(), tenant="red")
            assert (told["reason"], bool(told["advice"])) == (reason, True)
            if reason != "missing_key":  # a new current key is a right one
                assert await store.save(RED.records()[0], deadline=soon()) is SaveOutcome.FULL
                assert store.meters.get("encryption_refused_saves", reason=reason) == 1
            finding = judge_encryption(await store.status(deadline=soon()))
            assert finding.verdict is (Verdict.WARNING if reason == "missing_key" else Verdict.FAILED)
            assert "red" in finding.seen and words in finding.fix
            assert store.meters.get("encryption_problems", reason=reason) == 1
            write_keys(path, [*KEYS, ("red", 2, 2)])
            store.keys.poll()
            store.keys.poll()  # a change counts when it is seen twice
            await store.tenant_keys.check("red")
            assert judge_encryption(await store.status(deadline=soon())).verdict is Verdict.OK
            assert store.meters.get("encryption_problems", reason=reason) == 0
        caplog.clear()
    async with opened(place, None) as store:
        assert (await stage(store, RED)).lease is None
        await until(lambda: "all who can read a tier can read what this one saves" in caplog.text)
        store.report(Outcome("request", RED.namespace, 272, 272, 0, 0, "nothing_stored", stop=stop, tenant="red"))
        told = await store.explain("request", deadline=soon(), tenant="red")
        assert told["reason"] == "missing_key"
        finding = judge_encryption(await store.status(deadline=soon()))
        assert finding.verdict is Verdict.WARNING and finding.fix.startswith("set encryption_keys to those of")
    names = {name for name, _ in before}
    after = sorted((name, len(data)) for kind, name, data in place.contents() if name in names)
    if "hot" in place.flags:  # a directory's catalog grows
        assert after == before
    async with opened(place, right) as store:
        await check_exact(store, RED)


async def test_a_forged_record_is_quarantined_and_never_served(place: Place, tmp_path: Path) -> None:
    """Somebody who can write to the tiers, and knows our checksums, changes a byte of a record everywhere: its load
    fails, it is quarantined, and the next request is served up to there.
    """
    keys = write_keys(tmp_path / "keys.toml", KEYS)
    async with opened(place, keys) as store:
        await save(store, BLUE)
        assert isinstance(store, EncryptedStore)
        (key,) = store.generations("blue")
        assert key is not None
        bad = BLUE.key(128, 0, 1)
        for tier in store.inner.slower:
            record = await tier.get(key.named(bad), deadline=soon())
            assert record is not None
            data = bytearray(record.data)
            data[HEADER_BYTES + 500] ^= 1
            await tier.delete(record.key, deadline=soon())
            assert await tier.put(seal(record.header, data), deadline=soon()) is PutOutcome.STORED
    async with opened(place, keys) as store:
        staged = await stage(store, BLUE)
        assert staged.lease is not None and bad in staged.keys
        with pytest.raises(Unavailable, match="not what was encrypted"):
            await store.load(staged.lease, bad, deadline=soon())
        assert store.meters.get("encryption_misses", reason="tampered") == 1
        assert (await store.lookup(BLUE.query(), deadline=soon())).resume_tokens == 64
        assert isinstance(store, EncryptedStore)
        for tier in store.inner.slower:
            assert await tier.head([key.named(bad)], deadline=soon()) == [None]
    async with opened(place, keys) as store:
        assert (await stage(store, BLUE)).resume_tokens == 64


async def test_keys_change_while_it_runs_and_both_generations_are_read(tmp_path: Path) -> None:
    """Plain records, then a first key, then a second one: each prompt's earlier part under the name it was saved with,
    one hit over all of them, bit for bit; new records under the current key alone.
    """
    place = directory_place(tmp_path / "store")
    prompt = replace(RED, num_tokens=64 * 6)
    parts = [[64, 128], [192, 256], [320, 384]]
    path = write_keys(tmp_path / "keys.toml", [("red", 0, 0)])
    stages = [[("red", 0, 0)], [("red", 1, 1), ("red", 0, 0)], [("red", 2, 2), ("red", 1, 1), ("red", 0, 0)]]
    async with opened(place, path) as store:
        assert isinstance(store, EncryptedStore)
        await store.open_namespace(prompt.description, deadline=soon())
        for part, keys in zip(parts, stages, strict=True):
            write_keys(path, keys)
            store.keys.poll()
            store.keys.poll()  # a change counts when it is seen twice
            for record in prompt.records(part):
                assert await store.save(record, ack=Ack.COLD, deadline=soon()) is SaveOutcome.STORED
    async with opened(place, path) as store:
        await check_exact(store, prompt)
        assert (await store.lookup(prompt.query(), deadline=soon())).groups_present == tuple(
            3 if boundary.tokens % 64 == 0 else 0 for boundary in prompt.query().boundaries
        )
    async with opened(place, write_keys(path, [("red", 2, 2), ("red", 1, 1)])) as store:
        assert (await stage(store, prompt)).lease is None  # what starts in the plain is not read any more
    write_keys(path, [("red", 1, 1), ("red", 0, 0)])
    async with opened(place, path) as store:
        assert (await stage(store, prompt)).resume_tokens == 256


async def test_clients_and_their_tenants_know_nothing_of_it(tmp_path: Path) -> None:
    """Over a Unix socket and TCP: engines of two tenants, and one without credential, save and load plain records, bit
    for bit; none finds what another saved; a record that a client encrypted itself is refused.
    """
    credentials = credentials_of({f"{name} token": Grant(name) for name in ("red", "blue")})
    place = directory_place(tmp_path / "store")
    keys = write_keys(tmp_path / "keys.toml", [("red", 1, 1), ("*", 1, 2)])
    async with opened(place, keys) as store, AsyncExitStack() as stack:
        server = Server(store, token="shared token", credentials=credentials)
        stack.push_async_callback(server.aclose)
        await server.listen([parse_address(f"unix:{tmp_path / 's'}"), parse_address("tcp://127.0.0.1:0")])
        shared = replace(RED, tenant="", payload_bytes=100_000)
        clients = []
        for address in server.addresses:
            for name in ("red", "blue", "shared"):
                client = connect(str(address), token=f"{name} token")
                stack.push_async_callback(client.aclose)
                prompt = replace(shared, tenant="" if name == "shared" else name)
                assert await client.open_namespace(shared.description, deadline=soon()) == prompt.namespace
                found = await client.stage(prompt.query(), deadline=soon())
                assert found.resume_tokens == (prompt.num_tokens if address == server.addresses[1] else 0)
                for record in prompt.records():
                    await client.save(record, deadline=soon())
                clients.append((client, prompt))
        for client, prompt in clients:
            staged = await client.stage(prompt.query(), deadline=soon())
            saved = {record.key: bytes(record.data) for record in prompt.records()}
            assert staged.lease is not None and len(staged.keys) > 4
            for key in staged.keys:
                assert bytes((await client.load(staged.lease, key, deadline=soon())).data) == saved[key]
        client, prompt = clients[0]
        record = prompt.records()[0]
        forged = encrypt_record(record, tenant_key(1, "red"), bytearray(record.num_bytes + ENCRYPTION_BYTES))
        with pytest.raises(InvalidRequest, match="the service encrypts them"):
            await client.save(forged, deadline=soon())


async def test_an_embedded_store_takes_its_keys_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's environment names the key file: its private service keeps nothing readable, and another one that is
    started later reads all of it.
    """
    keys = write_keys(tmp_path / "keys.toml", [("", 1, 1)])
    monkeypatch.setenv("KVSTORE_ENCRYPTION_KEYS", str(keys))
    prompt = replace(RED, tenant="")
    options = EmbeddedOptions(tmp_path / "e", memory_bytes=32 << 20, disk_bytes=64 << 20, idle_exit_s=0.2)
    for is_first in (True, False):
        client = connect("embedded:", embedded=options)
        await client.wait_ready(deadline=soon())
        await client.open_namespace(prompt.description, deadline=soon())
        if is_first:
            for record in prompt.records():
                assert await client.save(record, ack=Ack.COLD, deadline=soon()) is SaveOutcome.STORED
        staged = await client.stage(prompt.query(), deadline=soon())
        assert staged.resume_tokens == prompt.num_tokens and staged.lease is not None
        saved = {record.key: bytes(record.data) for record in prompt.records()}
        for key in staged.keys:
            assert bytes((await client.load(staged.lease, key, deadline=soon())).data) == saved[key]
        await client.aclose()
        with (tmp_path / "e" / "run" / "service.lock").open() as lock:  # free when its service has ended
            await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
    _, found = find_readable(directory_place(tmp_path / "e"), [prompt])
    assert found == []


def test_what_is_wrong_with_keys_is_told_before_anything_opens(tmp_path: Path) -> None:
    """A key file that others may read, or a wrong entry, opens no store and makes no folder."""
    folder = tmp_path / "store"
    path = write_keys(tmp_path / "keys.toml", KEYS)
    path.chmod(0o644)
    flags = {"cold": f"file://{folder}", "encryption_keys": str(path)}

    async def start() -> None:
        async with open_served_store(load_settings(flags)):
            pass

    with pytest.raises(InvalidRequest, match="other users may read the encryption key file"):
        asyncio.run(start())
    assert not folder.exists()


async def test_random_damage_is_never_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files with flipped bits, cut, grown or swapped: every record that loads is what was saved."""
    caplog.set_level(logging.CRITICAL)
    place = directory_place(tmp_path / "store")
    keys = write_keys(tmp_path / "keys.toml", KEYS)
    numbers = np.random.default_rng(5)
    prompts = [replace(BLUE, name=f"prompt {number}") for number in range(12)]
    async with opened(place, keys) as store:
        for prompt in prompts:
            await save(store, prompt)
    files = [path for path in (tmp_path / "store" / "records" / "v1").rglob("*.g*") if path.is_file()]
    assert len(files) == sum(len(prompt.records()) for prompt in prompts)
    for path in numbers.choice(np.array(files), size=len(files) // 3, replace=False).tolist():
        data = bytearray(path.read_bytes())
        match numbers.integers(4):
            case 0:
                data[numbers.integers(len(data))] ^= 1 << numbers.integers(8)
            case 1:
                del data[numbers.integers(len(data)) :]
            case 2:
                data += numbers.bytes(7)
            case 3:
                data[:] = files[numbers.integers(len(files))].read_bytes()
        path.write_bytes(data)
    num_loaded = 0
    async with opened(place, keys) as store:
        for prompt in prompts:
            staged = await stage(store, prompt)
            saved: dict[RecordKey, bytes] = {record.key: bytes(record.data) for record in prompt.records()}
            for key in staged.keys:
                assert staged.lease is not None
                assert bytes((await store.load(staged.lease, key, deadline=soon())).data) == saved[key]
                num_loaded += 1
    assert 0 < num_loaded < len(files)
