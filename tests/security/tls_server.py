"""A TLS server that keeps what its peers send, in a thread of its own: blocking clients are looked at as well."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tests.security.certificates import Certificate

__all__ = ["TlsServer", "proxy", "tls_server"]

_POLL_S = 0.05

Answer = Callable[[bytes], bytes | None]
"""What to answer to some received bytes; `None`: close the connection."""


class TlsServer:
    """Listens on a free port of the loopback address.

    Attributes:
        port: Where.
        received: All that peers have sent inside TLS.
        num_connections: Connections so far, whether or not their handshake ended well.
    """

    def __init__(self, certificate: Certificate, answer: Answer) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate.cert_file, certificate.key_file)
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_POLL_S)
        self.port: int = self._listener.getsockname()[1]
        self.received = b""
        self.num_connections = 0
        self._stopping = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while not self._stopping:
            with suppress(TimeoutError):
                connection, _ = self._listener.accept()
                self.num_connections += 1
                thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(5.0)
        with connection, suppress(OSError), self._context.wrap_socket(connection, server_side=True) as inside:
            inside.settimeout(_POLL_S)
            while not self._stopping:
                try:
                    data = inside.recv(65536)
                except TimeoutError:
                    continue
                if not data:
                    return
                self.received += data
                if (answer := self._answer(data)) is None:
                    return
                inside.sendall(answer)

    def stop(self) -> None:
        """End all connections."""
        self._stopping = True
        for thread in self._threads:
            thread.join(10.0)
        self._listener.close()


@contextmanager
def tls_server(certificate: Certificate, answer: Answer = lambda _: None) -> Iterator[TlsServer]:
    """Run one for the length of the block."""
    server = TlsServer(certificate, answer)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def proxy(target_port: int) -> Iterator[int]:
    """An HTTP proxy that leads every CONNECT to one port of this machine; its own port. Any user may run it."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(_POLL_S)
    stopping = threading.Event()

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def serve(client: socket.socket) -> None:
        head = b""
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", target_port)) as target:
            while b"\r\n\r\n" not in head:
                head += client.recv(4096)
            client.sendall(b"HTTP/1.1 200 connected\r\n\r\n")
            back = threading.Thread(target=pump, args=(target, client), daemon=True)
            back.start()
            pump(client, target)
            back.join(10.0)

    def accept() -> None:
        while not stopping.is_set():
            with suppress(TimeoutError):
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        stopping.set()
        thread.join(10.0)
        listener.close()
