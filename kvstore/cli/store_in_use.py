"""Finds the store that a tool works on: that of the service that runs, whatever the environment of this shell says."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from kvstore.cli.administering import AdminClient, administered_by
from kvstore.cli.options import token_of
from kvstore.cli.quieting import quieted
from kvstore.client import BlockingStore, ClientOptions
from kvstore.client.embedded import EmbeddedOptions, private_socket_path
from kvstore.client.remote import EMBEDDED
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.runtime.deadline import Deadline
from kvstore.service.reported_settings import named_credentials, settings_of
from kvstore.settings import Settings, load_settings
from kvstore.tiers.locations import ColdLocation, FileLocation, HotLocation, S3Location
from kvstore.wire.address import Address, TcpAddress, UnixAddress, parse_address
from kvstore.wire.tls import ClientTls

__all__ = ["NONE", "ByService", "ServiceUrl", "StoreInUse", "client_of", "private_url", "store_in_use"]

NONE = "none"
_PROBE_S = 2.0
_LOOPBACK, _ANY = ("127.0.0.1", "::1", "localhost"), ("0.0.0.0", "::")

ServiceUrl: TypeAlias = Annotated[
    str,
    typer.Option(
        "--url",
        help="The service whose store it is: unix:/path, tcp://host:port, tls://host:port or embedded:; none: the "
        "store that the settings here name. Else the service that answers at listen or at admin_listen.",
    ),
]
ByService: TypeAlias = Annotated[
    bool, typer.Option("--by-service", help="Have the running service do it, as a job: no login is needed here.")
]


@dataclass(frozen=True, slots=True)
class StoreInUse:
    """The store that a tool works on.

    Attributes:
        settings: Those to work with.
        told_by: The address of the service that told them; empty: they are those of this shell.
        is_elsewhere: That service may run on another machine.
        lacking: Settings with a secret that is not known here: services never tell secrets.
        credentials: Variables with which the service logs in to S3, and which are not set here.
        differs: What the settings here say of a tier, where they say something else.
        problem: Why a service that answers did not tell; the settings are those of this shell then.
        asked: Where no service answers.
    """

    settings: Settings
    told_by: str = ""
    is_elsewhere: bool = False
    lacking: tuple[str, ...] = ()
    credentials: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    problem: str = ""
    asked: tuple[str, ...] = field(default_factory=tuple)

    def __str__(self) -> str:
        text = f"store: hot {self.settings.hot}, cold {_place_text(self.settings.cold)}"
        if self.told_by:
            return f"{text} (as the service at {self.told_by} tells)"
        where = f"; no service answers at {' or '.join(self.asked)}" if self.asked else ""
        return f"{text} (the settings of this shell{where})"

    def location(self, name: str) -> HotLocation | ColdLocation:
        """Where `hot` or `cold` is, if this process can use it.

        Raises:
            InvalidRequest: A login is missing, or it is on another machine; the message says what to do.
        """
        location: HotLocation | ColdLocation = getattr(self.settings, name)
        if (why := self.obstacle(name)) is not None:
            raise InvalidRequest(f"{why}; or let the service do it: --by-service", field=name, seen=str(location))
        return location

    def obstacle(self, name: str) -> str | None:
        """Why this process cannot use a tier, or the keys, of the service, with the next step; `None`: it can."""
        value, variable = getattr(self.settings, name), f"KVSTORE_{name.upper()}"
        if name in self.lacking:
            return f"services do not tell their secrets: set {variable} here to the service's whole {name}"
        if isinstance(value, S3Location) and self.credentials:
            return (
                f"the service logs in to S3 with {', '.join(self.credentials)} of its environment, which it does not "
                "tell: set them here too"
            )
        if isinstance(value, FileLocation) and self.is_elsewhere:
            return f"{value.path} is a directory of the service's machine: run this there"
        return None

    def check(self) -> None:
        """Refuse to guess which store is meant.

        Raises:
            Unavailable: A service answers, does not tell which store it uses, and the settings here name none.
            InvalidRequest: The settings here name another store than the service that answers.
        """
        if self.problem and not {"hot", "cold"} & self.settings.model_fields_set:
            raise Unavailable(f"a service runs, and does not tell which store it uses: {self.problem}")
        if self.differs:
            raise InvalidRequest(
                f"the settings here name another store ({', '.join(self.differs)}) than the service that runs at "
                f"{self.told_by}: --url {NONE} for theirs, --url {self.told_by} for the service's"
            )


def store_in_use(url: str, token_file: Path | None, config: Path | None, timeout_s: float = 5.0) -> StoreInUse:
    """Ask the service that runs for its settings.

    Args:
        url: Its address; empty: that of the settings here, else its administration's, else the private service's;
            `none`: nobody is asked.
        token_file: Its token; `None`: as the settings here say.
        config: The file with the settings here.
        timeout_s: How long each address may take.

    Raises:
        InvalidRequest: The settings, the url or the token file are wrong.
        Unavailable: A url was given, and nothing answers there.
    """
    local = load_settings({}, config=config)
    if url == NONE:
        return StoreInUse(local)
    token = token_of(local, token_file)
    problem, silent = "", []
    for address in _addresses(url, local):
        parsed = parse_address(address)
        if not _accepts(parsed):
            silent.append(address)
            continue
        try:
            is_elsewhere = isinstance(parsed, TcpAddress) and parsed.host not in _LOOPBACK
            told = _ask(address, token, local, timeout_s)
            return _told(told, local, address, is_elsewhere=is_elsewhere, is_chosen=bool(url))
        except KVStoreError as error:
            problem = problem or f"{address}: {error.message}"
    if url and silent:
        raise Unavailable("no service answers: is `kvstore serve` running there? name another --url", url=url)
    if (admin := local.admin_listen) is not None and not url:
        client = administered_by(local, token, timeout_s)
        if _accepts(admin):
            try:
                is_elsewhere = admin.host not in (*_LOOPBACK, *_ANY)
                return _told(client.get("settings"), local, client.url, is_elsewhere=is_elsewhere)
            except KVStoreError as error:
                if "admin_listen" in local.model_fields_set or "token" in error.message:
                    problem = problem or f"{client.url}: {error.message}"
        else:
            silent.append(client.url)
    private = private_url()
    if not url and not problem and not _named(local) and _accepts(parse_address(private)):
        with suppress(KVStoreError):
            return _told(_ask(private, token, local, timeout_s), local, private)
    return StoreInUse(local, problem=problem, asked=tuple(silent))


def private_url() -> str:
    """The address of this user's private service."""
    return f"unix:{private_socket_path(EmbeddedOptions().directory)}"


def _named(local: Settings) -> bool:
    return bool({"listen", "hot", "cold"} & local.model_fields_set)


def _addresses(url: str, local: Settings) -> list[str]:
    if url:
        return [private_url() if url == EMBEDDED else url]
    return [str(local.listen)]


def _accepts(address: Address) -> bool:
    """Whether something listens there."""
    try:
        if isinstance(address, UnixAddress):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(_PROBE_S)
                probe.connect(address.path)
        else:
            with socket.create_connection((address.host, address.port), _PROBE_S):
                pass
    except OSError:
        return False
    return True


def _ask(address: str, token: str, local: Settings, timeout_s: float) -> dict[str, Any]:
    tls = ClientTls(local.tls_ca_file, local.tls_certificate_file, local.tls_key_file)
    options = ClientOptions.of_a_person("kvstore settings", timeout_s, tls)
    with quieted(), BlockingStore(address, token=token or None, options=options) as store:
        told = dict(store.status(deadline=Deadline.after(timeout_s)))
    if "settings" not in told:
        raise Unavailable("it tells its settings on its Unix socket to its own user, and to operators at admin_listen")
    return told


def _told(
    told: dict[str, Any], local: Settings, address: str, *, is_elsewhere: bool = False, is_chosen: bool = False
) -> StoreInUse:
    settings, lacking = settings_of(told, local)
    own = {name: getattr(local, name) for name in ("hot", "cold") if name in local.model_fields_set}
    differs = [f"{name} {_place_text(here)}" for name, here in own.items() if not _same(here, getattr(settings, name))]
    return StoreInUse(
        settings,
        told_by=address,
        is_elsewhere=is_elsewhere,
        lacking=tuple(lacking),
        credentials=tuple(named_credentials(told)),
        differs=() if is_chosen else tuple(differs),
    )


def _same(here: object, there: object) -> bool:
    """Whether two locations are one place; what one of them leaves to the AWS environment is not known here."""
    if isinstance(here, S3Location) and isinstance(there, S3Location):
        ends = (here.endpoint_url, there.endpoint_url)
        return (here.bucket, here.prefix) == (there.bucket, there.prefix) and (None in ends or ends[0] == ends[1])
    return str(here) == str(there)


def _place_text(location: object) -> str:
    endpoint = location.endpoint_url if isinstance(location, S3Location) else None
    return f"{location} at {endpoint.rpartition('@')[2]}" if endpoint else str(location)


def client_of(store: StoreInUse, token_file: Path | None, config: Path | None, timeout_s: float) -> AdminClient:
    """The administration interface of the service that runs."""
    local = load_settings({}, config=config)
    return administered_by(store.settings if store.told_by else local, token_of(local, token_file), timeout_s)
