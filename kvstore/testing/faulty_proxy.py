"""A TCP proxy in front of a real server that refuses, answers 503, or is far away: what a loopback server never is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from kvstore.testing.servers.ports import free_ports

_CHUNK_BYTES = 1 << 18
_LINGER_S = 1.0
_CHUNKS_MAX = 256
"""Of one direction of one connection, while they are delayed: 64 MiB."""

_START_S = 60.0
_BODY = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>'
)


class FaultyProxy:
    """Passes bytes to a port of the loopback until a fault is set; a context manager that leaves nothing running.

    Every method returns when the change is in force. Changes end open connections, except those of the delay and of the
    server.

    Args:
        target_port: Where the real server listens.

    Attributes:
        port: Where the proxy listens, also after `refuse` and `heal`.
    """

    def __init__(self, target_port: int) -> None:
        (self.port,) = free_ports(1)
        self._target_port = target_port
        self._delay_s = 0.0
        self._answers_503 = False
        self._listener: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty-proxy", daemon=True)

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def refuse(self) -> None:
        """Stop listening: connections end and new ones are refused."""
        self._call(self._stop_listening())

    def answer_503(self) -> None:
        """Every HTTP request is answered `503 SlowDown`, as S3 does when it is asked too much."""
        self._call(self._start_answering())

    def delay(self, seconds: float) -> None:
        """Clients' bytes arrive this much later; answers come back at once."""
        self._delay_s = seconds

    def lead_to(self, target_port: int) -> None:
        """New connections go to another server, as when the address of a name changes; open ones stay."""
        self._target_port = target_port

    def heal(self) -> None:
        """Pass everything on again."""
        self._delay_s = 0.0
        self._call(self._pass_on())

    def __enter__(self) -> FaultyProxy:
        self._thread.start()
        self.heal()
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_S)
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_S)

    # on the loop's thread

    async def _start_answering(self) -> None:
        self._answers_503 = True
        self._drop_connections()

    async def _pass_on(self) -> None:
        if self._answers_503:
            self._answers_503 = False
            self._drop_connections()
        if self._listener is None:
            self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=_CHUNK_BYTES)

    async def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._drop_connections()

    async def _stop(self) -> None:
        await self._stop_listening()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _drop_connections(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            with suppress(OSError, EOFError):
                await (self._refuse_request(reader, writer) if self._answers_503 else self._relay(reader, writer))
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def _refuse_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        lines = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        if lines.get("expect") != "100-continue":  # else the body comes only after a word that is not given
            await reader.readexactly(int(lines.get("content-length", "0")))
        body = b"" if head.startswith("head ") else _BODY
        answer = f"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
        writer.write(answer.encode() + b"Connection: close\r\n\r\n" + body)
        await writer.drain()
        writer.write_eof()
        with suppress(TimeoutError):  # a client that sends its body nevertheless must not see a reset before the answer
            async with asyncio.timeout(_LINGER_S):
                while await reader.read(_CHUNK_BYTES):
                    pass

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until either side ends: the other one is ended with it."""
        answers, requests = await asyncio.open_connection("127.0.0.1", self._target_port, limit=_CHUNK_BYTES)
        try:
            async with asyncio.TaskGroup() as group:
                back = group.create_task(_copy(answers, writer))
                forth = group.create_task(self._copy_late(reader, requests))
                await asyncio.wait({back, forth}, return_when=asyncio.FIRST_COMPLETED)
                back.cancel()
                forth.cancel()
        except* (OSError, EOFError):
            pass
        finally:
            requests.transport.abort()

    async def _copy_late(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy with the delay that is in force when a chunk comes; chunks keep their distances."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_CHUNKS_MAX)

        async def write() -> None:
            while True:
                due_s, chunk = await queue.get()
                await asyncio.sleep(due_s - loop.time())
                writer.write(chunk)
                await writer.drain()

        async with asyncio.TaskGroup() as group:
            writing = group.create_task(write())
            while chunk := await reader.read(_CHUNK_BYTES):
                await queue.put((loop.time() + self._delay_s, chunk))
            writing.cancel()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()
