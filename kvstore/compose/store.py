"""The tiers, the pending log and the catalog that the settings name, and the store over them, encrypted or not."""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.util import find_spec
from socket import gethostname

from kvstore.catalog.base import Catalog, Gate
from kvstore.catalog.entry import Level
from kvstore.catalog.pending import PendingLog
from kvstore.compose.retention import open_retention
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable, UnsupportedFormat
from kvstore.format.manifest import STORE_VERSION_PLACE, check_store_version
from kvstore.model.media import medium_of, parse_media
from kvstore.runtime.arena import Arena
from kvstore.runtime.background import Background
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.io_loops import IoLoop, open_io_loops
from kvstore.runtime.meters import Meters
from kvstore.runtime.tracing import Tracing
from kvstore.settings import Settings
from kvstore.store.cache_events.placements import PlacementEvents, Topics
from kvstore.store.catalogued_tier import CataloguedTier
from kvstore.store.encryption.encrypted import EncryptedStore
from kvstore.store.encryption.key_ring import no_keys, watch_keys
from kvstore.store.limits import StoreLimits
from kvstore.store.recorder import Recorder
from kvstore.store.tiered import TieredStore
from kvstore.store.upkeep.catalog_keeper import LEASE_S, CatalogKeeper, DirectoryKeeper
from kvstore.store.upkeep.reindexing import Progress, Reports, mark_if_empty, reindex_store
from kvstore.tiers.base import Tier
from kvstore.tiers.guarded import GuardedTier, report_quarantine
from kvstore.tiers.locations import ColdLocation, FileLocation, HotLocation, NoTier, RedisLocation, S3Location
from kvstore.tiers.memory import MemoryTier

_log = logging.getLogger(__name__)

_PROBE_S = 2.0
_WALK_PROBE_S = 4.0
_POOL_NAME = "pool:kvstore"
"""In topics, of what nodes share."""
_ARENA_SPARE_BYTES = 64 << 20
"""In the arena beside the memory tier's budget: for records on their way in, and an eighth more for gaps."""
_WARM_BYTES = 256 << 20
"""Free memory that is kept faulted in: the records of a prompt of some ten thousand tokens."""


@asynccontextmanager
async def open_store(settings: Settings, instruments: Instruments | None = None) -> AsyncIterator[TieredStore]:
    """Open the tiers that the settings name and the store over them; close them again, the store first.

    A Redis or S3 that cannot be reached now is a warning: the store serves what it has, and uses the tier once it
    answers. On exit the write-back gets `drain_timeout_s`.

    Raises:
        InvalidRequest: The settings name something this installation cannot do; the message says what to install.
        Unavailable: The directory of the cold tier, or a file in it, cannot be used.
        UnsupportedFormat: A newer release has migrated a tier: nothing was written to it.
    """
    instruments = instruments or Instruments()
    async with AsyncExitStack() as stack:
        arena_bytes = settings.memory_bytes * 9 // 8 + _ARENA_SPARE_BYTES
        arena = Arena.open(arena_bytes, ahead_bytes=min(_WARM_BYTES, settings.memory_bytes))
        memory = MemoryTier(settings.memory_bytes, arena=arena)
        memory.on_quarantine = partial(report_quarantine, instruments.events, memory.name)
        stack.push_async_callback(memory.aclose)
        io_loops = await stack.enter_async_context(open_io_loops(_num_io_threads(settings)))
        hot = await _guarded(_open_hot(settings, io_loops), settings.hot, stack, instruments)
        cold = await _open_cold(settings, instruments.meters, io_loops)
        cold = await _guarded(cold, settings.cold, stack, instruments)
        # while the hot tier is not used, no other part of the store may call its server either
        gate = hot.check_usable if hot is not None else None
        recorder = await _open_recorder(settings, stack, instruments, gate)
        pending = await _open_pending(settings, recorder, stack, instruments.clock)
        if recorder is not None:
            await _check_catalog(recorder.catalog, hot, cold, stack, instruments)
            _keep_shared_catalog(recorder.catalog, settings, stack, instruments)
        retention, budget_gate = await open_retention(settings, recorder, cold, stack, hot=hot, instruments=instruments)
        cache_events = _cache_events(settings, memory, hot=hot, cold=cold, recorder=recorder, clock=instruments.clock)
        if cache_events is not None:  # closed after the store, whose last changes it publishes
            stack.push_async_callback(cache_events.aclose)
        store = TieredStore(
            memory,
            hot if hot is None or recorder is None else CataloguedTier(hot, Level.HOT, recorder),
            cold if cold is None or recorder is None else CataloguedTier(cold, Level.COLD, recorder, budget_gate),
            pending=pending,
            recorder=recorder,
            retention=retention,
            limits=store_limits(settings),
            instruments=instruments,
        )
        stack.push_async_callback(store.aclose)
        if cache_events is not None:
            store.publish_to(cache_events)
            cache_events.start()
        yield store


@asynccontextmanager
async def open_served_store(
    settings: Settings, *, tracing: Tracing | None = None
) -> AsyncIterator[TieredStore | EncryptedStore]:
    """`open_store`, behind an `EncryptedStore` where `encryption_keys` is set. Without it, a tenant whose records other
    services encrypt is warned of.

    Raises:
        InvalidRequest: The keys cannot be used, or the package for it is not installed; else as `open_store`.
    """
    instruments = Instruments(tracing=tracing)
    if settings.encryption_keys is None:
        async with open_store(settings, instruments) as store:
            store.check_keys(no_keys())
            yield store
        return
    if find_spec("cryptography") is None:
        raise missing_package("encryption", "encryption_keys", "cryptography")
    keys = watch_keys(settings.encryption_keys)  # before anything is opened: a wrong key file opens nothing
    async with open_store(settings, instruments) as store:
        encrypted = EncryptedStore(store, keys)
        try:
            yield encrypted
        finally:
            await encrypted.aclose()


@asynccontextmanager
async def open_tier(
    location: HotLocation | ColdLocation, settings: Settings, *, is_owner: bool = False
) -> AsyncIterator[Tier]:
    """One slower tier alone, for an operator's walk over it. It has answered once, since a step of a walk may wait
    longer.

    Args:
        is_owner: Own a directory, to write to it: no service may own it at the same time. Nothing is evicted from it:
            `disk_bytes` does not count. False: open it beside the service that owns it.

    Raises:
        InvalidRequest: There is none, or this installation cannot use it.
        Unavailable: The directory cannot be read, or the tier does not answer.
    """
    match location:
        case NoTier():
            raise InvalidRequest("there is no tier at this place", seen=str(location))
        case RedisLocation():
            tier = _redis(location, settings)
        case FileLocation():
            from kvstore.tiers.filesystem.tier import FilesystemTier

            tier = (
                await FilesystemTier.open(location.path, budget_bytes=sys.maxsize, fsync=settings.fsync)
                if is_owner
                else await FilesystemTier.open_beside(location.path)
            )
        case S3Location():
            tier = await _s3(location, Meters())
    try:
        try:
            await tier.get_manifest(STORE_VERSION_PLACE, deadline=Deadline.after(_WALK_PROBE_S))
        except Unavailable as error:
            raise Unavailable(f"{tier.name} does not answer: {error.message}", **error.details) from error
        yield tier
    finally:
        await tier.aclose()


@asynccontextmanager
async def open_catalog(
    settings: Settings, *, clock: Clock = SYSTEM_CLOCK, is_guest: bool = False, gate: Gate | None = None
) -> AsyncIterator[Catalog]:
    """The catalog of the settings' tiers: in the hot Redis, or in a file beside the records of a directory.

    Args:
        is_guest: Another process owns the directory.
        gate: Called before each call to Redis; raises `Unavailable` while Redis is not used.

    Raises:
        InvalidRequest: There is neither.
        Unavailable: The file cannot be used.
    """
    match settings.hot, settings.cold:
        case RedisLocation() as hot, _:
            from kvstore.catalog.redis.catalog import RedisCatalog
            from kvstore.tiers.redis import open_control

            async with open_control(hot, refuses_newer=gate is not None) as client:
                yield RedisCatalog(client, clock=clock, gate=gate)
        case NoTier(), FileLocation() as cold:
            from kvstore.catalog.sqlite.catalog import SqliteCatalog

            catalog = await SqliteCatalog.open(cold.path / "catalog.db", clock=clock, is_guest=is_guest)
            try:
                yield catalog
            finally:
                await catalog.aclose()
        case _:
            raise InvalidRequest("a catalog needs a hot Redis, or a directory for records", hot=str(settings.hot))


def store_limits(settings: Settings) -> StoreLimits:
    """The store's limits, as the settings choose them."""
    return StoreLimits(
        stage_bytes=settings.memory_bytes * 3 // 4,
        stall_timeout_s=settings.stall_timeout_ms / 1000,
        fetch_timeout_s=settings.fetch_timeout_ms / 1000,
        lease_s=settings.lease_s,
        write_back_bytes=settings.write_back_bytes,
        write_back_in_flight=settings.write_back_in_flight,
        pending_bytes=settings.pending_bytes,
        drain_timeout_s=settings.drain_timeout_s,
    )


async def _open_pending(
    settings: Settings, recorder: Recorder | None, stack: AsyncExitStack, clock: Clock
) -> PendingLog | None:
    """Where write-backs are recorded: beside the records that another process can find after this one has crashed."""
    match settings.hot, settings.cold:
        case RedisLocation(), FileLocation() | S3Location() as cold:
            from kvstore.catalog.redis.catalog import RedisCatalog

            assert recorder is not None and isinstance(recorder.catalog, RedisCatalog)
            return recorder.catalog.pending_log(str(cold), settings.pending_lease_s)
        case NoTier(), FileLocation() as cold:
            from kvstore.catalog.sqlite.pending import SqlitePendingLog

            log = await SqlitePendingLog.open(cold.path / "pending.db", lease_s=settings.pending_lease_s, clock=clock)
            stack.push_async_callback(log.aclose)
            return log
        case _:  # before the cold tier has a record, only this process's memory holds it
            return None


async def _open_recorder(
    settings: Settings, stack: AsyncExitStack, instruments: Instruments, gate: Gate | None
) -> Recorder | None:
    """The way to the catalog; `None`: the settings have no place for one, or it cannot be opened."""
    if not isinstance(settings.hot, RedisLocation) and not isinstance(settings.cold, FileLocation):
        return None
    try:
        catalog = await stack.enter_async_context(open_catalog(settings, clock=instruments.clock, gate=gate))
    except Unavailable as error:
        _log.warning("running without a catalog, so the directory drops its oldest records one by one: %s", error)
        return None
    recorder = Recorder(catalog, instruments)
    stack.push_async_callback(recorder.aclose)
    return recorder


async def _check_catalog(
    catalog: Catalog, hot: Tier | None, cold: Tier | None, stack: AsyncExitStack, instruments: Instruments
) -> None:
    """Mark the catalog of an empty store complete; say so if it may lack records. Then it is rebuilt in the background:
    that of a directory, which has one owner, by a keeper of its own.
    """
    tiers = [tier for tier in (hot, cold) if tier is not None]
    try:
        if hot is None and cold is not None:
            keeper = DirectoryKeeper(catalog, cold, instruments)
            stack.push_async_callback(keeper.aclose)
            try:
                await keeper.compare()
            finally:
                keeper.start()
        elif not await mark_if_empty(catalog, tiers, deadline=Deadline.after(_PROBE_S, instruments.clock)):
            _log.warning(
                "the catalog may lack records that are stored, so lookups ask the tiers as well, which is slower: "
                "one of the services adds them in the background"
            )
    except KVStoreError as error:
        _log.warning("cannot check whether the catalog is complete, it is used as it is: %s", error)


def _keep_shared_catalog(catalog: Catalog, settings: Settings, stack: AsyncExitStack, instruments: Instruments) -> None:
    """Correct a catalog in Redis in the background, and rebuild it when it is incomplete. Only once an empty store is
    marked complete: what the first check finds is what operators see until the next one.
    """
    if not isinstance(settings.hot, RedisLocation):
        return
    from kvstore.catalog.redis.catalog import RedisCatalog
    from kvstore.catalog.redis.reconcile import Reconciler

    assert isinstance(catalog, RedisCatalog)
    background = Background("catalog")
    stack.push_async_callback(background.aclose)
    reconciler = Reconciler(catalog, instruments.meters, period_s=settings.catalog_look_s, clock=instruments.clock)
    background.keep_running(reconciler.run, "reconcile")
    keeper = CatalogKeeper(
        catalog,
        partial(_add_to_catalog, settings, instruments.clock),
        catalog.ownership(LEASE_S),
        instruments,
        poll_s=settings.catalog_look_s,
    )
    stack.push_async_callback(keeper.aclose)
    keeper.start()


async def _add_to_catalog(settings: Settings, clock: Clock, progress: Progress) -> Reports:
    """`reindex_store` that only adds, over connections of its own in a thread of its own: a list of a thousand names of
    S3 takes its time to parse.

    Raises:
        Unavailable: As of `reindex_store`.
    """

    async def work() -> Reports:
        async with AsyncExitStack() as stack:
            places = {Level.HOT: settings.hot, Level.COLD: settings.cold}
            tiers = {
                level: await stack.enter_async_context(open_tier(place, settings))
                for level, place in places.items()
                if not isinstance(place, NoTier)
            }
            catalog = await stack.enter_async_context(open_catalog(settings, clock=clock))
            return await reindex_store(catalog, tiers, clock=clock, progress=progress, only_adds=True)

    loop = IoLoop("kvstore rebuild")
    try:
        return await loop.run(work)
    finally:
        await loop.aclose()


async def _guarded(
    tier: Tier | None, setting: object, stack: AsyncExitStack, instruments: Instruments
) -> GuardedTier | None:
    """Put the guard around a tier that was just opened, and check that it answers. If not, warn, and use it later. Warn
    of what an operator should change about it.

    Raises:
        UnsupportedFormat: A newer release has migrated it.
    """
    if tier is None:
        return None
    guarded = GuardedTier(tier, instruments)
    stack.push_async_callback(guarded.aclose)
    try:
        note = await tier.get_manifest(STORE_VERSION_PLACE, deadline=Deadline.after(_PROBE_S, instruments.clock))
        check_store_version(note, tier.name)
    except UnsupportedFormat:
        raise
    except KVStoreError as error:
        _log.warning(
            "tier is not reachable, starting without it; check that %s is running and may be used from here, "
            "it is used as soon as it answers tier=%s reason=%s",
            setting,
            tier.name,
            error,
        )
        if isinstance(error, Unavailable):
            guarded.open_breaker(str(error))
        return guarded
    try:
        for concern in await tier.concerns(deadline=Deadline.after(_PROBE_S, instruments.clock)):
            _log.warning("tier %s: %s: %s", tier.name, concern.severity.value, concern)
    except KVStoreError as error:
        _log.warning("cannot check the set-up of tier %s, it is used as it is: %s", tier.name, error)
    return guarded


def _cache_events(
    settings: Settings,
    memory: MemoryTier,
    *,
    hot: Tier | None,
    cold: Tier | None,
    recorder: Recorder | None,
    clock: Clock,
) -> PlacementEvents | None:
    """What publishes where pages are; `None`: no address is set."""
    if not settings.events_endpoint:
        if settings.events_replay_endpoint:
            raise InvalidRequest("setting events_endpoint: missing, though there is one", also="events_replay_endpoint")
        return None
    try:
        from kvstore.store.cache_events.publisher import EventPublisher
    except ImportError as error:
        raise missing_package("events", "events_endpoint", error.name) from error
    media = parse_media(settings.event_media)
    names = tuple(name.strip() for name in settings.events_node.split(",") if name.strip())
    if _POOL_NAME in names:
        raise InvalidRequest(
            "expected names of this node: all services have this one", field="events_node", seen=_POOL_NAME
        )
    tiers = {Level.HOT: hot, Level.COLD: cold}
    # in microseconds: fewer messages are sent, so that a later start has larger numbers
    first = 1000 * clock.wall_ms() if settings.events_numbers == "clock" else 0
    return PlacementEvents(
        EventPublisher(settings.events_endpoint, settings.events_replay_endpoint, first=first, clock=clock),
        Topics(names or (f"node:{gethostname()}",), _POOL_NAME),
        memory=memory,
        memory_medium=medium_of(memory.name, media),
        levels={level: medium_of(tier.name, media) for level, tier in tiers.items() if tier is not None},
        catalog=recorder.catalog if recorder is not None else None,
        clock=clock,
    )


def _num_io_threads(settings: Settings) -> int:
    """The setting, where there is a tier that uses such threads."""
    uses_network = isinstance(settings.hot, RedisLocation) or isinstance(settings.cold, S3Location)
    return settings.io_threads if uses_network else 1


def _open_hot(settings: Settings, io_loops: Sequence[IoLoop]) -> Tier | None:
    match settings.hot:
        case NoTier():
            return None
        case RedisLocation() as location:
            return _redis(location, settings, io_loops)


async def _open_cold(settings: Settings, meters: Meters, io_loops: Sequence[IoLoop]) -> Tier | None:
    match settings.cold:
        case NoTier():
            return None
        case FileLocation() as location:
            from kvstore.tiers.filesystem.tier import FilesystemTier

            budget_bytes = settings.disk_budget_bytes(location.path)
            return await FilesystemTier.open(location.path, budget_bytes=budget_bytes, fsync=settings.fsync)
        case S3Location() as location:
            return await _s3(location, meters, io_loops)


def _redis(location: RedisLocation, settings: Settings, io_loops: Sequence[IoLoop] = ()) -> Tier:
    try:
        from kvstore.tiers.redis import RedisTier
    except ImportError as error:
        raise missing_package("redis", "hot", error.name) from error
    return RedisTier(
        location,
        num_connections=max(settings.hot_connections, len(io_loops)),
        in_flight_bytes=settings.hot_in_flight_bytes,
        io_loops=io_loops,
    )


async def _s3(location: S3Location, meters: Meters, io_loops: Sequence[IoLoop] = ()) -> Tier:
    try:
        from kvstore.tiers.s3 import S3Tier
    except ImportError as error:
        raise missing_package("s3", "cold", error.name) from error
    return await S3Tier.open(location, meters=meters, io_loops=io_loops)


def missing_package(extra: str, setting: str, package: str | None) -> InvalidRequest:
    """The error for a setting that needs a package which is not installed."""
    return InvalidRequest(
        f"the setting {setting} needs a package that is not installed: pip install 'kvstore-vllm[{extra}]'",
        missing=package,
    )
