"""What the verbs that ask a running service have in common: whom, with which token, how long."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import typer

from kvstore.client import BlockingStore, ClientOptions
from kvstore.client.embedded import EmbeddedOptions, private_socket_path
from kvstore.runtime.deadline import Deadline
from kvstore.service.token_file import read_token
from kvstore.settings import TOKEN_VARIABLE, load_settings
from kvstore.wire.tls import ClientTls

__all__ = ["AsJson", "Asked", "Timeout", "Url", "asked"]

_EMBEDDED = "embedded:"

Url: TypeAlias = Annotated[
    str,
    typer.Option(
        help="unix:/path, tcp://host:port, tls://host:port or embedded: (asks, never starts one); else $KVSTORE_LISTEN."
    ),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]
Timeout: TypeAlias = Annotated[float, typer.Option(min=0.01, max=600, help="Seconds to wait for the answer.")]


@dataclass(frozen=True, slots=True)
class Asked:
    """A service that can be asked until a deadline.

    Attributes:
        name: Where it is, for people.
    """

    store: BlockingStore
    deadline: Deadline
    name: str


@contextmanager
def asked(url: str, timeout_s: float, verb: str) -> Iterator[Asked]:
    """The service at a url, or where the settings say that it listens; with the settings' token."""
    settings = load_settings({})
    token = os.getenv(TOKEN_VARIABLE, "").strip() or None
    if token is None and settings.token_file is not None:
        token = read_token(settings.token_file)
    if url == _EMBEDDED:
        url = f"unix:{private_socket_path(EmbeddedOptions().directory)}"
    name = url or str(settings.listen)
    tls = ClientTls(settings.tls_ca_file, settings.tls_certificate_file, settings.tls_key_file)
    options = ClientOptions.of_a_person(f"kvstore {verb}", timeout_s, tls)
    deadline = Deadline.after(timeout_s)
    logging.getLogger("kvstore").setLevel(logging.ERROR)  # what cannot be reached is said once, as the error
    with BlockingStore(name, token=token, options=options) as store:
        yield Asked(store, deadline, name)
