"""Wires the components of a service's store from its settings. The only place that does."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.model.keys import NamespaceId
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.settings import Settings
from kvstore.store.limits import StoreLimits
from kvstore.store.tiered import TieredStore
from kvstore.tiers.base import Tier
from kvstore.tiers.locations import ColdLocation, FileLocation, HotLocation, NoTier, RedisLocation, S3Location
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.wrap import GuardedTier

__all__ = ["open_store", "store_limits"]

_log = logging.getLogger(__name__)

_PROBE_S = 2.0


@asynccontextmanager
async def open_store(
    settings: Settings, *, clock: Clock = SYSTEM_CLOCK, meters: Meters | None = None
) -> AsyncIterator[TieredStore]:
    """Open the tiers that the settings name and the store over them; close them again, the store first.

    A Redis or S3 that cannot be reached now is a warning: the store serves what it has, and uses the tier once it is
    there. On exit the write-back gets `drain_timeout_s`.

    Raises:
        InvalidRequest: The settings name something this installation cannot do; the message says what to install.
        Unavailable: The directory of the cold tier cannot be used.
    """
    meters = meters if meters is not None else Meters()
    async with AsyncExitStack() as stack:
        memory = MemoryTier(settings.memory_bytes)
        stack.push_async_callback(memory.aclose)
        hot = await _guarded(await _open_hot(settings.hot), settings.hot, stack, meters, clock)
        cold = await _guarded(await _open_cold(settings.cold, settings), settings.cold, stack, meters, clock)
        store = TieredStore(memory, hot, cold, meters=meters, limits=store_limits(settings), clock=clock)
        stack.push_async_callback(store.aclose)
        yield store


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
        drain_timeout_s=settings.drain_timeout_s,
    )


async def _guarded(
    tier: Tier | None, setting: object, stack: AsyncExitStack, meters: Meters, clock: Clock
) -> Tier | None:
    """Put the guard around a tier that was just opened, and see whether it answers."""
    if tier is None:
        return None
    guarded = GuardedTier(tier, meters=meters, clock=clock)
    stack.push_async_callback(guarded.aclose)
    await _warn_if_unreachable(tier, setting, clock)
    return guarded


async def _open_hot(location: HotLocation) -> Tier | None:
    match location:
        case NoTier():
            return None
        case RedisLocation():
            return _redis(location)


async def _open_cold(location: ColdLocation, settings: Settings) -> Tier | None:
    match location:
        case NoTier():
            return None
        case FileLocation():
            return await _filesystem(location, settings)
        case S3Location():
            return await _s3(location)


async def _filesystem(location: FileLocation, settings: Settings) -> Tier:
    from kvstore.tiers.filesystem.tier import FilesystemTier

    budget_bytes = settings.disk_budget_bytes(location.path)
    return await FilesystemTier.open(location.path, budget_bytes=budget_bytes, fsync=settings.fsync)


def _redis(location: RedisLocation) -> Tier:
    if location.mode != "standalone" or location.tls:
        raise InvalidRequest(
            "this release speaks to one Redis without TLS: use redis://host:port/database", hot=str(location)
        )
    try:
        from kvstore.tiers.redis import RedisTier
    except ImportError as error:
        raise _missing("redis", "hot", error) from error
    return RedisTier.from_url(location.url)


async def _s3(location: S3Location) -> Tier:
    try:
        from kvstore.tiers.s3 import S3Tier
    except ImportError as error:
        raise _missing("s3", "cold", error) from error
    return await S3Tier.open(
        location.bucket, location.prefix, endpoint_url=location.endpoint_url, region=location.region
    )


def _missing(extra: str, setting: str, error: ImportError) -> InvalidRequest:
    return InvalidRequest(
        f"the setting {setting} needs a package that is not installed: pip install 'kvstore[{extra}]'",
        missing=error.name,
    )


async def _warn_if_unreachable(tier: Tier, setting: object, clock: Clock) -> None:
    try:
        await tier.get_manifest(NamespaceId(bytes(16)), deadline=Deadline.after(_PROBE_S, clock))
    except KVStoreError as error:
        _log.warning(
            "tier is not reachable, starting without it; check that %s is running and may be used from here, "
            "it is used as soon as it answers tier=%s reason=%s",
            setting,
            tier.name,
            error,
        )
