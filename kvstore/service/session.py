"""One connection of the service: greets, receives, limits, answers, and cleans up after its peer."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import kvstore
from kvstore.api import LeaseId, Progress
from kvstore.errors import Closed, InternalError, InvalidRequest, KVStoreError, Unavailable, UnsupportedFormat
from kvstore.format.record import Record
from kvstore.model.instance import EngineInstance
from kvstore.model.keys import NamespaceId
from kvstore.runtime.arena import Arena
from kvstore.runtime.background import Background
from kvstore.runtime.budget import ByteBudget, Shares
from kvstore.runtime.budget import Grant as ByteGrant
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.tracing import RequestContext, Tracing, request_context
from kvstore.runtime.turns import Turns, still_working
from kvstore.service.answers import Answers
from kvstore.service.authentication import NO_TENANT, Authenticator, Grant, Scope
from kvstore.service.incoming import Incoming, Receipt
from kvstore.service.limits import PROGRESS_BYTES, ServiceLimits, Stall, UnauthenticatedConnection, bytes_of
from kvstore.service.save_memory import SaveMemories, SaveMemory
from kvstore.wire import convert, messages
from kvstore.wire.frames import HELLO_HEAD_BYTES_MAX, LATER, MAX_HEAD_BYTES, Head, Later
from kvstore.wire.messages import PROTOCOL_VERSION, Message, error_of
from kvstore.wire.protocol import FrameConnection

_log = logging.getLogger(__name__)
_DEADLINE_MS_MAX = 3_600_000
_GRACE_S = 1.0
_SAVES_LINGER_S = 10.0
_TRACE_CHARS_MAX = 256


@dataclass(frozen=True, slots=True)
class SessionContext:
    """What all sessions of a service have in common.

    Attributes:
        budget: Payload bytes of saves that are being received or stored.
        requests: Bytes of unanswered long requests.
        heads: Bytes of long heads that are being received.
        connections: Connections that have said hello.
        frames: Turns of frames, a few in each round of the event loop. So the frames that one peer has sent in one go
            do not come before the frames of others.
        memories: Memory that clients make records in.
        tracing: Makes a span of each request; `None`: no tracing.
    """

    answers: Answers
    authenticator: Authenticator
    limits: ServiceLimits
    budget: ByteBudget
    requests: Shares
    heads: ByteBudget
    connections: Shares
    frames: Turns
    memories: SaveMemories
    tracing: Tracing | None = None


@dataclass(frozen=True, slots=True)
class ConnectedEngine:
    """An engine that loads from this service, as it described itself when it last opened a namespace here."""

    tenant: str
    namespace: NamespaceId
    instance: EngineInstance


class Session:
    """Serves one peer. Its requests run concurrently; each is answered exactly once while the peer is there.

    When the peer is gone its work is cancelled and its leases end. Saves that were received in full continue: they do
    not need the peer, and an engine that ends right after saving should not lose pages.

    Attributes:
        number: Number of the connection, for logs.
        grant: What its peer may do; `None` before the hello.
        engine: Its peer, if that is an engine that loads.

    Args:
        context: What it has in common with the other sessions.
        entry: Its entry among the unauthenticated connections.
        on_made: Called when there is a peer: not for one whose TLS handshake fails.
        on_ended: Called once, when the peer is gone; the callee must call `aclose`.
    """

    def __init__(
        self,
        context: SessionContext,
        entry: UnauthenticatedConnection,
        *,
        on_made: Callable[[Session], None],
        on_ended: Callable[[Session], None],
    ) -> None:
        # before the hello little is received, and no payload
        self.connection = FrameConnection(self, 0, partial(self._made, on_made), max_head_bytes=HELLO_HEAD_BYTES_MAX)
        reader = self.connection.reader
        reader.is_of_client = True
        reader.room_for_head, reader.head_arrived = self._take_head_room, self._return_head_room
        self.grant: Grant | None = None
        self.client = ""
        self.tenant = ""
        self.number = 0
        self.engine: ConnectedEngine | None = None
        self.leases: set[LeaseId] = set()
        self._entry = entry
        self._is_own_user = False
        self._context = context
        self._answers = context.answers
        self._limits = limits = context.limits
        self._incoming = Incoming(context.budget, limits.save_credit_bytes)
        self._memory: SaveMemory | None = None  # of this connection
        self._on_ended = on_ended
        self._tasks = Background("session")
        self._saves = Background("session-saves")
        self._running: dict[int, asyncio.Task[None]] = {}
        self._request_bytes = 0
        self._is_frame_waiting = False
        self._head_room: ByteGrant | None = None
        self._head_since_s = 0.0
        self._receiving: asyncio.TimerHandle | None = None
        self._load_turns = asyncio.Semaphore(limits.max_loads)
        self._loaded_bytes = 0  # of loads that are being sent
        self._sends, self._reads = Stall(), Stall()  # what its peer sends and reads
        self._greeting: asyncio.TimerHandle | None = None

    @property
    def num_running(self) -> int:
        """Requests that are being answered."""
        return len(self._running)

    @property
    def held_bytes(self) -> int:
        """Bytes of answers that its peer has not read."""
        return self.connection.unsent_bytes + self._loaded_bytes

    def check(self, now_s: float) -> float:
        """Give up what its peer has stopped to send. Returns for how many seconds the peer has not read what is sent.

        The server calls it every second.

        Args:
            now_s: On the monotonic clock.
        """
        is_in_head = self.connection.reader.is_in_head
        is_late = self._head_room is not None and now_s - self._head_since_s >= self._limits.receive_timeout_s
        if self.connection.is_held:  # this service does not read now
            silent_s, is_late = self._sends.reset(), False
            self._head_since_s = now_s
        elif is_in_head or self._incoming.holds_room:
            silent_s = self._sends.seconds(self.connection.received_bytes, now_s)
        else:
            silent_s = self._sends.reset()
        if is_late or silent_s >= self._limits.silence_timeout_s:
            self._give_up()
            if is_in_head:
                self._return_head_room()
                self.connection.refuse(InvalidRequest("the rest of a frame's head did not arrive in time"))
        if not self.held_bytes and self.connection.queued_bytes < PROGRESS_BYTES:
            return self._reads.reset()
        return self._reads.seconds(self.connection.arrived_bytes, now_s)

    # called by the connection

    def _made(self, on_made: Callable[[Session], None]) -> None:
        self._greeting = asyncio.get_running_loop().call_later(self._limits.hello_timeout_s, self._not_greeted)
        on_made(self)

    def _take_head_room(self, num_bytes: int) -> bool:
        """Take room for a long head. False: there is none, and nothing is read until there is."""
        room = self._context.heads.try_take(num_bytes, self.tenant)
        if room is None:
            self._tasks.spawn(self._wait_for_head_room(num_bytes), "room for a head")
            return False
        self._head_room, self._head_since_s = room, SYSTEM_CLOCK.monotonic_s()
        return True

    async def _wait_for_head_room(self, num_bytes: int) -> None:
        deadline = Deadline.after(self._limits.receive_timeout_s)
        try:
            room = await self._context.heads.take_until(deadline, "room for a long head", num_bytes, self.tenant)
        except Unavailable as error:
            self.connection.refuse(error)
            return
        if not self.connection.open:
            self._context.heads.give_back(room)
            return
        self._head_room, self._head_since_s = room, SYSTEM_CLOCK.monotonic_s()
        self.connection.provide(None)

    def _return_head_room(self) -> None:
        """Give back the memory taken for a head: it has arrived in full, or will not. Idempotent."""
        room, self._head_room = self._head_room, None
        if room is not None:
            self._context.heads.give_back(room)

    def on_head(self, head: Head, payload_bytes: int) -> memoryview | Later | None:
        """Allocate the buffer of a save, within credit and budget. A payload on any other message is an error. The
        payload of a save that will be refused is dropped as it arrives, so it holds no memory.
        """
        message = messages.decode(head)
        if not isinstance(message, messages.Save) or message.memory:
            raise InvalidRequest("this message carries no payload", type=message.type, payload_bytes=payload_bytes)
        if not self._may_save:
            return None
        if self._incoming.begin(payload_bytes):
            self._expect_payload(_deadline(message))
            return self._answers.store.buffer(payload_bytes)
        self._tasks.spawn(self._wait_for_room(payload_bytes, _deadline(message)), "room")
        return LATER

    async def _wait_for_room(self, payload_bytes: int, deadline: Deadline) -> None:
        """Apply backpressure: read nothing more from this peer until there is room, or until its save is late."""
        has_room = await self._incoming.wait(payload_bytes, deadline)
        if not self.connection.open:
            return
        if has_room:
            self._expect_payload(deadline)
        self.connection.provide(self._answers.store.buffer(payload_bytes) if has_room else None)

    def _expect_payload(self, deadline: Deadline) -> None:
        """Give up the payload that arrives now once it is late."""
        wait_s = min(deadline.remaining_s, self._limits.receive_timeout_s)
        self._receiving = asyncio.get_running_loop().call_later(wait_s, self._give_up)

    def _give_up(self) -> None:
        """Give back the room of the payload that is being received, if there is one, and drop the payload."""
        if self._incoming.give_up():
            self.connection.reader.drop_payload()

    def on_frame(self, head: Head, payload: memoryview | None) -> None:
        """Start the answer to a message, or do so when it is its turn: until then nothing more is read."""
        if self.grant is None:
            self._greet(head)
            return
        message = messages.decode(head)
        if isinstance(message, messages.Save | messages.Load):  # credit and `max_loads` bound them
            self._take(message, payload, head)
        elif self._context.frames.try_begin():
            self._end_turn()
            self._take(message, payload, head)
        else:
            self._is_frame_waiting = True
            self.connection.hold()
            self._tasks.spawn(self._take_in_turn(message, head), "frame")

    async def _take_in_turn(self, message: Message, head: Head) -> None:
        await self._context.frames.begin((self.tenant, self.number))
        self._end_turn()
        self._is_frame_waiting = False
        try:
            self._take(message, None, head)
        except KVStoreError as error:
            self.connection.refuse(error)
        except BaseException:  # a bug ends the connection, as it does for a frame that did not wait
            self.connection.abort()
            raise
        self._read_on()

    def _end_turn(self) -> None:
        asyncio.get_running_loop().call_soon(self._context.frames.end)  # in the next round

    def _read_on(self) -> None:
        """Read again, unless there is another reason not to."""
        if not self._is_frame_waiting and self._request_bytes <= self._limits.connection_request_bytes:
            self.connection.resume()

    def _take(self, message: Message, payload: memoryview | None, head: Head) -> None:
        match message:
            case messages.Ping():  # answered here: it checks whether this loop runs
                self.connection.post(messages.Pong(message.id))
            case messages.Cancel():
                if (task := self._running.get(message.id)) is not None:
                    task.cancel()
            case messages.Release():
                self._release(LeaseId(message.lease))
            case messages.Outcome() | messages.PageNames():
                self._answers.report(message, self.tenant, may_save=self._may_save)
            case messages.PromptEnded():
                self._answers.end_prompt(message, self.tenant, may_save=self._may_save)
            case messages.Request():
                self._start(message, payload, "" if self._context.tracing is None else _trace(head))
            case _:
                raise InvalidRequest("a client does not send this message", type=message.type)

    def on_lost(self, reason: str) -> None:
        """The peer is gone."""
        for timer in (self._greeting, self._receiving):
            if timer is not None:
                timer.cancel()
        self._entry.leave()
        self._return_head_room()
        if self._memory is not None:
            self._context.memories.close(self._memory)
        if self.grant is not None:
            self._context.connections.give_back(self.tenant, 1)
        self._on_ended(self)

    # the greeting

    def _not_greeted(self) -> None:
        self.connection.refuse(InvalidRequest("no hello arrived in time", seconds=self._limits.hello_timeout_s))

    def _greet(self, head: Head) -> None:
        if head.get("type") != messages.Hello.type:  # no other message is decoded
            raise InvalidRequest("the first message must be a hello")
        message = messages.decode(head)
        assert isinstance(message, messages.Hello)
        if message.version < PROTOCOL_VERSION:
            raise UnsupportedFormat("no common protocol version", expected=PROTOCOL_VERSION, seen=message.version)
        grant = self._context.authenticator.check(self.connection, message.token)
        if not self._context.connections.try_take(grant.tenant or NO_TENANT, 1):
            raise Unavailable(
                "too many connections: raise the limit of open files of the service, or use fewer",
                limit=self._context.connections.limit,
                of_this_tenant=self._context.connections.used_by(grant.tenant or NO_TENANT),
            )
        self.grant, self.tenant = grant, grant.tenant or NO_TENANT
        self._is_own_user = self._find_own_user()
        self._incoming.tenant = self.tenant
        self.client = convert.plain_text(message.client, 128)
        if self._greeting is not None:
            self._greeting.cancel()
        self._entry.leave()
        self.connection.reader.max_head_bytes = MAX_HEAD_BYTES
        self.connection.reader.max_payload_bytes = self._limits.max_payload_bytes
        self.connection.post(
            messages.Welcome(
                version=PROTOCOL_VERSION,
                release=kvstore.__version__,
                max_payload_bytes=self._limits.max_payload_bytes,
                save_credit_bytes=self._limits.save_credit_bytes,
                max_requests=self._limits.max_requests,
                arena=arena.id if (arena := self._shared_arena()) is not None else b"",
                explains=True,
                traces=self._context.tracing is not None,
                codes=True,
                losses=True,
                locates=True,
                instances=True,
                blocks=self._may_save and self._answers.store.takes_blocks,
                hints=self._may_save,
                save_memory=self._may_save and arena is not None,
                save_places=True,
                page_names=self._may_save and self._answers.store.takes_blocks,
            )
        )

    @property
    def _may_save(self) -> bool:
        return self.grant is not None and Scope.SAVE in self.grant.scopes

    # requests

    def _start(self, request: messages.Request, payload: memoryview | None, trace: str) -> None:
        receipt = self._incoming.finish()
        if self._receiving is not None:
            self._receiving.cancel()
        error: KVStoreError | None = None
        if request.id in self._running:
            receipt.settle()
            raise InvalidRequest("a request id is still in use", id=request.id)
        if len(self._running) >= self._limits.max_requests:
            error = Unavailable("too many requests in flight on this connection", limit=self._limits.max_requests)
        elif isinstance(request, messages.Save | messages.Discard) and not self._may_save:
            error = InvalidRequest("the token may not save or discard: give it the scope save", field="token")
        elif isinstance(request, messages.Save) and receipt.dropped:
            error = Unavailable("no room to receive this record before its deadline")
        elif (num_bytes := bytes_of(request)) > self._context.requests.left_for(self.tenant):
            error = Unavailable("too many long requests are in flight", limit_bytes=self._context.requests.limit)
        if error is not None:
            receipt.settle()
            self.connection.post(error_of(request.id, error))
            return
        receipt.payload = payload
        if isinstance(request, messages.Save) and request.memory:
            receipt.take_credit(request.num_bytes)
        owner = self._saves if isinstance(request, messages.Save) else self._tasks
        serve = self._serve if self._context.tracing is None else partial(self._traced, self._context.tracing, trace)
        task = owner.spawn(serve(request, receipt), request.type)
        self._running[request.id] = task
        self._context.requests.take(self.tenant, num_bytes)
        self._request_bytes += num_bytes
        if self._request_bytes > self._limits.connection_request_bytes:  # read nothing more until some have ended
            self.connection.hold()
        task.add_done_callback(partial(self._ended, request.id, receipt, num_bytes))

    def _ended(self, request_id: int, receipt: Receipt, num_bytes: int, task: asyncio.Task[None]) -> None:
        receipt.settle()
        self._context.requests.give_back(self.tenant, num_bytes)
        self._request_bytes -= num_bytes
        if self._running.get(request_id) is task:  # else it is answered
            del self._running[request_id]
            if task.cancelled():  # before it answered, or before it began
                self.connection.post(error_of(request_id, Unavailable("the request was cancelled")))
        self._read_on()

    async def _traced(self, tracing: Tracing, trace: str, request: messages.Request, receipt: Receipt) -> None:
        namespace = getattr(request, "namespace", b"").hex()
        named = {"tenant": self.tenant, "namespace": namespace, "request": f"{self.number}.{request.id}"}
        with tracing.span(f"kvstore.{request.type}", trace, **named):
            await self._serve(request, receipt)

    async def _serve(self, request: messages.Request, receipt: Receipt) -> None:
        deadline = _deadline(request)
        namespace = getattr(request, "namespace", b"")
        request_context.set(RequestContext(self.number, request.id, self.tenant, namespace))  # of this task alone
        reply: Message
        try:
            # the store keeps the deadline; the scope only guarantees that no request runs for ever
            async with Deadline(deadline.at_s + _GRACE_S).scope(request.type):
                if isinstance(request, messages.Load):
                    await self._serve_load(request, deadline)
                    return
                if isinstance(request, messages.ShareArena):
                    await self._share_arena(request)
                    return
                if isinstance(request, messages.ShareSaveMemory):
                    await self._share_save_memory(request)
                    return
                if isinstance(request, messages.Save):
                    receipt.records = await self._received(request, receipt, deadline)
                reply = await self._answers.answer(
                    request,
                    receipt.records,
                    deadline,
                    self._progress_of(request),
                    tenant=self.tenant,
                    sees_all=self._is_own_user,
                )
                if isinstance(request, messages.OpenNamespace) and isinstance(reply, messages.NamespaceOpened):
                    self._note_engine(request, NamespaceId(reply.namespace))
        except KVStoreError as error:
            reply = error_of(request.id, error)
        except Exception as error:  # noqa: BLE001 - a session's top: a bug costs one answer, not the connection
            _log.exception("a request failed type=%s client=%s", request.type, self.client)
            reply = error_of(request.id, InternalError("the service failed", error=type(error).__name__))
        receipt.settle()  # before the answer: when it arrives, the client counts its credit as free
        try:
            await self._send_or_release(request.id, reply)
        except InternalError as error:  # it cannot be packed, so nothing of it was sent
            _log.error("an answer cannot be sent type=%s client=%s: %s", request.type, self.client, error)
            reply = error_of(request.id, error)
            await self._send(request.id, reply)
        if isinstance(reply, messages.Error) and self._context.tracing is not None:
            self._context.tracing.failed(f"{reply.kind}: {reply.message}")

    async def _serve_load(self, request: messages.Load, deadline: Deadline) -> None:
        async with self._load_turns:
            # before the record is taken: for a peer that does not read, no evicted record is kept
            await self.connection.writable()
            reply, data = await self._answers.load(request, deadline, tenant=self.tenant)
            num_bytes = len(data) if data is not None else 0
            self._loaded_bytes += num_bytes
            try:
                await self._send(request.id, reply, data)
            finally:
                self._loaded_bytes -= num_bytes

    def _note_engine(self, request: messages.OpenNamespace, namespace: NamespaceId) -> None:
        instance = convert.parse_instance(request.engine) if request.engine else None
        if instance is not None:
            self.engine = ConnectedEngine(self.tenant, namespace, instance)

    def _shared_arena(self) -> Arena | None:
        """The arena, if this peer may map it. It holds the records of all tenants, so only a process of the service's
        own user without a tenant may."""
        return self._answers.store.arena if self._is_own_user else None

    def _find_own_user(self) -> bool:
        """Whether the peer is a process of the service's own user, on this node, without a tenant. It could read
        everything from the service's memory, so it may see everything here."""
        is_local = getattr(self.connection.extra("socket"), "family", None) == socket.AF_UNIX
        return is_local and self.tenant == NO_TENANT

    async def _share_arena(self, request: messages.ShareArena) -> None:
        arena = self._shared_arena()
        if arena is None:
            raise Unavailable("no memory is shared on this connection")
        reply = messages.ArenaShared(request.id, arena.id, arena.capacity_bytes)
        await self.connection.send_descriptor(reply, arena.descriptor)
        self._running.pop(request.id, None)

    async def _share_save_memory(self, request: messages.ShareSaveMemory) -> None:
        if self._shared_arena() is None or not self._may_save or not self.connection.open:
            raise Unavailable("no memory for saves is shared on this connection")
        if self._memory is not None:
            raise InvalidRequest("a connection has memory for saves once: use another connection")
        self._memory, descriptor = self._context.memories.open(request.num_bytes, self.tenant)
        reply = messages.SaveMemoryShared(request.id, self._memory.id, self._memory.capacity_bytes)
        try:
            await self.connection.send_descriptor(reply, descriptor)
        finally:
            os.close(descriptor)
        self._running.pop(request.id, None)

    async def _received(self, request: messages.Save, receipt: Receipt, deadline: Deadline) -> Sequence[Record]:
        """A save's records: the one that was sent, or copies from its client's memory."""
        if not request.memory:
            return (receipt.sent(),)
        if self._shared_arena() is None:
            raise Unavailable("no memory for saves is shared on this connection")
        buffer = self._answers.store.buffer
        return await self._context.memories.copy(request, receipt, buffer, tenant=self.tenant, deadline=deadline)

    async def _send_or_release(self, request_id: int, reply: Message) -> None:
        """Send an answer. If that fails, release the lease in it: the client never receives it."""
        lease = LeaseId(reply.lease) if isinstance(reply, messages.Staged) and reply.lease else None
        if lease is not None:
            self.leases.add(lease)
        try:
            await self._send(request_id, reply)
        except BaseException:
            if lease is not None:
                self._release(lease)
            raise

    async def _send(self, request_id: int, reply: Message, payload: memoryview | None = None) -> None:
        """Send the answer to a request. From then on its id is free: the client may use it again at once."""
        try:
            await self.connection.send(reply, payload)
        except Unavailable:  # the peer is gone; `aclose` cleans up
            return
        self._running.pop(request_id, None)

    def _progress_of(self, request: messages.Request) -> Progress:
        loop = asyncio.get_running_loop()
        began_s, sent_at_s, staged_bytes = loop.time(), 0.0, 0

        def send(*, working: bool) -> None:
            nonlocal sent_at_s
            before_s = max(began_s, sent_at_s) if working else sent_at_s  # the first bytes are reported at once
            if loop.time() - before_s >= self._limits.stage_progress_s:
                sent_at_s = loop.time()
                self.connection.post(messages.StageProgress(request.id, staged_bytes, working))

        def progress(num_bytes: int) -> None:
            nonlocal staged_bytes
            staged_bytes = num_bytes
            send(working=False)

        if isinstance(request, messages.Stage):
            still_working.set(lambda: send(working=True))  # of this request alone: it has a task of its own
        return progress

    # leases and the end

    def _release(self, lease: LeaseId) -> None:
        with suppress(Closed):  # the peer is gone: then `aclose` ends it
            self._tasks.spawn(self._answers.store.release(lease), "release")
            self.leases.discard(lease)

    async def aclose(self) -> None:
        """Cancel the peer's work, end its leases, let received saves finish. Idempotent."""
        self.connection.close()
        await self._tasks.aclose()
        self._incoming.abandon()
        leases, self.leases = self.leases, set()
        for lease in leases:
            await self._answers.store.release(lease)
        if saves := [task for task in self._running.values() if not task.done()]:
            await asyncio.wait(saves, timeout=_SAVES_LINGER_S)
        await self._saves.aclose()


def _trace(head: Head) -> str:
    """The peer's trace context. It is only a hint, so an unreadable one is ignored."""
    trace = head.get("trace")
    return trace if isinstance(trace, str) and len(trace) <= _TRACE_CHARS_MAX else ""


def _deadline(request: messages.Request) -> Deadline:
    return Deadline.after(min(request.deadline_ms, _DEADLINE_MS_MAX) / 1000)
