"""A peer that sends given bytes, over any kind of address."""

from __future__ import annotations

import socket
import ssl
import struct
from typing import Any

import msgpack

from kvstore.testing.attacked import AttackedService
from kvstore.testing.waiting import eventually
from kvstore.wire import messages
from kvstore.wire.address import UnixAddress, parse_address
from kvstore.wire.frames import pack_head

__all__ = ["RawPeer", "head_bytes", "prefix"]

_WAIT_S = 30.0
_RECEIVE_BUFFER_BYTES = 256 << 10


def head_bytes(message: messages.Message, payload_bytes: int = 0) -> bytes:
    """Prefix and head of a frame with this message."""
    return pack_head(messages.encode(message), payload_bytes)


def prefix(num_head_bytes: int, payload_bytes: int = 0) -> bytes:
    """The first sixteen bytes of a frame."""
    return struct.pack("<4sIQ", b"KVW1", num_head_bytes, payload_bytes)


class RawPeer:
    """A blocking connection; a context manager.

    Args:
        url: As in `listen`.
        token: Said in the hello.
        greet: Say hello, and read the welcome.
        source: The address on this machine that it connects from; empty: any.
    """

    def __init__(self, url: str, token: str = "", *, greet: bool = True, source: str = "") -> None:
        address = parse_address(url)
        is_unix = isinstance(address, UnixAddress)
        self.sock = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET)
        self.sock.settimeout(_WAIT_S)
        # else the kernel may take tens of MiB for a peer that reads nothing: then nothing is unread
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        try:
            if isinstance(address, UnixAddress):
                self.sock.connect(address.path)
            else:
                self.sock.bind((source, 0))
                self.sock.connect((address.host, address.port))
                if address.tls:
                    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                    self.sock = context.wrap_socket(self.sock)
            if greet:
                self.send(head_bytes(messages.Hello(1, token=token)))
                answer = self.receive()
                assert answer is not None and answer["type"] == "welcome", answer
        except BaseException:
            self.leave()
            raise

    def send(self, data: bytes) -> None:
        """Send all of it."""
        self.sock.sendall(data)

    def receive(self) -> dict[str, Any] | None:
        """The next head; its payload is skipped. `None`: the service has ended the connection.

        Raises:
            TimeoutError: Nothing came for half a minute.
        """
        try:
            start = self._exactly(16)
            _, num_head_bytes, payload_bytes = struct.unpack("<4sIQ", start)
            head: dict[str, Any] = msgpack.unpackb(self._exactly(num_head_bytes))
            self._exactly(payload_bytes)
        except (EOFError, ConnectionError, ssl.SSLError):
            return None
        return head

    def _exactly(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            part = self.sock.recv(min(1 << 20, num_bytes - len(data)))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def is_ended(self) -> bool:
        """Whether the service has ended the connection, by now. Skips what it has sent before."""
        self.sock.settimeout(0.0)
        try:
            while self.sock.recv(1 << 20):
                pass
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except (ConnectionError, ssl.SSLError):
            return True
        finally:
            self.sock.settimeout(_WAIT_S)
        return True

    def die(self) -> None:
        """Close, without a word."""
        self.sock.close()

    def leave(self) -> None:
        """Close and leave no port behind that waits: for tests that come thousands of times."""
        if self.sock.fileno() >= 0:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.die()


def greeted(service: AttackedService, token: str = "") -> RawPeer:
    """A peer of a service that may be busy with many others."""
    return eventually(lambda: RawPeer(service.url, token), despite=OSError)
