"""Large commands on real sockets: all bytes arrive in order, whatever the kernel takes at once."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator

import pytest
import uvloop

from kvstore.runtime.buffers import send
from kvstore.testing.waiting import until

Loops = asyncio.AbstractEventLoopPolicy


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> Iterator[Loops]:
    yield request.param()


# Its successor, a hook, would change the loop of every test of the run.
@pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture is deprecated")
@pytest.mark.parametrize("slow", [False, True], ids=["fast peer", "slow peer"])
async def test_bytes_arrive_in_order(slow: bool) -> None:
    """Parts of all sizes, some of them empty, sent while earlier ones still wait, to a peer that reads at once or
    late: it receives exactly these bytes."""
    generator = random.Random(3)
    sizes = [[100, 3 << 20, 10], [20], [0, 70_000, 0, 1], [1] * 200 + [90_000], [5 << 20, 5 << 20], [65_536]]
    messages = [[memoryview(generator.randbytes(size)) for size in message] for message in sizes]
    expected = b"".join(part for message in messages for part in message)
    received, may_read = bytearray(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_read.wait()
        while data := await reader.read(1 << 20):
            received.extend(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 16)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(asyncio.Protocol, *server.sockets[0].getsockname())
    if not slow:
        may_read.set()
    for message in messages:
        send(transport, message)
        await asyncio.sleep(0)
    may_read.set()
    transport.close()
    await until(lambda: len(received) >= len(expected))
    assert received == expected
    server.close()
    await server.wait_closed()


@pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture is deprecated")
async def test_a_closed_connection_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of a connection that was dropped may belong to another file by now: nothing is written to it."""
    written: list[int] = []
    monkeypatch.setattr(os, "writev", lambda descriptor, _: written.append(descriptor) or 0)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(asyncio.Protocol, *server.sockets[0].getsockname())
    send(transport, [memoryview(bytes(1 << 20))])
    assert written == [transport.get_extra_info("socket").fileno()]
    transport.abort()
    send(transport, [memoryview(bytes(1 << 20))])
    await asyncio.sleep(0.01)
    send(transport, [memoryview(bytes(1 << 20))])
    assert len(written) == 1
    server.close()
    await server.wait_closed()
