"""Sockets that accept peers: a Unix socket that only its user can reach, or a TCP port."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import stat
from collections.abc import Callable
from dataclasses import replace

from kvstore.errors import InvalidRequest
from kvstore.runtime.background import Background
from kvstore.service.limits import UnauthenticatedConnection, UnauthenticatedConnections
from kvstore.wire.address import Address, UnixAddress, unix_accepts
from kvstore.wire.tls import ServerTls

_log = logging.getLogger(__name__)

_BACKLOG = 512
_ACCEPTED_AT_ONCE = 16
"""Few, so that the loop reads the hello of those who have sent one before it accepts more."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_EXHAUSTED_PAUSE_S = 0.2
_EXHAUSTED_WARN_S = 60.0
_TAKEN = "another program listens there: end it, or name another place in listen"
_HINTS = {
    errno.EADDRINUSE: _TAKEN,
    errno.EADDRNOTAVAIL: "this machine has no such address, name one of its own in listen",
    errno.EACCES: "this user may not listen there, name another place in listen",
    errno.ENOENT: "the folder for its folder is not there: make it, or name another place in listen",
}


class Acceptor:
    """Accepts connections on a listening socket, whose peers are not authenticated yet.

    Args:
        sock: Bound and listening, not blocking; owned from now on.
        protocol: Makes the protocol of a connection, from its entry among the unauthenticated ones. The protocol calls
            `leave` of the entry once the peer is authenticated, and again when the connection is lost.
        unauthenticated: Bounds how many connections are not authenticated; several acceptors may share it.
        tls: What is shown to peers; `None`: no TLS.
        handshake_s: How long a TLS handshake may take.
    """

    def __init__(
        self,
        sock: socket.socket,
        protocol: Callable[[UnauthenticatedConnection], asyncio.BaseProtocol],
        unauthenticated: UnauthenticatedConnections,
        *,
        tls: ServerTls | None = None,
        handshake_s: float = 5.0,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._protocol = protocol
        self._unauthenticated = unauthenticated
        self._tls = tls
        self._handshake_s = handshake_s
        self._connecting = Background("acceptor")
        self._resume: asyncio.TimerHandle | None = None
        self._warn_at_s = 0.0
        self._loop.add_reader(sock.fileno(), self._accept)

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """The listening socket, unless it is closed."""
        return (self._sock,) if self._sock.fileno() >= 0 else ()

    def close(self) -> None:
        """Stop accepting. Idempotent."""
        if self._sock.fileno() < 0:
            return
        self._loop.remove_reader(self._sock.fileno())
        if self._resume is not None:
            self._resume.cancel()
        self._sock.close()

    async def wait_closed(self) -> None:
        """End the handshakes that are still running."""
        await self._connecting.aclose()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, peer = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._pause(error)
                return
            sock.setblocking(False)
            entry = self._unauthenticated.enter(peer[0] if isinstance(peer, tuple) else "")
            task = self._connecting.spawn(self._connect(sock, entry), "connection")
            entry.end_with(task.cancel)

    async def _connect(self, sock: socket.socket, entry: UnauthenticatedConnection) -> None:
        context = None if self._tls is None else self._tls.value  # the latest: certificates are renewed
        made = self._protocol(entry)
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: made,
                sock,
                ssl=context,
                ssl_handshake_timeout=None if context is None else self._handshake_s,
            )
        except OSError as error:  # the peer's doing, or the network's: it did not get through the handshake
            entry.leave()
            _log.debug("a connection was not established error=%s", error)
        except BaseException:
            entry.leave()
            raise
        else:
            entry.end_with(transport.abort)

    def _pause(self, error: OSError) -> None:
        """Nothing can be accepted now: warn at most once a minute, end the oldest unauthenticated connection, and try
        again soon."""
        if self._loop.time() >= self._warn_at_s:
            self._warn_at_s = self._loop.time() + _EXHAUSTED_WARN_S
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            _log.warning(
                "connections wait, since the system gives this process no more descriptors: raise the limit of open "
                "files (ulimit -n, or LimitNOFILE of its unit) error=%s limit=%d",
                error.strerror,
                limit,
            )
        self._unauthenticated.end_oldest()
        self._loop.remove_reader(self._sock.fileno())
        self._resume = self._loop.call_later(_EXHAUSTED_PAUSE_S, self._accept_again)

    def _accept_again(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock.fileno(), self._accept)


class Listener:
    """An address that the service listens on.

    Attributes:
        address: Where it listens; a TCP port of 0 is replaced by the real one.
    """

    def __init__(self, address: Address, acceptors: list[Acceptor], inode: int | None) -> None:
        self.address = address
        self._acceptors = acceptors
        self._inode = inode

    @classmethod
    async def open(
        cls,
        address: Address,
        protocol: Callable[[UnauthenticatedConnection], asyncio.BaseProtocol],
        unauthenticated: UnauthenticatedConnections,
        tls: ServerTls | None = None,
        *,
        handshake_s: float = 5.0,
    ) -> Listener:
        """Listen; `protocol` is called for each peer. See `Acceptor` for the arguments.

        Raises:
            InvalidRequest: The address is in use or cannot be listened on, or needs TLS and there is no certificate.
        """
        try:
            if isinstance(address, UnixAddress):
                sock, inode = _bind_unix(address.path)
                return cls(address, [Acceptor(sock, protocol, unauthenticated)], inode)
            if address.tls and tls is None:
                raise InvalidRequest("tls:// needs a certificate", field="tls_certificate_file", seen=None)
            shown = tls if address.tls else None
            socks = await bind_tcp(address.host, address.port)
            port: int = socks[0].getsockname()[1]
            acceptors = [
                Acceptor(sock, protocol, unauthenticated, tls=shown, handshake_s=handshake_s) for sock in socks
            ]
            return cls(replace(address, port=port), acceptors, None)
        except OSError as error:
            hint = _HINTS.get(error.errno or 0) or error.strerror or str(error)
            if isinstance(error, socket.gaierror):
                hint = "its name is not known here, name one of this machine's in listen"
            raise InvalidRequest(f"cannot listen: {hint}", address=address) from error

    async def aclose(self) -> None:
        """Stop accepting; a Unix socket's file goes first, so that no peer finds it half closed. Idempotent."""
        if isinstance(self.address, UnixAddress):
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self.address.path).st_ino == self._inode:  # not a successor's
                    os.unlink(self.address.path)
        for acceptor in self._acceptors:
            acceptor.close()
        for acceptor in self._acceptors:
            await acceptor.wait_closed()


async def bind_tcp(host: str, port: int) -> list[socket.socket]:
    """A listening socket for each address that a name stands for.

    Raises:
        OSError: One of them cannot be listened on.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    socks: list[socket.socket] = []
    try:
        for family, kind, protocol, _, place in dict.fromkeys(found):
            sock = socket.socket(family, kind, protocol)
            socks.append(sock)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(place)
            sock.listen(_BACKLOG)
    except BaseException:
        for sock in socks:
            sock.close()
        raise
    return socks


def _bind_unix(path: str) -> tuple[socket.socket, int]:
    """A listening socket that appears under `path` with its final mode, or not at all."""
    with contextlib.suppress(FileExistsError):  # one folder: of a misspelt path more would be made, where root may
        os.mkdir(os.path.dirname(path), mode=0o700)
    _remove_stale(path)
    own_path = f"{path}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(own_path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.bind(own_path)
        os.chmod(own_path, 0o600)
        sock.listen(_BACKLOG)
        inode = os.stat(own_path).st_ino
        os.rename(own_path, path)
    except BaseException:
        sock.close()
        raise
    return sock, inode


def _remove_stale(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise InvalidRequest(
            "cannot listen: the path exists and is not a socket: remove it, or name another place in listen", path=path
        )
    if unix_accepts(path):
        raise InvalidRequest(f"cannot listen: {_TAKEN}", path=path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
