"""The connections of one client: kept open in the background, and handed out without waiting."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from kvstore.client.connection import ClientOptions, Connection
from kvstore.errors import Closed, KVStoreError, Unavailable
from kvstore.runtime.background import Background
from kvstore.runtime.deadline import Deadline
from kvstore.wire.address import Address

_log = logging.getLogger(__name__)
_NOT_REACHABLE = "the kvstore service does not answer: continuing without it, and trying again in the background"
_NEXT_STEP = "if it does not run, start it with `kvstore serve --listen ...`: it is then used without a restart here"
_NEXT_STEP_PRIVATE = (
    "a private service that has ended is started again, and a frozen one is used as soon as it responds; if no line "
    "says soon that it is reachable, see service.log in its directory"
)
_NEXT_STEP_NOT_STARTED = (
    "it cannot be started: correct the reason below, or set url to the address of a running service"
)


class Pool:
    """One control connection and some for data, so that a lookup never queues behind a record.

    A connection that ends is opened again, with back-off unless it has lasted. While the service is away, `control` and
    `data` raise at once. When a call meets silence, later ones fail at once until the service answers a ping, so that a
    frozen service costs one deadline and not one per call.

    Args:
        locate: Finds the service; called before every attempt, and may start it.
        on_control: Called with each new control connection before it is handed out.
    """

    def __init__(
        self,
        locate: Callable[[], Awaitable[Address]],
        url: str,
        options: ClientOptions,
        on_control: Callable[[Connection], Awaitable[None]],
    ) -> None:
        self.url = url
        self._locate = locate
        self._options = options
        self._on_control = on_control
        self._slots: list[Connection | None] = [None] * (1 + options.num_data_connections)
        self._tasks = Background("client")
        self._started_s = 0.0
        self._attempted = asyncio.Event()
        self._closed = False
        self._suspected = False
        self._reason = "not connected yet"
        self._warned = False

    def start(self) -> None:
        """Begin to connect. Must run on the loop that uses the pool. Idempotent."""
        if self._started_s == 0.0:
            loop = asyncio.get_running_loop()
            self._started_s = loop.time()
            loop.call_later(self._options.first_attempt_s, self._attempted.set)
            for index in range(len(self._slots)):
                self._tasks.keep_running(partial(self._keep, index), f"connection-{index}")

    # for calls

    async def control(self, deadline: Deadline) -> Connection:
        """The connection for small messages.

        Raises:
            Unavailable: There is none now. Only the very first attempt to connect is waited for.
            Closed: After `aclose`.
        """
        await self._settled(deadline)
        return self._pick(self._slots[:1])

    async def data(self, deadline: Deadline) -> Connection:
        """The least busy connection for records; raises as `control` does."""
        await self._settled(deadline)
        return self._pick(self._slots[1:])

    def now(self) -> Connection | None:
        """The control connection, if there is one."""
        return self._slots[0]

    async def _settled(self, deadline: Deadline) -> None:
        self.start()
        if not self._attempted.is_set() and not self._closed:
            async with deadline.scope("connecting to the service"):
                await self._attempted.wait()

    def _pick(self, slots: list[Connection | None]) -> Connection:
        if self._closed:
            raise Closed("the client is closed")
        if self._suspected:
            raise Unavailable("the service does not answer at the moment", url=self.url)
        usable = [connection for connection in slots if connection is not None and connection.open]
        if not usable:
            raise Unavailable("the service is not reachable", url=self.url, reason=self._reason)
        return min(usable, key=lambda connection: connection.num_running)

    def connections(self) -> list[Connection]:
        """Those that are open."""
        return [slot for slot in self._slots if slot is not None and slot.open]

    def sockets(self) -> list[tuple[int, int]]:
        """Descriptor and inode of each open connection."""
        return [connection.socket_id for connection in self.connections() if connection.socket_id]

    # suspicion

    def heard_nothing(self) -> None:
        """Note that a call met its deadline in silence: fail later ones at once until a ping is answered."""
        if not self._suspected and not self._closed:
            self._suspected = True
            self._tasks.spawn(self._probe(), "probe")

    async def _probe(self) -> None:
        try:
            await self._ping()
        except Unavailable as error:
            self._reason = str(error)
            for connection in self._slots:  # new ones may work
                if connection is not None:
                    connection.close()
        finally:
            self._suspected = False

    async def _ping(self) -> None:
        control = self._slots[0]
        if control is None:
            raise Unavailable("the service is not reachable", reason=self._reason)
        await control.ping(Deadline.after(self._options.dead_after_s))

    # keeping connections

    async def _keep(self, index: int) -> None:
        loop = asyncio.get_running_loop()
        pause_s = self._options.backoff_s
        while True:
            begun_s = loop.time()
            try:
                connection = await self._open(index)
            except KVStoreError as error:
                self._failed(index, error)
            else:
                self._slots[index] = connection
                self._opened()
                await connection.closed.wait()
                self._slots[index] = None
                self._reason = connection.reason
                if loop.time() - begun_s > self._options.backoff_max_s:  # it was of use
                    pause_s = self._options.backoff_s
                    continue
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, self._options.backoff_max_s)

    async def _open(self, index: int) -> Connection:
        address = await self._locate()
        connection = await Connection.connect(address, self._options, "data" if index else "control")
        if index == 0:
            try:
                await self._on_control(connection)
            except BaseException:
                connection.close()
                raise
        return connection

    def _opened(self) -> None:
        if all(self._slots):
            self._attempted.set()
            level = logging.INFO if self._warned else logging.DEBUG
            self._warned = False
            _log.log(level, "the kvstore service is reachable url=%s", self.url)

    def _failed(self, index: int, error: KVStoreError) -> None:
        self._reason = str(error)
        self._attempted.set()
        if index == 0:
            level = logging.DEBUG if self._warned else logging.WARNING
            self._warned = True
            next_step = _NEXT_STEP
            if self.url == "embedded:":  # only an error of its start names a log
                next_step = _NEXT_STEP_NOT_STARTED if "log" in error.details else _NEXT_STEP_PRIVATE
            _log.log(level, "%s; %s url=%s reason=%s", _NOT_REACHABLE, next_step, self.url, error)

    async def wait_ready(self, deadline: Deadline) -> None:
        """Return when every connection is open.

        Raises:
            Unavailable: Some are not at the deadline; the message says why.
        """
        self.start()
        while not (all(slot is not None and slot.open for slot in self._slots)):
            if self._closed:
                raise Closed("the client is closed")
            if deadline.expired:
                raise Unavailable("the service is not reachable", url=self.url, reason=self._reason)
            await asyncio.sleep(min(0.01, deadline.remaining_s))

    async def aclose(self) -> None:
        """Close every connection. Idempotent."""
        self._closed = True
        self._attempted.set()
        await self._tasks.aclose()
        lost = [connection for connection in self._slots if connection is not None]
        for connection in lost:
            connection.frames.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                for connection in lost:
                    await connection.closed.wait()
