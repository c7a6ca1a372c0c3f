"""What the routes work with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.events import Events
from kvstore.service.admin.bridge import Bridge
from kvstore.service.admin.catalog_access import CatalogAccess, Namespace
from kvstore.service.admin.followers import Followers
from kvstore.service.admin.job_board import JobBoard
from kvstore.service.credentials import Grant
from kvstore.service.history import History
from kvstore.store.encryption.key_ring import Generation
from kvstore.store.retention.operator_rules import WEIGHTS_FIELD
from kvstore.store.upkeep.operations import StoreOperations

__all__ = ["AdminContext", "Context"]

_CALL_S = 5.0
_WALKS_AT_ONCE = 2


def _any(_: Grant) -> bool:
    return True


def _plain_only(tenant: str) -> Sequence[Generation]:
    return (None,)


@dataclass(frozen=True)
class AdminContext:
    """Belongs to the administration's loop.

    Attributes:
        bridge: The way to the data loop.
        catalog: The catalog, over a connection of our own.
        operations: What may be asked on the data loop.
        describe: What the data port tells of itself; safe from any thread.
        generations: Under which names a tenant's records stand, the current ones first; safe from any thread.
        events: What happened lately; safe from any thread.
        history: What was counted lately; safe from any thread.
        is_stopping: Whether long answers should end; safe from any thread.
        clock: For deadlines and expiry.
        jobs: Long operations.
        walks: Turns of those who walk over many entries.
        followers: Who follows the events.
        holds: Whether a grant is still in force; safe from any thread.
        health_bridge: The way to the data loop for `/livez` and `/readyz`, which wait for nobody else's work.
        settings: As `told_settings` returns them.
    """

    bridge: Bridge
    catalog: CatalogAccess
    operations: StoreOperations
    describe: Callable[[], Mapping[str, object]]
    events: Events
    history: History
    is_stopping: Callable[[], bool]
    generations: Callable[[str], Sequence[Generation]] = _plain_only
    clock: Clock = SYSTEM_CLOCK
    jobs: JobBoard = field(default_factory=JobBoard)
    walks: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_WALKS_AT_ONCE))
    followers: Followers = field(default_factory=Followers)
    holds: Callable[[Grant], bool] = _any
    health_bridge: Bridge | None = None
    settings: Mapping[str, object] = field(default_factory=dict)

    def soon(self, seconds: float = _CALL_S) -> Deadline:
        """When a call gives up."""
        return Deadline.after(seconds, self.clock)

    def is_retired(self, namespace: Namespace) -> bool:
        """Whether nothing of a namespace is served, because its weights are retired."""
        orders, description = self.operations.operator_rules, namespace.description
        return orders is not None and orders.are_retired(
            description.tenant, str(description.fields.get(WEIGHTS_FIELD, ""))
        )

    def now_s(self) -> int:
        """Seconds since the Unix epoch."""
        return self.clock.wall_ms() // 1000


async def _context(request: Request) -> AdminContext:
    context = request.app.state.admin
    assert isinstance(context, AdminContext)
    return context


Context = Annotated[AdminContext, Depends(_context)]
