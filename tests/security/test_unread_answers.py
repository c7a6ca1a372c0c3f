"""Peers that ask and never read: cut off on every kind of connection, and what they hold until then is bounded."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from kvstore.service.authentication import ALL_TENANTS
from kvstore.service.limits import ServiceLimits
from kvstore.service.server import Server
from kvstore.store.tiered import TieredStore
from kvstore.testing.attacked import HEALTHY, AttackedService, beside
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.servers.ports import free_ports
from kvstore.testing.servers.redis_tls import make_certificate
from kvstore.testing.waiting import eventually
from kvstore.tiers.memory import MemoryTier
from kvstore.wire import convert, messages
from kvstore.wire.address import parse_address
from kvstore.wire.tls import ServerTls
from tests.security.raw_peer import RawPeer, head_bytes

MIB = 1 << 20
NUM_PEERS = 100


def prompt_of(number: int) -> Prompt:
    """Four records of a MiB."""
    return Prompt(ATTENTION, f"unread {number}", 128, payload_bytes=MIB, tenant=HEALTHY)


@pytest.fixture(params=["unix", pytest.param("tcp", marks=pytest.mark.full)])
async def service(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[AttackedService]:
    (port,) = free_ports(1)
    listen = None if request.param == "unix" else f"tcp://127.0.0.1:{port}"
    with AttackedService(folder, listen=listen, tokens={"operator": ALL_TENANTS}) as made:
        yield made


def ask_for_much(peer: RawPeer, number: int) -> bool:
    """Save a prompt, stage it, and load each record eight times. False: there was no room to stage."""
    prompt = prompt_of(number)
    peer.send(head_bytes(messages.OpenNamespace(1, 20_000, prompt.description.canonical)))
    assert (peer.receive() or {})["type"] == "namespace_opened"
    for record in prompt.records():
        peer.send(head_bytes(messages.Save(2, 20_000, "memory"), record.num_bytes) + bytes(record.data))
        peer.receive()
    peer.send(head_bytes(messages.Stage(3, 20_000, **convert.query_fields(prompt.query()))))
    answer: dict[str, object] | None = {}
    while answer is not None and answer.get("type") not in ("staged", "error"):
        answer = peer.receive()
    if answer is None or not answer.get("lease"):
        return False
    lease = answer["lease"]
    assert isinstance(lease, bytes)
    for turn in range(8):
        for at, record in enumerate(prompt.records()):
            fields = convert.key_fields(record.key)
            peer.send(head_bytes(messages.Load(100 + turn * 8 + at, 600_000, lease, **fields)))
    # some are being sent, so that they are held when the lease has ended and the tier evicts them: until then the
    # kernel must have taken what it takes, which are MiB over TCP
    time.sleep(0.01 if peer.sock.family == socket.AF_UNIX else 0.2)
    peer.send(head_bytes(messages.Release(lease)))
    return True


def num_sessions(service: AttackedService) -> int:
    answer = httpx.get(f"http://{service.admin}/metrics", headers={"Authorization": "Bearer operator"}, timeout=20)
    return int(float(answer.text.partition("\nkvstore_sessions ")[2].partition("\n")[0]))


async def test_peers_that_read_nothing(service: AttackedService, tell: Callable[[str], None]) -> None:
    """A hundred peers, each with records of its own that the memory tier evicts, load 32 MiB each and read
    nothing: all are cut off, and memory and a healthy client are as if they were not there."""
    gone: list[int] = []
    asked: list[RawPeer] = []

    def attack() -> None:
        before = num_sessions(service)
        with ExitStack() as stack:
            for number in range(NUM_PEERS):
                peer = stack.enter_context(RawPeer(service.url, HEALTHY))
                with suppress(OSError):
                    if ask_for_much(peer, number):
                        asked.append(peer)
            ends_s = time.monotonic() + 30
            # a peer cannot look without reading; over TCP the kernel may end a connection before the service does
            while (left := num_sessions(service) - before) > NUM_PEERS - len(asked) and time.monotonic() < ends_s:
                time.sleep(0.5)
            gone.append(NUM_PEERS - left)

    seen = await beside(service, lambda: asyncio.to_thread(attack))
    tell(f"{service.url.partition(':')[0]}: {gone[0]} of {NUM_PEERS} cut off, {len(asked)} had asked for all; {seen}")
    seen.check()
    assert len(asked) >= NUM_PEERS // 2 and gone[0] >= len(asked) * 9 // 10


@pytest.mark.parametrize("kind", ["unix", "tcp", "tls"])
async def test_who_reads_slowly_stays(folder: Path, kind: str) -> None:
    """A peer that reads a little every now and then gets all of its answers; one beside it that reads nothing is cut
    off, after the silence that is allowed and not long after."""
    tls = ServerTls(*make_certificate(folder)) if kind == "tls" else None
    server = Server(TieredStore(MemoryTier(128 * MIB)), ServiceLimits(silence_timeout_s=1.5), tls=tls)
    await server.listen([parse_address(f"unix:{folder / 's'}" if kind == "unix" else f"{kind}://127.0.0.1:0")])
    url = str(server.addresses[0])
    prompt = Prompt(ATTENTION, "slow", 64, payload_bytes=8 * MIB)

    def ask(peer: RawPeer) -> None:
        record = prompt.records()[0]
        peer.send(head_bytes(messages.OpenNamespace(1, 60_000, prompt.description.canonical)))
        peer.receive()
        for one in prompt.records():
            peer.send(head_bytes(messages.Save(2, 60_000, "memory"), one.num_bytes) + bytes(one.data))
            peer.receive()
        peer.send(head_bytes(messages.Stage(3, 60_000, **convert.query_fields(prompt.query()))))
        staged: dict[str, object] = {}
        while staged.get("type") != "staged":
            staged = peer.receive() or {}
        lease = staged["lease"]
        assert isinstance(lease, bytes)
        for number in range(4):
            fields = convert.key_fields(record.key)
            peer.send(head_bytes(messages.Load(10 + number, 60_000, lease, **fields)))

    def read_slowly(peer: RawPeer) -> int:
        num_bytes = pause_at = 0
        while num_bytes < 32 * MIB:
            part = peer.sock.recv(MIB)
            assert part, "a peer that reads was cut off"
            num_bytes += len(part)
            if num_bytes > pause_at:
                pause_at += MIB
                time.sleep(0.1)
        return num_bytes

    def both() -> None:
        with RawPeer(url) as slow, RawPeer(url) as silent:
            ask(slow)
            ask(silent)
            read_slowly(slow)
            eventually(lambda: server.describe()["sessions"] == 1, 20)  # the silent one ended

    await asyncio.to_thread(both)
    await server.aclose()
