"""`kvstore serve`: run a service in the foreground, with one flag per setting."""

from __future__ import annotations

import inspect
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from kvstore.runtime.sizes import format_bytes
from kvstore.service.logs import log_to_stderr
from kvstore.service.main import serve_settings
from kvstore.service.server import Server
from kvstore.settings import Settings, load_settings

_log = logging.getLogger(__name__)
_NOTIFY_S = 1.0


def serve(config: Path | None = None, **flags: Any) -> None:
    """Run a store service until Ctrl-C or SIGTERM. Flags override KVSTORE_... variables, which override the file."""
    log_to_stderr()
    serve_settings(load_settings(flags, config=config), on_ready=_report_ready)


def _report_ready(server: Server) -> None:
    console = Console(stderr=True, soft_wrap=True)
    with suppress(OSError):  # stderr may be a file on a full disk
        for address in server.addresses:
            console.print(f"ready: set url to [bold]{escape(str(address))}[/bold]", highlight=False)
    notify_ready(f"serves engines at {', '.join(map(str, server.addresses))}")


def notify_ready(status: str) -> None:
    """Notify systemd that this process is ready (`Type=notify`), with a line for `systemctl status`; without
    `$NOTIFY_SOCKET` do nothing. A failure is logged only: systemd then ends the start by its own timeout.
    """
    place = os.getenv("NOTIFY_SOCKET", "")
    if not place.startswith(("/", "@")):
        return
    address = "\0" + place[1:] if place[0] == "@" else place  # an abstract one
    message = f"READY=1\nSTATUS={status.splitlines()[0] if status else ''}\n"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(_NOTIFY_S)
            sock.sendto(message.encode(), address)
    except OSError as error:
        _log.warning("cannot notify systemd that the service is ready error=%s", error)


def _described() -> dict[str, str]:
    """The help of each setting: its entry under `Attributes` in the docstring of `Settings`."""
    entries: dict[str, str] = {}
    name = ""
    for line in (inspect.getdoc(Settings) or "").partition("Attributes:")[2].splitlines():
        head, colon, rest = line.strip().partition(": ")
        if colon and head in Settings.model_fields:
            name = head
            entries[name] = rest
        elif name and line.strip():
            entries[name] += " " + line.strip()
    return entries


def _default_text(name: str) -> str:
    """The default of a setting as it would be typed, on this machine."""
    value = Settings.model_fields[name].get_default(call_default_factory=True)
    if not value and not isinstance(value, int | float):
        return "not set"
    if isinstance(value, int) and name.endswith("_bytes"):
        return format_bytes(value)
    return str(value).removeprefix("tcp://")


def _parameter(name: str, annotation: Any, *declarations: str, **option: Any) -> inspect.Parameter:
    default = typer.Option(None, *declarations, show_default=False, **option)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _signature() -> inspect.Signature:
    helps = _described()
    config = _parameter("config", Path | None, "--config", help="TOML file with settings. Default: $KVSTORE_CONFIG.")
    settings = [
        _parameter(
            name,
            str | None,
            "--" + name.replace("_", "-"),
            metavar="VALUE",
            help=escape(f"{helps.get(name, '')} [default: {_default_text(name)}]"),
        )
        for name in Settings.model_fields
    ]
    return inspect.Signature([config, *settings])


serve.__signature__ = _signature()  # type: ignore[attr-defined]
serve.__annotations__ = {}  # typer prefers these to the signature's
