"""The service: whether it answers, its release, encryption keys, administration interface, lost saves."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import kvstore
from kvstore.client import ClientOptions, connect
from kvstore.client.remote import EMBEDDED
from kvstore.doctor.check import Check, Criterion, Finding
from kvstore.doctor.service_tiers import judge_tiers, mapping_of
from kvstore.doctor.unreachable import CERTIFICATE_FIX, step_of
from kvstore.errors import InvalidRequest, KVStoreError, next_step
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.sizes import counted
from kvstore.service.authentication import read_token
from kvstore.store.explain.reasons import REASONS, UNKNOWN
from kvstore.wire.address import TcpAddress, UnixAddress, parse_address
from kvstore.wire.private_place import default_directory, private_socket_path
from kvstore.wire.tls import ClientTls

_NAMES = (
    "service",
    "service.release",
    "service.tiers",
    "service.encryption",
    "service.catalog",
    "service.files",
    "service.saves",
    "service.admin",
)
_NOTHING_SAVED = {"no_key", "wrong_key"}
"""Problems of a tenant's keys for which nothing of it is saved."""
_ANSWER_S_MIN = 0.1
_ANSWER_BYTES_MAX = 1 << 20
_MIB = 1 << 20
_CATALOG_FIX = "mend what the checks of redis find or, without a Redis, of the directory: it has the catalog"


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
    """Request its status. Skipped if no embedded service is running: engines start it.

    Raises:
        InvalidRequest: The url is not an address.
    """
    is_embedded = address.url == EMBEDDED
    url = f"unix:{private_socket_path(default_directory())}" if is_embedded else address.url
    parsed = parse_address(url)
    reported: dict[str, object] = {}

    async def run(deadline: Deadline) -> AsyncIterator[Finding]:
        it = Criterion("service", "it answers")
        if is_embedded and isinstance(parsed, UnixAddress) and not Path(parsed.path).exists():
            yield it.skipped("no embedded service is running; the first engine starts one")
            return
        try:
            token = read_token(address.token_file) if address.token_file is not None else address.token or None
            options = ClientOptions.of_a_person("kvstore doctor", deadline.remaining_s, address.tls)
            async with aclosing(connect(url, token=token, options=options)) as store:
                status = await store.status(deadline=deadline)
        except KVStoreError as error:
            yield judge_unreachable(url, error)
            return
        reported.update(status)
        yield it.ok(f"answers at {url}")
        yield judge_release(status, kvstore.__version__)
        yield judge_tiers(status)
        yield judge_encryption(status)
        yield judge_catalog(status)
        yield judge_files(status)
        yield judge_saves(status)
        instance = mapping_of(status.get("service")).get("instance")
        yield await examine_admin(address.admin, address.tls, deadline, instance=instance)

    def conclude(found: Mapping[str, Finding]) -> Iterator[Finding]:
        if reported:
            yield judge_tiers(reported, found)

    return Check(_NAMES, run, f"check that the process at {url} is not frozen, and restart it if it is", conclude)


def judge_unreachable(url: str, error: KVStoreError) -> Finding:
    """Judge why a service does not answer."""
    it = Criterion("service", f"a service answers at {url}")
    if isinstance(error, InvalidRequest) and (path := error.details.get("path")) is not None:
        fix = f"check that {path} exists, is PEM, and can be read by this user"
        if "token" in error.message:
            fix = f"chmod 600 {path}: it must exist, be readable by this user only, and contain the service's token"
        return it.failed(error.sentence(), fix)
    fix = step_of(str(error), url)
    if not fix:
        fix = f"kvstore serve --listen {url} (with its other settings), or correct --url and the url of the engines"
        if isinstance(parse_address(url), TcpAddress):
            fix += "; check that no firewall blocks it"
    return it.failed(error.sentence(), fix)


def judge_release(status: Mapping[str, object], ours: str) -> Finding:
    it, seen = Criterion("service.release", f"{ours}, as here"), str(status.get("version", "unknown"))
    if seen == ours:
        return it.ok(seen)
    later = max(seen, ours, key=lambda release: [int(digits) for digits in re.findall(r"\d+", release)])
    return it.warning(
        seen, f"install release {later} on both sides, from its wheel or its clone, and restart the service"
    )


def judge_encryption(status: Mapping[str, object]) -> Finding:
    """Judge whether the service has the keys that its tenants' records were written with."""
    it = Criterion("service.encryption", "the keys that records were written with")
    encryption = status.get("encryption")
    if not isinstance(encryption, Mapping) or "problems" not in encryption:
        return it.skipped("this service is of an older release, which does not report it")
    problems = mapping_of(encryption["problems"])
    if not problems:
        return it.ok("as expected" if encryption.get("keys") else "it has none, and its tenants' records need none")
    found = key_problems(problems)
    seen, fix = "; ".join(cause for cause, _ in found), "; ".join(dict.fromkeys(step for _, step in found))
    return it.failed(seen, fix) if problems.keys() & _NOTHING_SAVED else it.warning(seen, fix)


def key_problems(problems: Mapping[str, object]) -> list[tuple[str, str]]:
    """What is wrong with encryption keys, and the next step of each, from a service's status."""
    return [next_step(str(text)) for texts in problems.values() if isinstance(texts, list | tuple) for text in texts]


def judge_catalog(status: Mapping[str, object]) -> Finding:
    """Judge whether the catalog has every stored record."""
    it = Criterion("service.catalog", "the catalog answers, and has every stored record")
    if away := list(_catalog_troubles(mapping_of(status.get("catalog")))):
        steps = [step for _, step in away if step]
        return it.warning("; ".join(what for what, _ in away), "; ".join(dict.fromkeys(steps)) or _CATALOG_FIX)
    is_complete = mapping_of(status.get("counters")).get("catalog_complete")
    if is_complete is None:
        return it.skipped("the service has no catalog of several services, or does not report it")
    if is_complete:
        return it.ok("it is complete")
    return it.warning("it may lack records that are stored, so lookups query the tiers too", reindex_step(status))


def _catalog_troubles(catalog: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """What the catalog does not do for the service, with why and the next step, which may be empty."""
    for what, verb in (("takes_none", "takes no changes"), ("answers_none", "answers no lookups")):
        if catalog.get(f"{what}_since_ms") is not None:
            cause, step = next_step(str(catalog.get(f"{what}_reason", "")))
            yield f"it {verb} of the service{f' ({cause})' if cause else ''}", step


def reindex_step(status: Mapping[str, object]) -> str:
    """How an incomplete catalog becomes complete, which needs every tier."""
    tiers = mapping_of(status.get("tiers"))
    down = [tier for tier, values in tiers.items() if mapping_of(values).get("healthy") is False]
    when = f", once {' and '.join(down)} answers again" if down else ""
    return (
        f"wait: one of the services adds them{when}; its log says how far it is, and `kvstore reindex` does the same; "
        "if it does not end, see redis.policy in `kvstore doctor`: a Redis that may evict any key evicts the catalog"
    )


def judge_files(status: Mapping[str, object]) -> Finding:
    """Judge whether the files that a service reads again when they change are in force."""
    it, service = Criterion("service.files", "changed files are in force"), mapping_of(status.get("service"))
    if "not_reloaded" not in service:
        return it.skipped("this service does not report it to this token, or is of an older release")
    refused = {what: next_step(str(problem)) for what, problem in mapping_of(service["not_reloaded"]).items()}
    if not refused:
        return it.ok("none was refused")
    seen = "; ".join(f"what changed in the {what} is refused ({cause})" for what, (cause, _) in refused.items())
    steps = "; ".join(f"correct the file of the {what}{step and ': '}{step}" for what, (_, step) in refused.items())
    return it.warning(f"{seen}, the previous content stays in force", f"{steps}; it is read again without a restart")


def judge_saves(status: Mapping[str, object]) -> Finding:
    """Judge whether engines save what they compute."""
    it, recent = Criterion("service.saves", "engines save all that they compute"), mapping_of(status.get("recent"))
    if "losses" not in recent:
        return it.skipped("this service is of an older release, which does not report it")
    if not recent["losses"] and not recent.get("too_large"):
        return it.ok(f"no record was lost in the last {_minutes(recent)} minutes")
    return it.warning(losses_text(recent), "; ".join(loss_fixes(recent)))


def losses_text(recent: Mapping[str, object]) -> str:
    """What engines computed and did not save in the last minutes, from `recent` of a service's status."""
    parts = []
    if losses := _losses(recent):
        by_reason = ", ".join(f"{reason} {num:,}" for reason, num in losses)
        total = sum(num for _, num in losses)
        parts.append(
            f"{counted(total, 'record was', 'records were')} computed in the last {_minutes(recent)} minutes, but not "
            f"saved ({by_reason})"
        )
    if sizes := mapping_of(recent.get("too_large")):
        parts.append(
            f"an engine never saves some of its pages or states: they need {_mib(sizes.get('needs_bytes'))} of "
            f"pinned_bytes and it has {_mib(sizes.get('pinned_bytes'))}"
        )
    return "; ".join(parts)


def loss_fixes(recent: Mapping[str, object]) -> list[str]:
    """What to do about each reason of `losses_text`, the most frequent first."""
    fixes = []
    sizes = mapping_of(recent.get("too_large"))
    if sizes:
        fixes.append(f'set "pinned_bytes":"{_mib(sizes.get("needs_bytes"))}" in kv_connector_extra_config of vLLM')
    for reason, _ in _losses(recent):
        if reason != "save_too_large" or not sizes:
            known = REASONS.get(reason, UNKNOWN)
            fixes.append(f"{reason}: {known.advice or known.why}")
    return fixes


def _losses(recent: Mapping[str, object]) -> list[tuple[str, int]]:
    found = [(str(reason), num) for reason, num in mapping_of(recent.get("losses")).items() if isinstance(num, int)]
    return sorted(found, key=lambda one: -one[1])


def _minutes(recent: Mapping[str, object]) -> int:
    window_s = recent.get("window_s")
    return window_s // 60 if isinstance(window_s, int) else 5


def _mib(num_bytes: object) -> str:
    """Rounded up, so that a setting of this size is enough."""
    return f"{-(-num_bytes // _MIB)}MiB" if isinstance(num_bytes, int) else "more"


async def examine_admin(
    address: TcpAddress | None, tls: ClientTls, deadline: Deadline, *, instance: object = None
) -> Finding:
    """Request `/livez` of the administration interface. A service works without it, so a problem is a warning.

    Args:
        address: Where it listens; `None`: it is off, or not known here.
        tls: Trusted authorities and our certificate for a `tls://` address.
        deadline: When to stop waiting for the answer.
        instance: What names the examined service; `None`: it does not say.
    """
    if address is None:
        return Criterion("service.admin").skipped("admin_listen is off, or not known here")
    url = address.http_url
    it = Criterion("service.admin", f"it answers at {url}")

    async def get(path: str) -> tuple[int, Mapping[str, object]]:
        return await asyncio.to_thread(_get, address, path, tls, max(_ANSWER_S_MIN, deadline.remaining_s))

    try:
        status, alive = await get("/livez")
        if status != http.HTTPStatus.OK:
            return it.warning(f"another program answers at {url}: {status}", "give admin_listen a free port")
        if instance is None or alive.get("instance") in (None, instance):
            return it.ok(f"answers at {url}")
        listen = mapping_of(mapping_of((await get("/v1/settings"))[1].get("settings")).get("listen"))
    except (OSError, http.client.HTTPException, InvalidRequest) as error:
        seen = str(error) or type(error).__name__
    else:
        whose = f"the service at {listen['value']}" if "value" in listen else "another service"
        fix = (
            "give admin_listen of this service a port of its own and restart it: verbs like `kvstore ls` show the other"
        )
        step = "" if "value" in listen else f"; `ss -ltnp sport = :{address.port}` names its process"
        return it.warning(f"{whose} answers at {url}, not this one", f"{fix}{step}")
    if "certificate" in seen or "tls_" in seen:
        fix = CERTIFICATE_FIX
    elif address.tls and "SSL" in seen:
        fix = "restart the service: it listens there without TLS, or another program listens there"
    elif not address.tls and "TLS" in seen:
        fix = "set admin_listen to tls://host:port here too, or restart the service"
    else:
        fix = (
            "look for `no administration interface` in the service's log: its port is in use, or "
            "pip install 'kvstore-vllm[admin]'"
        )
    return it.warning(seen, fix)


def _get(address: TcpAddress, path: str, tls: ClientTls, timeout_s: float) -> tuple[int, Mapping[str, object]]:
    """The status of an answer, and its object; empty: it is none. No token is sent, since others may answer there."""
    host = address.reachable.host
    if address.tls:
        context = tls.context()
        if host != address.host:  # its certificate has the name that others use, not the loopback's
            context.check_hostname = False
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            host, address.port, timeout=timeout_s, context=context
        )
    else:
        connection = http.client.HTTPConnection(host, address.port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        try:
            return answer.status, mapping_of(json.loads(answer.read(_ANSWER_BYTES_MAX)))
        except ValueError:  # it is another program
            return answer.status, {}
    except ssl.SSLCertVerificationError as error:
        raise OSError(f"its certificate is not trusted: {error.verify_message}") from error
    except ssl.SSLError as error:
        raise OSError(f"SSL: {error.reason or error}") from error
    except (ConnectionResetError, http.client.RemoteDisconnected) as error:
        hint = "it may require a client certificate" if address.tls else "it may use TLS"
        raise OSError(f"it closed the connection before it answered: {hint}") from error
    finally:
        connection.close()
