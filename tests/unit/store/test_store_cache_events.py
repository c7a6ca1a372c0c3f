"""Cache events of the service: what subscribers believe is what the tiers hold, through every change."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgpack
import pytest
import zmq

from kvstore.errors import InvalidRequest
from kvstore.model.keys import Boundary, NamespaceId, PrefixHash
from kvstore.model.media import MEDIA
from kvstore.model.page_blocks import BlockGroup, PageBlocks
from kvstore.store.cache_events.encoding import Event, encode_batch, removed, stored
from kvstore.store.cache_events.publisher import EventPublisher
from kvstore.testing.event_subscriber import Entry, EventSubscriber, apply
from kvstore.testing.waiting import eventually

SPACE = NamespaceId(bytes(16))
BLOCK = 16


def blocks_of(name: str, count: int, *, start: int = 0, width: int = 8, window: int | None = None) -> PageBlocks:
    """Blocks `start..` of a prompt, whose hashes follow from its name and their position."""
    hashes = [f"{name}{index}".encode().rjust(width, b"\0") for index in range(start - 1, start + count)]
    return PageBlocks(
        namespace=SPACE,
        boundary=Boundary((start + count) * BLOCK, PrefixHash(f"{name}{start}+{count}".encode().ljust(32))),
        group=0,
        model="org/model",
        hash_bytes=width,
        hashes=b"".join(hashes[1:]),
        parent=hashes[0] if start else b"",
        block_tokens=BLOCK,
        groups=(BlockGroup(0, "full_attention"), BlockGroup(2, "sliding_window", window))
        if window
        else (BlockGroup(0, "full_attention"),),
        tokens=struct.pack(f"<{count * BLOCK}I", *range(start * BLOCK, (start + count) * BLOCK)),
    )


@pytest.mark.parametrize("width", [8, 32])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("start", [0, 4])
def test_batches_are_those_of_vllm(width: int, window: int | None, start: int) -> None:
    """vLLM's classes decode a batch, and encode it to the very same bytes; another library reads the same values."""
    msgspec = pytest.importorskip("msgspec")
    kv_events = pytest.importorskip("vllm.distributed.kv_events")
    blocks = blocks_of("a", 3, start=start, width=width, window=window)
    events: list[Event] = [stored(blocks, range(3), group, MEDIA["redis"]) for group in blocks.groups]
    events.append(removed([1, 2], 0, MEDIA["memory"]))
    events.append({"type": "AllBlocksCleared"})
    encoded = encode_batch(12.5, events)
    decoded = msgspec.msgpack.decode(encoded, type=kv_events.KVEventBatch)
    assert msgspec.msgpack.encode(decoded) == encoded
    assert (decoded.ts, decoded.data_parallel_rank, len(decoded.events)) == (12.5, 0, len(events))
    first = decoded.events[0]
    assert isinstance(first, kv_events.BlockStored)
    assert (first.token_ids, first.block_size) == (list(range(start * BLOCK, (start + 3) * BLOCK)), BLOCK)
    assert (first.medium, first.locality, first.ownership) == ("STORAGE", "REMOTE", None)
    assert (first.parent_block_hash is None) == (start == 0)
    assert isinstance(decoded.events[-1], kv_events.AllBlocksCleared)
    assert msgpack.unpackb(encoded) == [12.5, events, 0]


def test_a_part_of_a_page_continues_it() -> None:
    """Its parent is the block before it, its tokens are its own."""
    blocks = blocks_of("a", 4)
    event = stored(blocks, range(1, 3), blocks.groups[0], MEDIA["memory"])
    whole = stored(blocks, range(4), blocks.groups[0], MEDIA["memory"])
    assert event["block_hashes"] == whole["block_hashes"][1:3]
    assert event["parent_block_hash"] == whole["block_hashes"][0]
    assert event["token_ids"] == list(range(BLOCK, 3 * BLOCK))


@pytest.fixture
def addresses(tmp_path: Path) -> tuple[str, str]:
    return f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"


@pytest.fixture
def publisher(addresses: tuple[str, str]) -> Iterator[EventPublisher]:
    publisher = EventPublisher(*addresses)
    try:
        yield publisher
    finally:
        publisher.close()


def batch_of(number: int) -> list[Event]:
    return [stored(blocks_of(f"p{number}-", 2), range(2), BlockGroup(0, "full_attention"), MEDIA["memory"])]


def test_a_subscriber_that_stops_and_replays_ends_equal(publisher: EventPublisher, addresses: tuple[str, str]) -> None:
    """It joins late, loses what is sent while it is away, finds each gap by the sequence, and has all at the end."""
    publisher.publish("kv@node:a@m", batch_of(0))
    time.sleep(0.5)  # until it was sent to nobody
    subscriber, expected = EventSubscriber(*addresses), set[Entry]()
    apply(expected, "kv@node:a@m", batch_of(0))
    try:
        time.sleep(0.5)  # until its subscription is known
        sent = 1
        for away in (False, True, False):
            if away:
                subscriber.pause()
                time.sleep(0.5)
            for number in range(sent, sent + 500):
                publisher.publish("kv@node:a@m", batch_of(number))
                apply(expected, "kv@node:a@m", batch_of(number))
            sent += 500
            if away:
                time.sleep(0.5)
                subscriber.resume()
                time.sleep(0.5)
            else:
                subscriber.read(sent)
        assert subscriber.index == expected
        assert len(expected) == 2 * sent
        assert subscriber.replays >= 2
    finally:
        subscriber.close()


def test_a_replay_ends_when_all_is_published_again(publisher: EventPublisher, addresses: tuple[str, str]) -> None:
    """Numbers from 0 on begin at 0 again: who has read a part does not get other messages with the next numbers."""

    def publish(name: str) -> None:
        for number in range(100):
            events: list[Event] = [{"type": "BlockRemoved", "medium": name, "block_hashes": [number] * 20_000}]
            publisher.publish("kv@node:a@m", events)

    publish("before")
    context = zmq.Context()
    try:
        replay = context.socket(zmq.DEALER)
        replay.set_hwm(1)
        replay.setsockopt(zmq.RCVBUF, 4096)
        replay.connect(addresses[1])
        replay.send_multipart((b"", bytes(8)))
        assert replay.poll(5_000)  # it has begun, and waits for this peer to read
        publisher.begin_again()
        publish("again")
        publisher.told_all()
        seen = []
        while not seen or seen[-1][3]:
            assert replay.poll(5_000)
            seen.append(replay.recv_multipart())
        assert 0 < len(seen) - 1 < 100
        assert {msgpack.unpackb(frames[3])[1][0]["medium"] for frames in seen[:-1]} == {"before"}
        assert not publisher.lacks_some
    finally:
        context.destroy(linger=0)


def test_pages_that_are_too_many_to_be_replayed_are_said(
    publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are not published again for who comes late, so an operator must know what to do."""
    monkeypatch.setattr("kvstore.store.cache_events.publisher.KEPT", 3)
    for num_batches, is_said in ((3, False), (4, True)):
        publisher.begin_again()
        for number in range(num_batches):
            publisher.publish("kv@node:a@m", batch_of(number))
        publisher.told_all()
        eventually(vars(publisher)["_waiting"].empty)
        time.sleep(0.2)
        assert ("restarted" in caplog.text) == is_said


def test_an_address_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    for fields in (("nowhere",), (f"ipc://{tmp_path}/e", "nowhere")):
        with pytest.raises(InvalidRequest, match="events_"):
            EventPublisher(*fields)


def test_a_port_in_use() -> None:
    """Its user sees whose port that is by default, since an engine beside the service may have a publisher too."""
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        endpoint = f"tcp://*:{other.getsockname()[1]}"
        with pytest.raises(InvalidRequest, match="another process listens there, as vLLM's own publisher"):
            EventPublisher(endpoint)


def turns_of(thread: threading.Thread) -> int:
    """How often a thread has gone to sleep so far."""
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


@pytest.mark.parametrize("num_batches", [0, 3])
def test_a_publisher_with_nothing_to_do_sleeps(publisher: EventPublisher, num_batches: int) -> None:
    """Before its first message, and after messages and a replay: nothing wakes it, and it does not compute."""
    (thread,) = (one for one in threading.enumerate() if one.name == "kvstore-events")
    for number in range(num_batches):
        publisher.publish("kv@node:a@m", batch_of(number))
    time.sleep(0.5)  # until they were sent
    before, before_s = turns_of(thread), time.process_time()
    time.sleep(1.0)
    assert turns_of(thread) - before <= 2
    assert time.process_time() - before_s < 0.5
    publisher.publish("kv@node:a@m", batch_of(9))
    time.sleep(0.2)
    assert turns_of(thread) > before


def test_a_publisher_that_is_closed_sends_nothing(publisher: EventPublisher) -> None:
    publisher.close()
    publisher.publish("kv@node:a@m", batch_of(0))
    publisher.close()


def test_an_empty_batch_follows_and_is_sent_again(addresses: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who subscribes when all was sent sees by its number that there is more. No batch with events is sent twice: some
    subscribers count how often a block was stored. The messages of a replay have each number once."""
    monkeypatch.setattr("kvstore.store.cache_events.publisher.AGAIN_S", 0.3)
    publisher, context = EventPublisher(*addresses, first=1_000), zmq.Context()
    try:
        early, events, replay = (context.socket(kind) for kind in (zmq.SUB, zmq.SUB, zmq.DEALER))
        early.connect(addresses[0])
        early.subscribe(b"")
        time.sleep(0.2)  # until it is connected
        for number in range(3):
            publisher.publish("kv@node:a@m", batch_of(number))
        time.sleep(0.5)  # until they were sent
        events.connect(addresses[0])
        events.subscribe(b"")
        replay.connect(addresses[1])
        again = []
        for _ in range(2):
            assert events.poll(5_000)
            again.append(events.recv_multipart())
        assert again[0] == again[1]
        assert [again[0][0], number_of(again[0]), msgpack.unpackb(again[0][2])[1]] == [b"kv@node:a@m", 1_003, []]
        seen = []
        while len(seen) < 5:
            assert early.poll(5_000)
            frames = early.recv_multipart()
            seen.append((number_of(frames), msgpack.unpackb(frames[2])[1]))
        assert seen == [*((1_000 + number, batch_of(number)) for number in range(3)), (1_003, []), (1_003, [])]
        replay.send_multipart((b"", bytes(8)))
        sent = []
        while not sent or sent[-1][3]:
            assert replay.poll(5_000)
            sent.append(replay.recv_multipart())
        assert [number_of(frames[1:]) for frames in sent[:-1]] == [1_000, 1_001, 1_002, 1_003]
        publisher.publish("kv@node:a@m", batch_of(3))
        while number_of(frames := early.recv_multipart()) == 1_003:
            assert early.poll(5_000)
        assert (number_of(frames), msgpack.unpackb(frames[2])[1]) == (1_004, batch_of(3))
    finally:
        publisher.close()
        context.destroy(linger=0)


def number_of(frames: Sequence[bytes]) -> int:
    """The sequence of a message."""
    return int.from_bytes(frames[1], "big")
