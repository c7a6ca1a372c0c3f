"""The contract of tiers, run on a real S3: Ceph's object gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvstore.format.names import format_name
from kvstore.format.record import Record
from kvstore.model.keys import RecordKey
from kvstore.runtime.io_loops import open_io_loops
from kvstore.testing.records import flipped, make_record
from kvstore.testing.servers import CephRgw
from kvstore.testing.tier_contract import LastingTierContract, RawMedium
from kvstore.testing.waiting import soon
from kvstore.tiers.verify import open_off_loop
from tests.contract.media import S3Medium

pytestmark = pytest.mark.servers


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
    """Another writer's good record takes the name of a damaged one that is being read: it stays, and is served."""
    tier = await medium.open_tier()
    record = make_record(1)
    await tier.put(record, deadline=soon())
    await medium.write(record.key, flipped(bytes(record.data), 8 * 500))

    async def judged(data: memoryview, key: RecordKey) -> Record | str:
        verdict = await open_off_loop(data, key)
        await medium.write(key, bytes(record.data))
        return verdict

    monkeypatch.setattr("kvstore.tiers.s3.tier.open_off_loop", judged)
    found = await tier.get(record.key, deadline=soon())
    assert found is not None and found.data == record.data
    assert await medium.read(record.key) == record.data
    assert tier.num_quarantined == 0
    await tier.aclose()
