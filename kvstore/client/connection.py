"""One greeted connection to a service: requests out, answers back to their callers."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol, TypeVar

from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.format.record import MAX_RECORD_BYTES
from kvstore.model.instance import EngineInstance
from kvstore.runtime.budget import ByteBudget
from kvstore.runtime.buffers import fresh_buffer
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.tracing import trace_parent
from kvstore.wire import messages
from kvstore.wire.address import Address, UnixAddress
from kvstore.wire.frames import Head
from kvstore.wire.messages import PROTOCOL_VERSION, Message, raise_error
from kvstore.wire.protocol import FrameConnection
from kvstore.wire.tls import ClientTls


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How a client behaves.

    Attributes:
        token: Shown to the service; TCP services may require one.
        name: Shown to people in the service's status.
        num_data_connections: Connections that carry records; two keep one core of the service busy.
        stall_timeout_s: A stage that gets neither an answer nor further bytes for this long ends. Longer than the
            service's own timeout, after which the service answers with what has arrived.
        first_stall_timeout_s: The same until the first stage has ended: a service that was just started delivers its
            first records late on a busy machine. `None`: no difference.
        hello_timeout_s: A connection that is not greeted by then is abandoned and tried again.
        dead_after_s: The client reconnects to a service that answers nothing for this long.
        backoff_s: First pause between two attempts to connect; doubles up to `backoff_max_s`.
        backoff_max_s: The longest pause, and so the longest that recovery takes once the service is back.
        first_attempt_s: Calls wait this long, within their deadlines, for the very first attempt to connect to end: it
            fails at once where no service listens, but a private service may take as long to start.
        tls: What the client trusts and presents at a `tls://` address.
        shared_memory: Read records where they are in the service's shared memory, if it offers that.
        save_memory_bytes: Memory to ask the service for, in which records are made that need not be sent. For clients
            that make records in `PageStore.shared_buffer`; 0: none.
        instance: The engine that this client belongs to, if it loads: the service then answers routers for it.
    """

    token: str = ""
    name: str = ""
    num_data_connections: int = 2
    stall_timeout_s: float = 0.6
    first_stall_timeout_s: float | None = None
    hello_timeout_s: float = 2.0
    dead_after_s: float = 5.0
    backoff_s: float = 0.05
    backoff_max_s: float = 0.5
    first_attempt_s: float = 20.0
    tls: ClientTls = field(default_factory=ClientTls)
    shared_memory: bool = True
    save_memory_bytes: int = 0
    instance: EngineInstance | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_data_connections <= 64:
            raise InvalidRequest("1 to 64 data connections", seen=self.num_data_connections)
        for name in ("stall_timeout_s", "hello_timeout_s", "dead_after_s", "backoff_s", "backoff_max_s"):
            if getattr(self, name) <= 0:
                raise InvalidRequest("a time must be positive", field=name, seen=getattr(self, name))

    @classmethod
    def of_a_person(cls, name: str, seconds: float, tls: ClientTls) -> ClientOptions:
        """Options of a command that makes one request and waits: connecting may take all of `seconds`, as it can on a
        busy machine. An engine would rather continue without an answer.
        """
        return cls(name=name, num_data_connections=1, hello_timeout_s=seconds, first_attempt_s=seconds, tls=tls)


_SILENCE_S = 0.02
Answer = TypeVar("Answer", bound=messages.Reply)
Allocate = Callable[[int], memoryview]


class Silent(Unavailable):
    """The deadline passed and the service sent nothing at all until then: it may be frozen."""


class Call(Protocol):
    """Makes a request once its id is known."""

    def __call__(self, request_id: int, deadline_ms: int, /) -> messages.Request: ...


@dataclass(eq=False, slots=True)
class _Pending:
    """A request that has not been answered.

    Attributes:
        future: Resolved with answer and payload; if done earlier, its caller no longer waits.
        allocate: Makes the buffer for the answer's payload.
        on_progress: Called with progress: the bytes so far, and whether the service works on the request.
        error: Why a payload could not be received.
        settle: Called once, when the service has answered or never will.
    """

    future: asyncio.Future[tuple[Message, memoryview | None]]
    allocate: Allocate | None = None
    on_progress: Callable[[int, bool], None] | None = None
    error: Exception | None = None
    settle: Callable[[], None] | None = None

    def settled(self) -> None:
        """Call `settle`, once: the service is done with this request."""
        if self.settle is not None:
            self.settle()
            self.settle = None


class Connection:
    """A greeted connection; made by `connect`.

    Attributes:
        welcome: The service's greeting.
        save_credit: Bytes of saves that may be unanswered.
        closed: Set once the connection is unusable.
        num_running: Unanswered requests.
        socket_id: Descriptor and inode of the socket.
        address: What it is connected to.
    """

    def __init__(self, role: str) -> None:
        self.frames = FrameConnection(self, MAX_RECORD_BYTES)
        self.role = role
        self.closed = asyncio.Event()
        self.reason = ""
        self.socket_id: tuple[int, int] | None = None
        self.num_running = 0
        self._ids = count(1)
        self._pending: dict[int, _Pending] = {}
        self._greeting: asyncio.Future[messages.Welcome] = asyncio.get_running_loop().create_future()
        self.welcome: messages.Welcome
        self.address: Address
        self.save_credit: ByteBudget

    @classmethod
    async def connect(cls, address: Address, options: ClientOptions, role: str) -> Connection:
        """Connect and be greeted.

        Raises:
            Unavailable: No service listens, or no greeting came in time.
            InvalidRequest: The service refused us, e.g. for the token.
            UnsupportedFormat: No common protocol version.
        """
        loop = asyncio.get_running_loop()
        self = cls(role)
        self.address = address
        try:
            async with asyncio.timeout(options.hello_timeout_s):
                if isinstance(address, UnixAddress):
                    await loop.create_unix_connection(lambda: self.frames, address.path)
                else:
                    tls = options.tls.context() if address.tls else None
                    await loop.create_connection(lambda: self.frames, address.host, address.port, ssl=tls)
                self.socket_id = socket_id(self.frames.extra("socket"))
                hello = messages.Hello(PROTOCOL_VERSION, options.token, role, options.name)
                self.frames.post(hello)
                self.welcome = await self._greeting
        except TimeoutError as error:
            self.frames.abort()
            raise Unavailable("the service sent no greeting in time", address=address) from error
        except ssl.SSLCertVerificationError as error:
            raise Unavailable(
                "the service's certificate is not believed: see tls_ca_file",
                address=address,
                error=error.verify_message,
            ) from error
        except OSError as error:
            raise Unavailable("cannot connect", address=address, error=error.strerror or error) from error
        except BaseException:
            self.frames.abort()
            raise
        self.save_credit = ByteBudget(max(1, self.welcome.save_credit_bytes))
        return self

    # called by the frames

    def on_head(self, head: Head, payload_bytes: int) -> memoryview | None:
        """The caller's buffer for this payload; `None`, if no caller waits or it has no buffer, drops the payload."""
        message = messages.decode(head)
        pending = self._pending.get(message.id) if isinstance(message, messages.Loaded) else None
        if pending is None or pending.future.done():
            return None
        if pending.allocate is None:
            return fresh_buffer(payload_bytes)
        try:
            target = memoryview(pending.allocate(payload_bytes)).cast("B")
            if target.readonly or len(target) < payload_bytes:
                raise InvalidRequest("allocate must return a writable buffer of that size", expected=payload_bytes)
        except Exception as error:  # noqa: BLE001 - the caller's code: its call gets the error, the stream continues
            pending.error = error
            return None
        return target

    def on_frame(self, head: Head, payload: memoryview | None) -> None:
        """Hand an answer to its caller."""
        message = messages.decode(head)
        match message:
            case messages.Welcome():
                if not self._greeting.done():
                    self._greeting.set_result(message)
            case messages.Refused():
                self._refused(message)
            case messages.StageProgress():
                pending = self._pending.get(message.id)
                if pending is not None and pending.on_progress is not None and not pending.future.done():
                    pending.on_progress(message.num_bytes, message.working)
            case messages.Reply():
                self._answered(message, payload)
            case _:
                raise InvalidRequest("a service does not send this message", type=message.type)

    def _answered(self, message: messages.Reply, payload: memoryview | None) -> None:
        pending = self._pending.pop(message.id, None)
        if pending is None:
            raise InvalidRequest("an answer to a request that is not running", id=message.id, type=message.type)
        pending.settled()
        if not pending.future.done():
            if pending.error is not None:
                pending.future.set_exception(pending.error)
            else:
                pending.future.set_result((message, payload))
        else:
            self._drop_answer(message)

    def _drop_answer(self, message: Message) -> None:
        """Release the lease of an answer that no caller takes; else it would have to expire."""
        if isinstance(message, messages.Staged) and message.lease:
            self.frames.post(messages.Release(message.lease))

    def _refused(self, message: messages.Refused) -> None:
        self.reason = f"refused by the service: {message.message}"
        if not self._greeting.done():
            try:
                raise_error(message)
            except KVStoreError as error:
                self._greeting.set_exception(error)
        self.frames.close()

    def on_lost(self, reason: str) -> None:
        """Fail all waiting callers."""
        self.reason = self.reason or reason
        self.closed.set()
        pending, self._pending = self._pending, {}
        for entry in pending.values():
            entry.settled()
            if not entry.future.done():
                entry.future.set_exception(Unavailable("the service went away", reason=self.reason))
        if not self._greeting.done():
            self._greeting.set_exception(Unavailable("the service went away", reason=self.reason))
            self._greeting.exception()  # there may be no caller left to retrieve it

    # called by the pool's users

    @property
    def open(self) -> bool:
        return self.frames.open

    async def request(
        self,
        call: Call,
        expected: type[Answer],
        *,
        deadline: Deadline,
        payload: memoryview | None = None,
        allocate: Allocate | None = None,
        stall_s: float | None = None,
        on_progress: Callable[[int], None] | None = None,
        settle: Callable[[], None] | None = None,
    ) -> tuple[Answer, memoryview | None]:
        """Send a request and return its answer and the answer's payload.

        Args:
            call: Makes the request.
            expected: Class of its answer.
            deadline: When to give up; the service gets a slightly earlier one, so that its answer can still arrive.
            payload: Sent after the request, not copied.
            allocate: Makes the buffer for the answer's payload.
            stall_s: Give up when neither the answer nor progress came for this long.
            on_progress: Called with progress, if `stall_s` is given.
            settle: Called once, when the service has answered or never will; that may be after this call has ended.

        Raises:
            Silent: The deadline passed without a single byte from the service.
            Unavailable: The deadline passed, the stage stalled, or the service went away.
            KVStoreError: What the service answered.

        If cancelled, the service receives a cancel, its answer is dropped, and buffers from `allocate` are no longer
        written.
        """
        if not self.open:
            if settle is not None:
                settle()
            raise Unavailable("the service went away", reason=self.reason)
        loop = asyncio.get_running_loop()
        request_id = next(self._ids)
        heard_bytes = self.frames.received_bytes
        pending = _Pending(loop.create_future(), allocate, settle=settle)
        self._pending[request_id] = pending
        self.num_running += 1
        sent = taken = is_late = False
        begun_s = loop.time()
        ends_s = begun_s + deadline.remaining_s
        try:
            async with asyncio.timeout_at(ends_s if stall_s is None else min(ends_s, loop.time() + stall_s)) as limit:
                if stall_s is not None:
                    pending.on_progress = _postpone(limit, stall_s, ends_s, on_progress)
                trace = trace_parent.get() if self.welcome.traces else ""
                await self.frames.send(call(request_id, _deadline_ms(deadline)), payload, trace)
                sent = True
                answer, data = await pending.future
                taken = True
        except TimeoutError:
            # raised below: the cause's traceback would have the timeout, which has this task, which has the error
            is_late = True
        finally:
            self.num_running -= 1
            self._forget(request_id, pending, sent=sent, taken=taken)
            # they have the error, whose traceback has this frame: such a cycle would keep the caller's record
            del pending, limit
        if is_late:
            long_enough = loop.time() - begun_s >= _SILENCE_S  # a shorter silence proves nothing
            quiet = long_enough and self.frames.received_bytes == heard_bytes
            what = "no answer in time" if loop.time() >= ends_s else "no progress in time"
            raise (Silent if quiet else Unavailable)(what, role=self.role, request=expected.type)
        if isinstance(answer, messages.Error):
            raise_error(answer, codes=self.welcome.codes)
        if not isinstance(answer, expected):
            self.frames.refuse(InvalidRequest("unexpected answer", expected=expected.type, seen=answer.type))
            raise Unavailable("the service answered something else", expected=expected.type, seen=answer.type)
        return answer, data

    def _forget(self, request_id: int, pending: _Pending, *, sent: bool, taken: bool) -> None:
        """Stop waiting for an answer. Unless it was taken it is dropped, now or when it arrives."""
        if pending.future.done() and not pending.future.cancelled():
            failed = pending.future.exception() is not None  # also marks the exception as retrieved
            if not failed and not taken:  # it arrived in the same turn of the loop in which its caller was cancelled
                self._drop_answer(pending.future.result()[0])
        if request_id not in self._pending:
            return
        pending.future.cancel()
        pending.allocate = None
        if not sent:
            del self._pending[request_id]
            pending.settled()
            return
        self.frames.post(messages.Cancel(request_id))
        receiving = self.frames.reader.head_of_payload
        if receiving is not None and receiving.get("id") == request_id:
            self.frames.reader.drop_payload()

    async def ping(self, deadline: Deadline) -> None:
        """Return when the service's loop answers.

        Raises:
            Unavailable: It does not answer.
        """
        await self.request(messages.Ping, messages.Pong, deadline=deadline)

    def post(self, message: Message) -> None:
        """Send a message that has no answer."""
        self.frames.post(message)

    def close(self) -> None:
        """Close at once. Idempotent."""
        self.frames.abort()


def socket_id(sock: object) -> tuple[int, int] | None:
    """Descriptor and inode of a socket; `None`: it is none."""
    if not hasattr(sock, "fileno"):
        return None
    descriptor: int = sock.fileno()
    return descriptor, os.fstat(descriptor).st_ino


def _postpone(
    limit: asyncio.Timeout, stall_s: float, ends_s: float, report: Callable[[int], None] | None
) -> Callable[[int, bool], None]:
    """A progress callback that grants the stage another `stall_s` each time its bytes grow, or the service says that it
    works on it."""
    loop = asyncio.get_running_loop()
    best_bytes = 0

    def on_progress(num_bytes: int, is_working: bool) -> None:
        nonlocal best_bytes
        if limit.expired():
            return
        if is_working or num_bytes > best_bytes:
            limit.reschedule(min(ends_s, loop.time() + stall_s))
        if num_bytes > best_bytes:
            best_bytes = num_bytes
            if report is not None:
                report(num_bytes)

    return on_progress


def _deadline_ms(deadline: Deadline) -> int:
    remaining_ms = deadline.remaining_s * 1000
    return int(remaining_ms - min(20.0, remaining_ms / 10))
