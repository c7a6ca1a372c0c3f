"""Payloads that are being received: a connection's credit and the service's budget, with a receipt for both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.errors import InternalError, InvalidRequest, Unavailable
from kvstore.runtime.budget import ByteBudget, Grant
from kvstore.runtime.deadline import Deadline

__all__ = ["Incoming", "Receipt"]


@dataclass(eq=False, slots=True)
class Receipt:
    """What one save holds until it is settled.

    Attributes:
        window_bytes: Its part of the connection's credit.
        grant: Its part of the service's budget; `None` when there was no room in time and its payload was dropped.
        payload: The record, once it has arrived in full. No other reference to it is kept, so that its memory is free
            once the save is settled.
    """

    window_bytes: int
    grant: Grant | None
    _settle: Callable[[Receipt], None]
    payload: memoryview | None = None
    _settled: bool = False

    @property
    def dropped(self) -> bool:
        """Whether there was no room in time."""
        return self.window_bytes > 0 and self.grant is None

    def settle(self) -> None:
        """Give both back, and drop the payload. Idempotent."""
        self.payload = None
        if not self._settled:
            self._settled = True
            self._settle(self)


class Incoming:
    """The payloads of one connection: at most one is being received, others are being stored.

    Args:
        budget: Shared by all connections, and by the rule of `Shares` among tenants.
        credit_bytes: This connection's window; a larger payload is admitted if it is alone.

    Attributes:
        tenant: Whose payloads these are; set after the hello.
    """

    def __init__(self, budget: ByteBudget, credit_bytes: int) -> None:
        self.tenant = ""
        self._budget = budget
        self._credit_bytes = credit_bytes
        self._used_bytes = 0
        self._current: Receipt | None = None

    def begin(self, payload_bytes: int) -> bool:
        """Open a receipt for the next payload. False: there is no room yet, `wait` for it.

        Raises:
            InvalidRequest: The peer sent more than its credit.
        """
        if self._current is not None:
            raise InternalError("two payloads at once on one connection")
        window = min(payload_bytes, self._credit_bytes)
        if self._used_bytes + window > self._credit_bytes:
            raise InvalidRequest("saves exceed the credit", credit_bytes=self._credit_bytes, used=self._used_bytes)
        self._used_bytes += window
        self._current = Receipt(window, self._budget.try_take(payload_bytes, self.tenant), self._give_back)
        return self._current.grant is not None

    async def wait(self, payload_bytes: int, deadline: Deadline) -> bool:
        """Wait for room until `deadline`. False: there was none; the payload must be dropped."""
        if self._current is None:
            raise InternalError("waited for a payload that did not begin")
        try:
            async with deadline.scope("room for a record"):
                self._current.grant = await self._budget.take(payload_bytes, self.tenant)
        except Unavailable:
            return False
        return True

    @property
    def holds_room(self) -> bool:
        """Whether a payload is being received, into room that others could use."""
        return self._current is not None and self._current.grant is not None

    def give_up(self) -> bool:
        """Give back the room of the payload that is being received. False: there is none, or it has no room."""
        receipt = self._current
        if receipt is None or receipt.grant is None:
            return False
        self._return(receipt)
        return True

    def finish(self) -> Receipt:
        """Return the receipt of the payload that has arrived; the caller owns it now."""
        receipt, self._current = self._current, None
        return receipt if receipt is not None else Receipt(0, None, self._give_back)

    def abandon(self) -> None:
        """Give back what the current payload holds: the peer is gone."""
        self.finish().settle()

    def _give_back(self, receipt: Receipt) -> None:
        self._used_bytes -= receipt.window_bytes
        self._return(receipt)

    def _return(self, receipt: Receipt) -> None:
        if receipt.grant is not None:
            self._budget.give_back(receipt.grant)
        receipt.grant = None
