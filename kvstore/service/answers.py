"""Turns requests into calls of the `PageStore`, and results into messages. Knows no connection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from kvstore.api import Ack, LeaseId, PageStore, PrefixQuery, Progress, Retention
from kvstore.errors import InternalError, InvalidRequest, Unavailable
from kvstore.format.record import Record
from kvstore.model.keys import NamespaceId
from kvstore.model.layout import Layout
from kvstore.model.namespace import NamespaceDescription, NamespaceNotOpen
from kvstore.runtime.arena import Arena, Place
from kvstore.runtime.background import gather_all
from kvstore.runtime.bounded_map import Latest
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.turns import PIECE, LongWork
from kvstore.wire import convert, messages, places
from kvstore.wire.messages import Reply, Request
from kvstore.wire.page_names import parse_blocks, parse_names

_OPENED_MAX = 4096
"""Namespaces whose tenants are remembered, the latest: more than a store keeps open."""
_RETENTIONS = {one.value: one for one in Retention}
"""By the value on the wire. Retention is a hint: a record with a value that is not known here is saved as `normal`."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """A namespace that was opened here."""

    tenant: str
    layout: Layout


class Answers:
    """Answers requests from a store.

    Args:
        store: Holds the pages.
        describe: The service's own part of `status`, for a tenant; empty: all of it.
        settings: A part of `status` for peers that may see everything, as `reported_settings` returns it.

    A namespace belongs to the tenant that opened it. For every other tenant it does not exist, even if its id is known.
    """

    def __init__(
        self,
        store: PageStore,
        describe: Callable[[str], Mapping[str, object]],
        settings: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        self.store = store
        self._settings = settings
        self._describe = describe
        self._work = LongWork("messages")
        self._opened = Latest[NamespaceId, _Opened](_OPENED_MAX)  # clients open the others again

    async def answer(
        self,
        request: Request,
        records: Sequence[Record],
        deadline: Deadline,
        progress: Progress,
        *,
        tenant: str,
        sees_all: bool = False,
    ) -> Reply:
        """The reply to any request but `Load`.

        Args:
            records: Of a save; none for other requests.
            progress: Called with the bytes that a stage has received.
            tenant: The peer's tenant, which the session has verified.
            sees_all: Explanations may cover the requests of all tenants.

        Raises:
            KVStoreError: What the store raised; the session reports it to the client.
        """
        match request:
            case messages.Stage():  # before Lookup, which it extends
                return await self._stage(request, deadline, progress, tenant)
            case messages.Lookup():
                query = await self._query(request, tenant)
                lookup = await self.store.lookup(query, deadline=deadline)
                return await self._work.run(len(query.boundaries), convert.lookup_reply, request.id, lookup)
            case messages.Save():
                return await self._save(request, records, deadline, tenant)
            case messages.Renew():
                alive = await self.store.renew(LeaseId(request.lease), deadline=deadline)
                return messages.Renewed(request.id, alive)
            case messages.OpenNamespace():
                # the tenant comes from the session's credential, never from the description
                description = NamespaceDescription(request.description, tenant)
                known = self._opened.get(description.id)
                if known is None:  # else equal bytes were parsed before
                    description = NamespaceDescription.from_canonical(request.description, tenant)
                namespace = await self.store.open_namespace(description, deadline=deadline)
                self._opened[namespace] = known or _Opened(tenant, description.layout())
                return messages.NamespaceOpened(request.id, namespace)
            case messages.Locate():
                return await self._locate(request, deadline, tenant)
            case messages.Discard():
                key = convert.parse_key(request)
                self._check_owner(tenant, key.namespace)
                await self.store.discard(key, convert.plain_text(request.reason, 512), deadline=deadline)
                return messages.Discarded(request.id)
            case messages.Explain():
                whose = None if sees_all else tenant
                values = await self.store.explain(convert.plain_text(request.request), deadline=deadline, tenant=whose)
                return messages.Explained(request.id, values)
            case messages.Status():
                values = dict(await self.store.status(deadline=deadline, tenant=tenant))
                if sees_all:
                    values |= self._settings
                return messages.StatusReply(request.id, {**values, "service": dict(self._describe(tenant))})
            case _:
                raise InternalError("a request without an answer", type=request.type)

    async def _stage(self, request: messages.Stage, deadline: Deadline, progress: Progress, tenant: str) -> Reply:
        query = await self._query(request, tenant)
        staged = await self.store.stage(query, deadline=deadline, progress=progress)
        opened = self._opened.get(query.namespace)
        packed = (query, opened.layout) if request.packed and opened is not None else ()
        try:
            return await self._work.run(len(staged.keys), convert.staged_reply, request.id, staged, *packed)
        except BaseException:  # the client will never learn of it
            if staged.lease is not None:
                await self.store.release(staged.lease)
            raise

    def report(self, message: messages.Outcome | messages.PageNames, tenant: str, *, may_save: bool) -> None:
        """Keep an engine's report of a request, or its names of pages.

        A report on another tenant's namespace is dropped. For a namespace that is not open here only losses are kept.
        Ranks report them, and a service that has just started may receive a rank's report before the scheduler opens
        the namespace. Losses are kept by tenant, and need no catalog.

        An outcome with `blocks` names a page too. The first names count, so only who may save a page may name it.

        Raises:
            InvalidRequest: Something in it is malformed, or the peer may not name pages.
        """
        if isinstance(message, messages.PageNames) or message.blocks:
            if not may_save:
                raise InvalidRequest("the token may not name pages: give it the scope save", field="token")
            pages = parse_names(message) if isinstance(message, messages.PageNames) else [parse_blocks(message)]
            if self._is_of(tenant, pages[0].namespace):
                for blocks in pages:
                    self.store.name_blocks(blocks)
            return
        outcome = replace(convert.parse_outcome(message), tenant=tenant)
        namespace = outcome.namespace
        is_early = outcome.is_loss and namespace not in self._opened
        if namespace is None or is_early or self._is_of(tenant, namespace):
            self.store.report(outcome)

    def end_prompt(self, message: messages.PromptEnded, tenant: str, *, may_save: bool) -> None:
        """Take an ended prompt and its client's wishes; one of another tenant's namespace is dropped. Wishes decide
        what is kept, so only who may save has them.

        Raises:
            InvalidRequest: Something in it is malformed, or the peer may not save.
        """
        if not may_save:
            raise InvalidRequest("the token may not give hints: give it the scope save", field="token")
        prompt = replace(convert.parse_ended(message), tenant=tenant)
        if self._is_of(tenant, prompt.namespace):
            self.store.end_prompt(prompt)

    async def load(
        self, request: messages.Load, deadline: Deadline, *, tenant: str
    ) -> tuple[messages.Loaded, memoryview | None]:
        """The reply to a `Load`, and the record as its payload unless an older peer can copy it from shared memory."""
        key = convert.parse_key(request)
        self._check_owner(tenant, key.namespace)
        record = await self.store.load(LeaseId(request.lease), key, deadline=deadline)
        arena = self._arena(request.arena)
        if arena is not None and (place := arena.place(record.data)) is not None:
            return messages.Loaded(request.id, place.offset, place.num_bytes, place.stamp), None
        return messages.Loaded(request.id), record.data

    async def _locate(self, request: messages.Locate, deadline: Deadline, tenant: str) -> Reply:
        num_keys = len(request.parts) // 4
        keys = await self._work.run(num_keys, convert.parse_locate, request)
        self._check_owner(tenant, convert.parse_namespace(request.namespace, "locate.namespace"))
        arena = self._arena(request.arena)
        if arena is None:
            return messages.Located(request.id, bytes(num_keys * 24))
        lease, found, lost = LeaseId(request.lease), list[Place | None](), list[Unavailable]()
        for start in range(0, num_keys, PIECE):
            async with self._work.turn(num_keys):
                for key in keys[start : start + PIECE]:
                    try:
                        record = await self.store.load(lease, key, deadline=deadline)
                    except Unavailable as error:  # its own load says so; the others can be read
                        lost.append(error)
                        found.append(None)
                    else:
                        found.append(arena.place(record.data))
        if lost and len(lost) == num_keys:  # the lease has ended
            raise lost[0]
        return await self._work.run(num_keys, places.located_reply, request.id, found)

    def _arena(self, arena_id: bytes) -> Arena | None:
        """The memory with this id, which a peer has mapped; `None`: this service has another one, or none."""
        arena = self.store.arena
        return arena if arena is not None and arena.id == arena_id else None

    async def _query(self, request: messages.Lookup, tenant: str) -> PrefixQuery:
        self._check_owner(tenant, convert.parse_namespace(request.namespace, f"{request.type}.namespace"))
        return await self._work.run(len(request.tokens) // 4, convert.parse_query, request)

    def _is_of(self, tenant: str, namespace: NamespaceId) -> bool:
        opened = self._opened.get(namespace)
        return opened is not None and opened.tenant == tenant

    def _check_owner(self, tenant: str, namespace: NamespaceId) -> None:
        if not self._is_of(tenant, namespace):  # an unknown namespace and another tenant's get one message
            raise NamespaceNotOpen("the namespace was not opened: call open_namespace first", namespace=namespace.hex())

    async def _save(self, request: messages.Save, records: Sequence[Record], deadline: Deadline, tenant: str) -> Reply:
        if not records:
            raise InternalError("a save without its record")
        try:
            ack = Ack(request.ack)
        except ValueError as error:
            expected = [level.value for level in Ack]
            raise InvalidRequest("unknown level", field="save.ack", expected=expected, seen=request.ack) from error
        for record in records:
            if record.header.key_id:
                raise InvalidRequest("records are saved plain: the service encrypts them", key_id=record.header.key_id)
            self._check_owner(tenant, record.key.namespace)
        retention = _RETENTIONS.get(request.retention, Retention.NORMAL)
        save = partial(self.store.save, ack=ack, retention=retention, deadline=deadline)
        if ack is Ack.MEMORY:  # each waits for nothing, so that tasks would only cost time
            outcomes = [(await save(record)).value for record in records]
        else:
            outcomes = [outcome.value for outcome in await gather_all(map(save, records))]
        return messages.Saved(request.id, outcomes[0], outcomes if request.places else [])
