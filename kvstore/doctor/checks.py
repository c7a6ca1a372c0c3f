"""Selects the checks that a set-up needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.client.remote import EMBEDDED
from kvstore.doctor.check import Check, Criterion, Finding, single
from kvstore.doctor.directory import DIRECTORY_NAMES, directory_check
from kvstore.doctor.engines import DOORS, engine_check
from kvstore.doctor.gpu import gpu_check
from kvstore.doctor.machine import machine_check
from kvstore.doctor.namespaces import namespaces_check
from kvstore.doctor.redis import REDIS_NAMES, redis_check
from kvstore.doctor.s3 import S3_NAMES, s3_check
from kvstore.doctor.service import ServiceAddress, service_check
from kvstore.doctor.store_in_use import REPORTING, StoreInUse
from kvstore.doctor.unreachable import step_of
from kvstore.doctor.versions import versions_check
from kvstore.errors import next_step
from kvstore.tiers.locations import FileLocation, RedisLocation, S3Location
from kvstore.wire.address import TcpAddress, parse_address


def checks_of(store: StoreInUse, address: ServiceAddress, engine: str | None) -> list[Check]:
    """All checks; those that do not apply to this set-up report why they are skipped.

    Args:
        store: The store to examine, with the settings of the service, or of this shell.
        address: Where the service is.
        engine: An engine to check too: `vllm`, or one of `kvstore.doctor.engines.DOORS`.

    Raises:
        InvalidRequest: The url is not an address.
    """
    settings = store.settings
    is_ours = address.url in (EMBEDDED, str(settings.listen))
    is_here = is_ours or not isinstance(parse_address(address.url), TcpAddress)
    checks = [
        versions_check(settings),
        *([] if engine is None else [engine_check(engine) if engine in DOORS else gpu_check()]),
        service_check(address),
        single(judge_store(store)),
        machine_check(settings, is_here=is_here),
    ]
    if store.service or is_ours or store.settings.names_a_store:
        return [*checks, *_tier_checks(store)]
    no_tiers = "the settings here name no tiers: use the service's settings (--config, KVSTORE_HOT, KVSTORE_COLD)"
    why = "see the check store" if store.problem else no_tiers
    return [*checks, *(_skipped(names, why) for names in (REDIS_NAMES, S3_NAMES, DIRECTORY_NAMES, ("namespaces",)))]


def judge_store(store: StoreInUse) -> Finding:
    """Judge whether the checks examine the store that the service uses."""
    it = Criterion("store", "the store that the running service uses")
    if store.service and store.differs:
        seen = f"{store}; the settings of this shell say {', '.join(store.differs)}"
        return it.warning(seen, "unset what differs (KVSTORE_HOT, KVSTORE_COLD), or restart the service")
    if store.service:
        return it.ok(str(store))
    if store.problem:
        fix = step_of(store.problem, store.problem.partition(", ")[0]) or REPORTING
        return it.warning(f"{store}: {store.problem}", fix)
    return it.skipped(f"no service reported it: {store}")


def _tier_checks(store: StoreInUse) -> list[Check]:
    hot, cold = store.settings.hot, store.settings.cold
    kind = "S3" if isinstance(cold, S3Location) else "a directory" if isinstance(cold, FileLocation) else "memory:"
    redis = _skipped(REDIS_NAMES, "hot is memory:, no Redis is used")
    s3 = _skipped(S3_NAMES, f"cold is {kind}, no S3 is used")
    directory = _skipped(DIRECTORY_NAMES, f"cold is {kind}, no directory is used")
    hot_obstacle, cold_obstacle = store.obstacle("hot"), store.obstacle("cold")
    if hot_obstacle is not None:
        redis = _not_examined(REDIS_NAMES, hot_obstacle)
    elif isinstance(hot, RedisLocation):
        redis = _if_installed(REDIS_NAMES, lambda: redis_check(hot))
    if isinstance(cold, S3Location):
        s3 = _if_installed(S3_NAMES, lambda: s3_check(cold))
        if cold_obstacle is not None:
            s3 = _not_examined(S3_NAMES, cold_obstacle)
    elif cold_obstacle is not None:
        directory = _not_examined(DIRECTORY_NAMES, cold_obstacle)
    elif isinstance(cold, FileLocation):
        directory = directory_check(cold.path, store.settings.disk_bytes)
    is_all_examined = hot_obstacle is None and cold_obstacle is None
    namespaces = namespaces_check(store.settings) if is_all_examined else _skipped(("namespaces",), "see the tiers")
    return [redis, s3, directory, namespaces]


def _if_installed(names: Sequence[str], make: Callable[[], Check]) -> Check:
    try:
        return make()
    except ImportError:
        return _skipped(names, "its client is not installed: see packages")


def _skipped(names: Sequence[str], why: str) -> Check:
    """A check that reports in one finding that its subject is skipped."""
    return single(Criterion(names[0]).skipped(why))


def _not_examined(names: Sequence[str], obstacle: str) -> Check:
    """A check of a subject that is used but cannot be examined from here: a warning, since it may be broken."""
    cause, step = next_step(obstacle)
    return single(Criterion(names[0], "it can be examined from here").warning(f"not examined: {cause}", step))
