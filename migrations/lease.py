"""The lease of a migration: one run at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvstore.catalog.ownership import Ownership
from kvstore.errors import Unavailable
from kvstore.runtime.deadline import Deadline
from migrations.store import soon

__all__ = ["LEASE", "alone"]

LEASE = "migration"
_RENEW_SHARE = 0.3
"""Share of the lease after which it is renewed."""
_WAIT_SHARE = 2.0
"""How many leases long a run waits for another one's lease to expire."""
_POLL_S = 0.2


@asynccontextmanager
async def alone(ownership: Ownership, lease_s: float) -> AsyncIterator[None]:
    """Hold the lease during the block. Waits first, since the lease of a run that was killed must expire.

    Raises:
        Unavailable: Another run holds it, or it was lost since this run could not renew it in time.
    """
    ends = Deadline.after(lease_s * _WAIT_SHARE)
    while not await ownership.hold(LEASE, deadline=soon()):
        if ends.expired:
            raise Unavailable("another run of this migration is active: wait for it, or end it", lease_s=lease_s)
        await asyncio.sleep(_POLL_S)
    main = asyncio.current_task()
    assert main is not None
    lost: list[str] = []

    async def renew() -> None:
        while True:
            await asyncio.sleep(lease_s * _RENEW_SHARE)
            try:
                is_ours = await ownership.hold(LEASE, deadline=soon())
            except Unavailable:
                continue  # two runs at once would repeat work, but do no harm
            if not is_ours:
                lost.append("another run has taken over this migration")
                main.cancel()
                return

    try:
        async with asyncio.TaskGroup() as group:
            renewing = group.create_task(renew())
            try:
                yield
            finally:
                renewing.cancel()
    except asyncio.CancelledError:
        if lost:
            raise Unavailable(lost[0]) from None
        raise
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        await ownership.release(LEASE, deadline=soon())
