"""After the faults: everything comes to rest within a bounded time, and then everything adds up."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvstore.catalog.entry import EntryShape, Level, entry_of
from kvstore.errors import KVStoreError, Unavailable
from kvstore.model.keys import RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.store.upkeep.reindexing import reindex_store
from kvstore.testing.prompts import Prompt
from kvstore.tiers.memory import RECORD_OVERHEAD_BYTES
from tests.simulation.process import Process
from tests.simulation.redis_catalog import Loss, SimulatedRedisCatalog
from tests.simulation.servers import Link
from tests.simulation.service import OWNER_LEASE_S, Service
from tests.simulation.tiers import SimulatedTier

if TYPE_CHECKING:
    from tests.simulation.cluster import SimulatedCluster

_REST_S = 240.0
_SAMPLED_S = 60.0
"""The sampler's patience, and its way once round a Redis."""
_RECONCILED_S = 60.0
_OVER_BUDGET = 1.05
_REINDEXES_MAX = 5


async def settle(cluster: SimulatedCluster) -> None:
    """End all faults, start what is dead, wait until nothing is under way."""
    deployment = cluster.deployment
    for server in (deployment.redis, deployment.s3):
        weather = server.weather
        weather.slowness, weather.failing, weather.mangling, weather.is_down = 1.0, 0.0, 0.0, False
        server.thaw()
    for service in cluster.services:
        for link in service.links:
            link.is_cut = False
    deployment.hot.is_full = deployment.cold.is_full = False
    began_s = deployment.clock.monotonic_s()
    while left := under_way(cluster):
        await asyncio.sleep(1.0)
        if deployment.clock.monotonic_s() - began_s > _REST_S:
            cluster.oracle.violate(f"no rest after {_REST_S:.0f} s without faults: {left}")
            return
    lost_manifests = not deployment.cold.manifests.keys() <= deployment.hot.manifests.keys()
    if Loss.CATALOG in cluster.losses or lost_manifests:
        await asyncio.sleep(_SAMPLED_S)
        _redis_tells_of_its_records(cluster)
    if not deployment.books.catalog.complete:
        await _reindex(cluster)
    # leases end and are swept, those of dead owners as well, and retention does what it then may
    await asyncio.sleep(3.0 + OWNER_LEASE_S + cluster.plan.sizes.limits.lease_s)
    rested_s = deployment.clock.monotonic_s()
    while _told_and_lost(cluster) and deployment.clock.monotonic_s() - rested_s < _RECONCILED_S:
        await asyncio.sleep(1.0)  # a look that a fault held up is made again after as long a pause
    cluster.trace.add("WORLD", "rests")


async def _reindex(cluster: SimulatedCluster) -> None:
    """As `kvstore reindex`, which the log asks for; services go on meanwhile."""
    deployment, process = cluster.deployment, Process("reindex")
    to_redis, to_s3 = Link(process, deployment.redis), Link(process, deployment.s3)
    clock, suspect = deployment.clock, cluster.oracle.suspect
    catalog = SimulatedRedisCatalog(deployment.books, clock=clock, ask=to_redis)
    hot = SimulatedTier("redis", deployment.hot, to_redis, clock, suspect)
    cold = SimulatedTier("s3", deployment.cold, to_s3, clock, suspect)
    tiers = {Level.HOT: hot, Level.COLD: cold}
    for _ in range(_REINDEXES_MAX):  # a service may find meanwhile that it had lost something
        try:
            reports = await reindex_store(catalog, tiers, clock=clock)
        except Unavailable:
            continue
        listed = {level.name: (one.num_records, one.num_unknown) for level, one in reports.items()}
        cluster.trace.add("WORLD", f"reindexed: {listed}, records and unknown ones")
        return


def told(cluster: SimulatedCluster, level: Level) -> set[RecordKey]:
    """Of which records the catalog tells."""
    records: set[RecordKey] = set()
    for (namespace, prefix), data in cluster.deployment.books.catalog.entries.items():
        layout = next(prompt.layout for prompt in cluster.plan.prompts if prompt.description.id == namespace)
        records.update(entry_of(EntryShape.of(layout), namespace, prefix, data).keys(level))
    return records


def _redis_tells_of_its_records(cluster: SimulatedCluster) -> None:
    """Whatever was lost, the sampler has found every record that nobody told of."""
    hot, told_of = cluster.deployment.hot, told(cluster, Level.HOT)
    for key in hot.records:
        if key not in told_of and key.namespace in hot.manifests:
            cluster.oracle.violate("redis has a record, and the catalog was never told", key)


def _the_manifests_are_in_redis(cluster: SimulatedCluster) -> None:
    """Those of what is open in a service, and of what the catalog tells of as far as the cold tier has them. Of a
    namespace whose every service was killed while Redis did not answer it tells after `kvstore reindex` alone.
    """
    deployment = cluster.deployment
    told = deployment.cold.manifests.keys() & deployment.books.catalog.tenants.keys()
    there = {*told, *(one for service in cluster.services for one in service.store._namespaces)}
    for namespace in there.difference(deployment.hot.manifests):
        cluster.oracle.violate(f"redis lacks a manifest that there is: {namespace.hex()}")


def _told_and_lost(cluster: SimulatedCluster) -> set[RecordKey]:
    """Records that Redis let go and the catalog still tells of. But for those of a namespace whose only manifest was
    lost, and that no service has open: nobody can read its entries.
    """
    hot = cluster.deployment.hot
    return {key for key in told(cluster, Level.HOT).difference(hot.records) if key.namespace in hot.manifests}


def _the_catalog_tells_of_nothing_lost(cluster: SimulatedCluster) -> None:
    for key in _told_and_lost(cluster):
        cluster.oracle.violate("redis let a record go, and the catalog still tells of it", key)


def under_way(cluster: SimulatedCluster) -> str:
    if cluster.deployment.books.pending.entries:
        return f"{len(cluster.deployment.books.pending.entries)} records are pending"
    for service in cluster.services:
        if not service.is_open:
            return f"{service.name} is not there"
        saver = service.store._saver
        num_requests = len(saver._finisher._requests) if saver._finisher is not None else 0
        if (
            saver._copies
            or len(saver._pending_writes)
            or any(map(len, saver.queues.values()))
            or num_requests
            or len(service.recorder)
        ):
            return f"{service.name} is not done"
    return ""


async def check_at_rest(cluster: SimulatedCluster) -> None:
    """Everything adds up: see the names of what is called."""
    for service in cluster.services:
        cluster.watch(service).look_at_rest()
    _promises_are_in_the_cold_tier(cluster)
    _redis_may_evict_everything(cluster)
    _the_manifests_are_in_redis(cluster)
    _the_catalog_tells_of_nothing_lost(cluster)
    _the_cold_tier_is_within_its_budget(cluster)
    cluster.oracle.check()


async def check_at_the_end(cluster: SimulatedCluster) -> None:
    """Services stop, and what was promised is served by one that starts."""
    for service in cluster.services:
        await cluster.stop(service)
    await _everything_promised_is_served(cluster)


def _promises_are_in_the_cold_tier(cluster: SimulatedCluster) -> None:
    oracle, cold = cluster.oracle, cluster.deployment.cold
    for key, ack in oracle.promises.items():
        if cold.records.get(key) not in oracle.versions[key]:
            oracle.violate(f"acknowledged at {ack.value}, and not in the cold tier in the end", key)


def _redis_may_evict_everything(cluster: SimulatedCluster) -> None:
    hot = cluster.deployment.hot
    lost_pending = {Loss.EVERYTHING, Loss.ITS_RUN}.intersection(cluster.losses)
    for key in hot.records:
        if key not in hot.evictable and not lost_pending:
            cluster.oracle.violate("redis must keep a record for which no pending entry stands", key)


def _the_cold_tier_is_within_its_budget(cluster: SimulatedCluster) -> None:
    """What a service has written to S3 while Redis did not answer, and was killed before it could report it, is counted
    after `kvstore reindex` alone (docs/durability.md).
    """
    budget_bytes, cold = cluster.plan.sizes.cold_bytes, cluster.deployment.cold
    used_bytes = cold.used_bytes
    if cluster.num_kills:
        listed = told(cluster, Level.COLD)
        used_bytes = sum(len(data) for key, data in cold.records.items() if key in listed)
    if budget_bytes is not None and used_bytes > budget_bytes * _OVER_BUDGET:
        cluster.oracle.violate(f"the cold tier holds {used_bytes} of {budget_bytes} bytes")


async def _everything_promised_is_served(cluster: SimulatedCluster) -> None:
    """A service with empty memory serves each prompt as far as it was promised, bit for bit. The catalog is not
    believed in what it lacks: that it may lack a record after a crash costs a hit, and is no broken promise.
    """
    service = cluster.new_service("fresh")
    await service.start()
    cluster.deployment.books.catalog.complete = False
    cluster.services.append(service)
    for prompt in cluster.plan.prompts:
        try:
            await _serve(cluster, service, prompt)
        except KVStoreError as error:
            cluster.oracle.violate(f"the fresh service failed without any fault: {error}")
    await cluster.stop(service)
    cluster.services.remove(service)


async def _serve(cluster: SimulatedCluster, service: Service, prompt: Prompt) -> None:
    def soon() -> Deadline:
        return Deadline.after(30.0, cluster.deployment.clock)

    store, oracle = service.store, cluster.oracle
    await service.process.spawn(store.open_namespace(prompt.description, deadline=soon()))
    staged = await service.process.spawn(store.stage(prompt.query(), deadline=soon()))
    promised = _promised_tokens(cluster, prompt)
    sizes = [len(cluster.deployment.cold.records.get(key, b"")) for key in _keys(prompt)]
    is_small = sum(sizes) + RECORD_OVERHEAD_BYTES * len(sizes) <= service.sizes.limits.stage_bytes
    if staged.resume_tokens < promised and is_small:  # a hit is cut to what may be staged
        oracle.violate(f"{promised} tokens of {prompt.name} were promised, {staged.resume_tokens} are served")
    if staged.lease is None:
        return
    for key in staged.keys:
        record = await service.process.spawn(store.load(staged.lease, key, deadline=soon()))
        oracle.served(record, key, service.name)
    await service.process.spawn(store.release(staged.lease))


def _keys(prompt: Prompt) -> list[RecordKey]:
    page_tokens = prompt.layout.page_tokens
    return [
        prompt.key(tokens, group, slice_)
        for tokens in range(page_tokens, prompt.num_tokens + 1, page_tokens)
        for group, layout in enumerate(prompt.layout.groups)
        for slice_ in range(layout.num_slices)
    ]


def _promised_tokens(cluster: SimulatedCluster, prompt: Prompt) -> int:
    """The end of the last page up to which every record is promised."""
    page_tokens, reached = prompt.layout.page_tokens, 0
    for tokens in range(page_tokens, prompt.num_tokens + 1, page_tokens):
        keys = [
            prompt.key(tokens, group, slice_)
            for group, layout in enumerate(prompt.layout.groups)
            for slice_ in range(layout.num_slices)
        ]
        if not all(key in cluster.oracle.promises for key in keys):
            break
        reached = tokens
    return reached
