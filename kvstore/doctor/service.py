"""The service: whether it answers, its release, its tiers, whether its engines save what they compute."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import kvstore
from kvstore.client import ClientOptions, connect
from kvstore.client.embedded import EmbeddedOptions, private_socket_path
from kvstore.client.remote import EMBEDDED
from kvstore.doctor.administration import CERTIFICATE_FIX, administration_finding
from kvstore.doctor.finding import Finding, failed, ok, skipped, warning
from kvstore.doctor.running import Check, Report
from kvstore.doctor.saves import judge_saves
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.runtime.deadline import Deadline
from kvstore.service.authentication import read_token
from kvstore.wire.address import TcpAddress, UnixAddress, parse_address
from kvstore.wire.tls import ClientTls

__all__ = ["ServiceAddress", "judge_release", "judge_tiers", "judge_unreachable", "service_check"]

_NAMES = ("service", "service.release", "service.tiers", "service.saves", "service.admin")


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """Where the service is, and how to log in.

    Attributes:
        url: `unix:/path`, `tcp://host:port`, `tls://host:port` or `embedded:`, as in the engines' settings.
        token_file: File with the token; `None`: `token` is used, if there is one.
        tls: Trusted authorities and our certificate for a `tls://` address.
        admin: Address of the administration interface; `None`: it is off, or not known here.
        token: From the environment; empty: none.
    """

    url: str
    token_file: Path | None = None
    tls: ClientTls = field(default_factory=ClientTls)
    admin: TcpAddress | None = None
    token: str = field(default="", repr=False)


def service_check(address: ServiceAddress) -> Check:
    """Ask for its status. Skipped where a private service does not run: engines start it themselves.

    Raises:
        InvalidRequest: The url is not an address.
    """
    is_private = address.url == EMBEDDED
    url = f"unix:{private_socket_path(EmbeddedOptions().directory)}" if is_private else address.url
    parsed = parse_address(url)

    async def run(report: Report, deadline: Deadline) -> None:
        if is_private and isinstance(parsed, UnixAddress) and not Path(parsed.path).exists():
            report(skipped("service", "no private service runs: an engine with url embedded: starts it"))
            for name in _NAMES[1:]:
                report(skipped(name, "see service"))
            return
        try:
            token = read_token(address.token_file) if address.token_file is not None else address.token or None
            options = ClientOptions.of_a_person("kvstore doctor", deadline.remaining_s, address.tls)
            async with aclosing(connect(url, token=token, options=options)) as store:
                status = await store.status(deadline=deadline)
        except KVStoreError as error:
            report(judge_unreachable(url, error))
            for name in _NAMES[1:]:
                report(skipped(name, "see service"))
            return
        report(ok("service", f"answers at {url}", "it answers"))
        report(judge_release(status, kvstore.__version__))
        report(judge_tiers(status))
        report(judge_saves(status))
        report(await administration_finding(address.admin, address.tls, deadline))

    return Check(_NAMES, run, f"check that the process at {url} is not frozen, and restart it if it is")


def judge_unreachable(url: str, error: KVStoreError) -> Finding:
    """Judge why a service does not answer."""
    expected = f"a service answers at {url}"
    said = str(error).replace(url, "")
    if isinstance(error, InvalidRequest) and (path := error.details.get("path")) is not None:
        fix = f"check that {path} exists, is PEM, and can be read by this user"
        if "token" in said:
            fix = f"chmod 600 {path}: it must exist, be readable by this user only, and contain the service's token"
        return failed("service", str(error), expected, fix)
    if "certificate" in said or "TLS" in said:
        return failed("service", str(error), expected, CERTIFICATE_FIX)
    if "token" in said:
        fix = (
            "put the service's token into token_file (KVSTORE_TOKEN_FILE, chmod 600), and into the engines' token_file"
        )
        return failed("service", str(error), expected, fix)
    fix = f"kvstore serve --listen {url} (with its other settings); or name the one that runs in --url and in engines"
    if isinstance(parse_address(url), TcpAddress):
        fix += "; check that no firewall blocks it"
    return failed("service", str(error), expected, fix)


def judge_release(status: Mapping[str, object], ours: str) -> Finding:
    name, seen = "service.release", str(status.get("version", "unknown"))
    if seen == ours:
        return ok(name, seen, f"{ours}, as here")
    later = max(seen, ours, key=_numbers)
    fix = f"install release {later} on both sides, from its wheel or its clone, and restart the service"
    return warning(name, seen, f"{ours}, as here", fix)


def _numbers(release: str) -> list[int]:
    """Of a release, to compare it with others: 0.10.0 is later than 0.9.0."""
    return [int(digits) for digits in re.findall(r"\d+", release)]


def judge_tiers(status: Mapping[str, object]) -> Finding:
    """Judge the service's tiers: open circuit breakers, quarantined records."""
    name, expected = "service.tiers", "every tier answers, and has no corrupt records"
    tiers = {tier: values for tier, values in _mapping(status.get("tiers")).items() if isinstance(values, Mapping)}
    down = {tier: values.get("reason") for tier, values in tiers.items() if values.get("healthy") is False}
    if down:
        seen = "; ".join(f"{tier} does not answer: {reason}" for tier, reason in down.items())
        fix = f"repair {', '.join(down)} (see its own checks); the service then uses it again, without a restart"
        return failed(name, seen, expected, fix)
    quarantined = {tier: values["num_quarantined"] for tier, values in tiers.items() if values.get("num_quarantined")}
    if quarantined:
        seen = ", ".join(f"{number} corrupt records quarantined in {tier}" for tier, number in quarantined.items())
        fix = "kvstore verify hot; kvstore verify cold; if there are more, check that medium for failing hardware"
        return warning(name, seen, expected, fix)
    return ok(name, f"{', '.join(tiers)} answer" if tiers else "it reports none", expected)


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
