"""Wires the components of a service's store from its settings. The only place that does, with `compose_retention`."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from kvstore.catalog.base import Catalog, Gate
from kvstore.catalog.entry import Level
from kvstore.catalog.pending import PendingLog
from kvstore.compose_retention import open_orders, open_retention
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable, UnsupportedFormat
from kvstore.format.manifest import STORE_VERSION_PLACE, check_store_version
from kvstore.runtime.arena import Arena
from kvstore.runtime.background import Background
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.events import Events
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.meters import Meters
from kvstore.runtime.tracing import Tracing
from kvstore.settings import Settings
from kvstore.store.catalog_keeper import CatalogKeeper
from kvstore.store.catalogued import CataloguedTier
from kvstore.store.limits import StoreLimits
from kvstore.store.recorder import Recorder
from kvstore.store.reindexing import mark_if_empty
from kvstore.store.tiered import TieredStore
from kvstore.tiers.base import Tier
from kvstore.tiers.guarded import GuardedTier, report_quarantine
from kvstore.tiers.locations import ColdLocation, FileLocation, HotLocation, NoTier, RedisLocation, S3Location
from kvstore.tiers.memory import MemoryTier

__all__ = ["open_catalog", "open_store", "open_tier", "store_limits"]

_log = logging.getLogger(__name__)

_PROBE_S = 2.0
_ARENA_SPARE_BYTES = 64 << 20
"""In the arena beside the memory tier's budget: for records on their way in, and an eighth more for gaps."""
_WARM_BYTES = 256 << 20
"""Free memory that is kept faulted in: the records of a prompt of some ten thousand tokens."""


@asynccontextmanager
async def open_store(
    settings: Settings,
    *,
    clock: Clock = SYSTEM_CLOCK,
    meters: Meters | None = None,
    events: Events | None = None,
    tracing: Tracing | None = None,
) -> AsyncIterator[TieredStore]:
    """Open the tiers that the settings name and the store over them; close them again, the store first.

    A Redis or S3 that cannot be reached now is a warning: the store serves what it has, and uses the tier once it is
    there. On exit the write-back gets `drain_timeout_s`.

    Raises:
        InvalidRequest: The settings name something this installation cannot do; the message says what to install.
        Unavailable: The directory of the cold tier, or a file in it, cannot be used.
        UnsupportedFormat: A newer release has migrated a tier: nothing was written to it.
    """
    meters = meters if meters is not None else Meters()
    events = events if events is not None else Events(clock)
    async with AsyncExitStack() as stack:
        arena_bytes = settings.memory_bytes * 9 // 8 + _ARENA_SPARE_BYTES
        arena = Arena.open(arena_bytes, ahead_bytes=min(_WARM_BYTES, settings.memory_bytes))
        memory = MemoryTier(settings.memory_bytes, arena=arena)
        memory.on_quarantine = partial(report_quarantine, events, memory.name)
        stack.push_async_callback(memory.aclose)
        guard = partial(_guarded, stack=stack, clock=clock, meters=meters, events=events, tracing=tracing)
        hot = await guard(await _open_hot(settings.hot, settings), settings.hot)
        cold = await guard(await _open_cold(settings.cold, settings, meters), settings.cold)
        # while the hot tier is not used, its server gets no other requests either
        gate = hot.check_usable if hot is not None else None
        pending = await _open_pending(settings, stack, clock, gate)
        recorder = await _open_recorder(settings, stack, meters, clock, gate)
        if recorder is not None:
            await _look_at_catalog(recorder, hot, cold, stack, meters=meters, clock=clock)
        orders = await open_orders(settings, recorder, stack, meters=meters, clock=clock, gate=gate)
        bounds = await open_retention(
            settings, recorder, cold, stack, orders=orders, meters=meters, clock=clock, gate=gate
        )
        store = TieredStore(
            memory,
            hot if hot is None or recorder is None else CataloguedTier(hot, Level.HOT, recorder),
            cold if cold is None or recorder is None else CataloguedTier(cold, Level.COLD, recorder, bounds.room),
            pending=pending,
            recorder=recorder,
            choice=bounds.choice,
            admission=bounds.admission,
            orders=orders,
            meters=meters,
            events=events,
            limits=store_limits(settings),
            clock=clock,
            tracing=tracing,
        )
        stack.push_async_callback(store.aclose)
        yield store


@asynccontextmanager
async def open_tier(
    location: HotLocation | ColdLocation, settings: Settings, *, is_owner: bool = False
) -> AsyncIterator[Tier]:
    """One slower tier alone, for an operator's walk over it; a directory is looked at beside the service that owns it.

    Args:
        location: Where it is.
        settings: How it is used.
        is_owner: Own the directory, which no service may do meanwhile: for whoever writes to it.

    Raises:
        InvalidRequest: There is none, or this installation cannot use it.
        Unavailable: The directory cannot be read.
    """
    match location:
        case NoTier():
            raise InvalidRequest("there is no tier at this place", seen=str(location))
        case RedisLocation():
            tier = _redis(location, settings)
        case FileLocation() if is_owner:
            tier = await _filesystem(location, settings)
        case FileLocation():
            from kvstore.tiers.filesystem.tier import FilesystemTier

            tier = await FilesystemTier.open_beside(location.path)
        case S3Location():
            tier = await _s3(location, Meters())
    try:
        yield tier
    finally:
        await tier.aclose()


def store_limits(settings: Settings) -> StoreLimits:
    """The store's limits, as the settings choose them."""
    stage_bytes = settings.stage_bytes if settings.stage_bytes is not None else settings.memory_bytes * 3 // 4
    return StoreLimits(
        stage_bytes=stage_bytes,
        stall_timeout_s=settings.stall_timeout_ms / 1000,
        fetch_timeout_s=settings.fetch_timeout_ms / 1000,
        lease_s=settings.lease_s,
        write_back_bytes=settings.write_back_bytes,
        write_back_in_flight=settings.write_back_in_flight,
        pending_bytes=settings.pending_bytes,
        drain_timeout_s=settings.drain_timeout_s,
    )


async def _guarded(
    tier: Tier | None,
    setting: object,
    *,
    stack: AsyncExitStack,
    clock: Clock,
    meters: Meters,
    events: Events,
    tracing: Tracing | None,
) -> GuardedTier | None:
    """Put the guard around a tier that was just opened, and see whether it answers."""
    if tier is None:
        return None
    guarded = GuardedTier(tier, Instruments(clock, meters, events, tracing))
    stack.push_async_callback(guarded.aclose)
    await _look_at(guarded, setting, clock)
    return guarded


async def _open_hot(location: HotLocation, settings: Settings) -> Tier | None:
    match location:
        case NoTier():
            return None
        case RedisLocation():
            return _redis(location, settings)


async def _open_cold(location: ColdLocation, settings: Settings, meters: Meters) -> Tier | None:
    match location:
        case NoTier():
            return None
        case FileLocation():
            return await _filesystem(location, settings)
        case S3Location():
            return await _s3(location, meters)


async def _open_pending(
    settings: Settings, stack: AsyncExitStack, clock: Clock, gate: Gate | None
) -> PendingLog | None:
    """Where write-backs are recorded: beside the records that another process can find after a crash of ours."""
    match settings.hot, settings.cold:
        case RedisLocation() as hot, FileLocation() | S3Location() as cold:
            from kvstore.catalog.redis.pending import RedisPendingLog
            from kvstore.tiers.redis import open_control

            client = await stack.enter_async_context(open_control(hot, refuses_newer=True))
            return RedisPendingLog(client, str(cold), lease_s=settings.pending_lease_s, gate=gate)
        case NoTier(), FileLocation() as cold:
            from kvstore.catalog.sqlite.pending import SqlitePendingLog

            log = await SqlitePendingLog.open(cold.path / "pending.db", lease_s=settings.pending_lease_s, clock=clock)
            stack.push_async_callback(log.aclose)
            return log
        case _:  # nothing, or nothing but this process's memory, holds a record before the cold tier does
            return None


async def _open_recorder(
    settings: Settings, stack: AsyncExitStack, meters: Meters, clock: Clock, gate: Gate | None
) -> Recorder | None:
    """The way to the catalog: in the hot Redis, where there is one, or beside the records of a directory."""
    if not isinstance(settings.hot, RedisLocation) and not isinstance(settings.cold, FileLocation):
        return None
    try:
        catalog = await stack.enter_async_context(open_catalog(settings, clock=clock, gate=gate))
    except Unavailable as error:
        _log.warning("going on without a catalog, so the directory drops its oldest records one by one: %s", error)
        return None
    recorder = Recorder(catalog, meters, clock)
    stack.push_async_callback(recorder.aclose)
    if not isinstance(settings.hot, RedisLocation):
        return recorder

    from kvstore.catalog.redis.catalog import RedisCatalog
    from kvstore.catalog.redis.reconcile import Reconciler

    assert isinstance(catalog, RedisCatalog)
    background = Background("catalog")
    stack.push_async_callback(background.aclose)
    reconciler = Reconciler(catalog, meters, period_s=settings.catalog_look_s, clock=clock)
    background.spawn(reconciler.run(), "reconcile")
    return recorder


async def _look_at_catalog(
    recorder: Recorder,
    hot: Tier | None,
    cold: Tier | None,
    stack: AsyncExitStack,
    *,
    meters: Meters,
    clock: Clock,
) -> None:
    """At the first start nothing is stored, and the catalog knows all of it; else say when it may lack something. That
    of a directory, which nobody else writes to, is then made anew in the background.
    """
    tiers = [tier for tier in (hot, cold) if tier is not None]
    try:
        if hot is None and cold is not None:
            keeper = CatalogKeeper(recorder.catalog, cold, Level.COLD, meters=meters, clock=clock)
            stack.push_async_callback(keeper.aclose)
            try:
                await keeper.compare()
            finally:
                keeper.start()
        elif not await mark_if_empty(recorder.catalog, tiers, deadline=Deadline.after(_PROBE_S, clock)):
            _log.warning(
                "the catalog may lack records that are stored, so lookups ask the tiers as well, which is slower: "
                "run `kvstore reindex` once, services may go on meanwhile"
            )
    except KVStoreError as error:
        _log.warning("the catalog cannot be looked at, the store goes on without what it tells: %s", error)


@asynccontextmanager
async def open_catalog(
    settings: Settings, *, clock: Clock = SYSTEM_CLOCK, is_guest: bool = False, gate: Gate | None = None
) -> AsyncIterator[Catalog]:
    """The catalog of the settings' tiers: in the hot Redis, or in a file, also as a guest of whoever keeps that one.

    Args:
        settings: Where it is.
        clock: For first and last use.
        is_guest: Another process owns the directory.
        gate: Asked before each call to Redis; raises `Unavailable` while nothing may be asked of it.

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


async def _filesystem(location: FileLocation, settings: Settings) -> Tier:
    from kvstore.tiers.filesystem.tier import FilesystemTier

    budget_bytes = settings.disk_budget_bytes(location.path)
    return await FilesystemTier.open(location.path, budget_bytes=budget_bytes, fsync=settings.fsync)


def _redis(location: RedisLocation, settings: Settings) -> Tier:
    try:
        from kvstore.tiers.redis import RedisTier
    except ImportError as error:
        raise _missing("redis", "hot", error) from error
    return RedisTier(location, num_connections=settings.hot_connections, in_flight_bytes=settings.hot_in_flight_bytes)


async def _s3(location: S3Location, meters: Meters) -> Tier:
    try:
        from kvstore.tiers.s3 import S3Tier
    except ImportError as error:
        raise _missing("s3", "cold", error) from error
    return await S3Tier.open(location, meters=meters)


def _missing(extra: str, setting: str, error: ImportError) -> InvalidRequest:
    return InvalidRequest(
        f"the setting {setting} needs a package that is not installed: pip install 'kvstore-vllm[{extra}]'",
        missing=error.name,
    )


async def _look_at(guarded: GuardedTier, setting: object, clock: Clock) -> None:
    """Warn when the tier does not answer, and leave it alone until it does; or of what an operator should change
    about it.

    Raises:
        UnsupportedFormat: A newer release has migrated it.
    """
    tier = guarded.inner
    try:
        note = await tier.get_manifest(STORE_VERSION_PLACE, deadline=Deadline.after(_PROBE_S, clock))
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
        return
    try:
        for concern in await tier.concerns(deadline=Deadline.after(_PROBE_S, clock)):
            _log.warning("tier %s: %s: %s", tier.name, concern.severity.value, concern)
    except KVStoreError as error:
        _log.warning("the set-up of tier %s cannot be looked at, going on without: %s", tier.name, error)
