"""Selects the checks that a set-up needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.client.remote import EMBEDDED
from kvstore.doctor.directory import DIRECTORY_NAMES, directory_check
from kvstore.doctor.finding import Finding, ok, skipped, warning
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

__all__ = ["ToldStore", "checks_of", "judge_store"]

_ELSEWHERE = "the settings here name no tiers: run this with the service's (--config, KVSTORE_HOT, KVSTORE_COLD)"


@dataclass(frozen=True, slots=True)
class ToldStore:
    """Which store the checks look at.

    Attributes:
        text: The store, and who named it.
        is_told: The running service told it; else the settings of this shell did.
        problem: Why a service that answers did not tell.
        differs: What the settings of this shell say instead.
        obstacles: By `hot` and `cold`, why this process cannot look at the tier, with the next step.
    """

    text: str = ""
    is_told: bool = False
    problem: str = ""
    differs: Sequence[str] = ()
    obstacles: Mapping[str, str] = field(default_factory=dict)


def checks_of(settings: Settings, address: ServiceAddress, store: ToldStore | None = None) -> list[Check]:
    """All checks; those that do not apply to this set-up report why they are skipped.

    Args:
        settings: The service's, or defaults where they are not known here.
        address: Where the service is.
        store: Who told the settings; `None`: they are those of this shell.

    Raises:
        InvalidRequest: The url is not an address.
    """
    store = store or ToldStore()
    is_here = address.url in (EMBEDDED, str(settings.listen)) or not isinstance(parse_address(address.url), TcpAddress)
    return [
        versions_check(settings),
        service_check(address),
        _reporting(judge_store(store)),
        machine_check(settings, is_here=is_here),
        *(
            _of_tiers(settings, store.obstacles)
            if store.is_told or _are_known(settings, address)
            else _unknown(store.problem or _ELSEWHERE)
        ),
    ]


def judge_store(store: ToldStore) -> Finding:
    """Judge whether the checks look at the store that the service uses."""
    name, expected = "store", "the store that the running service uses"
    if store.is_told and store.differs:
        seen = f"{store.text}; the settings of this shell say {', '.join(store.differs)}"
        return warning(name, seen, expected, "unset what differs (KVSTORE_HOT, KVSTORE_COLD), or restart the service")
    if store.is_told:
        return ok(name, store.text, expected)
    if store.problem:
        fix = "run this as the service's user on its node, or with an operator's token for its administration"
        return warning(name, f"{store.text or 'not known'}: the service does not tell: {store.problem}", expected, fix)
    return skipped(name, f"no service tells: {store.text or 'the settings of this shell count'}")


def _are_known(settings: Settings, address: ServiceAddress) -> bool:
    named = bool({"hot", "cold"} & settings.model_fields_set)
    return named or address.url in (EMBEDDED, str(settings.listen))


def _of_tiers(settings: Settings, obstacles: Mapping[str, str]) -> list[Check]:
    hot, cold = _of_hot(settings), _of_cold(settings)
    if (why := obstacles.get("hot")) is not None:
        hot = [_not_looked_at(REDIS_NAMES, why)]
    if (why := obstacles.get("cold")) is not None:
        cold = [_not_looked_at(check.names, why) if len(check.names) > 1 else check for check in cold]
    namespaces = _none(("namespaces",), "see the tiers") if obstacles else namespaces_check(settings)
    return [*hot, *cold, namespaces]


def _of_hot(settings: Settings) -> list[Check]:
    match settings.hot:
        case RedisLocation() as hot:
            redis = _installed(REDIS_NAMES, lambda: redis_check(hot))
        case NoTier():
            redis = _none(REDIS_NAMES, "hot is memory:, no Redis is used")
    return [redis]


def _of_cold(settings: Settings) -> list[Check]:
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
    return [s3, directory]


def _installed(names: Sequence[str], make: Callable[[], Check]) -> Check:
    try:
        return make()
    except ImportError:
        return _none(names, "its client is not installed: see packages")


def _unknown(why: str) -> list[Check]:
    return [_none(names, why) for names in (REDIS_NAMES, S3_NAMES, DIRECTORY_NAMES, ("namespaces",))]


def _none(names: Sequence[str], why: str) -> Check:
    """A check that only reports that its subject is skipped."""

    return _reporting(skipped(names[0], why))


def _not_looked_at(names: Sequence[str], why: str) -> Check:
    """A check whose subject is used, and cannot be looked at from here: that is not the same as all being well."""
    cause, _, step = why.rpartition(": ")
    return _reporting(warning(names[0], f"not looked at: {cause}", "it can be looked at from here", step))


def _reporting(finding: Finding) -> Check:
    async def run(report: Report, deadline: Deadline) -> None:
        report(finding)

    return Check((finding.name,), run, "")
