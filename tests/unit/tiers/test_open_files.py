"""A process that may open no more files: each tier tells so, and not that its server is away."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvstore.errors import Unavailable
from kvstore.testing.records import make_key
from kvstore.testing.waiting import soon
from kvstore.tiers.base import Tier
from kvstore.tiers.locations import S3Location
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.s3 import S3Tier


@contextmanager
def no_more_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = os.open("/dev/null", os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first + 16, limits[1]))
    held = [first]
    try:
        while True:
            try:
                held.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("name", ["redis", "s3"])
async def test_the_next_step_is_the_limit(name: str) -> None:
    """Both for records and for small requests."""
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        tier: Tier = RedisTier(f"redis://{address}")
        if name == "s3":
            tier = await S3Tier.open(S3Location("pages", "", f"http://{address}"), credentials=("A", "b"))
        with no_more_files():
            for call in (tier.get(make_key(1), deadline=soon()), tier.head([make_key(1)], deadline=soon())):
                with pytest.raises(Unavailable, match=r"raise the limit of open files \(ulimit -n\)"):
                    await call
        await tier.aclose()
