"""The proxy that faults of S3 are made with: it passes bytes, refuses, answers 503 and delays, and comes back."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvstore.testing.faulty_proxy import FaultyProxy

BODY = bytes(range(256)) * 4096


class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def proxy() -> Iterator[FaultyProxy]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with FaultyProxy(server.server_address[1]) as proxy:
            yield proxy
        server.shutdown()
        thread.join()


def put(proxy: FaultyProxy, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10)
    try:
        connection.request("PUT", "/object", BODY, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_passes_bytes_on(proxy: FaultyProxy) -> None:
    """A large request and its answer arrive whole."""
    assert put(proxy) == (200, BODY)


def test_refuses_and_heals(proxy: FaultyProxy) -> None:
    """Open connections end and new ones are refused; later they are taken on the same port."""
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10)
    connection.request("PUT", "/object", BODY)
    assert connection.getresponse().read() == BODY
    proxy.refuse()
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        connection.request("PUT", "/object", BODY)
        connection.getresponse()
    connection.close()
    with pytest.raises(ConnectionRefusedError):
        put(proxy)
    proxy.heal()
    assert put(proxy) == (200, BODY)


def test_answers_503_and_heals(proxy: FaultyProxy) -> None:
    """Every request is told to slow down, also one that waits for a word before it sends its body."""
    proxy.answer_503()
    for headers in ({}, {"Expect": "100-continue"}):
        status, body = put(proxy, **headers)
        assert status == 503 and b"<Code>SlowDown</Code>" in body
    proxy.heal()
    assert put(proxy) == (200, BODY)


def test_delays_and_heals(proxy: FaultyProxy) -> None:
    """A request arrives late as a whole, and not each of its chunks by so much."""
    proxy.delay(0.3)
    begun_s = time.monotonic()
    assert put(proxy) == (200, BODY)
    assert 0.3 <= time.monotonic() - begun_s < 3
    proxy.heal()
    assert put(proxy) == (200, BODY)
