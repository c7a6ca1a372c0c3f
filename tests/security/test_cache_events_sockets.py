"""Peers of the sockets of cache events, which show no token: large frames, and peers that read nothing."""

from __future__ import annotations

import re
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from kvstore.store.cache_events.publisher import EventPublisher
from kvstore.testing.waiting import eventually

MIB = 1 << 20
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
DEALER, SUB = b"DEALER", b"SUB"
TOPIC = "kv@node:here@m"


@pytest.fixture
def ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        for sock in (one, other):
            sock.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


@pytest.fixture
def publisher(ports: tuple[int, int]) -> Iterator[EventPublisher]:
    publisher = EventPublisher(*(f"tcp://*:{port}" for port in ports))
    try:
        yield publisher
    finally:
        publisher.close()


class Peer:
    """A socket that has shaken hands and reads nothing; a context manager.

    Args:
        kind: As whose peer it comes.
    """

    def __init__(self, port: int, kind: bytes = DEALER) -> None:
        self.sock = socket.socket()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.sock.settimeout(20)
        self.sock.connect(("127.0.0.1", port))
        self.sock.sendall(GREETING)
        self._exactly(64)
        ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind + b"\x08Identity" + bytes(4)
        self.sock.sendall(b"\x04" + bytes([len(ready)]) + ready)
        _, size = self._exactly(2)
        self._exactly(size)

    def _exactly(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            part = self.sock.recv(num_bytes - len(data))
            assert part
            data += part
        return data

    def ask(self) -> None:
        """For a replay."""
        self.sock.sendall(b"\x01\x00" + b"\x00\x08" + bytes(8))

    def is_ended(self) -> bool:
        try:
            return not self.sock.recv(1)
        except ConnectionError:
            return True

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()


def replayed(port: int) -> list[int]:
    """The sequences that a peer gets that reads."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send_multipart((b"", bytes(8)))
        found = list[int]()
        while True:
            assert dealer.poll(20_000), f"no more after {len(found)} batches"
            _, topic, sequence, _ = dealer.recv_multipart()
            if int.from_bytes(sequence, "big", signed=True) == -1:
                return found
            assert topic.decode() == TOPIC
            found.append(int.from_bytes(sequence, "big"))


def until_replayed(port: int, count: int) -> None:
    """Return when a peer that reads gets all batches: the last ones were on their way to what is kept."""
    ends_s = time.monotonic() + 20
    while (seen := replayed(port)) != list(range(count)):
        assert seen == list(range(len(seen))) and time.monotonic() < ends_s


def resident_bytes() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def fill(publisher: EventPublisher, count: int) -> None:
    """Publish batches of 64 KiB."""
    for number in range(count):
        publisher.publish(TOPIC, [{"type": "BlockStored", "data": number.to_bytes(4, "big") * (16 << 10)}])
        eventually(lambda: not publisher.is_behind)


def test_a_large_frame_ends_the_connection(publisher: EventPublisher, ports: tuple[int, int]) -> None:
    """On both sockets, before any of it takes memory."""
    fill(publisher, 3)
    before = resident_bytes()
    for port, kind in zip(ports, (SUB, DEALER), strict=True):
        with Peer(port, kind) as peer:
            try:
                peer.sock.sendall(b"\x02" + (512 * MIB).to_bytes(8, "big") + bytes(64 * MIB))
            except ConnectionError:
                continue
            assert peer.is_ended()
    assert resident_bytes() - before < 100 * MIB  # what this test sends is in it
    until_replayed(ports[1], 3)


def test_peers_that_do_not_read_a_replay_take_little(
    publisher: EventPublisher, ports: tuple[int, int], tell: Callable[[str], None]
) -> None:
    """Thirty of them ask for all that is kept, three times each: a peer that reads gets all of it, and what waits for
    them shares the memory of what is kept."""
    fill(publisher, 400)
    until_replayed(ports[1], 400)
    before = resident_bytes()
    peers = [Peer(ports[1]) for _ in range(30)]
    for peer in peers:
        for _ in range(3):
            peer.ask()
    assert replayed(ports[1]) == list(range(400))
    more = resident_bytes() - before
    tell(f"30 peers that do not read take {more >> 20} MiB")
    assert more < 48 * MIB
    fill(publisher, 10)
    until_replayed(ports[1], 410)
    for peer in peers:
        peer.sock.close()
    assert replayed(ports[1]) == list(range(410))


def test_a_hundred_peers_that_do_not_read_keep_nobody_out(publisher: EventPublisher, ports: tuple[int, int]) -> None:
    fill(publisher, 100)
    peers = [Peer(ports[1]) for _ in range(100)]
    for peer in peers:
        peer.ask()
    time.sleep(0.5)
    until_replayed(ports[1], 100)
    for peer in peers:
        peer.sock.close()


def test_a_subscriber_that_does_not_read_takes_little(
    publisher: EventPublisher, ports: tuple[int, int], tell: Callable[[str], None]
) -> None:
    """What waits for it shares the memory of what can be replayed, until it has lost batches."""
    fill(publisher, 1_100)
    before = resident_bytes()
    with Peer(ports[0], SUB) as peer:
        peer.sock.sendall(b"\x00\x01\x01")  # a subscription to all topics
        time.sleep(0.5)
        fill(publisher, 3_000)
        more = resident_bytes() - before
    tell(f"a subscriber that does not read takes {more >> 20} MiB")
    assert more < 100 * MIB


def test_a_subscriber_that_does_not_read_is_cut_off(ports: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while, so that what waits for it is dropped."""
    monkeypatch.setattr("kvstore.store.cache_events.publisher.SILENT_S", 2)
    publisher = EventPublisher(f"tcp://*:{ports[0]}")
    try:
        with Peer(ports[0], SUB) as peer:
            peer.sock.sendall(b"\x00\x01\x01")
            time.sleep(0.5)
            for _ in range(8):
                fill(publisher, 30)
                time.sleep(1)
            with pytest.raises(ConnectionError):
                while peer.sock.recv(MIB):
                    pass
    finally:
        publisher.close()


def test_what_waits_is_counted_in_bytes(publisher: EventPublisher) -> None:
    publisher.close()
    for _ in range(7):
        publisher.publish(TOPIC, [{"type": "BlockStored", "data": bytes(MIB)}])
    assert not publisher.is_behind
    for _ in range(2):
        publisher.publish(TOPIC, [{"type": "BlockStored", "data": bytes(MIB)}])
    assert publisher.is_behind
