"""Bounds on what is held at a time: the shares of tenants, and byte budgets that a caller can wait for."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from kvstore.errors import InternalError, InvalidRequest
from kvstore.runtime.deadline import Deadline

_TIMES_FREE = 3


def share_left(limit: int, used: int, held: int, *, tenant: str) -> int:
    """How much more a tenant may take now, by the rule of `Shares`.

    Args:
        used: What all tenants hold together.
        held: What this tenant holds.
    """
    free = max(0, limit - used)
    return max(0, (_TIMES_FREE * free - held) // (_TIMES_FREE + 1)) if tenant else free


class Shares:
    """Counts what tenants hold of something limited: leases, bytes, namespaces.

    A tenant may hold up to three times what is left free. So a single tenant may have three quarters, two that want all
    have three sevenths each, and something is always left for one more. The tenant without a name is this service's own
    user: it may hold all that is free.
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
        """Count what a tenant has, even if that is more than its share."""
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


@dataclass(eq=False, slots=True)
class Grant:
    """A receipt for `num_bytes` of a budget; give it back exactly once with `ByteBudget.give_back`."""

    num_bytes: int
    tenant: str = ""
    returned: bool = False


@dataclass(eq=False, slots=True)
class _Waiter:
    num_bytes: int
    tenant: str
    future: asyncio.Future[Grant]


class ByteBudget:
    """At most `limit_bytes` granted at a time, first come first served.

    Tenants share the budget by the rule of `Shares`. A tenant that holds nothing may also take more than its share, so
    that one large item never waits for ever. Waiting for its share, a tenant delays no other one.
    """

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes <= 0:
            raise InvalidRequest("a byte budget must be positive", limit_bytes=limit_bytes)
        self.limit_bytes = limit_bytes
        self._shares = Shares(limit_bytes)
        self._waiters: list[_Waiter] = []

    @property
    def used_bytes(self) -> int:
        """Bytes that are granted now."""
        return self._shares.used

    def try_take(self, num_bytes: int, tenant: str = "") -> Grant | None:
        """Grant without waiting; `None`: too few bytes are free, or others wait for them already."""
        is_behind = any(one.tenant == tenant or self._lacks_room(one.num_bytes) for one in self._waiters)
        return None if is_behind or not self._fits(num_bytes, tenant) else self._grant(num_bytes, tenant)

    async def take(self, num_bytes: int, tenant: str = "") -> Grant:
        """Wait until `num_bytes` are free.

        Raises:
            InvalidRequest: More than the whole budget was asked for; it would wait forever.

        If cancelled, nothing stays granted.
        """
        if num_bytes > self.limit_bytes:
            raise InvalidRequest("asked for more than the whole budget", asked=num_bytes, limit_bytes=self.limit_bytes)
        if (grant := self.try_take(num_bytes, tenant)) is not None:
            return grant
        waiter = _Waiter(num_bytes, tenant, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            return await waiter.future
        except BaseException:
            if waiter.future.done() and not waiter.future.cancelled():
                self.give_back(waiter.future.result())
            else:
                self._waiters.remove(waiter)
                self._wake()
            raise

    async def take_until(self, deadline: Deadline, what: str, num_bytes: int, tenant: str = "") -> Grant:
        """As `take`, until a deadline. What is free is granted without a timer, also after the deadline.

        Raises:
            Unavailable: There was no room until the deadline; the message begins with `what`.
        """
        if (grant := self.try_take(num_bytes, tenant)) is not None:
            return grant
        async with deadline.scope(what):
            return await self.take(num_bytes, tenant)

    def give_back(self, grant: Grant) -> None:
        """Return a grant's bytes and wake the waiters that fit now."""
        if grant.returned:
            raise InternalError("a byte grant was given back twice", num_bytes=grant.num_bytes)
        grant.returned = True
        self._shares.give_back(grant.tenant, grant.num_bytes)
        self._wake()

    def _grant(self, num_bytes: int, tenant: str) -> Grant:
        self._shares.take(tenant, num_bytes)
        return Grant(num_bytes, tenant)

    def _lacks_room(self, num_bytes: int) -> bool:
        return num_bytes > self.limit_bytes - self._shares.used

    def _fits(self, num_bytes: int, tenant: str) -> bool:
        if self._lacks_room(num_bytes):
            return False
        return num_bytes <= self._shares.left_for(tenant) or not self._shares.used_by(tenant)

    def _wake(self) -> None:
        """Grant to the waiters that fit, in order; those that wait for their tenant's share are passed over."""
        passed_over: set[str] = set()
        for waiter in list(self._waiters):
            if waiter.future.cancelled():  # its task removes it and calls `_wake` again
                return
            if self._lacks_room(waiter.num_bytes):
                return
            if waiter.tenant in passed_over or not self._fits(waiter.num_bytes, waiter.tenant):
                passed_over.add(waiter.tenant)
                continue
            self._waiters.remove(waiter)
            waiter.future.set_result(self._grant(waiter.num_bytes, waiter.tenant))
