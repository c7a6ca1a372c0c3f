"""The contract of tiers, run on a real S3: Ceph's object gateway."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence

import pytest

from kvstore.format.names import format_name
from kvstore.format.record import Record
from kvstore.model.keys import RecordKey
from kvstore.runtime.io_loops import IoLoop, open_io_loops
from kvstore.testing.records import flipped, make_record
from kvstore.testing.servers import CephRgw
from kvstore.testing.tier_contract import LastingTierContract, RawMedium
from kvstore.testing.waiting import soon
from kvstore.tiers.base import Tier
from kvstore.tiers.s3 import S3Tier
from kvstore.tiers.verify import open_off_loop

pytestmark = pytest.mark.servers

_NUMBERS = itertools.count()


class S3Medium(RawMedium):
    """Reaches the objects with the fixture's own signed requests."""

    def __init__(self, server: CephRgw) -> None:
        self.server = server
        self.bucket = f"contract-{next(_NUMBERS)}"
        self.prefix = "some/prefix"
        self.io_loops: Sequence[IoLoop] = ()
        server.create_bucket(self.bucket)

    async def open_tier(self) -> Tier:
        location = self.server.location(self.bucket, self.prefix)
        return await S3Tier.open(location, credentials=self.server.credentials, io_loops=self.io_loops)

    def path(self, key: RecordKey) -> str:
        return f"/{self.bucket}/{self.prefix}/{format_name(key)}"

    async def read(self, key: RecordKey) -> bytes | None:
        status, body = self.server.request("GET", self.path(key))
        assert status in (200, 404)
        return body if status == 200 else None

    async def write(self, key: RecordKey, data: bytes) -> None:
        status, body = self.server.request("PUT", self.path(key), data)
        assert status == 200, body


@pytest.fixture
async def medium(shared_rgw: CephRgw) -> S3Medium:
    return S3Medium(shared_rgw)


class TestS3Tier(LastingTierContract):
    @pytest.fixture
    async def medium(self, medium: S3Medium) -> RawMedium:
        return medium


class TestS3TierOnTwoThreads(LastingTierContract):
    """Bytes move on other loops than the caller's: the whole contract again."""

    @pytest.fixture
    async def medium(self, medium: S3Medium) -> AsyncIterator[RawMedium]:
        async with open_io_loops(2) as medium.io_loops:
            yield medium


async def test_quarantine_keeps_the_bytes(medium: S3Medium) -> None:
    """A damaged object is kept under `quarantine/`, which no scan lists."""
    tier = await medium.open_tier()
    record = make_record(1)
    await tier.put(record, deadline=soon())
    await medium.write(record.key, b"damaged")
    assert await tier.get(record.key, deadline=soon()) is None
    path = f"/{medium.bucket}/{medium.prefix}/quarantine/{format_name(record.key)}"
    assert medium.server.request("GET", path) == (200, b"damaged")
    assert [entry async for entry in tier.scan()] == []
    await tier.aclose()


async def test_an_object_that_is_replaced_while_it_is_judged(medium: S3Medium, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another writer's good record takes the name of a damaged one that is being read: it stays."""
    tier = await medium.open_tier()
    record = make_record(1)
    await tier.put(record, deadline=soon())
    await medium.write(record.key, flipped(bytes(record.data), 8 * 500))

    async def judged(data: memoryview, key: RecordKey) -> Record | str:
        verdict = await open_off_loop(data, key)
        await medium.write(key, bytes(record.data))
        return verdict

    monkeypatch.setattr("kvstore.tiers.s3.tier.open_off_loop", judged)
    assert await tier.get(record.key, deadline=soon()) is None
    assert await medium.read(record.key) == record.data
    assert tier.num_quarantined == 0
    await tier.aclose()
