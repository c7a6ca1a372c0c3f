"""`python -m kvstore.service`: a service from settings, or the private one of a directory."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from kvstore.api import PageStore
from kvstore.compose import open_served_store
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.runtime.background import on_loose_exception
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.files import open_regular, try_lock
from kvstore.runtime.machine import disk_size_and_free, usable_bytes
from kvstore.runtime.sizes import format_bytes
from kvstore.service.admin.port import Administered, admin_port, check_admin_listen
from kvstore.service.authentication import read_token, watch_credentials
from kvstore.service.hidden_secrets import secrets_of
from kvstore.service.logs import log_to_file, log_to_stderr, shape_logs
from kvstore.service.reported_settings import reported_settings
from kvstore.service.server import Server
from kvstore.service.tracing import open_tracing
from kvstore.settings import Settings, load_settings
from kvstore.tiers.locations import FileLocation
from kvstore.wire.address import Address, TcpAddress, unix_accepts
from kvstore.wire.private_place import default_directory, private_socket_path

_log = logging.getLogger(__name__)

_DESCRIPTORS_MIN, _DESCRIPTORS_MAX = 256, 1 << 16
"""For the tiers, the files of an HTTP server, and the connections of some engines."""
SWITCH_S = 0.001
"""How long a thread computes while another one waits for the interpreter. The event loop waits for this several times
in each request. Python's default is five times as long."""
_IDLE_POLL_S = 0.1
_LOCK_S = 15.0
_LOCK_POLL_S = 0.05

Store = TypeVar("Store", bound=PageStore)


def serve_settings(settings: Settings, on_ready: Callable[[Server], None]) -> None:
    """Serve as the settings say, until SIGTERM or SIGINT, or until it has been idle for `idle_exit_s` if that is set.

    Raises:
        KVStoreError: It cannot start; the message says what to change.
    """
    shape_logs(settings.log_format, secrets_of(settings))
    _allow_descriptors()
    warn_of_memory(settings.memory_bytes, usable_bytes())
    if isinstance(settings.cold, FileLocation) and settings.disk_bytes is not None:
        warn_of_disk(settings.disk_bytes, disk_size_and_free(settings.cold.path)[0])
    token = read_token(settings.token_file) if settings.token_file is not None else ""
    credentials = watch_credentials(settings.credentials_file) if settings.credentials_file is not None else None
    if isinstance(settings.listen, TcpAddress) and not token and credentials is None:
        raise InvalidRequest("a TCP service needs a token: write one into a file and name it in token_file")
    tls = settings.tls()
    check_admin_listen(settings.admin_listen, credentials, has_certificate=tls is not None)
    with open_tracing(settings) as tracing:
        serving = serve(
            open_served_store(settings, tracing=tracing),
            lambda store: Server(
                store,
                token=token,
                credentials=credentials,
                tls=tls,
                tracing=tracing,
                settings=reported_settings(settings),
            ),
            [settings.listen],
            idle_exit_s=settings.idle_exit_s,
            on_ready=on_ready,
            open_admin=lambda store, server: admin_port(Administered(settings, credentials, store, server)),
        )
        sys.setswitchinterval(SWITCH_S)
        uvloop.run(serving)


def warn_of_memory(wanted_bytes: int, usable: int) -> None:
    """Say once that `memory_bytes` does not fit: the kernel would kill the service only when its memory is full."""
    if wanted_bytes > usable * 3 // 4:
        _log.warning(
            "memory_bytes is %s, and this machine or container has %s: set at most %s, or the service may be killed",
            *map(format_bytes, (wanted_bytes, usable, usable * 3 // 4)),
        )


def warn_of_disk(wanted_bytes: int, total_bytes: int) -> None:
    """Say once that `disk_bytes` does not fit: records would be refused only when the disk is full."""
    if wanted_bytes > total_bytes:
        _log.warning(
            "disk_bytes is %s, and the disk of cold has %s: set less, or writes fail once it is full",
            *map(format_bytes, (wanted_bytes, total_bytes)),
        )


def _allow_descriptors() -> None:
    """Raise the limit of open files to what the system allows, at most 65,536. Each connection is one file.

    Raises:
        InvalidRequest: The system allows too few files for a service.
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


def serve_embedded(directory: Path, flags: Mapping[str, object], on_ready: Callable[[Server], None]) -> None:
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
    with _only_service_of(directory, path):
        own = {"listen": f"unix:{path}", "hot": "memory:", "cold": f"file://{directory / 'records'}"}
        own["admin_listen"] = "off"
        serve_settings(load_settings({**flags, **own}), on_ready)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; returns the exit status: 0 for an ordinary end, 1 for a failure, 2 for a wrong argument."""
    given = vars(_parser().parse_args(arguments))
    if not given.pop("detach"):
        return _run(given, lambda: None)
    report = _detach()
    status = _run(given, lambda: report(0))
    report(status)
    return status


def _run(given: dict[str, Any], on_ready: Callable[[], None]) -> int:
    embedded, directory, config = given.pop("embedded"), given.pop("directory"), given.pop("settings")
    try:
        if embedded:
            directory = Path(os.path.abspath(directory or default_directory()))
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            log_to_file(directory / "service.log")
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


class AnotherRuns(Unavailable):
    """The directory has its service already; this one is not needed."""


@contextmanager
def _only_service_of(directory: Path, socket_path: Path) -> Iterator[None]:
    """Hold the directory's lock; wait for a predecessor that is closing.

    Raises:
        AnotherRuns: Another service holds the lock and accepts clients, or does not release it.
    """
    run = directory / "run"
    run.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = open_regular(run / "service.lock", os.O_RDWR | os.O_CREAT)
    try:
        ends_s = SYSTEM_CLOCK.monotonic_s() + _LOCK_S
        while not try_lock(descriptor):
            if unix_accepts(str(socket_path)) or SYSTEM_CLOCK.monotonic_s() > ends_s:
                raise AnotherRuns("another service holds this directory", directory=directory)
            time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)  # frees the lock, as the end of the process would


def _detach() -> Callable[[int], None]:
    """Continue in a forked child. The calling process exits with the status that the child reports, which leaves the
    child without a parent.

    An engine that ends kills all its descendants, but the service must outlive it, for the next engine. The status
    shows the process that started this one whether that worked.

    Returns:
        Reports the status, 0 for "ready"; only the first call counts.
    """
    ours, theirs = os.pipe()
    if os.fork() > 0:
        os.close(theirs)
        status = os.read(ours, 1)
        os._exit(status[0] if status else 1)  # no status: the child died
    os.close(ours)

    def report(status: int) -> None:
        with suppress(BrokenPipeError):  # the parent was killed; that changes nothing here
            os.write(theirs, bytes([status]))

    return report


async def serve(
    store: AbstractAsyncContextManager[Store],
    make_server: Callable[[Store], Server],
    addresses: Sequence[Address],
    *,
    idle_exit_s: float | None = None,
    on_ready: Callable[[Server], None],
    open_admin: Callable[[Store, Server], AbstractAsyncContextManager[object]] = lambda *_: nullcontext(),
) -> None:
    """Serve until SIGTERM or SIGINT, or until there has been no client for `idle_exit_s`.

    Args:
        store: Opened first, closed last.
        make_server: Makes the server of the open store.
        addresses: Where to listen.
        idle_exit_s: `None`: never ends by itself.
        on_ready: Called when all addresses accept.
        open_admin: Opens the administration port; after the addresses, and it is closed before them.

    Raises:
        KVStoreError: The store does not open, or an address cannot be listened on.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(on_loose_exception)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with store as opened:
        server = make_server(opened)
        try:
            await server.listen(addresses)
            async with open_admin(opened, server):
                on_ready(server)
                await _wait_for_end(stop, server, idle_exit_s)
        finally:
            await server.aclose()
    _log.info("stopped")


async def _wait_for_end(stop: asyncio.Event, server: Server, idle_exit_s: float | None) -> None:
    if idle_exit_s is None:
        await stop.wait()
        return
    while not stop.is_set() and server.quiet_s < idle_exit_s:
        with suppress(TimeoutError):
            async with asyncio.timeout(_IDLE_POLL_S):
                await stop.wait()
