"""One connection to Redis against peers that no real server is: slow to take bytes, silent, or answering by halves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from kvstore.errors import Unavailable
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.redis.connection import UNSENT_BYTES_MAX, Connection

Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def connected(peer: Peer) -> AsyncIterator[Connection]:
    """A connection to a server that does what `peer` says."""

    serving: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        try:
            await peer(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection("peer:1"), "127.0.0.1", port)
    try:
        yield connection
    finally:
        await connection.aclose()
        server.close()
        for task in filter(None, serving):
            task.cancel()  # a peer may wait for ever, and from Python 3.12 on `wait_closed` waits for each
        await server.wait_closed()


async def ends_of_connection(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 20):
        pass


async def test_bytes_of_callers_that_left_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes hardly any bytes, and is not given up yet: puts that were given up do not pile up without
    bound."""
    monkeypatch.setattr("kvstore.tiers.redis.connection._HANG_S", 60.0)

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        await asyncio.Event().wait()

    value, call_bytes = memoryview(bytes(4 << 20)), 9 * (4 << 20)
    async with connected(slow) as connection:
        for _ in range(40):
            with pytest.raises(Unavailable) as caught:
                await connection.run([("SET", "a", value)] * 9, deadline=Deadline.after(0.02))
            assert connection.unsent_bytes < UNSENT_BYTES_MAX + call_bytes + (1 << 16)
            if "takes bytes too slowly" in str(caught.value):
                break
        else:
            pytest.fail("calls go on leaving their bytes")


async def test_leaving_early_ends_nothing_of_others() -> None:
    """A caller that is cancelled just after it has sent does not take down what others wait for."""

    async def answers_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        await asyncio.sleep(0.1)
        writer.write(b":1\r\n:2\r\n")
        await ends_of_connection(reader)

    async with connected(answers_late) as connection:
        leaver = asyncio.ensure_future(connection.run([("A",)], deadline=Deadline.after(5)))
        stayer = asyncio.ensure_future(connection.run([("B",)], deadline=Deadline.after(5)))
        await asyncio.sleep(0.01)
        leaver.cancel()
        assert await stayer == [2]
        assert connection.alive


async def test_what_is_said_of_a_connection_that_ended() -> None:
    """Closed by the server: to look at that. Dropped by a caller to whom the server was silent: the others that waited
    say the same as that caller, and not that the connection was lost.
    """

    async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)

    async with connected(closes) as connection:
        with pytest.raises(Unavailable) as caught:
            await connection.run([("A",)], deadline=Deadline.after(5))
    text = "the connection to Redis was lost: check whether Redis runs, its log and the network"
    assert str(caught.value) == f"{text} address=peer:1"

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ends_of_connection(reader)

    async with connected(silent) as connection:
        stayer = asyncio.ensure_future(connection.run([("A",)], deadline=Deadline.after(20)))
        with pytest.raises(Unavailable, match="did not answer before the deadline: check its load"):
            await connection.run([("B",)], deadline=Deadline.after(0.25))
        with pytest.raises(Unavailable, match="did not answer before the deadline: check its load"):
            await stayer


async def test_a_silent_server_is_left() -> None:
    """If nothing arrives for 0.2 s although a reply is due, the next caller that leaves drops the connection."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ends_of_connection(reader)

    async with connected(silent) as connection:
        with pytest.raises(Unavailable, match="before the deadline"):
            await connection.run([("A",)], deadline=Deadline.after(0.05))
        assert connection.alive
        with pytest.raises(Unavailable):
            await connection.run([("B",)], deadline=Deadline.after(0.25))
        await asyncio.sleep(0)
        assert not connection.alive
