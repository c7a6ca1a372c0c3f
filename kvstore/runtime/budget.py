"""Bounds on what is held at a time: byte budgets that are waited for, and the shares of tenants."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass

from kvstore.errors import InternalError, InvalidRequest

__all__ = ["ByteBudget", "Grant", "Shares", "share_left"]


@dataclass(eq=False, slots=True)
class Grant:
    """A receipt for `num_bytes` of a budget; give it back exactly once with `ByteBudget.give_back`."""

    num_bytes: int
    returned: bool = False


class ByteBudget:
    """At most `limit_bytes` granted at a time, first come first served."""

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes <= 0:
            raise InvalidRequest("a byte budget must be positive", limit_bytes=limit_bytes)
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._waiters: deque[tuple[int, asyncio.Future[Grant]]] = deque()

    def try_take(self, num_bytes: int) -> Grant | None:
        """Grant without waiting; `None`: too few bytes are free, or others wait already."""
        if self._waiters or self.used_bytes + num_bytes > self.limit_bytes:
            return None
        self.used_bytes += num_bytes
        return Grant(num_bytes)

    async def take(self, num_bytes: int) -> Grant:
        """Wait until `num_bytes` are free.

        Raises:
            InvalidRequest: More than the whole budget was asked for; it would wait forever.

        If cancelled, nothing stays granted.
        """
        if num_bytes > self.limit_bytes:
            raise InvalidRequest("asked for more than the whole budget", asked=num_bytes, limit_bytes=self.limit_bytes)
        if (grant := self.try_take(num_bytes)) is not None:
            return grant
        future: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        waiter = (num_bytes, future)
        self._waiters.append(waiter)
        try:
            return await future
        except BaseException:
            if future.done() and not future.cancelled():
                self.give_back(future.result())
            else:
                self._waiters.remove(waiter)
                self._wake()
            raise

    def give_back(self, grant: Grant) -> None:
        """Return a grant's bytes and wake the waiters that fit now."""
        if grant.returned:
            raise InternalError("a byte grant was given back twice", num_bytes=grant.num_bytes)
        grant.returned = True
        self.used_bytes -= grant.num_bytes
        self._wake()

    def _wake(self) -> None:
        while self._waiters:
            num_bytes, future = self._waiters[0]
            if future.done():
                if future.cancelled():  # its waiter removes the entry and calls `_wake` again
                    return
                self._waiters.popleft()
                continue
            if self.used_bytes + num_bytes > self.limit_bytes:
                return
            self._waiters.popleft()
            self.used_bytes += num_bytes
            future.set_result(Grant(num_bytes))


_TIMES_FREE = 3


def share_left(limit: int, used: int, held: int, *, tenant: str) -> int:
    """How much more a tenant may take now, by the rule of `Shares`.

    Args:
        limit: How much there is.
        used: What all hold together.
        held: What this one holds.
        tenant: Its name.
    """
    free = max(0, limit - used)
    return max(0, (_TIMES_FREE * free - held) // (_TIMES_FREE + 1)) if tenant else free


class Shares:
    """Counts what tenants hold of something limited: leases, bytes, namespaces.

    A tenant may hold up to three times what is left free. So a single one may have three quarters, two that want all
    have three sevenths each, and something is always left for one more. The tenant without a name is this service's own
    user: it may hold all that is free.

    Args:
        limit: How much there is.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._used: Counter[str] = Counter()

    def used_by(self, tenant: str) -> int:
        """What a tenant holds."""
        return self._used[tenant]

    def left_for(self, tenant: str) -> int:
        """How much more a tenant may take now."""
        return share_left(self.limit, self.used, self._used[tenant], tenant=tenant)

    def try_take(self, tenant: str, amount: int) -> bool:
        """Take some. False: it is more than the tenant may take now, and nothing was taken."""
        if amount > self.left_for(tenant):
            return False
        self.take(tenant, amount)
        return True

    def take(self, tenant: str, amount: int) -> None:
        """Note what a tenant has in any case."""
        self._used[tenant] += amount
        self.used += amount

    def give_back(self, tenant: str, amount: int) -> None:
        """Return some.

        Raises:
            InternalError: It is more than the tenant holds.
        """
        if amount > self._used[tenant]:
            raise InternalError("more was given back than was taken", tenant=tenant, held=self._used[tenant])
        self._used[tenant] -= amount
        if not self._used[tenant]:
            del self._used[tenant]
        self.used -= amount
