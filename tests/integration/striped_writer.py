"""A process that puts striped records until it is killed, others under the same names beside it: see the test."""

from __future__ import annotations

import asyncio
import sys

from kvstore.runtime.deadline import Deadline
from kvstore.testing.records import make_record
from kvstore.tiers.redis import RedisTier

NUM_RECORDS = 8


def payload_bytes(number: int) -> int:
    """Of a record: some are put in one round trip, others in two."""
    return (4 << 20) + (number // 2 % 2 << 20)


async def write(url: str, seed: int) -> None:
    """Put the records in order; those with an odd number have the bytes of `seed`, the others those of all writers."""
    tier = RedisTier(url)
    records = [make_record(number, payload_bytes(number), seed=seed * (number % 2)) for number in range(NUM_RECORDS)]
    print("ready", flush=True)
    sys.stdin.readline()
    for record in records:
        await tier.put(record, deadline=Deadline.after(10))
    await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(write(sys.argv[1], int(sys.argv[2])))
