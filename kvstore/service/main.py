"""`python -m kvstore.service`: a service from settings, or the private one of a directory."""

from __future__ import annotations

import argparse
import logging
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from kvstore.client.embedded import default_directory, private_socket_path
from kvstore.compose import open_served_store
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.service.admin.port import Administered, admin_port, check_admin_listen
from kvstore.service.credentials import CredentialsFile
from kvstore.service.logs import log_to_stderr, shape_logs
from kvstore.service.private import AnotherRuns, detach, log_to, only_service_of
from kvstore.service.running import serve_until_told
from kvstore.service.secrets import secrets_of
from kvstore.service.server import Server
from kvstore.service.token_file import read_token
from kvstore.service.told_settings import told_settings
from kvstore.service.tracing import open_tracing
from kvstore.settings import Settings, load_settings
from kvstore.wire.address import TcpAddress

__all__ = ["main", "serve_embedded", "serve_settings"]

_log = logging.getLogger(__name__)

_DESCRIPTORS_MIN, _DESCRIPTORS_MAX = 256, 1 << 16
"""For the tiers, the files of an HTTP server, and the connections of some engines."""
_SWITCH_S = 0.001
"""How long a thread computes while another one waits for the interpreter: the event loop waits so long several times
for each request, five times as long by default."""


def serve_settings(settings: Settings, on_ready: Callable[[Server], None] | None = None) -> None:
    """Serve as the settings say, until SIGTERM or SIGINT, or until it has been idle for `idle_exit_s` if that is set.

    Raises:
        KVStoreError: It cannot start; the message says what to change.
    """
    shape_logs(settings.log_format, secrets_of(settings))
    _allow_descriptors()
    token = read_token(settings.token_file) if settings.token_file is not None else ""
    credentials = CredentialsFile(settings.credentials_file) if settings.credentials_file is not None else None
    if isinstance(settings.listen, TcpAddress) and not token and credentials is None:
        raise InvalidRequest("a TCP service needs a token: write one into a file and name it in token_file")
    tls = settings.tls()
    check_admin_listen(settings.admin_listen, credentials, has_certificate=tls is not None)
    with open_tracing(settings) as tracing:
        serving = serve_until_told(
            open_served_store(settings, tracing=tracing),
            [settings.listen],
            token=token,
            credentials=credentials,
            tls=tls,
            tracing=tracing,
            settings=told_settings(settings),
            idle_exit_s=settings.idle_exit_s,
            on_ready=on_ready,
            beside=lambda store, server: admin_port(Administered(settings, credentials, store, server)),
        )
        sys.setswitchinterval(_SWITCH_S)
        uvloop.run(serving)


def _allow_descriptors() -> None:
    """Let this process open as many files as the system allows it, up to 65,536; a connection is one.

    Raises:
        InvalidRequest: These are too few for a service.
    """
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_unlimited = most == resource.RLIM_INFINITY
    wanted = _DESCRIPTORS_MAX if is_unlimited else min(most, _DESCRIPTORS_MAX)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    if not is_unlimited and most < _DESCRIPTORS_MIN:
        raise InvalidRequest(
            "the limit of open files is too low for a service: raise it (ulimit -Hn, or LimitNOFILE of its unit)",
            expected=f"at least {_DESCRIPTORS_MIN}",
            seen=most,
        )


def serve_embedded(
    directory: Path, flags: Mapping[str, object], on_ready: Callable[[Server], None] | None = None
) -> None:
    """Serve one directory privately: memory and files, on a socket inside it, as its only service.

    Args:
        directory: Where everything is kept.
        flags: Further settings; the addresses and tiers are overridden, and there is no admin port.
        on_ready: Called once it accepts peers.

    Raises:
        AnotherRuns: The directory has a service already.
        KVStoreError: It cannot start.
    """
    path = private_socket_path(directory)
    with only_service_of(directory, path):
        own = {"listen": f"unix:{path}", "hot": "memory:", "cold": f"file://{directory / 'records'}"}
        own["admin_listen"] = "off"
        serve_settings(load_settings({**flags, **own}), on_ready)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; returns the exit status: 0 for an ordinary end, 1 for a failure, 2 for a wrong argument."""
    given = vars(_parser().parse_args(arguments))
    if not given.pop("detach"):
        return _run(given, lambda: None)
    tell = detach()
    status = _run(given, lambda: tell(0))
    tell(status)
    return status


def _run(given: dict[str, Any], on_ready: Callable[[], None]) -> int:
    embedded, directory, config = given.pop("embedded"), given.pop("directory"), given.pop("settings")
    try:
        if embedded:
            directory = Path(os.path.abspath(directory or default_directory()))
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            log_to(directory / "service.log")
            serve_embedded(directory, given, lambda _: on_ready())
        else:
            log_to_stderr()
            serve_settings(load_settings(given, config=config), lambda _: on_ready())
    except AnotherRuns as error:
        _log.info("%s", error)
    except InvalidRequest as error:
        _complain(error)
        return 2
    except (KVStoreError, OSError) as error:
        _complain(error)
        return 1
    return 0


def _complain(error: Exception) -> None:
    _log.error("%s", error)
    print(f"kvstore service: {error}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvstore.service", allow_abbrev=False)
    parser.add_argument("--embedded", action="store_true", help="be the private service of a directory")
    parser.add_argument("--detach", action="store_true", help="once ready, continue as a process without parent")
    parser.add_argument("--directory", type=Path, help="directory of the private service")
    parser.add_argument("--settings", type=Path, help="TOML file")
    for name in Settings.model_fields:
        option: dict[str, Any] = {"dest": name, "metavar": "VALUE", "help": "see the settings"}
        parser.add_argument("--" + name.replace("_", "-"), **option)
    return parser
