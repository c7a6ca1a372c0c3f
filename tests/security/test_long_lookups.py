"""Lookups as long as they may be, as many as a connection may ask at once: other clients are served meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.model.kinds import FullAttention
from kvstore.model.layout import GroupLayout, Layout
from kvstore.testing.attacked import AttackedService, beside
from kvstore.testing.prompts import Prompt
from kvstore.testing.servers import RedisServer
from kvstore.wire import convert, messages
from kvstore.wire.address import UnixAddress, parse_address
from kvstore.wire.frames import pack_head
from kvstore.wire.messages import encode

NUM_BOUNDARIES = 8192


async def pipelined(service: AttackedService, prompt: Prompt, number: int, token: str = "") -> None:
    """Ask for a prompt so many times in one go, and read all answers."""
    address = parse_address(service.url)
    assert isinstance(address, UnixAddress)
    reader, writer = await asyncio.open_unix_connection(address.path, limit=64 << 20)
    writer.write(pack_head(encode(messages.Hello(1, token=token))))
    writer.write(pack_head(encode(messages.OpenNamespace(number, 60_000, prompt.description.canonical))))
    await reader.readuntil(b"namespace_opened")
    fields = convert.query_fields(prompt.query())
    for request in range(number):
        writer.write(pack_head(encode(messages.Lookup(request, 60_000, **fields))))
        await writer.drain()
    answered = 0
    async with asyncio.timeout(120):
        while answered < number:
            data = await reader.readuntil(b"type\xa9looked_up")
            assert b"refused" not in data
            answered += 1
    writer.close()


@pytest.mark.parametrize("place", ["directory", "redis"])
@pytest.mark.servers
async def test_pipelined_lookups_delay_nobody(
    folder: Path, shared_redis: RedisServer, full: bool, place: str, tell: Callable[[str], None]
) -> None:
    """One connection asks for 300 lookups of 8,192 boundaries at once: another client's lookups are answered."""
    layout = Layout(16, (GroupLayout(FullAttention(), 8),))
    prompt = Prompt(layout, "long", NUM_BOUNDARIES * 16, model="long")
    hot = shared_redis.url if place == "redis" else None
    with AttackedService(folder, hot=hot) as service:
        seen = await beside(service, lambda: pipelined(service, prompt, 300 if full else 60))
    tell(f"{place}: {seen}")
    seen.check(full=full)
