"""Payloads that are being received: a connection's credit and the service's budget, with a receipt for both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import CorruptRecord, InvalidRequest, Unavailable
from kvstore.format.record import Record, read_record
from kvstore.runtime.budget import ByteBudget, Grant
from kvstore.runtime.deadline import Deadline


@dataclass(eq=False, slots=True)
class Receipt:
    """What one request holds until it is settled.

    Attributes:
        credit: A save's part of the connection's credit; `None`: the request has no payload.
        room: Its part of the service's budget; `None` when there was no room in time and its payload was dropped.
        payload: The record's bytes, once they have arrived in full. No other reference to them is kept, so that their
            memory is free once the save is settled.
        records: The record in it, or those that were copied. The same holds for references to them.
    """

    _incoming: Incoming
    credit: Grant | None = None
    room: Grant | None = None
    payload: memoryview | None = None
    records: Sequence[Record] = ()

    @property
    def dropped(self) -> bool:
        """Whether there was no room in time."""
        return self.credit is not None and self.room is None

    def take_credit(self, num_bytes: int) -> None:
        """Take the connection's credit for a save.

        Raises:
            InvalidRequest: The peer sent more than its credit.
        """
        credit = self._incoming.credit
        self.credit = credit.try_take(min(num_bytes, credit.limit_bytes))
        if self.credit is None:
            used, limit = credit.used_bytes, credit.limit_bytes
            raise InvalidRequest("saves exceed the credit", credit_bytes=limit, used=used)

    async def take_room(self, num_bytes: int, deadline: Deadline) -> bool:
        """Wait for room in the service's budget until `deadline`. False: there was none."""
        incoming = self._incoming
        try:
            self.room = await incoming.budget.take_until(deadline, "room for a record", num_bytes, incoming.tenant)
        except Unavailable:
            return False
        return True

    def sent(self) -> Record:
        """The record that was sent, not verified yet.

        Raises:
            CorruptRecord, UnsupportedFormat: As `read_record`; or none was sent.
        """
        if self.payload is None:
            raise CorruptRecord("a save carries no record")
        return read_record(self.payload)

    def settle(self) -> None:
        """Give back credit and room, and drop the payload. Idempotent."""
        self.payload, self.records = None, ()
        self.give_up_room()
        if self.credit is not None:
            self._incoming.credit.give_back(self.credit)
            self.credit = None

    def give_up_room(self) -> None:
        """Give back the room alone. Idempotent."""
        if self.room is not None:
            self._incoming.budget.give_back(self.room)
            self.room = None


class Incoming:
    """The payloads of one connection: at most one is being received, others are being stored.

    Args:
        budget: Memory for payloads, shared by all connections; `Shares` divides it among tenants.
        credit_bytes: This connection's window; a larger payload is admitted if it is alone.

    Attributes:
        tenant: Whose payloads these are; set after the hello.
    """

    def __init__(self, budget: ByteBudget, credit_bytes: int) -> None:
        self.tenant = ""
        self.budget = budget
        self.credit = ByteBudget(credit_bytes)
        self._current: Receipt | None = None

    def begin(self, payload_bytes: int) -> bool:
        """Open a receipt for the next payload. False: there is no room yet, `wait` for it.

        Raises:
            InvalidRequest: The peer sent more than its credit.
        """
        assert self._current is None, "two payloads at once on one connection"
        receipt = Receipt(self)
        receipt.take_credit(payload_bytes)
        receipt.room = self.budget.try_take(payload_bytes, self.tenant)
        self._current = receipt
        return receipt.room is not None

    async def wait(self, payload_bytes: int, deadline: Deadline) -> bool:
        """Wait for room until `deadline`. False: there was none; the payload must be dropped."""
        assert self._current is not None, "waited for a payload that did not begin"
        return await self._current.take_room(payload_bytes, deadline)

    @property
    def holds_room(self) -> bool:
        """Whether a payload is being received, into room that others could use."""
        return self._current is not None and self._current.room is not None

    def give_up(self) -> bool:
        """Give back the room of the payload that is being received. False: there is none, or it has no room."""
        if self._current is None or self._current.room is None:
            return False
        self._current.give_up_room()
        return True

    def finish(self) -> Receipt:
        """Return the receipt of the payload that has arrived; the caller owns it now."""
        receipt, self._current = self._current, None
        return receipt if receipt is not None else Receipt(self)

    def abandon(self) -> None:
        """Give back what the current payload holds: the peer is gone."""
        self.finish().settle()
