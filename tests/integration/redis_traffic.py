"""Puts and gets that go on while servers of a Redis are killed, frozen or moved, and keys of one server."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from kvstore.errors import Unavailable
from kvstore.format.names import format_name
from kvstore.model.keys import RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.testing.records import make_key, make_record
from kvstore.testing.servers import RedisCluster, RedisServer
from kvstore.testing.waiting import until
from kvstore.tiers.base import Tier
from kvstore.tiers.redis.cluster import slot_of

LARGE_BYTES = 9 << 20
CALL_S = 0.5


@dataclass
class Traffic:
    """Puts and gets of ever new records, until `ended` is set; each call has half a second."""

    tier: Tier
    stored: list[RecordKey] = field(default_factory=list)
    num_refused: int = 0
    longest_s: float = 0.0
    ended: bool = False

    async def run(self, first: int) -> None:
        for number in range(first, first + 1_000_000):
            if self.ended:
                return
            record = make_record(number, LARGE_BYTES if number % 50 == 25 else 2000)
            started_s = time.monotonic()
            try:
                await self.tier.put(record, deadline=Deadline.after(CALL_S))
                got = await self.tier.get(record.key, deadline=Deadline.after(CALL_S))
            except Unavailable:
                self.num_refused += 1
                await asyncio.sleep(0.01)
            else:
                # an acknowledged write that was not replicated yet is lost with its primary: a miss, never other bytes
                assert got is None or got.data == record.data
                self.stored.append(record.key)
            self.longest_s = max(self.longest_s, (time.monotonic() - started_s) / 2)


async def served_everywhere(tier: Tier, within_s: float = 25) -> None:
    """Every part of the key space answers."""
    keys = [make_key(number) for number in range(200)]
    await until(lambda: tier.head(keys, deadline=Deadline.after(1)), within_s, despite=Unavailable)


def number_on(group: RedisCluster, server: RedisServer) -> int:
    """The number of a key that lives on `server`."""
    return next(
        number for number in range(10_000) if group.primary_of(slot_of(format_name(make_key(number)))) is server
    )
