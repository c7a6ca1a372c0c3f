"""What each request means: messages in, calls of the `PageStore`, messages out. Knows no connection."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvstore.api import Ack, LeaseId, PageStore, Progress
from kvstore.errors import CorruptRecord, InternalError, InvalidRequest
from kvstore.format.record import read_record
from kvstore.model.namespace import NamespaceDescription
from kvstore.runtime.deadline import Deadline
from kvstore.wire import convert, messages
from kvstore.wire.messages import Reply, Request

__all__ = ["Answers"]


class Answers:
    """Answers requests from a store.

    Args:
        store: Where pages are.
        describe: The service's own part of `status`.
    """

    def __init__(self, store: PageStore, describe: Callable[[], Mapping[str, object]]) -> None:
        self.store = store
        self._describe = describe

    async def answer(
        self, request: Request, payload: memoryview | None, deadline: Deadline, progress: Progress
    ) -> Reply:
        """The reply to any request but `Load`.

        Raises:
            KVStoreError: Whatever the store raised; the session tells the client.
        """
        match request:
            case messages.Stage():  # before Lookup, which it extends
                query = convert.parse_query(request)
                staged = await self.store.stage(query, deadline=deadline, progress=progress)
                return convert.staged_reply(request.id, staged)
            case messages.Lookup():
                lookup = await self.store.lookup(convert.parse_query(request), deadline=deadline)
                return convert.lookup_reply(request.id, lookup)
            case messages.Save():
                return await self._save(request, payload, deadline)
            case messages.Renew():
                alive = await self.store.renew(LeaseId(request.lease), deadline=deadline)
                return messages.Renewed(request.id, alive)
            case messages.OpenNamespace():
                # the tenant is never taken from the description: nobody is verified as one yet, so it is the empty one
                description = NamespaceDescription.from_canonical(request.description)
                namespace = await self.store.open_namespace(description, deadline=deadline)
                return messages.NamespaceOpened(request.id, namespace)
            case messages.Discard():
                await self.store.discard(convert.parse_key(request), request.reason[:512], deadline=deadline)
                return messages.Discarded(request.id)
            case messages.Status():
                values = dict(await self.store.status(deadline=deadline))
                return messages.StatusReply(request.id, {**values, "service": dict(self._describe())})
            case _:
                raise InternalError("a request without an answer", type=request.type)

    async def load(self, request: messages.Load, deadline: Deadline) -> tuple[messages.Loaded, memoryview]:
        """The reply to a `Load`, and the record as its payload."""
        key = convert.parse_key(request)
        record = await self.store.load(LeaseId(request.lease), key, deadline=deadline)
        return messages.Loaded(request.id), record.data

    async def _save(self, request: messages.Save, payload: memoryview | None, deadline: Deadline) -> Reply:
        if payload is None:
            raise CorruptRecord("a save carries no record")
        try:
            ack = Ack(request.ack)
        except ValueError as error:
            expected = [level.value for level in Ack]
            raise InvalidRequest("unknown level", field="save.ack", expected=expected, seen=request.ack) from error
        outcome = await self.store.save(read_record(payload), ack=ack, deadline=deadline)
        return messages.Saved(request.id, outcome.value)
