"""Shared by the verbs that ask a running service on its data port: its address, the token, the timeout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from kvstore.cli.options import AsJson, Config, TokenFile, token_of
from kvstore.cli.quieting import quieted
from kvstore.client import BlockingStore, ClientOptions
from kvstore.client.embedded import EmbeddedOptions, private_socket_path
from kvstore.client.remote import EMBEDDED
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.runtime.deadline import Deadline
from kvstore.settings import TOKEN_VARIABLE, Settings, load_settings
from kvstore.wire.address import UnixAddress, parse_address
from kvstore.wire.tls import ClientTls

__all__ = ["AsJson", "Asked", "Config", "Timeout", "TokenFile", "Url", "asked", "service_url"]


Url: TypeAlias = Annotated[
    str,
    typer.Option(
        help="unix:/path, tcp://host:port, tls://host:port or embedded: (asks, never starts one); else as listen says "
        "($KVSTORE_LISTEN)."
    ),
]
Timeout: TypeAlias = Annotated[
    float, typer.Option("--timeout", "--timeout-s", min=0.01, max=600, help="Seconds to wait for the answer.")
]


@dataclass(frozen=True, slots=True)
class Asked:
    """A running service.

    Attributes:
        store: The connection to it.
        deadline: When to stop waiting for it.
        name: Its address, for people.
    """

    store: BlockingStore
    deadline: Deadline
    name: str


@contextmanager
def asked(url: str, timeout_s: float, verb: str, token_file: Path | None, config: Path | None) -> Iterator[Asked]:
    """The service at a url, or else at the `listen` of the settings; with the token of the flag or the settings.

    Raises:
        InvalidRequest: The url, the settings or the token file are wrong.
        Unavailable: It does not answer; the message names the next step.
    """
    settings = load_settings({}, config=config)
    token = token_of(settings, token_file)
    url = url or _running(settings, token_file, config, timeout_s) or service_url(settings)
    is_private = url == EMBEDDED
    name = f"unix:{private_socket_path(EmbeddedOptions().directory)}" if is_private else url
    try:
        parse_address(name)
    except InvalidRequest as error:
        raise InvalidRequest(f"{error}; or embedded:", field="url") from error
    tls = ClientTls(settings.tls_ca_file, settings.tls_certificate_file, settings.tls_key_file)
    options = ClientOptions.of_a_person(f"kvstore {verb}", timeout_s, tls)
    deadline = Deadline.after(timeout_s)
    try:
        # an unreachable service is reported once, as the error
        with quieted(), BlockingStore(name, token=token or None, options=options) as store:
            yield Asked(store, deadline, name)
    except Unavailable as error:
        said = str(error)
        step = _next_step(said, is_private=is_private, has_token=bool(token))
        message = "the service answers, and refuses this token" if "token" in said else error.message
        raise Unavailable(f"{message}: {step}", **error.details) from error


def _running(settings: Settings, token_file: Path | None, config: Path | None, timeout_s: float) -> str:
    """The address that the administration interface tells, where nothing here names one and no private service runs;
    empty: none.
    """
    private = private_socket_path(EmbeddedOptions().directory)
    if service_url(settings) != EMBEDDED or private.exists():
        return ""
    from kvstore.cli.store_in_use import store_in_use  # with what it stands on, which probes need not load

    store = store_in_use("", token_file, config, timeout_s)
    return str(store.settings.listen) if store.told_by else ""


def service_url(settings: Settings) -> str:
    """The address of these settings' service; the private one if nothing was set and its socket does not exist."""
    is_set = bool({"listen", "hot", "cold"} & settings.model_fields_set)
    listen = settings.listen
    is_there = isinstance(listen, UnixAddress) and Path(listen.path).exists()
    return str(listen) if is_set or is_there else EMBEDDED


def _next_step(said: str, *, is_private: bool, has_token: bool) -> str:
    """The next step for an error, by its text."""
    if "token" in said:
        which = "another" if has_token else "a"
        return f"give {which} token of this service, by --token-file, KVSTORE_TOKEN_FILE or {TOKEN_VARIABLE}"
    if "WRONG_VERSION_NUMBER" in said:
        return "what listens there does not use TLS: tcp:// instead of tls://?"
    if "certificate" in said:
        return "see tls_ca_file (KVSTORE_TLS_CA_FILE)"
    if "deadline" in said:
        return (
            "the service is frozen or very busy: see its process and its log; if those are well, the address may be "
            "that of its administration port"
        )
    if is_private:
        return (
            "no private service runs, an engine with url embedded: starts it; name another one with --url or "
            "KVSTORE_LISTEN"
        )
    return "is `kvstore serve` running there? name another one with --url or KVSTORE_LISTEN; embedded: is a private one"
