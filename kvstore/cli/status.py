"""`kvstore status`: what a running service holds and how it is."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvstore.client import BlockingStore, ClientOptions
from kvstore.client.embedded import EmbeddedOptions, private_socket_path
from kvstore.runtime.deadline import Deadline
from kvstore.service.main import read_token
from kvstore.settings import load_settings

__all__ = ["status"]

_EMBEDDED = "embedded:"


def status(
    url: Annotated[
        str,
        typer.Option(help="unix:/path, tcp://host:port or embedded: (asks, never starts one); else $KVSTORE_LISTEN."),
    ] = "",
    json_: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    timeout_s: Annotated[float, typer.Option(min=0.01, max=600, help="Seconds to wait for the answer.")] = 3.0,
) -> None:
    """Show what a running service holds and how it is."""
    settings = load_settings({})
    token = read_token(settings.token_file) if settings.token_file is not None else None
    if url == _EMBEDDED:
        url = f"unix:{private_socket_path(EmbeddedOptions().directory)}"
    options = ClientOptions(name="kvstore status", num_data_connections=1)
    deadline = Deadline.after(timeout_s)
    logging.getLogger("kvstore").setLevel(logging.ERROR)  # what cannot be reached is said once, as the error
    with BlockingStore(url or str(settings.listen), token=token, options=options) as store:
        values = store.status(deadline=deadline)
    if json_:
        typer.echo(json.dumps(values, indent=2, sort_keys=True, default=str))
        return
    table = Table("what", "value", title=f"kvstore at {url or settings.listen}")
    for name, value in _flat(values):
        table.add_row(name, value)
    Console().print(table)


def _flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, int) and not isinstance(value, bool) and "bytes" in name:
            yield prefix + name, f"{value:,} ({value / (1 << 20):,.1f} MiB)"
        else:
            yield prefix + name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
