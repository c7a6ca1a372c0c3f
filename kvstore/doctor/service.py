"""The service: does it answer, which release is it, how are its tiers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import kvstore
from kvstore.client import ClientOptions, connect
from kvstore.client.embedded import EmbeddedOptions, private_socket_path
from kvstore.doctor.administration import administration_finding
from kvstore.doctor.finding import Finding, failed, ok, skipped, warning
from kvstore.doctor.running import Check, Tell
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.runtime.deadline import Deadline
from kvstore.service.token_file import read_token
from kvstore.wire.address import TcpAddress, UnixAddress, parse_address
from kvstore.wire.tls import ClientTls

__all__ = ["EMBEDDED", "ServiceAddress", "judge_release", "judge_tiers", "judge_unreachable", "service_check"]

EMBEDDED = "embedded:"
_NAMES = ("service", "service.release", "service.tiers", "service.admin")


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """Where the service is, and how to log in.

    Attributes:
        url: `unix:/path`, `tcp://host:port`, `tls://host:port` or `embedded:`, as engines are told it.
        token_file: `None`: it asks for no token.
        tls: What to believe and to show at a `tls://` address.
        admin: Where it is administered; `None`: nowhere, or it is not known here.
    """

    url: str
    token_file: Path | None = None
    tls: ClientTls = field(default_factory=ClientTls)
    admin: TcpAddress | None = None


def service_check(address: ServiceAddress) -> Check:
    """Ask its status; a private service that does not run is none to be asked, engines start it themselves.

    Raises:
        InvalidRequest: The url is no address.
    """
    is_private = address.url == EMBEDDED
    url = f"unix:{private_socket_path(EmbeddedOptions().directory)}" if is_private else address.url
    parsed = parse_address(url)

    async def run(tell: Tell, deadline: Deadline) -> None:
        if is_private and isinstance(parsed, UnixAddress) and not Path(parsed.path).exists():
            tell(skipped("service", "no private service runs: an engine with url embedded: starts it"))
            for name in _NAMES[1:]:
                tell(skipped(name, "see service"))
            return
        try:
            token = read_token(address.token_file) if address.token_file is not None else None
            options = ClientOptions.of_a_person("kvstore doctor", deadline.remaining_s, address.tls)
            async with aclosing(connect(url, token=token, options=options)) as store:
                status = await store.status(deadline=deadline)
        except KVStoreError as error:
            tell(judge_unreachable(url, error))
            for name in _NAMES[1:]:
                tell(skipped(name, "see service"))
            return
        tell(ok("service", f"answers at {url}", "it answers"))
        tell(judge_release(status, kvstore.__version__))
        tell(judge_tiers(status))
        tell(await administration_finding(address.admin, address.tls, deadline))

    return Check(_NAMES, run, f"check that the process at {url} is not frozen, and start it again if it is")


def judge_unreachable(url: str, error: KVStoreError) -> Finding:
    """Judge why a service cannot be asked."""
    expected = f"a service answers at {url}"
    said = str(error).replace(url, "")
    if isinstance(error, InvalidRequest) and (path := error.details.get("path")) is not None:
        fix = f"see that {path} is there, is PEM, and may be read by this user"
        if "token" in said:
            fix = f"chmod 600 {path}: it must be there, be this user's alone, and hold the service's token"
        return failed("service", str(error), expected, fix)
    if "certificate" in said or "TLS" in said:
        fix = "name the authority of its certificate in tls_ca_file (KVSTORE_TLS_CA_FILE), and itself as that names it"
        return failed("service", str(error), expected, f"{fix}; if it asks for ours, tls_certificate_file")
    if "token" in said:
        fix = "name the service's token in token_file (KVSTORE_TOKEN_FILE, chmod 600); engines in theirs"
        return failed("service", str(error), expected, fix)
    fix = f"kvstore serve --listen {url} (with its other settings); or name the one that runs in --url and in engines"
    if isinstance(parse_address(url), TcpAddress):
        fix += "; check that no firewall is between"
    return failed("service", str(error), expected, fix)


def judge_release(status: Mapping[str, object], ours: str) -> Finding:
    name, seen = "service.release", str(status.get("version", "unknown"))
    if seen == ours:
        return ok(name, seen, f"{ours}, as here")
    fix = f"install one release on both sides, and start the service again: pip install kvstore=={max(seen, ours)}"
    return warning(name, seen, f"{ours}, as here", fix)


def judge_tiers(status: Mapping[str, object]) -> Finding:
    """Judge what the service says of its tiers: a breaker that is open, records put aside."""
    name, expected = "service.tiers", "every tier answers, and has no bad records"
    tiers = {tier: values for tier, values in _mapping(status.get("tiers")).items() if isinstance(values, Mapping)}
    down = {tier: values.get("reason") for tier, values in tiers.items() if values.get("healthy") is False}
    if down:
        seen = "; ".join(f"{tier} does not answer: {reason}" for tier, reason in down.items())
        fix = f"mend {', '.join(down)} (see its own checks); it is used again by itself, without a restart"
        return failed(name, seen, expected, fix)
    aside = {tier: values["num_quarantined"] for tier, values in tiers.items() if values.get("num_quarantined")}
    if aside:
        seen = ", ".join(f"{tier} put {number} bad records aside" for tier, number in aside.items())
        fix = "kvstore verify hot; kvstore verify cold; if there are more, check that medium for failing hardware"
        return warning(name, seen, expected, fix)
    return ok(name, f"{', '.join(tiers)} answer" if tiers else "it tells of none", expected)


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
