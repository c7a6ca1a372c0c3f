"""Selects the checks that a set-up needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.client.connecting import EMBEDDED
from kvstore.doctor.directory import DIRECTORY_NAMES, directory_check
from kvstore.doctor.finding import skipped
from kvstore.doctor.machine import machine_check
from kvstore.doctor.namespaces import namespaces_check
from kvstore.doctor.redis import REDIS_NAMES, redis_check
from kvstore.doctor.running import Check, Report
from kvstore.doctor.s3 import S3_NAMES, s3_check
from kvstore.doctor.service import ServiceAddress, service_check
from kvstore.doctor.versions import versions_check
from kvstore.runtime.deadline import Deadline
from kvstore.settings import Settings
from kvstore.tiers.locations import FileLocation, NoTier, RedisLocation, S3Location
from kvstore.wire.address import TcpAddress, parse_address

__all__ = ["checks_of"]

_ELSEWHERE = "the settings here name no tiers: run this with the service's (--config, KVSTORE_HOT, KVSTORE_COLD)"


def checks_of(settings: Settings, address: ServiceAddress) -> list[Check]:
    """All checks; those that do not apply to this set-up report why they are skipped.

    Args:
        settings: The service's, or defaults where they are not known here.
        address: Where the service is.

    Raises:
        InvalidRequest: The url is not an address.
    """
    is_here = address.url in (EMBEDDED, str(settings.listen)) or not isinstance(parse_address(address.url), TcpAddress)
    return [
        versions_check(settings),
        service_check(address),
        machine_check(settings, is_here=is_here),
        *(_of_tiers(settings) if _are_known(settings, address) else _unknown(_ELSEWHERE)),
    ]


def _are_known(settings: Settings, address: ServiceAddress) -> bool:
    named = bool({"hot", "cold"} & settings.model_fields_set)
    return named or address.url in (EMBEDDED, str(settings.listen))


def _of_tiers(settings: Settings) -> list[Check]:
    match settings.hot:
        case RedisLocation() as hot:
            redis = _installed(REDIS_NAMES, lambda: redis_check(hot))
        case NoTier():
            redis = _none(REDIS_NAMES, "hot is memory:, no Redis is used")
    match settings.cold:
        case S3Location() as cold:
            s3 = _installed(S3_NAMES, lambda: s3_check(cold))
            directory = _none(DIRECTORY_NAMES, "cold is S3, no directory is used")
        case FileLocation(path):
            s3 = _none(S3_NAMES, "cold is a directory, no S3 is used")
            directory = directory_check(path, settings.disk_bytes)
        case NoTier():
            s3 = _none(S3_NAMES, "cold is memory:, no S3 is used")
            directory = _none(DIRECTORY_NAMES, "cold is memory:, no directory is used")
    return [redis, s3, directory, namespaces_check(settings)]


def _installed(names: Sequence[str], make: Callable[[], Check]) -> Check:
    try:
        return make()
    except ImportError:
        return _none(names, "its client is not installed: see packages")


def _unknown(why: str) -> list[Check]:
    return [_none(names, why) for names in (REDIS_NAMES, S3_NAMES, DIRECTORY_NAMES, ("namespaces",))]


def _none(names: Sequence[str], why: str) -> Check:
    """A check that only reports that its subject is skipped."""

    async def run(report: Report, deadline: Deadline) -> None:
        report(skipped(names[0], why))

    return Check((names[0],), run, "")
