"""Addresses of a service, for both sides: `unix:/path`, `tcp://host:port` or `tls://host:port`."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from urllib.parse import SplitResult, quote, urlsplit

from kvstore.errors import InvalidRequest, Unavailable

UNIX_PATH_BYTES_MAX = 107
"""Linux stores a socket's path in 108 bytes, including the terminating zero."""

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_GRAMMAR = "unix:/path, tcp://host:port or tls://host:port"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix stream socket.

    Attributes:
        path: Absolute path of the socket file.
    """

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP port.

    Attributes:
        host: A name or a literal address, IPv6 without brackets.
        port: 0 to 65535; 0 means any free port, for a listener only.
        tls: Whether both sides speak TLS.
    """

    host: str
    port: int
    tls: bool = False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls else 'tcp'}://{host}:{self.port}"

    @property
    def reachable(self) -> TcpAddress:
        """Where a client on the listener's machine connects: the loopback, if this means all interfaces."""
        return replace(self, host=_LOOPBACK.get(self.host, self.host))

    @property
    def http_url(self) -> str:
        return f"http{'s' if self.tls else ''}://{str(self).partition('://')[2]}"


Address = UnixAddress | TcpAddress


def parse_address(text: str) -> Address:
    """Read an address; `str(address)` writes it back.

    Raises:
        InvalidRequest: Not an address; the message says what was expected.
    """
    if text.startswith("unix:"):
        return _parse_unix(text)
    if text.startswith(("tcp://", "tls://")):
        return _parse_tcp(text)
    raise InvalidRequest(f"an address is {_GRAMMAR}", seen=repr(text))


def _parse_unix(text: str) -> UnixAddress:
    path = text.removeprefix("unix:")
    if path.startswith("//"):  # unix:///run/x.sock, as other programs spell it
        path = path[2:]
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise InvalidRequest(
            "a Unix address is unix: and an absolute path, like unix:/run/kvstore.sock", seen=repr(text)
        )
    if (num_bytes := len(path.encode())) > UNIX_PATH_BYTES_MAX:
        raise InvalidRequest(
            f"the path of a Unix socket has at most {UNIX_PATH_BYTES_MAX} bytes: choose a shorter one",
            seen=num_bytes,
            path=path,
        )
    return UnixAddress(path)


def _parse_tcp(text: str) -> TcpAddress:
    expected = "a TCP address is tcp://host:port, like tcp://10.0.0.7:7079"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidRequest(expected, seen=repr(text)) from error
    if parts.username is not None or parts.password is not None:
        raise InvalidRequest("a TCP address carries no password: name a file in token_file instead")
    if not host or port is None or parts.path or parts.query or parts.fragment:
        raise InvalidRequest(expected, seen=repr(text))
    return TcpAddress(host, port, tls=parts.scheme == "tls")


def parse_admin_url(url: str) -> SplitResult:
    """The parts of an administration interface's address. Its path, without a slash at the end, is where a proxy serves
    the interface.

    Raises:
        InvalidRequest: Not such an address; the message says what was expected.
    """
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right or parts.username is not None or parts.query or parts.fragment:
        raise InvalidRequest("expected http://host:port or https://host:port", seen=repr(url))
    return parts._replace(path=quote(parts.path.rstrip("/"), safe="/%"))


def unix_accepts(path: str) -> bool:
    """Whether a process listens on a Unix socket.

    Raises:
        Unavailable: That cannot be determined, e.g. for lack of permission.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
            return False
        except BlockingIOError:  # its backlog is full: the listener is there, if slow
            return True
        except OSError as error:
            raise Unavailable("cannot probe a Unix socket", path=path, error=error.strerror) from error
        return True
