"""Before its hello a peer costs almost nothing, on every kind of connection, and keeps no other peer out."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore.service.limits import ServiceLimits, UnauthenticatedConnections
from kvstore.service.server import Server
from kvstore.testing.attacked import HEALTHY, AttackedService, beside
from kvstore.testing.servers.ports import free_ports
from kvstore.testing.servers.redis_tls import make_certificate
from kvstore.testing.steered_store import SteeredStore
from kvstore.testing.waiting import until
from kvstore.wire import messages
from kvstore.wire.address import parse_address
from kvstore.wire.frames import HELLO_HEAD_BYTES_MAX
from kvstore.wire.tls import ServerTls
from tests.security.raw_peer import RawPeer, head_bytes, prefix

KINDS = ("unix", "tcp", "tls")
LIMITS = ServiceLimits()


@pytest.fixture(params=KINDS)
async def service(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[AttackedService]:
    """With tokens, on each kind of connection."""
    (port,) = free_ports(1)
    settings = {}
    if request.param == "tls":
        certificate, key = make_certificate(folder)
        settings = {"tls_certificate_file": str(certificate), "tls_key_file": str(key)}
    listen = None if request.param == "unix" else f"{request.param}://127.0.0.1:{port}"
    with AttackedService(folder, listen=listen, tokens={"x": "x"}, settings=settings) as made:
        yield made


def test_heads_and_payloads_before_hello(service: AttackedService) -> None:
    """A head of more than 8 KiB, and any payload, are refused by their first bytes: nothing is received for them."""
    too_large = [prefix(num_bytes) for num_bytes in (HELLO_HEAD_BYTES_MAX + 1, 64 << 10, 4 << 20)]
    too_large += [prefix(100, 1), prefix(100, 256 << 20)]
    for first in too_large:
        with RawPeer(service.url, greet=False) as peer:
            peer.send(first)
            answer = peer.receive()
            assert answer is not None and answer["type"] == "refused"
            assert re.search("head size is out of range|payload is too large", answer["message"]), answer
            assert peer.receive() is None


def test_nothing_is_decoded_but_the_hello(service: AttackedService) -> None:
    """A message of another type is refused for its type, not for its fields; a hello with a token as long as a token
    file may hold is answered."""
    for message in (
        messages.Ping(1, 1),
        messages.Status(1, 1),
        messages.Cancel(1),
        messages.Outcome("", b"", 0, 0, 0, 0),
    ):
        whole = head_bytes(message)
        with RawPeer(service.url, greet=False) as peer:
            peer.send(whole.replace(b"deadline_ms", b"no_field_ms"))
            answer = peer.receive()
            assert answer is not None and "the first message must be a hello" in answer["message"]
    with RawPeer(service.url, greet=False) as peer:
        peer.send(head_bytes(messages.Hello(1, token="x" * 4096, client="y" * 2048)))
        answer = peer.receive()
        assert answer is not None and "the token is wrong" in answer["message"]


async def test_many_silent_peers(service: AttackedService, tell: Callable[[str], None]) -> None:
    """Six hundred peers come and say half a hello or nothing: few of them are kept, the service takes little memory,
    and a peer that says hello is greeted at once all the time, from the same address too."""
    most = LIMITS.unauthenticated if service.url.startswith("unix") else LIMITS.unauthenticated_of_address
    greeted_s: list[float] = []
    kept: list[int] = []

    def attack() -> None:
        hello = head_bytes(messages.Hello(1, token=HEALTHY))
        with ExitStack() as stack:
            silent: list[RawPeer] = []
            for number in range(600):
                silent.append(stack.enter_context(connected_only(service, number, hello)))
                if number % 20 == 0:
                    started_s = time.monotonic()
                    RawPeer(service.url, HEALTHY).die()
                    greeted_s.append(time.monotonic() - started_s)
            time.sleep(0.3)
            kept.append(sum([not peer.is_ended() for peer in silent]))

    before_bytes = service.resident_bytes
    if service.url.startswith("tls"):  # the healthy client of these tests does not trust its certificate
        await asyncio.to_thread(attack)
    else:
        seen = await beside(service, lambda: asyncio.to_thread(attack))
        tell(f"{service.url.partition(':')[0]}: {seen}")
        seen.check()
    tell(f"{service.url.partition(':')[0]}: kept {kept[0]}, greeted within {max(greeted_s) * 1e3:.0f} ms")
    assert kept[0] <= most
    assert max(greeted_s) < 5.0
    assert service.resident_bytes < before_bytes + (100 << 20)


def connected_only(service: AttackedService, number: int, hello: bytes) -> RawPeer:
    """A connection without a handshake where there would be one, and with half a hello where there is none."""
    peer = RawPeer(service.url.replace("tls:", "tcp:"), greet=False)
    if number % 2 and not service.url.startswith("tls"):
        peer.send(hello[: len(hello) // 2])
    return peer


@pytest.mark.parametrize("kind", KINDS)
async def test_silence_has_an_end(folder: Path, kind: str) -> None:
    """Peers that say nothing, half a handshake or half a hello are ended at their deadline, and nothing of them is
    left."""
    tls = ServerTls(*make_certificate(folder)) if kind == "tls" else None
    server = Server(SteeredStore(), ServiceLimits(hello_timeout_s=0.3), tls=tls)
    url = f"unix:{folder / 's'}" if kind == "unix" else f"{kind}://127.0.0.1:0"
    await server.listen([parse_address(url)])
    url = str(server.addresses[0])

    def come(number: int) -> list[RawPeer]:
        silent = [RawPeer(url.replace("tls:", "tcp:"), greet=False) for _ in range(number)]
        halves = [RawPeer(url, greet=False) for _ in range(number)]
        for peer in halves:
            peer.send(head_bytes(messages.Hello(1))[:20])
        return [*silent, *halves]

    peers = await asyncio.to_thread(come, 5)
    await until(lambda: not server.describe()["sessions"] and all(peer.is_ended() for peer in peers), 20)
    for peer in peers:
        peer.die()
    await server.aclose()


def test_who_has_waited_longest_goes_first() -> None:
    """Of one address, of one IPv6 network, and in all; connections without an address count in all only."""
    unauthenticated, ended = UnauthenticatedConnections(2, 4), list[str]()

    def enter(address: str, name: str) -> None:
        unauthenticated.enter(address).end_with(lambda: ended.append(name))

    for number in range(3):
        enter("10.0.0.1", f"red {number}")
    assert ended == ["red 0"]
    for number in range(3):
        enter(f"2001:db8::{number}", f"blue {number}")
    assert ended == ["red 0", "blue 0"]
    for number in range(4):
        enter("", f"local {number}")
    assert ended == ["red 0", "blue 0", "red 1", "red 2", "blue 1", "blue 2"]
    enter("::ffff:10.0.0.1", "red 3")
    assert ended[-1] == "local 0" and len(unauthenticated) == 4
