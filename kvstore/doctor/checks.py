"""Selects the checks that a set-up needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.client.remote import EMBEDDED
from kvstore.doctor.check import Check, Criterion, Finding, single
from kvstore.doctor.directory import DIRECTORY_NAMES, directory_check
from kvstore.doctor.machine import machine_check
from kvstore.doctor.namespaces import namespaces_check
from kvstore.doctor.redis import REDIS_NAMES, redis_check
from kvstore.doctor.s3 import S3_NAMES, s3_check
from kvstore.doctor.service import ServiceAddress, service_check
from kvstore.doctor.versions import versions_check
from kvstore.settings import Settings
from kvstore.tiers.locations import FileLocation, RedisLocation, S3Location
from kvstore.wire.address import TcpAddress, parse_address

__all__ = ["ReportedStore", "checks_of", "judge_store"]


@dataclass(frozen=True, slots=True)
class ReportedStore:
    """The store that the checks examine.

    Attributes:
        text: The store, and where its settings are from.
        is_reported: The running service reported it; else it is that of the settings of this shell.
        problem: Why a service that answers did not report it.
        differs: What the settings of this shell say instead.
        obstacles: For `hot` and `cold`, why this process cannot examine the tier, with the next step after a colon.
    """

    text: str = ""
    is_reported: bool = False
    problem: str = ""
    differs: Sequence[str] = ()
    obstacles: Mapping[str, str] = field(default_factory=dict)


def checks_of(settings: Settings, address: ServiceAddress, store: ReportedStore | None = None) -> list[Check]:
    """All checks; those that do not apply to this set-up report why they are skipped.

    Args:
        settings: The service's, or defaults if they are not known here.
        address: Where the service is.
        store: Where the settings are from; `None`: from this shell.

    Raises:
        InvalidRequest: The url is not an address.
    """
    store = store or ReportedStore()
    is_ours = address.url in (EMBEDDED, str(settings.listen))
    is_here = is_ours or not isinstance(parse_address(address.url), TcpAddress)
    checks = [
        versions_check(settings),
        service_check(address),
        single(judge_store(store)),
        machine_check(settings, is_here=is_here),
    ]
    if store.is_reported or is_ours or {"hot", "cold"} & settings.model_fields_set:
        return [*checks, *_tier_checks(settings, store.obstacles)]
    why = store.problem or (
        "the settings here name no tiers: use the service's settings (--config, KVSTORE_HOT, KVSTORE_COLD)"
    )
    return [*checks, *(_skipped(names, why) for names in (REDIS_NAMES, S3_NAMES, DIRECTORY_NAMES, ("namespaces",)))]


def judge_store(store: ReportedStore) -> Finding:
    """Judge whether the checks examine the store that the service uses."""
    it = Criterion("store", "the store that the running service uses")
    if store.is_reported and store.differs:
        seen = f"{store.text}; the settings of this shell say {', '.join(store.differs)}"
        return it.warning(seen, "unset what differs (KVSTORE_HOT, KVSTORE_COLD), or restart the service")
    if store.is_reported:
        return it.ok(store.text)
    if store.problem:
        fix = "run this as the service's user on its node, or with an operator's token for admin_listen"
        return it.warning(f"{store.text}; the service did not report its store: {store.problem}", fix)
    return it.skipped(f"no service reported it: {store.text or 'the settings of this shell are used'}")


def _tier_checks(settings: Settings, obstacles: Mapping[str, str]) -> list[Check]:
    hot, cold = settings.hot, settings.cold
    is_s3, is_directory = isinstance(cold, S3Location), isinstance(cold, FileLocation)
    kind = "S3" if is_s3 else "a directory" if is_directory else "memory:"
    redis = _skipped(REDIS_NAMES, "hot is memory:, no Redis is used")
    s3 = _skipped(S3_NAMES, f"cold is {kind}, no S3 is used")
    directory = _skipped(DIRECTORY_NAMES, f"cold is {kind}, no directory is used")
    if "hot" in obstacles:
        redis = _not_examined(REDIS_NAMES, obstacles["hot"])
    elif isinstance(hot, RedisLocation):
        redis = _if_installed(REDIS_NAMES, lambda: redis_check(hot))
    if "cold" in obstacles:
        if is_s3:
            s3 = _not_examined(S3_NAMES, obstacles["cold"])
        else:
            directory = _not_examined(DIRECTORY_NAMES, obstacles["cold"])
    elif isinstance(cold, S3Location):
        s3 = _if_installed(S3_NAMES, lambda: s3_check(cold))
    elif isinstance(cold, FileLocation):
        directory = directory_check(cold.path, settings.disk_bytes)
    namespaces = _skipped(("namespaces",), "see the tiers") if obstacles else namespaces_check(settings)
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
    cause, _, step = obstacle.rpartition(": ")
    return single(Criterion(names[0], "it can be examined from here").warning(f"not examined: {cause}", step))
