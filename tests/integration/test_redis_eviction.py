"""A Redis that evicts by itself takes only what the cold tier has."""

from __future__ import annotations

import pytest
import redis

from kvstore.format.names import format_name
from kvstore.testing.records import make_record
from kvstore.testing.servers import redis_server
from kvstore.testing.waiting import soon
from kvstore.tiers.base import PutOutcome
from kvstore.tiers.redis import RedisTier

pytestmark = pytest.mark.servers


@pytest.mark.parametrize("policy", ["volatile-lru", "volatile-lfu", "volatile-ttl", "volatile-random"])
async def test_only_what_may_go_is_evicted(policy: str) -> None:
    """Records that may go, one of them in stripes, make room for new ones; those that may not are all there when the
    server is full of them and refuses more."""
    with redis_server(maxmemory_bytes=96 << 20, arguments=("--maxmemory-policy", policy)) as server:
        tier = RedisTier(server.url)
        kept, may_go = [make_record(number, 1 << 20) for number in range(10)], [make_record(99, 9 << 20)]
        may_go += [make_record(number, 1 << 20) for number in range(100, 130)]
        for record in kept + may_go:
            assert await tier.put(record, deadline=soon()) is PutOutcome.STORED
        await tier.allow_eviction([record.key for record in [*may_go, make_record(7777)]], deadline=soon())
        with redis.Redis.from_url(server.url) as raw:
            names = [format_name(record.key) for record in kept]
            assert {raw.ttl(name) for name in names} == {-1}
            assert len([name for name in raw.scan_iter("v1/*") if raw.ttl(name) > 0]) >= len(may_go) + 3
        number = 1000
        while True:
            record = make_record(number, 1 << 20)
            if await tier.put(record, deadline=soon()) is PutOutcome.FULL:
                break
            kept.append(record)
            number += 1
        assert len(kept) > 35
        for record in kept:
            found = await tier.get(record.key, deadline=soon())
            assert found is not None
            assert found.data == record.data
        assert await tier.head([record.key for record in may_go], deadline=soon()) == [None] * len(may_go)
        await tier.aclose()
