"""`connect` and `RemoteStore`: the page store of a service in another process."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from kvstore.api import (
    Ack,
    LeasedRecord,
    LeaseId,
    Lookup,
    Outcome,
    PageStore,
    PrefixQuery,
    Progress,
    Retention,
    SaveOutcome,
    Staged,
)
from kvstore.client.connection import ClientOptions, Connection, Silent
from kvstore.client.embedded import EmbeddedOptions, EmbeddedService
from kvstore.client.pool import Pool
from kvstore.client.reports import Reports
from kvstore.client.sharing import MappedRecord, SaveMemory, SharedMemory, read_plain
from kvstore.errors import Closed, CorruptRecord, InternalError, InvalidRequest, KVStoreError, Unavailable
from kvstore.format.record import Record
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.model.layout import Layout
from kvstore.model.namespace import NamespaceDescription, NamespaceNotOpen
from kvstore.model.page_blocks import PageBlocks
from kvstore.model.prompt_hint import EndedPrompt
from kvstore.runtime.arena import ArenaView
from kvstore.runtime.background import Work, gather_all
from kvstore.runtime.bounded_map import Latest
from kvstore.runtime.deadline import Deadline
from kvstore.wire import convert, messages
from kvstore.wire.address import Address, TcpAddress, parse_address
from kvstore.wire.places import parse_located

Value = TypeVar("Value")
_PROMPTS_KEPT = 256
"""Prompts that wait to be reported: long ones have some 100 KB."""
_NAMES_GATHERED_S = 1.0
"""Names of pages that come within this time share one ping, one message and one wake of the service, which cost more
processor time than they do. Routers learn of a new page later by this time; removals do not wait for it."""
_NAMES_KEPT = 8192
"""Names that wait: an engine that saves many small pages may name thousands of them in that time."""
_NAMESPACES_MAX = 64
"""The namespaces that were used last, up to this number, are opened again on a new connection."""


class RemoteStore(PageStore):
    """Talks to a service; made by `kvstore.client.connect`. Belongs to the event loop of its first call.

    While the service is down or frozen every call raises `Unavailable` at once. It reconnects by itself, and opens its
    namespaces again before a new connection is used.
    """

    def __init__(self, locate: Callable[[], Awaitable[Address]], url: str, options: ClientOptions) -> None:
        self._options = options
        self._namespaces = Latest[NamespaceId, NamespaceDescription](_NAMESPACES_MAX)  # used longest ago first
        self.pool = Pool(locate, url, options, self._reopen)
        self._shared = SharedMemory(options)
        self._save_memory = SaveMemory(options)
        self._stall_s = options.first_stall_timeout_s or options.stall_timeout_s
        self._reports = Reports(self._control, options.dead_after_s)
        self._names = Reports(self._control, options.dead_after_s, kept=_NAMES_KEPT, gather_s=_NAMES_GATHERED_S)
        self._prompts = Reports(self._control, options.dead_after_s, kept=_PROMPTS_KEPT)
        self._closed = False

    @property
    def url(self) -> str:
        """The url that it was made with."""
        return self.pool.url

    def start(self) -> None:
        """Begin to connect, on the running loop; otherwise the first call does. Idempotent."""
        self.pool.start()

    def sockets(self) -> list[tuple[int, int]]:
        """Descriptor and inode of each connection, which a forked child must not keep open."""
        return self.pool.sockets() + self._save_memory.sockets()

    async def wait_ready(self, *, deadline: Deadline) -> None:
        """Return when the service can be used.

        Raises:
            Unavailable: It cannot be used at the deadline; the message says why.
        """
        self._check_open()
        await self.pool.wait_ready(deadline)

    async def open_namespace(self, description: NamespaceDescription, *, deadline: Deadline) -> NamespaceId:
        async with self._control(deadline) as connection:
            namespace = await self._open(connection, description, deadline)
        self._namespaces[namespace] = description
        return namespace

    async def lookup(self, query: PrefixQuery, *, deadline: Deadline) -> Lookup:
        return await self._in_namespace(query.namespace, lambda: self._lookup(query, deadline), deadline)

    async def _lookup(self, query: PrefixQuery, deadline: Deadline) -> Lookup:
        fields = convert.query_fields(query)
        async with self._control(deadline) as connection:
            answer, _ = await connection.request(
                lambda i, ms: messages.Lookup(i, ms, **fields), messages.LookedUp, deadline=deadline
            )
        return convert.parse_lookup(answer, len(query.boundaries))

    async def stage(self, query: PrefixQuery, *, deadline: Deadline, progress: Progress | None = None) -> Staged:
        return await self._in_namespace(query.namespace, lambda: self._stage(query, deadline, progress), deadline)

    async def _stage(self, query: PrefixQuery, deadline: Deadline, progress: Progress | None) -> Staged:
        fields = convert.query_fields(query)
        description = self._namespaces.get(query.namespace)
        layout = _layout_of(description) if description is not None else None
        async with self._control(deadline) as connection:
            try:
                answer, _ = await connection.request(
                    lambda i, ms: messages.Stage(i, ms, **fields, packed=layout is not None),
                    messages.Staged,
                    deadline=deadline,
                    stall_s=self._stall_s,
                    on_progress=progress,
                )
            finally:
                self._stall_s = self._options.stall_timeout_s  # also if it failed: silence costs more time only once
        return convert.parse_staged(answer, query, layout)

    async def renew(self, lease: LeaseId, *, deadline: Deadline) -> bool:
        async with self._control(deadline) as connection:
            answer, _ = await connection.request(
                lambda i, ms: messages.Renew(i, ms, lease), messages.Renewed, deadline=deadline
            )
        return answer.alive

    async def load(
        self,
        lease: LeaseId,
        key: RecordKey,
        *,
        deadline: Deadline,
        allocate: Callable[[int], memoryview] | None = None,
    ) -> Record:
        """As `PageStore.load`; if cancelled, a buffer from `allocate` is no longer written."""
        fields = convert.key_fields(key)
        async with self._data(deadline) as connection:
            _, payload = await connection.request(
                lambda i, ms: messages.Load(i, ms, lease, **fields),
                messages.Loaded,
                deadline=deadline,
                allocate=allocate,
            )
        if payload is None:
            raise CorruptRecord("the service answered a load without a record", key=key)
        return read_plain(payload, key)

    async def load_many(
        self, lease: LeaseId, keys: Sequence[RecordKey], *, deadline: Deadline
    ) -> Sequence[LeasedRecord]:
        records: list[LeasedRecord] = []
        for start in range(0, len(keys), messages.LOCATE_MAX):
            records += await self._locate(lease, keys[start : start + messages.LOCATE_MAX], deadline)
        return records

    def shared_memory(self) -> ArenaView | None:
        return self._shared.view

    async def _locate(self, lease: LeaseId, keys: Sequence[RecordKey], deadline: Deadline) -> Sequence[LeasedRecord]:
        async with self._control(deadline) as connection:
            arena, view = self._shared.arena, self._shared.view
            if view is None:
                return await super().load_many(lease, keys, deadline=deadline)
            fields = convert.locate_fields(keys)
            answer, _ = await connection.request(
                lambda i, ms: messages.Locate(i, ms, lease, **fields, arena=arena), messages.Located, deadline=deadline
            )
        return [
            LeasedRecord(self, lease, key) if place is None else MappedRecord(self, lease, key, view, place)
            for key, place in zip(keys, parse_located(answer, len(keys)), strict=True)
        ]

    def shared_buffer(self, num_bytes: int) -> memoryview | None:
        return None if self._closed else self._save_memory.take(num_bytes)

    def shares(self, num_bytes: int) -> bool:
        return not self._closed and self._save_memory.fits(num_bytes)

    async def save(
        self,
        record: Record,
        *,
        ack: Ack = Ack.MEMORY,
        retention: Retention = Retention.NORMAL,
        deadline: Deadline,
    ) -> SaveOutcome:
        (outcome,) = await self._save([record], ack, retention, deadline)
        return outcome

    async def save_many(
        self, records: Sequence[Record], *, retention: Retention = Retention.NORMAL, deadline: Deadline
    ) -> list[SaveOutcome]:
        outcomes: list[SaveOutcome] = []
        for start in range(0, len(records), messages.SAVE_PLACES_MAX):
            part = records[start : start + messages.SAVE_PLACES_MAX]
            outcomes += await self._save(part, Ack.MEMORY, retention, deadline)
        return outcomes

    async def _save(
        self, records: Sequence[Record], ack: Ack, retention: Retention, deadline: Deadline
    ) -> list[SaveOutcome]:
        namespace = records[0].key.namespace
        return await self._in_namespace(namespace, lambda: self._save_now(records, ack, retention, deadline), deadline)

    async def _save_now(
        self, records: Sequence[Record], ack: Ack, retention: Retention, deadline: Deadline
    ) -> list[SaveOutcome]:
        """Save records with one request, or each by itself where they must be sent."""
        async with self._data(deadline) as connection:
            limit_bytes = connection.welcome.max_payload_bytes
            for record in records:
                if record.num_bytes > limit_bytes:
                    raise InvalidRequest(
                        "the record is too large for this service",
                        field="record",
                        expected=f"at most {limit_bytes} bytes",
                        seen=record.num_bytes,
                    )
            where = self._save_memory.where(records) if connection.welcome.save_memory else {}
            num_bytes = sum(record.num_bytes for record in records)
            if len(records) > 1 and not (where and connection.welcome.save_places and num_bytes <= limit_bytes):
                each = [self._save_now([record], ack, retention, deadline) for record in records]
                return [outcome for (outcome,) in await gather_all(each)]
            credit = connection.save_credit
            grant = await credit.take_until(deadline, "room for a save", min(num_bytes, credit.limit_bytes))
            kept = list(records)

            def settle() -> None:
                credit.give_back(grant)
                kept.clear()  # until now the service may have read the records, whose memory was not used again

            answer, _ = await connection.request(
                lambda i, ms: messages.Save(i, ms, ack.value, retention.value, **where),
                messages.Saved,
                deadline=deadline,
                payload=None if where else records[0].data,
                settle=settle,
            )
        outcomes = answer.outcomes or [answer.outcome]
        try:
            return [SaveOutcome(outcome) for outcome, _ in zip(outcomes, records, strict=True)]
        except ValueError as error:
            raise InternalError("unknown outcomes of a save", seen=outcomes[:8], num_records=len(records)) from error

    async def release(self, lease: LeaseId) -> None:
        connection = self.pool.now()
        if connection is not None and not self._closed:  # without a connection its leases have ended already
            connection.post(messages.Release(lease))

    async def discard(self, key: RecordKey, reason: str, *, deadline: Deadline) -> None:
        await self._in_namespace(key.namespace, lambda: self._discard(key, reason, deadline), deadline)

    async def _discard(self, key: RecordKey, reason: str, deadline: Deadline) -> None:
        fields = convert.key_fields(key)
        async with self._control(deadline) as connection:
            await connection.request(
                lambda i, ms: messages.Discard(i, ms, **fields, reason=reason), messages.Discarded, deadline=deadline
            )

    def report(self, outcome: Outcome) -> None:
        if not self._closed:
            self._reports.add(outcome)

    def name_blocks(self, blocks: PageBlocks) -> None:
        if not self._closed and not blocks.is_too_large:  # a service would end the connection
            self._names.add(blocks)

    def end_prompt(self, prompt: EndedPrompt) -> None:
        if not self._closed:
            self._prompts.add(prompt)

    async def explain(self, request: str, *, deadline: Deadline, tenant: str | None = "") -> Mapping[str, object]:
        await self._send_reports(deadline)
        async with self._control(deadline) as connection:
            if not connection.welcome.explains:
                raise InvalidRequest("this service is too old to explain", release=connection.welcome.release)
            answer, _ = await connection.request(
                lambda i, ms: messages.Explain(i, ms, request), messages.Explained, deadline=deadline
            )
        return answer.values

    async def status(self, *, deadline: Deadline, tenant: str = "") -> Mapping[str, object]:
        await self._send_reports(deadline)
        async with self._control(deadline) as connection:
            answer, _ = await connection.request(messages.Status, messages.StatusReply, deadline=deadline)
        return answer.values

    async def aclose(self) -> None:
        self._closed = True
        await self._reports.aclose(self.pool.now())
        await self._names.aclose(self.pool.now())
        await self._prompts.aclose(self.pool.now())
        await self._save_memory.aclose()
        await self.pool.aclose()
        self._shared.close()  # not when Python collects this store: until then the service's memory could not be freed

    # helpers

    async def _send_reports(self, deadline: Deadline) -> None:
        """Send the reports that still wait, so that the answer includes them."""
        with suppress(Unavailable):  # the call itself says so
            await self._reports.send(deadline)
            await self._prompts.send(deadline)

    async def _in_namespace(self, namespace: NamespaceId, call: Work[Value], deadline: Deadline) -> Value:
        """Make a call; if the service has closed the unused namespace, open it again and repeat the call."""
        description = self._namespaces.get(namespace)
        if description is None:
            return await call()
        self._namespaces.move_to_end(namespace)
        try:
            return await call()
        except NamespaceNotOpen:
            await self.open_namespace(description, deadline=deadline)
            return await call()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the client is closed")

    def _control(self, deadline: Deadline) -> AbstractAsyncContextManager[Connection]:
        return self._watched(self.pool.control, deadline)

    def _data(self, deadline: Deadline) -> AbstractAsyncContextManager[Connection]:
        return self._watched(self.pool.data, deadline)

    @asynccontextmanager
    async def _watched(
        self, pick: Callable[[Deadline], Awaitable[Connection]], deadline: Deadline
    ) -> AsyncIterator[Connection]:
        """Report silence to the pool; raise `Closed` from a call that ended because this client was closed."""
        self._check_open()
        connection = await pick(deadline)
        try:
            yield connection
        except Silent:
            self.pool.heard_nothing()
            raise
        except KVStoreError:
            self._check_open()
            raise

    async def _reopen(self, connection: Connection) -> None:
        deadline = Deadline.after(self._options.hello_timeout_s)
        for description in list(self._namespaces.values()):
            try:
                await self._open(connection, description, deadline)
            except KVStoreError:  # refused, for example by another release; the other namespaces are of use
                if not connection.open or deadline.expired:
                    raise
        self._save_memory.follow(connection)
        await self._shared.follow(connection)

    async def _open(self, connection: Connection, description: NamespaceDescription, deadline: Deadline) -> NamespaceId:
        instance = self._options.instance if connection.welcome.instances else None
        engine = convert.instance_fields(instance) if instance is not None else {}
        answer, _ = await connection.request(
            lambda i, ms: messages.OpenNamespace(i, ms, description.canonical, engine),
            messages.NamespaceOpened,
            deadline=deadline,
        )
        return convert.parse_namespace(answer.namespace, "namespace_opened.namespace")


@lru_cache(_NAMESPACES_MAX)
def _layout_of(description: NamespaceDescription) -> Layout:
    return description.layout()


EMBEDDED = "embedded:"


def connect(
    url: str,
    *,
    token: str | None = None,
    options: ClientOptions | None = None,
    embedded: EmbeddedOptions | None = None,
) -> RemoteStore:
    """A store at `url`. Neither blocks nor fails when there is no service; the store's calls do, until there is one.

    Args:
        url: `unix:/path`, `tcp://host:port`, `tls://host:port`, or `embedded:` for a private service that is started
            when needed.
        token: The content of the service's `token_file`, if it has one.

    Raises:
        InvalidRequest: `url` is none of these, or a file of `options.tls` cannot be used.
    """
    options = options or ClientOptions()
    options = replace(options, token=token or options.token, name=options.name or f"pid {os.getpid()}")
    if url == EMBEDDED:
        return RemoteStore(EmbeddedService(embedded or EmbeddedOptions()).ensure, url, options)
    address = parse_address(url)
    if isinstance(address, TcpAddress) and address.tls:
        options.tls.context()  # so that unusable files are reported now, not at every attempt to connect

    async def locate() -> Address:
        return address

    return RemoteStore(locate, url, options)
