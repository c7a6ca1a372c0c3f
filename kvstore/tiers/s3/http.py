"""HTTP/1.1 connections for large bodies: received straight into their target, sent without a copy; and their pool.

A general client delivers every body in pieces that are copied again, at several times the processor time per byte. This
one supports what S3 needs: one request at a time, answers with a length, and chunked errors.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from urllib.parse import urlsplit

from kvstore.errors import KVStoreError
from kvstore.runtime.buffers import BufferedConnection, OnLoop, send
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.io_loops import IoLoop

_HEAD_BYTES_MAX = 32 << 10
_SMALL_BYTES_MAX = 64 << 10
"""An error's body is read up to this size; if it is longer, the connection is dropped."""

Place = Callable[[int], memoryview]


class Lost(Exception):
    """The connection broke, or the answer is not HTTP. Does not leave this package.

    Attributes:
        before_answer: No byte of the answer had arrived. If the connection was idle before, the peer had closed it.
    """

    def __init__(self, reason: str, *, before_answer: bool = False) -> None:
        super().__init__(reason)
        self.before_answer = before_answer


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer; names of `fields` are in lower case.

    Attributes:
        body: Of a success, in the buffer that `place` returned; otherwise at most 64 KiB of it.
    """

    status: int
    fields: Mapping[str, str]
    body: memoryview


class _Phase(Enum):
    IDLE = auto()
    HEAD = auto()
    BODY = auto()
    SMALL = auto()
    CHUNKS = auto()
    REST = auto()


class HttpConnection(BufferedConnection):
    """Sends one request at a time; unusable once `reusable` is false while no request runs."""

    def __init__(self) -> None:
        super().__init__()
        self._phase = _Phase.IDLE
        self._scratch = memoryview(bytearray(_HEAD_BYTES_MAX))
        self._end = 0  # of what the scratch holds: a head, then bytes that came with it
        self._target = self._scratch
        self._filled = 0
        self._needed = 0
        self._small = bytearray()
        self._place: Place | None = None
        self._status = 0
        self._fields: dict[str, str] = {}
        self._answer: asyncio.Future[Answer] | None = None
        self._any_byte = False
        self._keep = True

    @property
    def reusable(self) -> bool:
        """Whether another request can be sent. May be read in any thread while none runs."""
        return self._phase is _Phase.IDLE and self._keep and self._transport is not None

    async def request(self, head: bytes, body: memoryview | None, place: Place) -> Answer:
        """Send a request and receive its answer.

        Args:
            head: Request line and fields, the empty line included.
            body: What follows them; not copied.
            place: Returns the buffer for the body of a success, given its size.

        Raises:
            Lost: The connection broke.
            KVStoreError: From `place`.

        If cancelled, the connection is dropped, and the buffer is no longer written.
        """
        transport = self._transport
        if transport is None:
            raise Lost("the connection was closed", before_answer=True)
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._answer = answer
        self._phase, self._place, self._any_byte, self._end = _Phase.HEAD, place, False, 0
        send(transport, [head] if body is None else [head, body])
        try:
            return await answer
        finally:
            self._answer, self._place, self._target = None, None, self._scratch
            if self._phase is not _Phase.IDLE or not self._keep:
                self.abort()

    def abort(self) -> None:
        self._keep = False
        super().abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._phase is _Phase.BODY:
            return self._target[self._filled : self._needed]
        return self._scratch[self._end :] if self._phase is _Phase.HEAD else self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        self._any_byte = True
        if not self._keep and self._answer is None:
            return
        try:
            if self._phase is _Phase.BODY:
                self._fill(nbytes)
            elif self._phase is _Phase.HEAD:
                self._end += nbytes
                self._read_head()
            elif self._phase is _Phase.IDLE:
                raise Lost("bytes without a request")
            else:
                self._more(self._scratch[:nbytes])
        except (Lost, KVStoreError) as error:
            self._fail(error)
            self.abort()

    def eof_received(self) -> bool:
        if self._phase is _Phase.REST:
            self._done(memoryview(bytes(self._small)))
        return False

    def on_lost(self, error: Exception | None) -> None:
        self._keep = False
        self._fail(Lost(str(error or "closed by the other side"), before_answer=not self._any_byte))

    def _read_head(self) -> None:
        while (stop := bytes(self._scratch[: self._end]).find(b"\r\n\r\n")) >= 0:
            head = bytes(self._scratch[:stop])
            behind = bytes(self._scratch[stop + 4 : self._end])
            self._status, self._fields, version = _parse_head(head)
            if self._status >= 200:
                self._keep = self._keep and _keeps(version, self._fields)
                self._begin_body(behind)
                return
            self._scratch[: len(behind)] = behind  # it was an interim answer like 100 Continue
            self._end = len(behind)
        if self._end == len(self._scratch):
            raise Lost("the head of the answer is too long")

    def _begin_body(self, behind: bytes) -> None:
        length = self._fields.get("content-length")
        is_chunked = self._fields.get("transfer-encoding", "").lower() == "chunked"
        self._small = bytearray()
        if self._status in (204, 304):
            self._needed = 0
            self._phase = _Phase.SMALL
        elif length is not None and not is_chunked:
            if not (length.isascii() and length.isdecimal() and len(length) < 19):
                raise Lost("the answer's length is no number")
            self._needed = int(length)
            if 200 <= self._status < 300 and self._needed:
                assert self._place is not None
                if len(behind) > self._needed:
                    raise Lost("more came than the answer announced")
                self._target, self._filled = self._place(self._needed), 0
                self._phase = _Phase.BODY
                self._target[: len(behind)] = behind  # what came with the head is the only part that is copied
                self._fill(len(behind))
                return
            self._phase = _Phase.SMALL
        elif is_chunked:
            self._phase = _Phase.CHUNKS
        else:
            self._keep, self._phase = False, _Phase.REST
        self._more(memoryview(behind))

    def _fill(self, num_bytes: int) -> None:
        """Count bytes that are in their target."""
        self._filled += num_bytes
        if self._filled == self._needed:
            self._done(self._target[: self._needed])

    def _more(self, data: memoryview) -> None:
        self._small += data
        if self._phase is _Phase.SMALL:
            if len(self._small) > self._needed:
                raise Lost("more came than the answer announced")
            if len(self._small) == self._needed:
                self._done(memoryview(bytes(self._small)))
                return
        elif self._phase is _Phase.CHUNKS and (joined := _join_chunks(self._small)) is not None:
            self._done(memoryview(joined))
            return
        if len(self._small) > _SMALL_BYTES_MAX:  # enough for the error's code
            self._keep = False
            self._done(memoryview(bytes(self._small)))

    def _done(self, body: memoryview) -> None:
        self._phase = _Phase.IDLE
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(Answer(self._status, self._fields, body))

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


class HttpConnectionOnLoop(OnLoop[HttpConnection]):
    """A connection whose bytes move on another loop; `place` is called in that thread."""

    @property
    def reusable(self) -> bool:
        """As `HttpConnection.reusable`. It may change at any moment; then the next request fails."""
        return self._connection.reusable

    async def request(self, head: bytes, body: memoryview | None, place: Place) -> Answer:
        """As `HttpConnection.request`; `Closed` if the other loop is closed."""
        return await self._io_loop.run(partial(self._connection.request, head, body, place))


def _parse_head(head: bytes) -> tuple[int, dict[str, str], str]:
    line, *rest = head.decode("latin-1").split("\r\n")
    version, _, status = line.partition(" ")
    if not version.startswith("HTTP/1.") or not status[:3].isdecimal():
        raise Lost("the answer is no HTTP/1")
    fields = {}
    for entry in rest:
        name, colon, value = entry.partition(":")
        if not colon:
            raise Lost("a field of the answer has no colon")
        fields[name.strip().lower()] = value.strip()
    return int(status[:3]), fields, version


def _keeps(version: str, fields: Mapping[str, str]) -> bool:
    said = fields.get("connection", "").lower()
    return said == "keep-alive" if version == "HTTP/1.0" else said != "close"


def _join_chunks(data: bytearray) -> bytes | None:
    """The body that the chunks form; `None`: the last one has not arrived."""
    body, at = bytearray(), 0
    while (line_stop := data.find(b"\r\n", at)) >= 0:
        try:
            num_bytes = int(data[at:line_stop].partition(b";")[0], 16)
        except ValueError as error:
            raise Lost("a chunk's length is no number") from error
        start = line_stop + 2
        if num_bytes < 0:
            raise Lost("a chunk's length is no number")
        if num_bytes == 0:
            return bytes(body) if data.find(b"\r\n", start) >= 0 else None
        if len(data) < start + num_bytes + 2:
            return None
        body += data[start : start + num_bytes]
        at = start + num_bytes + 2
    return None


_CONNECT_S = 3.0
_IDLE_S = 15.0
"""Servers close connections that were idle for 20 s or more. A request sent at that moment fails."""


class Connections:
    """Connections to one endpoint: one per concurrent request; the most recently used one is used first.

    Args:
        endpoint: `http://host:port` or `https://host`.
        tls: Checks an `https` endpoint.
        num_idle_max: Idle connections to keep; others are closed after use.
        io_loops: Where connections move their bytes, in turn; none: on the caller's loop. They stay the caller's.
    """

    def __init__(
        self,
        endpoint: str,
        tls: ssl.SSLContext,
        *,
        num_idle_max: int,
        io_loops: Sequence[IoLoop],
    ) -> None:
        parts = urlsplit(endpoint)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = tls if parts.scheme == "https" else None
        self._num_idle_max = num_idle_max
        self._io_loops = io_loops
        self._num_opened = 0
        self._idle: list[tuple[HttpConnection | HttpConnectionOnLoop, float]] = []

    @asynccontextmanager
    async def one(self) -> AsyncIterator[tuple[HttpConnection | HttpConnectionOnLoop, bool]]:
        """A connection for one request, and whether it was used before.

        Raises:
            OSError: No connection could be opened within 3 s.

        If cancelled during the request, the connection is dropped.
        """
        connection = self._take()
        is_used = connection is not None
        if connection is None:
            connection = await self._connect_in_turn()
        try:
            yield connection, is_used
        finally:
            if connection.reusable and len(self._idle) < self._num_idle_max:
                self._idle.append((connection, SYSTEM_CLOCK.monotonic_s()))
            else:
                connection.abort()

    def _take(self) -> HttpConnection | HttpConnectionOnLoop | None:
        while self._idle:
            connection, since_s = self._idle.pop()
            if connection.reusable and SYSTEM_CLOCK.monotonic_s() - since_s < _IDLE_S:
                return connection
            connection.abort()
        return None

    async def _connect_in_turn(self) -> HttpConnection | HttpConnectionOnLoop:
        if not self._io_loops:
            return await self._connect()
        self._num_opened += 1
        io_loop = self._io_loops[self._num_opened % len(self._io_loops)]
        return await HttpConnectionOnLoop.open(self._connect, io_loop)

    async def _connect(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, connection = await loop.create_connection(HttpConnection, self._host, self._port, ssl=self._tls)
        except TimeoutError as error:
            raise ConnectionError("no answer to a connection attempt") from error
        return connection

    async def aclose(self) -> None:
        """Drop idle connections and wait until they are gone; others are dropped after their request. Idempotent."""
        self._num_idle_max = 0
        idle, self._idle = self._idle, []
        await asyncio.gather(*(connection.aclose() for connection, _ in idle))
