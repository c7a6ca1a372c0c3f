"""The port of the administration interface. It listens from the start; its thread starts with the first connection.

This module imports no web framework, so a service without requests for its administration never loads one.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec

import uvloop

import kvstore
from kvstore.errors import InternalError, InvalidRequest
from kvstore.runtime.events import EventKind
from kvstore.runtime.watched_file import Watched
from kvstore.service.authentication import Credentials
from kvstore.service.history import History
from kvstore.service.listener import bind_tcp
from kvstore.service.server import Server
from kvstore.service.watcher import Watcher
from kvstore.settings import Settings
from kvstore.store.encryption.encrypted import EncryptedStore
from kvstore.store.tiered import TieredStore
from kvstore.wire.address import TcpAddress
from kvstore.wire.tls import ServerTls

_log = logging.getLogger(__name__)
_JOIN_S = 5.0
_PACKAGES = ("fastapi", "uvicorn")


def check_admin_listen(
    address: TcpAddress | None, credentials: Watched[Credentials] | None, *, has_certificate: bool = False
) -> None:
    """Require tokens on an address that other machines can reach, and a certificate for TLS.

    Raises:
        InvalidRequest: The address is not a loopback address and there are no credentials, or it is a TLS address and
            there is no certificate.
    """
    if address is not None and address.tls and not has_certificate:
        raise InvalidRequest("tls:// needs a certificate", field="tls_certificate_file", seen=None)
    if address is not None and credentials is None and not is_loopback(address.host):
        raise InvalidRequest(
            "an administration interface that other machines can reach needs tokens: set credentials_file, or listen "
            "on 127.0.0.1",
            field="admin_listen",
            seen=f"{address.host}:{address.port}",
        )


def is_loopback(host: str) -> bool:
    """Whether a host is this machine by its name or address, as a url or a setting has it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Administered:
    """A service as its administration sees it.

    Attributes:
        credentials: The grant of each token; `None`: processes of the service's own user may do everything.
        store: Belongs to the data loop.
        server: The data port.
    """

    settings: Settings
    credentials: Watched[Credentials] | None
    store: TieredStore | EncryptedStore
    server: Server
    history: History = field(default_factory=History)


@asynccontextmanager
async def admin_port(service: Administered) -> AsyncIterator[AdminPort | None]:
    """Listen on `admin_listen` until the end of the block, during which the store and the data port stay open. If that
    is not possible, log a warning that names the setting, and yield `None`.
    """
    port = await _open(service)
    try:
        yield port
    finally:
        if port is not None:
            await port.aclose()


async def _open(service: Administered) -> AdminPort | None:
    address = service.settings.admin_listen
    if address is None:
        return None
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        _log.warning(
            "no administration interface: pip install 'kvstore-vllm[admin]', or set admin_listen to off missing=%s",
            ",".join(missing),
        )
        return None
    try:
        socks = await bind_tcp(address.host, address.port)
    except OSError as error:
        hint = "another program listens there" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        _log.warning(
            "no administration interface; the service runs without it: cannot listen: %s; set admin_listen to another "
            "address, or to off field=admin_listen seen=%s:%d",
            hint,
            address.host,
            address.port,
        )
        return None
    _report_start(service)
    if address.tls and service.server.tls is None:
        raise InternalError("the administration port needs the service's TLS certificate")
    return AdminPort(socks, service, service.server.tls if address.tls else None)


def _report_start(service: Administered) -> None:
    settings = service.settings
    detail: dict[str, str | int | float] = {
        "hot": str(settings.hot),
        "cold": str(settings.cold),
        "memory_bytes": settings.memory_bytes,
        "release": kvstore.__version__,
        "settings": ", ".join(sorted(settings.model_fields_set)),
    }
    service.store.events.add(EventKind.STARTED, "the service started", is_public=True, detail=detail)


class AdminPort:
    """Listening sockets, and a thread with an event loop of its own that starts with the first connection. Requests of
    operators therefore never run on the data loop, and a service without any spends neither time nor memory on them.

    Args:
        socks: Bound and listening; owned from now on.
        tls: The certificate to present, which the data port keeps up to date; `None`: plain HTTP.

    Attributes:
        watcher: Adds samples to the history, on the data loop.
    """

    def __init__(self, socks: Sequence[socket.socket], service: Administered, tls: ServerTls | None) -> None:
        self._socks = socks
        self._service = service
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self.watcher = Watcher(service.store, service.history, service.store.events, credentials=service.credentials)
        self.watcher.start()
        for sock in socks:
            self._loop.add_reader(sock.fileno(), self._start)
        _log.info("administration address=%s", self.url)

    @property
    def url(self) -> str:
        """`http://host:port`, or `https://`; a port of 0 is replaced by the real one."""
        host, port = self._socks[0].getsockname()[:2]
        return f"{'http' if self._tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"

    def _start(self) -> None:
        """Start the thread: the first peer connects."""
        self._stop_waiting()
        self._thread = threading.Thread(target=self._run, name="kvstore-admin", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            from kvstore.service.admin.serving import serve_admin

            uvloop.run(serve_admin(self._socks, self._loop, self._stop, self._service, self._tls))
        except Exception:  # noqa: BLE001 - a thread's top: the data path is not affected
            _log.exception("the administration interface failed; the service runs without it field=admin_listen")
            for sock in self._socks:
                sock.close()

    def _stop_waiting(self) -> None:
        for sock in self._socks:
            self._loop.remove_reader(sock.fileno())

    async def aclose(self) -> None:
        """Give running requests a moment to end, then stop. Idempotent."""
        self._stop.set()
        await self.watcher.aclose()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _JOIN_S)
        elif self._socks:
            self._stop_waiting()
        for sock in self._socks:
            sock.close()
        self._socks = ()
