"""The lease that one run of a migration holds, so that two do not do the same work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvstore.catalog.ownership import Ownership
from kvstore.errors import Unavailable
from kvstore.runtime.deadline import Deadline

__all__ = ["LEASE", "alone"]

LEASE = "migration"
_BEAT_SHARE = 0.3
_WAIT_SHARE = 2.0
_POLL_S = 0.2
_CALL_S = 30.0


@asynccontextmanager
async def alone(ownership: Ownership, lease_s: float) -> AsyncIterator[None]:
    """Hold the lease for as long as the block; a run that was killed held it for a while longer.

    Raises:
        Unavailable: Somebody else holds it, or it was lost: this run was too slow to renew it.
    """
    ends = Deadline.after(lease_s * _WAIT_SHARE)
    while not await ownership.hold(LEASE, deadline=_soon()):
        if ends.expired:
            raise Unavailable("another run has this migration: wait for it, or end it", lease_s=lease_s)
        await asyncio.sleep(_POLL_S)
    main = asyncio.current_task()
    assert main is not None
    lost: list[str] = []

    async def beat() -> None:
        while True:
            await asyncio.sleep(lease_s * _BEAT_SHARE)
            try:
                is_ours = await ownership.hold(LEASE, deadline=_soon())
            except Unavailable:
                continue  # two runs at once do the same work twice, and no harm
            if not is_ours:
                lost.append("another run took this migration over")
                main.cancel()
                return

    try:
        async with asyncio.TaskGroup() as group:
            beating = group.create_task(beat())
            try:
                yield
            finally:
                beating.cancel()
    except asyncio.CancelledError:
        if lost:
            raise Unavailable(lost[0]) from None
        raise
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        await ownership.release(LEASE, deadline=_soon())


def _soon() -> Deadline:
    return Deadline.after(_CALL_S)
