"""A service of the simulated cluster: the real store over simulated servers, wired as `kvstore.compose` does it."""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

from kvstore.catalog.entry import Level
from kvstore.catalog.redis.reconcile import Reconciler
from kvstore.errors import KVStoreError
from kvstore.eviction.candidates import AUTO, AdmitAll
from kvstore.runtime.background import Background
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.meters import Meters
from kvstore.store.catalogued_tier import CataloguedTier
from kvstore.store.limits import StoreLimits
from kvstore.store.recorder import Recorder
from kvstore.store.retention import RetentionParts
from kvstore.store.retention.backpressure import BudgetGate
from kvstore.store.retention.cold_admission import ColdAdmission
from kvstore.store.retention.owner import RetentionOwner
from kvstore.store.retention.policy_choice import PolicyChoice, candidates_of
from kvstore.store.retention.rules import RetentionRules, shares
from kvstore.store.tiered import TieredStore
from kvstore.store.upkeep.reindexing import mark_if_empty
from kvstore.testing.dict_pending import DictPendingLog
from kvstore.tiers.guarded import GuardedTier
from kvstore.tiers.memory import MemoryTier
from tests.simulation.media import Medium
from tests.simulation.oracle import Oracle
from tests.simulation.process import Process
from tests.simulation.redis_catalog import RedisBooks, SimulatedRedisCatalog
from tests.simulation.servers import Link, Server
from tests.simulation.tiers import SimulatedTier
from tests.virtual_time import VirtualClock

_PROBE_S = 2.0
LOOK_S = 4.0
OWNER_LEASE_S = 10.0


@dataclass(frozen=True)
class ServiceSizes:
    """Settings of a service.

    Attributes:
        memory_bytes: Of the memory tier.
        limits: Of the store.
        pending_lease_s: So long after its death another one finishes what it left.
        cold_bytes: Budget of the cold tier, over all services; `None`: no bound.
        admission: What the cold tier gets, as the setting `retention_admission`.
    """

    memory_bytes: int
    limits: StoreLimits
    pending_lease_s: float
    cold_bytes: int | None
    admission: str = "auto"


@dataclass
class Deployment:
    """What all services share, and what watches them."""

    clock: VirtualClock
    oracle: Oracle
    redis: Server
    s3: Server
    books: RedisBooks
    cold: Medium

    @property
    def hot(self) -> Medium:
        return self.books.records


class Service:
    """One run of one service, from its start to its end.

    Attributes:
        store: Once `start` has returned.
    """

    store: TieredStore
    memory: MemoryTier
    recorder: Recorder
    reconciler: Reconciler

    def __init__(
        self, name: str, deployment: Deployment, sizes: ServiceSizes, store_class: type[TieredStore] = TieredStore
    ) -> None:
        self.name = name
        self.process = Process(name)
        self.meters = Meters()
        self.sizes = sizes
        self.is_open = False
        self.clock = deployment.clock
        self.to_redis = Link(self.process, deployment.redis)
        self.to_s3 = Link(self.process, deployment.s3)
        self._deployment = deployment
        self._store_class = store_class
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        await self.process.spawn(self._open())

    async def _open(self) -> None:
        deployment, clock, meters, stack = self._deployment, self._deployment.clock, self.meters, self._stack
        instruments = Instruments(clock, meters)
        # no arena: its memory is warmed by a thread, and records this small never stand in it
        self.memory = MemoryTier(self.sizes.memory_bytes)
        stack.push_async_callback(self.memory.aclose)
        hot = self._guarded(SimulatedTier("redis", deployment.hot, self.to_redis, clock, deployment.oracle.suspect))
        cold = self._guarded(SimulatedTier("s3", deployment.cold, self.to_s3, clock, deployment.oracle.suspect))
        # entries, like the catalog, stand in the same Redis as the records
        pending = DictPendingLog(
            deployment.books.pending, lease_s=self.sizes.pending_lease_s, clock=clock, ask=self.to_redis
        )
        catalog = SimulatedRedisCatalog(deployment.books, clock=clock, ask=self.to_redis)
        self.recorder = Recorder(catalog, instruments)
        stack.push_async_callback(self.recorder.aclose)
        background = Background("catalog")
        stack.push_async_callback(background.aclose)
        self.reconciler = Reconciler(catalog, meters, period_s=LOOK_S, clock=clock)  # type: ignore[arg-type]
        background.spawn(self.reconciler.run(), "reconcile")
        rule = self.sizes.admission
        own_rule = AdmitAll.name if rule == AUTO else rule
        admission = ColdAdmission(own_rule, instruments, self.recorder.parents.of)
        choice, budget_gate = PolicyChoice(candidates_of(AUTO, rule), admission), None
        if (budget_bytes := self.sizes.cold_bytes) is not None:
            start, stop = shares(budget_bytes)
            budget_gate = BudgetGate(budget_bytes, int(budget_bytes * start), clock, is_shared=True)
            retention = RetentionOwner(
                cold,
                self.recorder,
                catalog.ownership(OWNER_LEASE_S),
                RetentionRules(budget_bytes=budget_bytes, start_share=start, stop_share=stop),
                choice=choice,
                instruments=instruments,
                hot=hot,
                budget_gate=budget_gate,
            )
            stack.push_async_callback(retention.aclose)
            retention.start()
        with suppress(KVStoreError):
            await mark_if_empty(catalog, [hot, cold], deadline=Deadline.after(_PROBE_S, clock))
        self.store = self._store_class(
            self.memory,
            CataloguedTier(hot, Level.HOT, self.recorder),
            CataloguedTier(cold, Level.COLD, self.recorder, budget_gate),
            pending=pending,
            recorder=self.recorder,
            limits=self.sizes.limits,
            retention=RetentionParts(choice=choice, admission=admission),
            instruments=instruments,
        )
        stack.push_async_callback(self.store.aclose)
        self.is_open = True

    def _guarded(self, tier: SimulatedTier) -> GuardedTier:
        guarded = GuardedTier(tier, Instruments(self._deployment.clock, self.meters))
        self._stack.push_async_callback(guarded.aclose)
        return guarded

    async def stop(self) -> None:
        """End in order."""
        self.is_open = False
        await self.process.spawn(self._stack.aclose())

    async def kill(self) -> None:
        """End at once: what it was doing is cut off wherever it is."""
        self.is_open = False
        await self.process.kill()

    @property
    def links(self) -> tuple[Link, Link]:
        return self.to_redis, self.to_s3
