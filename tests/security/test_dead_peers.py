"""Peers that die in every state: what they made the service hold is free at once, without the cyclic collector."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore.testing.attacked import HEALTHY, AttackedService
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.servers.ports import free_ports
from kvstore.testing.servers.redis_tls import make_certificate
from kvstore.wire import convert, messages
from tests.security.raw_peer import RawPeer, greeted, head_bytes, prefix

MEMORY_BYTES = 64 << 20
LARGE_BYTES = 40 << 20
NUM_PEERS = 8
SLACK_BYTES = 76 << 20
"""Less than two of the large records, and than a sixth of what all peers of one state make the service hold."""

# A service whose cyclic collector never runs: memory that only that would free is seen as resident.
_WITHOUT_COLLECTOR = "import gc; gc.disable(); gc.enable = lambda: None; from kvstore.cli.main import main; main()"

PROMPT = Prompt(ATTENTION, "dead peers", 64, payload_bytes=4 << 20, tenant=HEALTHY)


@pytest.fixture(params=["unix", "tls", pytest.param("tcp", marks=pytest.mark.full)])
def service(request: pytest.FixtureRequest, folder: Path) -> Iterator[AttackedService]:
    """On each kind of connection. Its memory tier has been full once: the arena's memory stays resident."""
    (port,) = free_ports(1)
    settings = {}
    if request.param == "tls":
        certificate, key = make_certificate(folder)
        settings = {"tls_certificate_file": str(certificate), "tls_key_file": str(key)}
    listen = None if request.param == "unix" else f"{request.param}://127.0.0.1:{port}"
    made = AttackedService(folder, listen=listen, memory_bytes=MEMORY_BYTES, tokens={"x": "x"}, settings=settings)
    made.process.command = [sys.executable, "-c", _WITHOUT_COLLECTOR, *made.process.command[3:]]
    with made:
        yield made


def opened(service: AttackedService) -> RawPeer:
    peer = greeted(service, HEALTHY)
    peer.send(head_bytes(messages.OpenNamespace(1, 20_000, PROMPT.description.canonical)))
    assert (peer.receive() or {})["type"] == "namespace_opened"
    return peer


def save_of(num_bytes: int, number: int = 7, deadline_ms: int = 20_000) -> bytes:
    return head_bytes(messages.Save(number, deadline_ms, "memory"), num_bytes)


def in_head(service: AttackedService) -> None:
    """All but the last byte of the largest head has come."""
    for _ in range(NUM_PEERS):
        peer = greeted(service, HEALTHY)
        peer.send(prefix(4 << 20) + bytes((4 << 20) - 1))
        peer.die()


def in_payload(service: AttackedService) -> None:
    """All but the last byte of a record has come."""
    for _ in range(NUM_PEERS):
        peer = greeted(service, HEALTHY)
        peer.send(save_of(LARGE_BYTES) + bytes(LARGE_BYTES - 1))
        peer.die()


def waiting_for_room(service: AttackedService) -> None:
    """Six have all the room, two wait for some; all die together."""
    peers = [greeted(service, HEALTHY) for _ in range(NUM_PEERS)]
    for peer in peers[:6]:
        peer.send(save_of(LARGE_BYTES) + bytes(LARGE_BYTES - 1))
    for peer in peers[6:]:
        peer.send(save_of(LARGE_BYTES) + bytes(64 << 10))
    time.sleep(0.2)
    for peer in peers:
        peer.die()


def refused_record(service: AttackedService) -> None:
    """A whole record has come that is none: it is answered with an error, which no peer reads."""
    for _ in range(NUM_PEERS):
        peer = greeted(service, HEALTHY)
        peer.send(save_of(LARGE_BYTES) + bytes(LARGE_BYTES))
        assert (peer.receive() or {})["type"] == "error"
        peer.send(save_of(LARGE_BYTES) + bytes(LARGE_BYTES))
        peer.die()


def too_late(service: AttackedService) -> None:
    """The deadline of a save passes when half of it has come; the rest is dropped as it comes."""
    for number in range(NUM_PEERS):
        peer = greeted(service, HEALTHY)
        peer.send(save_of(LARGE_BYTES, number, 50) + bytes(LARGE_BYTES // 2))
        time.sleep(0.1)
        peer.send(bytes(LARGE_BYTES // 4))
        peer.die()


def cut_off(service: AttackedService) -> None:
    """A bad frame follows a record: the service ends the connection itself."""
    for _ in range(NUM_PEERS):
        peer = greeted(service, HEALTHY)
        with suppress(OSError):
            peer.send(save_of(LARGE_BYTES) + bytes(LARGE_BYTES) + b"rubbish of sixteen bytes and more")
        while peer.receive() is not None:
            pass
        peer.die()


def unread(service: AttackedService) -> None:
    """Sixteen loads are answered with four MiB each, and the peer does not read."""
    record = PROMPT.records()[0]
    peer = opened(service)
    peer.send(save_of(record.num_bytes) + bytes(record.data))
    peer.receive()
    for one in PROMPT.records()[1:]:
        peer.send(save_of(one.num_bytes) + bytes(one.data))
        peer.receive()
    peer.send(head_bytes(messages.Stage(3, 20_000, **convert.query_fields(PROMPT.query()))))
    staged: dict[str, object] = {}
    while staged.get("type") != "staged":
        staged = peer.receive() or {}
    lease = staged["lease"]
    assert isinstance(lease, bytes) and lease
    for _ in range(NUM_PEERS):
        dying = greeted(service, HEALTHY)
        dying.send(head_bytes(messages.OpenNamespace(1, 20_000, PROMPT.description.canonical)))
        fields = convert.key_fields(record.key)
        for number in range(2, 18):
            dying.send(head_bytes(messages.Load(number, 20_000, lease, **fields)))
        time.sleep(0.05)
        dying.die()
    peer.die()


STATES: list[Callable[[AttackedService], None]] = [
    in_head, in_payload, waiting_for_room, refused_record, too_late, cut_off, unread
]  # fmt: skip


def test_memory_of_peers_that_die(service: AttackedService, tell: Callable[[str], None]) -> None:
    """Eight peers die in one state after the other: within seconds the service has no more memory than before."""
    unread(service)
    refused_record(service)  # what libraries load once is loaded, the arena has been used
    before_bytes = settled(service, 0)
    for state in STATES:
        state(service)
        limit_bytes = before_bytes + SLACK_BYTES
        after_bytes = settled(service, limit_bytes)
        tell(f"{service.url.partition(':')[0]} {state.__name__}: {before_bytes >> 20} to {after_bytes >> 20} MiB")
        assert after_bytes <= limit_bytes, (state.__name__, before_bytes >> 20, after_bytes >> 20)


def settled(service: AttackedService, limit_bytes: int) -> int:
    """What is resident, as soon as it is within a limit, or after five seconds."""
    ends_s = time.monotonic() + (5.0 if limit_bytes else 2.0)
    while (resident_bytes := service.resident_bytes) > limit_bytes and time.monotonic() < ends_s:
        time.sleep(0.05)
    return resident_bytes
