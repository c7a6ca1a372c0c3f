"""The S3 tier against a real gateway that is killed or frozen, with wrong credentials, and without its bucket."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import Unavailable
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.meters import Meters
from kvstore.testing.records import make_key, make_record
from kvstore.testing.servers import CephRgw, ceph_rgw, redis_server
from kvstore.testing.servers.ports import free_ports
from kvstore.testing.waiting import until
from kvstore.tiers.base import PutOutcome, Tier
from kvstore.tiers.breaker import Breaker
from kvstore.tiers.guarded import GuardedTier
from kvstore.tiers.locations import S3Location
from kvstore.tiers.s3 import S3Tier
from kvstore.tiers.s3.client import Credentials
from tests.unit.admin.service_harness import ended, open_service, prompt_of

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def server() -> Iterator[CephRgw]:
    """Of this module alone, since its tests kill and freeze it."""
    with ceph_rgw() as server:
        server.create_bucket("pages")
        yield server


async def open_tier(server: CephRgw, bucket: str = "pages", credentials: Credentials | None = None) -> S3Tier:
    return await S3Tier.open(server.location(bucket), credentials=credentials or server.credentials)


async def assert_every_verb_raises(tier: Tier, match: str) -> None:
    record = make_record(1)
    for call in (
        tier.head([record.key, make_key(2), make_key(3)], deadline=Deadline.after(8)),
        tier.get(record.key, deadline=Deadline.after(8)),
        tier.put(record, deadline=Deadline.after(8)),
    ):
        with pytest.raises(Unavailable, match=match):
            await call


async def test_missing_bucket(server: CephRgw) -> None:
    """A bucket that does not exist is said so by every verb, also by a head, whose answer looks like a miss."""
    tier = await open_tier(server, bucket="not-there")
    await assert_every_verb_raises(tier, "bucket does not exist: create it.*not-there")
    server.create_bucket("not-there")
    assert await tier.head([make_key(1)], deadline=Deadline.after(8)) == [None]
    assert await tier.put(make_record(1), deadline=Deadline.after(8)) is PutOutcome.STORED
    await tier.aclose()


async def test_wrong_credentials(server: CephRgw) -> None:
    """A wrong secret or an unknown key is said so by every verb, and no secret is repeated."""
    for access_key in (server.access_key, "NOBODY"):
        tier = await open_tier(server, credentials=(access_key, "not-the-secret"))
        await assert_every_verb_raises(tier, "check the access key, the secret key")
        with pytest.raises(Unavailable) as caught:
            await tier.get(make_key(1), deadline=Deadline.after(8))
        assert "not-the-secret" not in str(caught.value)
        await tier.aclose()


async def test_nothing_listens() -> None:
    """An endpoint where nothing listens is named within the bounded retries."""
    (port,) = free_ports(1)
    tier = await S3Tier.open(S3Location("pages", "", f"http://127.0.0.1:{port}"), credentials=("A", "b"))
    with pytest.raises(Unavailable, match=f"check the endpoint.*127.0.0.1:{port}"):
        await tier.get(make_key(1), deadline=Deadline.after(15))
    await tier.aclose()


async def test_killed_and_restarted(server: CephRgw) -> None:
    """A killed gateway is unavailable; once it is back the same tier serves what was stored."""
    tier = await open_tier(server)
    record = make_record(20, 2 << 20)
    await tier.put(record, deadline=Deadline.after(8))
    server.kill9()
    with pytest.raises(Unavailable):
        await tier.get(record.key, deadline=Deadline.after(2))
    server.restart()
    stored = await tier.get(record.key, deadline=Deadline.after(10))
    assert stored is not None and stored.data == record.data
    await tier.aclose()


async def test_frozen(server: CephRgw) -> None:
    """A frozen gateway costs one call its deadline; the breaker then refuses at once, and closes after the thaw."""
    tier = GuardedTier(
        await open_tier(server), Instruments(), breaker=Breaker(hang_s=0.4, delay_first_s=0.1, delay_max_s=0.5)
    )
    record = make_record(21)
    await tier.put(record, deadline=Deadline.after(8))
    server.freeze()
    try:
        started_s = time.monotonic()
        with pytest.raises(Unavailable):
            await tier.get(record.key, deadline=Deadline.after(0.5))
        assert time.monotonic() - started_s < 5.0  # a busy machine is late, a call that hangs never ends
        started_s = time.monotonic()
        with pytest.raises(Unavailable, match="not used until"):
            await tier.get(record.key, deadline=Deadline.after(20))
        assert time.monotonic() - started_s < 5.0
    finally:
        server.thaw()
    await until(lambda: not tier.is_open)
    stored = await tier.get(record.key, deadline=Deadline.after(8))
    assert stored is not None and stored.data == record.data
    await tier.aclose()


async def test_a_service_sees_that_its_idle_gateway_is_frozen(
    server: CephRgw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is read or written. It is not ready, with the reason; its last sizes stay; a walk names the cause."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
    cold = f"s3://pages/idle?endpoint_url={server.endpoint_url}"
    with redis_server() as redis:
        settings = {"hot": redis.url, "cold": cold, "cold_bytes": 1 << 30}
        async with open_service(tmp_path, with_tokens=False, **settings) as made, made.client() as client:

            async def seen() -> dict[str, Any]:
                [tier] = [one for one in (await client.get("/v1/tiers")).json()["tiers"] if one["name"] == "s3"]
                return dict(tier)

            await made.save(prompt_of("a"))
            before = await until(seen, 30, holds=lambda s3: s3["usage"]["used_bytes"])
            server.freeze()
            try:
                ready = await until(lambda: client.get("/readyz"), 20, holds=lambda answer: answer.status_code != 200)
                assert ready.json()["reason"].startswith("s3: it ")
                after = await seen()
                assert after["problem"] and after["last_known"]["used_bytes"] == before["usage"]["used_bytes"]
                used = f'kvstore_tier_used_bytes{{tier="s3"}} {before["usage"]["used_bytes"]}'
                assert used in (await client.get("/metrics")).text
                job = await ended(client, await client.post("/v1/tiers/cold/verify"))
                assert job["state"] == "failed" and job["error"].startswith("s3 does not answer: "), job
            finally:
                server.thaw()


async def test_requests_and_bytes_are_counted(server: CephRgw) -> None:
    """What an operator pays for: requests by verb, listings and copies apart, and the bytes of records both ways."""
    meters = Meters()
    tier = await S3Tier.open(server.location("pages", "counted"), credentials=server.credentials, meters=meters)
    record = make_record(30, 100_000)
    await tier.put(record, deadline=Deadline.after(8))
    await tier.get(record.key, deadline=Deadline.after(8))
    await tier.head([record.key, make_key(31)], deadline=Deadline.after(8))
    assert [entry.key async for entry in tier.scan()] == [record.key]
    await tier.quarantine(record.key, "a test", deadline=Deadline.after(8))
    seen = {verb: meters.get("s3_requests", verb=verb) for verb in ("GET", "PUT", "HEAD", "LIST", "COPY", "DELETE")}
    assert seen == {"GET": 1, "PUT": 1, "HEAD": 3, "LIST": 1, "COPY": 1, "DELETE": 1}
    assert meters.get("s3_received_bytes") == meters.get("s3_sent_bytes") == record.num_bytes
    await tier.aclose()


async def test_many_are_removed_by_one_request(server: CephRgw) -> None:
    """A real gateway takes the list of names; a wrong secret is an error, not an endpoint without such requests."""
    meters = Meters()
    tier = await S3Tier.open(server.location("pages", "many"), credentials=server.credentials, meters=meters)
    records = [make_record(number) for number in range(40, 60)]
    for record in records:
        await tier.put(record, deadline=Deadline.after(8))
    await tier.delete_all([record.key for record in records], deadline=Deadline.after(8))
    assert [entry async for entry in tier.scan()] == []
    assert meters.get("s3_requests", verb="DELETE") == 1
    await tier.aclose()
    stranger = await open_tier(server, credentials=(server.access_key, "not-the-secret"))
    with pytest.raises(Unavailable, match="check the access key"):
        await stranger.delete_all([record.key for record in records], deadline=Deadline.after(8))
    await stranger.aclose()
