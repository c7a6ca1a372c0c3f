"""What every route works with, and the namespace that a request names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated

from fastapi import Depends, Query, Request

from kvstore.errors import Unavailable
from kvstore.model.keys import RecordKey
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.turns import TenantTurns, Turns
from kvstore.service.admin.access import Reader
from kvstore.service.admin.catalog_access import NO_CATALOG, CatalogAccess, Namespace
from kvstore.service.admin.data_loop import CALL_S, DataLoop
from kvstore.service.admin.documents import DocumentUses
from kvstore.service.admin.known_pieces import KnownPieces
from kvstore.service.admin.models import (
    NAMESPACE_EXAMPLE,
    NAMESPACE_PATTERN,
    NamespaceText,
    namespace_id,
    shown_tenant,
)
from kvstore.service.admin.port import Administered
from kvstore.service.authentication import Grant
from kvstore.service.session import ConnectedEngine
from kvstore.store.encryption.encrypted import EncryptedStore
from kvstore.store.encryption.key_ring import Generation
from kvstore.store.retention.operator_rules import OperatorRules
from kvstore.store.upkeep.operations import StoreOperations, TierState

_SCANS_AT_ONCE = 2


@dataclass(frozen=True)
class AdminContext:
    """What the routes work with: the service, its catalog, calls into its store, and turns for what takes long. Belongs
    to the administration's loop.

    Attributes:
        service: The service. Its settings, credentials, events and history are safe from any thread; its store is used
            through `data_loop` only.
        data_loop: Calls into the store's loop.
        health_loop: The same for `/livez` and `/readyz`, which do not wait for other calls.
        catalog: The catalog, over a connection of the administration's own.
        is_stopping: Whether long responses should end.
        scans: Turns of requests that read many entries: `turn(who_asks())`, so that they go round among tenants.
        prompts: Turns of plans and lookups, which do not wait for scans.
        queries: Turns of what routers ask, and of hints: fewer at a time than the calls into the data loop. Routers
            ask in bursts, so more may wait.
        known_pieces: Of the prompts that routers asked about.
        document_uses: How often plans asked for documents.
        followers: How many responses follow the events, by token.
    """

    service: Administered
    data_loop: DataLoop
    health_loop: DataLoop
    catalog: CatalogAccess
    is_stopping: Callable[[], bool]
    scans: Turns = field(default_factory=lambda: Turns(_SCANS_AT_ONCE))
    prompts: TenantTurns = field(default_factory=lambda: TenantTurns(2, of_tenant=1, waiting_max=4))
    queries: TenantTurns = field(default_factory=lambda: TenantTurns(3, of_tenant=2, waiting_max=24))
    known_pieces: KnownPieces = field(default_factory=KnownPieces)
    document_uses: DocumentUses = field(default_factory=DocumentUses)
    followers: Counter[str] = field(default_factory=Counter)

    @property
    def operations(self) -> StoreOperations:
        """What the store does for operators. Its coroutines run on the data loop."""
        return self.service.store.operations

    @property
    def rules(self) -> OperatorRules:
        """Quotas and retired weights that operators have set for all services.

        Raises:
            Unavailable: The service has no place to keep them.
        """
        if self.operations.operator_rules is None:
            raise Unavailable(NO_CATALOG)
        return self.operations.operator_rules

    def generations(self, tenant: str) -> Sequence[Generation]:
        """The keys under whose names a tenant's records are stored, the current one first; `None`: plain names."""
        store = self.service.store
        return store.generations(tenant) if isinstance(store, EncryptedStore) else (None,)

    def is_valid(self, grant: Grant) -> bool:
        """Whether a token still has this grant."""
        return self.service.credentials is None or self.service.credentials.value.holds(grant)

    def engines(self, grant: Grant, model: str, tenant_shown: str | None) -> list[ConnectedEngine]:
        """The connected engines that a token may see and that serve a model.

        Args:
            tenant_shown: Of this tenant alone, as `shown_tenant` names it; `None`: of all.
        """
        return [
            engine
            for engine in self.service.server.engines()
            if grant.sees(engine.tenant)
            and model in engine.instance.models
            and tenant_shown in (None, shown_tenant(engine.tenant))
        ]

    def soon(self, within_s: float = CALL_S) -> Deadline:
        """The deadline of a call that starts now."""
        return self.data_loop.soon(within_s)

    def now_s(self) -> int:
        """Seconds since the Unix epoch."""
        return SYSTEM_CLOCK.wall_ms() // 1000

    def is_retired(self, namespace: Namespace) -> bool:
        """Whether nothing of a namespace is served, because its weights are retired."""
        rules = self.operations.operator_rules
        return rules is not None and rules.are_retired(namespace.description.tenant, namespace.weights_id)

    async def memory_sizes(self, keys: Sequence[RecordKey]) -> list[int | None]:
        """For each record its bytes in this node's memory; `None`: it is not there."""
        pieces = await self.data_loop.call_in_pieces(
            keys, lambda piece, deadline: self.operations.memory_sizes(piece, deadline=deadline)
        )
        return list(chain.from_iterable(pieces))

    async def tier_states(self, within_s: float, *, is_health: bool = False) -> list[TierState]:
        """The state of each tier, the fastest first. A tier has half of the time to answer.

        Raises:
            Unavailable: The data loop does not answer.
        """
        loop = self.health_loop if is_health else self.data_loop
        return await loop.call(
            lambda deadline: self.operations.tiers(deadline=deadline.earlier(within_s / 2)), within_s
        )


async def _context(request: Request) -> AdminContext:
    context = request.app.state.admin
    assert isinstance(context, AdminContext)
    return context


Context = Annotated[AdminContext, Depends(_context)]


async def _in_path(context: Context, grant: Reader, namespace: NamespaceText) -> Namespace:
    return await context.catalog.find(namespace_id(namespace), grant)


async def _in_query(
    context: Context,
    grant: Reader,
    namespace: Annotated[
        str, Query(pattern=NAMESPACE_PATTERN, examples=[NAMESPACE_EXAMPLE], description="the namespace to list")
    ],
) -> Namespace:
    return await context.catalog.find(namespace_id(namespace), grant)


NamedNamespace = Annotated[Namespace, Depends(_in_path)]
"""The namespace in the path of a request, if the token may see it; else the answer is 404."""
QueriedNamespace = Annotated[Namespace, Depends(_in_query)]
"""The same for a parameter `namespace`."""
