"""A server on the port of a Redis that logs everybody in and answers every other command with the same bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hiredis import Reader

__all__ = ["strange_redis"]


@asynccontextmanager
async def strange_redis(answer: bytes, *, polite_to: frozenset[bytes] = frozenset()) -> AsyncIterator[int]:
    """Run one for the length of the block; its port.

    Args:
        answer: The reply to every command.
        polite_to: Commands that are answered with `+OK`, or `+PONG`, as a Redis would.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = Reader()
        try:
            while data := await reader.read(65536):
                parser.feed(data)
                while isinstance(command := parser.gets(), list):
                    verb = command[0].upper()
                    polite = b"+PONG\r\n" if verb == b"PING" else b"+OK\r\n"
                    writer.write(polite if verb in polite_to else answer)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
