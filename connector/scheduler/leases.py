"""A lease of staged records, renewed and ended by the engine's thread without waiting."""

from __future__ import annotations

from connector.bridge import Bridge, post
from kvstore.api import Deadline, LeaseId, PageStore
from kvstore.runtime.clock import Clock

_RENEW_SHARE = 3
"""A lease is renewed after a third of its time, so that two lost renewals do not end it."""


class Lease:
    """Keeps records readable until `release`, or until its time is over. Belongs to the engine's thread.

    Args:
        lease_s: The time that each renewal gives.
        granted_s: Monotonic time of the grant, or of the call that asked for it.

    Attributes:
        id: The service's receipt.
        renewed_s: Monotonic time of the grant or of the last renewal.
        is_lost: The service reported that the lease has ended. Written on the store's thread.
    """

    def __init__(self, bridge: Bridge, clock: Clock, lease_id: LeaseId, *, lease_s: float, granted_s: float) -> None:
        self._bridge = bridge
        self._clock = clock
        self.id = lease_id
        self._lease_s = lease_s
        self.renewed_s = granted_s
        self.is_lost = False

    @property
    def has_ended(self) -> bool:
        return self.is_lost or self._clock.monotonic_s() - self.renewed_s >= self._lease_s

    def renew_if_due(self) -> None:
        """Renew it after a third of its time."""
        if self._clock.monotonic_s() - self.renewed_s > self._lease_s / _RENEW_SHARE:
            self.renew()

    def renew(self) -> None:
        """Renew it now. If it has ended, that shows later as `is_lost`."""
        self.renewed_s = self._clock.monotonic_s()

        async def renew(store: PageStore) -> None:
            if not await store.renew(self.id, deadline=Deadline.after(1.0)):
                self.is_lost = True

        post(self._bridge, renew)

    def release(self) -> None:
        """End it. Idempotent."""

        async def release(store: PageStore) -> None:
            await store.release(self.id)

        post(self._bridge, release)
