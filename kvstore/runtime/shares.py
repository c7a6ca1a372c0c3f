"""Resources that tenants share: each may have much of one while nobody else asks, and never all of it."""

from __future__ import annotations

from collections import Counter

from kvstore.errors import InternalError

__all__ = ["Shares", "share_left"]

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
