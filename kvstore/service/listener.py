"""Sockets that accept peers: a Unix socket that only its user can reach, or a TCP port."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import replace

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.wire.address import Address, UnixAddress
from kvstore.wire.tls import ServerTls

__all__ = ["Listener", "unix_accepts"]

_BACKLOG = 512
_TAKEN = "another program listens there: end it, or name another place in listen"
_HINTS = {
    errno.EADDRINUSE: _TAKEN,
    errno.EADDRNOTAVAIL: "this machine has no such address, name one of its own in listen",
    errno.EACCES: "this user may not listen there, name another place in listen",
}
_HANDSHAKE_S = 10.0


class Listener:
    """One open address.

    Attributes:
        address: Where it listens; a TCP port of 0 is replaced by the real one.
    """

    def __init__(self, address: Address, server: asyncio.Server, inode: int | None) -> None:
        self.address = address
        self._server = server
        self._inode = inode

    @classmethod
    async def open(
        cls, address: Address, protocol: Callable[[], asyncio.BaseProtocol], tls: ServerTls | None = None
    ) -> Listener:
        """Listen; `protocol` is called for each peer.

        Raises:
            InvalidRequest: The address is in use or cannot be listened on, or needs TLS and there is no certificate.
        """
        loop = asyncio.get_running_loop()
        try:
            if isinstance(address, UnixAddress):
                sock, inode = _bind_unix(address.path)
                return cls(address, await loop.create_unix_server(protocol, sock=sock, backlog=_BACKLOG), inode)
            if address.tls and tls is None:
                raise InvalidRequest("tls:// needs a certificate", field="tls_certificate_file", seen=None)
            context = tls.context if tls is not None and address.tls else None

            handshake_s = _HANDSHAKE_S if context is not None else None

            def make() -> asyncio.BaseProtocol:
                if tls is not None:
                    tls.refresh()  # so that this peer sees a renewed certificate
                return protocol()

            server = await loop.create_server(
                make, address.host, address.port, backlog=_BACKLOG, ssl=context, ssl_handshake_timeout=handshake_s
            )
            port: int = server.sockets[0].getsockname()[1]
            return cls(replace(address, port=port), server, None)
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
        self._server.close()


def _bind_unix(path: str) -> tuple[socket.socket, int]:
    """A listening socket that appears under `path` with its final mode, or not at all."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
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


def unix_accepts(path: str) -> bool:
    """Whether a process listens on a Unix socket.

    Raises:
        Unavailable: That cannot be determined, e.g. for lack of permission.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:  # its backlog is full: the listener is there, if slow
            return True
        except OSError as error:
            raise Unavailable("cannot probe a Unix socket", path=path, error=error.strerror) from error
        return True
