"""Connections to the administration's port that say nothing, half of something, or read nothing: others are served."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest

from kvstore.service.admin import gate, serving
from kvstore.testing.attacked import AttackedService
from kvstore.testing.servers.redis_tls import make_certificate
from kvstore.testing.waiting import eventually, until
from tests.unit.admin.service_harness import open_service

HALVES = {
    "nothing": b"",
    "half a head": b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ",
    "a second head": b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /livez HTTP/1.1\r\nHost: ",
    "half a body": b"POST /v1/lookup HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer x\r\n"
    b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{",
}


@pytest.fixture
async def service(folder: Path) -> AsyncIterator[AttackedService]:
    with AttackedService(folder, tokens={"x": "x"}) as made:
        url = f"http://{made.admin}/readyz"
        eventually(lambda: httpx.get(url).status_code == 200, despite=httpx.TransportError, why=made.log_tail)
        yield made


def said(address: str, data: bytes) -> socket.socket:
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), 30)
    sock.sendall(data)
    return sock


def is_ended(sock: socket.socket) -> bool:
    sock.settimeout(0.0)
    try:
        while sock.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


@pytest.mark.parametrize("kind", HALVES)
def test_silent_connections_keep_nobody_out(service: AttackedService, kind: str, tell: Callable[[str], None]) -> None:
    """Three hundred of a kind come: all the time the health of the service and a token's requests are answered at once,
    and few of them are kept."""
    took_s = dict.fromkeys(("/livez", "/readyz", "/v1/tiers"), 0.0)
    with ExitStack() as stack:
        silent = []
        for number in range(300):
            silent.append(stack.enter_context(said(service.admin, HALVES[kind])))
            if number % 10 == 0:
                for path in took_s:
                    started_s = time.monotonic()
                    answer = httpx.get(
                        f"http://{service.admin}{path}", headers={"Authorization": "Bearer x"}, timeout=20
                    )
                    took_s[path] = max(took_s[path], time.monotonic() - started_s)
                    assert answer.status_code == 200 or (kind == "half a body" and path == "/v1/tiers"), answer.text
        time.sleep(0.3)
        kept = sum(not is_ended(sock) for sock in silent)
    tell(f"{kind}: {kept} of 300 kept, answers within {max(took_s.values()) * 1e3:.0f} ms")
    assert max(took_s.values()) < 10.0
    assert kept <= serving._IDLE_MAX + gate._REQUESTS_MAX


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("kind", HALVES)
async def test_silence_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, tls: bool) -> None:
    """A connection that stops at any point is closed at its deadline; with TLS also one without a handshake."""
    for module, name in ((serving, "_HEAD_S"), (gate, "_BODY_S")):
        monkeypatch.setattr(module, name, 0.5)
    flags: dict[str, object] = {}
    if tls:
        certificate, key = make_certificate(tmp_path)
        flags = {"admin_listen": "tls://127.0.0.1:0", "tls_certificate_file": certificate, "tls_key_file": key}
    async with open_service(tmp_path, **flags) as made:
        data = HALVES[kind].replace(b"Bearer x", b"Bearer red token")
        socks = [await asyncio.to_thread(said, made.url.rpartition("/")[2], data) for _ in range(3)]
        await until(lambda: all(map(is_ended, socks)), 15)
        for sock in socks:
            sock.close()


@pytest.mark.parametrize("begun", [b"", b"{"])
async def test_bodies_that_do_not_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    """A tenant's token begins a hundred lookups and sends no bodies, or the first byte: an operator, another tenant and
    the dashboard at the same address are answered all the time, and so is the tenant once the deadline is over."""
    monkeypatch.setattr(gate, "_BODY_BEGINS_S" if not begun else "_BODY_S", 3.0)
    head = HALVES["half a body"].replace(b"Bearer x", b"Bearer red token")[:-1]
    async with open_service(tmp_path) as made:
        clients = made.client("operator"), made.client("blue"), made.client("red")
        async with clients[0] as operator, clients[1] as blue, clients[2] as red:
            assert (await operator.get("/v1/tiers")).status_code == 200
            stack, started_s = ExitStack(), time.monotonic()
            for number in range(100):
                stack.enter_context(await asyncio.to_thread(said, made.url.rpartition("/")[2], head + begun))
                if number % 20 == 19:
                    for client, path in ((operator, "/v1/tiers"), (blue, "/v1/requests"), (operator, "/")):
                        assert (await client.get(path)).status_code == 200
            refused = await red.get("/v1/requests")
            assert (refused.status_code, refused.headers.get("retry-after")) == (503, "1")
            while (await red.get("/v1/requests")).status_code != 200:
                assert time.monotonic() - started_s < 12.0
                await asyncio.sleep(0.1)
            stack.close()


async def test_who_ends_in_a_body_is_no_bug(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A client that gives up while it sends a body leaves no traceback in the log, on any route with a body."""
    async with open_service(tmp_path) as made:
        for route in ("/v1/lookup", "/v1/pins"):
            data = (
                HALVES["half a body"].replace(b"Bearer x", b"Bearer red token").replace(b"/v1/lookup", route.encode())
            )
            sock = await asyncio.to_thread(said, made.url.rpartition("/")[2], data)
            sock.shutdown(socket.SHUT_WR)
            await until(partial(is_ended, sock))
            sock.close()
        async with made.client("red") as client:
            assert (await client.get("/v1/requests")).status_code == 200
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


async def test_a_request_that_the_end_interrupts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The service stops while a client sends a body: the client is told so, and no traceback says that it was a bug."""
    monkeypatch.setitem(vars(serving), "_GRACE_S", 0.2)
    async with open_service(tmp_path) as made:
        data = HALVES["half a body"].replace(b"Bearer x", b"Bearer red token")
        sock = await asyncio.to_thread(said, made.url.rpartition("/")[2], data)
        async with made.client("red") as client:
            assert (await client.get("/v1/requests")).status_code == 200  # so that the lookup has begun
    sock.settimeout(30)
    assert sock.recv(1 << 16).startswith(b"HTTP/1.1 503 Service Unavailable")
    sock.close()
    assert "Traceback" not in caplog.text


async def test_events_are_followed_though_a_body_was_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of a GET is of no use, so that nobody waits for it: the events go on behind the deadline for bodies."""
    monkeypatch.setitem(vars(gate), "_BODY_BEGINS_S", 0.2)
    request = b"GET /v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer red token\r\nContent-Length: 5\r\n\r\n"
    async with open_service(tmp_path) as made:
        sock = await asyncio.to_thread(said, made.url.rpartition("/")[2], request)
        await asyncio.sleep(1.0)
        assert not is_ended(sock)
        sock.close()


async def test_who_does_not_read_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for a large answer again and again and reads none of it."""
    monkeypatch.setattr(serving, "_READ_S", 0.5)
    request = b"GET /v1/openapi.json HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer watcher token\r\n\r\n"
    async with open_service(tmp_path) as made:
        async with made.client("watcher") as client:
            assert (await client.get("/livez")).status_code == 200
        host, _, port = made.url.rpartition("/")[2].rpartition(":")
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(20)
            await asyncio.to_thread(sock.connect, (host, int(port)))

            def ask() -> None:
                with suppress(ConnectionError):
                    for _ in range(2000):
                        sock.sendall(request * 10)
                        time.sleep(0.005)
                    raise AssertionError("it was not cut off")

            await asyncio.to_thread(ask)
