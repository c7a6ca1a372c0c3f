"""The running service that a verb works with: its address, the token, a connection, and the store that it uses."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from kvstore.cli.admin import AdminClient, admin_client
from kvstore.cli.options import quieted, tls_of, token_of
from kvstore.client import BlockingStore, ClientOptions
from kvstore.client.remote import EMBEDDED
from kvstore.doctor.store_in_use import REPORTING, StoreInUse, store_of
from kvstore.doctor.unreachable import step_of
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable, next_step
from kvstore.runtime.deadline import Deadline
from kvstore.settings import Settings, load_settings
from kvstore.tiers.locations import ColdLocation, HotLocation
from kvstore.wire.address import Address, TcpAddress, UnixAddress, parse_address, unix_accepts
from kvstore.wire.private_place import default_directory, private_socket_path

Url: TypeAlias = Annotated[
    str,
    typer.Option(
        help="unix:/path, tcp://host:port, tls://host:port, or embedded: for this user's embedded service (the command "
        "does not start one). Default: the setting listen ($KVSTORE_LISTEN)."
    ),
]
DataTimeout: TypeAlias = Annotated[
    float, typer.Option("--timeout", "--timeout-s", min=0.01, max=600, help="Seconds to wait for the answer.")
]
ServiceUrl: TypeAlias = Annotated[
    str,
    typer.Option(
        "--url",
        help="The service whose store to use: unix:/path, tcp://host:port, tls://host:port or embedded:. `none` means "
        "the store that the settings here name. Default: the service that answers at listen or at admin_listen.",
    ),
]
ByService: TypeAlias = Annotated[
    bool, typer.Option("--by-service", help="Run it as a job of the running service; needs no login to the tiers here.")
]

NO_SERVICE = "none"
_PROBE_S, _JOB_ANSWER_S = 2.0, 30.0
_EMBEDDED_FOUND = "this user's embedded service"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection to the data port of a running service, its address and how it was found, and when to stop
    waiting for answers."""

    store: BlockingStore
    deadline: Deadline
    address: str
    found: str


@contextmanager
def connected(
    url: str, timeout_s: float, verb: str, token_file: Path | None, config: Path | None
) -> Iterator[Connection]:
    """Connect to the service at a url, or at `listen` of the settings if that is empty.

    Raises:
        InvalidRequest: The url, the settings or the token file are wrong.
        Unavailable: The service does not answer; the message names the next step.
    """
    settings = load_settings({}, config=config)
    token = token_of(settings, token_file)
    address, found = _found(url, settings, token_file, config, timeout_s)
    parsed_address(address)
    deadline = Deadline.after(timeout_s)
    try:
        with quieted(), _open(address, token, settings, verb, timeout_s) as store:
            yield Connection(store, deadline, address, found)
    except Unavailable as error:
        text = str(error)
        message = "the service refuses this token" if "token" in text else error.message
        reason = next_step(str(error.details.get("reason", "")).replace(f" address={address}", ""))[0]
        where = f"{address}, {found}{f': {reason}' if reason else ''}"
        step = _next_step(text, address, has_token=bool(token))
        raise Unavailable(f"{message} ({where}): {step}") from error


def parsed_address(address: str, *also: str, given: str = "--url") -> Address:
    """An address, which is wrong only if the user gave it.

    Args:
        also: What else may be given there.
        given: How it was given.
    """
    try:
        return parse_address(address)
    except InvalidRequest as error:
        raise InvalidRequest(
            f"{given}: {error.message}, or {' or '.join((EMBEDDED, *also))}", **error.details
        ) from error


def _open(address: str, token: str, settings: Settings, verb: str, timeout_s: float) -> BlockingStore:
    options = ClientOptions.of_a_person(f"kvstore {verb}", timeout_s, tls_of(settings))
    return BlockingStore(address, token=token or None, options=options)


def _found(
    url: str, settings: Settings, token_file: Path | None, config: Path | None, timeout_s: float
) -> tuple[str, str]:
    """The address of the data port, and how it was found: the url, else `listen` of the settings, else as
    `store_in_use` finds a service."""
    if url:
        return (_embedded_address() if url == EMBEDDED else url), "given as --url"
    if _names_a_service(settings):
        return str(settings.listen), _origin(settings)
    store = store_in_use("", token_file, config, timeout_s)
    if store.service:
        address = str(store.settings.listen)
        return address, store.found if address == store.service else f"reported at {store.service}, {store.found}"
    if store.problem:
        cause, step = next_step(store.problem)
        step = step or "name it with --url"
        raise Unavailable(f"a service runs, but does not report its address ({cause}): {step}")
    if (url := service_url(settings)) != EMBEDDED:
        return url, _origin(settings)
    return _embedded_address(), _EMBEDDED_FOUND


def _origin(settings: Settings) -> str:
    """How the address in `listen` was found."""
    given = settings.given("listen")
    return f"given {given}" if given else "the default of listen"


def service_url(settings: Settings) -> str:
    """The address of these settings' service; the embedded one if nothing was set and no socket exists at `listen`."""
    return str(settings.listen) if settings.names_a_store or _names_a_service(settings) else EMBEDDED


def _names_a_service(settings: Settings) -> bool:
    """Whether `listen` was set, or a socket exists at its default."""
    listen = settings.listen
    return "listen" in settings.model_fields_set or (isinstance(listen, UnixAddress) and Path(listen.path).exists())


def _embedded_address() -> str:
    return f"unix:{private_socket_path(default_directory())}"


def _next_step(text: str, address: str, *, has_token: bool) -> str:
    """The next step for an error, by its text."""
    if step := step_of(text, address, has_token=has_token):
        return step
    if address == _embedded_address():
        return "no embedded service is running; the first engine starts one. Use --url for another service"
    return (
        "check that `kvstore serve` runs there, or name another address with --url or KVSTORE_LISTEN (embedded: is "
        "this user's embedded service)"
    )


def check_store(store: StoreInUse, url: str) -> None:
    """Refuse to guess which store the user wants.

    Args:
        url: Of the service whose store the user wants; empty: not given.

    Raises:
        Unavailable: A service does not report which store it uses, and it was given, or the settings here name none.
        InvalidRequest: The settings here name another store than the service that answers.
    """
    if store.problem and (url or not store.settings.names_a_store):
        cause, step = next_step(store.problem)
        step = step_of(store.problem, store.problem.partition(", ")[0]) or step
        step = step or f"{REPORTING}; or name the store in KVSTORE_HOT and KVSTORE_COLD with --url {NO_SERVICE}"
        raise Unavailable(f"a service runs, but does not report which store it uses ({cause}): {step}")
    if store.differs:
        theirs = f"with --url {store.service}"
        if store.service.startswith("http"):  # found by its administration, whose address is no --url
            theirs = f"without {' and '.join(one.partition(' ')[0] for one in store.differs)} in these settings"
        raise InvalidRequest(
            f"the settings here name another store ({', '.join(store.differs)}) than the service at {store.service} "
            f"uses: run this with --url {NO_SERVICE} for the store named here, or {theirs} for the service's"
        )


def location_of(store: StoreInUse, name: str) -> HotLocation | ColdLocation:
    """The location of `hot` or `cold`, if this process can use it.

    Raises:
        InvalidRequest: A login is missing, or it is on another machine; the message names the next step.
    """
    if (why := store.obstacle(name)) is not None:
        raise InvalidRequest(f"cannot use the {name} tier from here: {why}; or add --by-service")
    location: HotLocation | ColdLocation = getattr(store.settings, name)
    return location


def store_in_use(url: str, token_file: Path | None, config: Path | None, timeout_s: float = 5.0) -> StoreInUse:
    """Find the running service, and request its settings.

    Args:
        url: Its address. Empty: `listen` of the settings here, else their `admin_listen`, else the embedded service,
            also where another user's service answers at the default of `admin_listen`; `none`: use the settings here.
        token_file: Its token; `None`: as the settings here say.
        config: The file with the settings here.
        timeout_s: How long each address may take.

    Raises:
        InvalidRequest: The settings, the url or the token file are wrong.
        Unavailable: A url was given, and nothing answers there.
    """
    local = load_settings({}, config=config)
    if url == NO_SERVICE:
        return StoreInUse(local)
    token = token_of(local, token_file)
    address = _embedded_address() if url == EMBEDDED else url or str(local.listen)
    parsed = parsed_address(address, NO_SERVICE)
    problem, refusal, silent = "", "", []
    if _accepts(parsed):
        try:
            is_remote = isinstance(parsed, TcpAddress) and parsed.host not in _LOOPBACK
            reported = _reported_settings(address, token, local, timeout_s)
            found = "given as --url" if url else _origin(local)
            return store_of(reported, local, address, found=found, is_remote=is_remote, is_chosen=bool(url))
        except KVStoreError as error:
            problem = f"{address}, {error.sentence()}"
    elif url:
        raise Unavailable(f"no service answers at {url}: check that `kvstore serve` runs there, or name another --url")
    else:
        silent.append(address)
    if (admin := local.admin_listen) is not None and not url:
        client = admin_client(local, token, timeout_s)
        if _accepts(admin):
            try:
                is_remote = admin.reachable.host not in _LOOPBACK
                return store_of(client.get("settings"), local, client.url, found=client.found, is_remote=is_remote)
            except KVStoreError as error:
                if "admin_listen" in local.model_fields_set:
                    problem = problem or f"{client.url}, {error.sentence()}"
                elif "token" in error.message:
                    refusal = f"{client.url}, {error.sentence()}"
        else:
            silent.append(client.url)
    embedded = _embedded_address()
    is_named = local.names_a_store or "listen" in local.model_fields_set
    if not url and not problem and not is_named and _accepts(parse_address(embedded)):
        with suppress(KVStoreError):
            reported = _reported_settings(embedded, token, local, timeout_s)
            return store_of(reported, local, embedded, found=_EMBEDDED_FOUND)
    return StoreInUse(local, problem=problem or refusal, silent=tuple(silent))


def _accepts(address: Address) -> bool:
    """Whether a program listens there."""
    try:
        if isinstance(address, UnixAddress):
            return unix_accepts(address.path)
        socket.create_connection((address.host, address.port), _PROBE_S).close()
    except (OSError, Unavailable):
        return False
    return True


def _reported_settings(address: str, token: str, local: Settings, timeout_s: float) -> Mapping[str, Any]:
    with quieted(), _open(address, token, local, "settings", timeout_s) as store:
        reported: Mapping[str, Any] = store.status(deadline=Deadline.after(timeout_s))
    if "settings" not in reported:
        raise Unavailable(
            "it reports its settings only to its own user on its Unix socket, and to operators at admin_listen"
        )
    return reported


def admin_of(store: StoreInUse, token_file: Path | None, config: Path | None) -> AdminClient:
    """A client for the administration interface of the running service."""
    local = load_settings({}, config=config)
    return admin_client(store.settings if store.service else local, token_of(local, token_file), _JOB_ANSWER_S)
