"""A subscriber to cache events, as routers are: an index, gaps that it finds by the sequence, replays."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgpack
import zmq

Entry = tuple[str, str, int, object]
"""Topic, medium, the engine's group, hash of a block."""

PATIENCE_S = 20.0
_SILENT_S = 2.0
_SMALL_BYTES = 4096


class EventSubscriber:
    """A subscriber as routers are: it keeps an index, finds gaps by the sequence, and asks for what it missed.

    Args:
        waiting_max: Messages that wait in this process until they are read; the publisher's socket has the next ones.
            0: any number.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, *, waiting_max: int = 0) -> None:
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.set_hwm(waiting_max)
        if waiting_max:
            self._events.setsockopt(zmq.RCVBUF, _SMALL_BYTES)
        self._events.connect(endpoint)
        self._events.subscribe(b"")
        self._replay_endpoint = replay_endpoint
        self.next = 0
        self.replays = 0
        self.topics: set[str] = set()
        self.index: set[Entry] = set()

    def pause(self) -> None:
        """Lose what is sent from now on, as if the queue for this subscriber were full."""
        self._events.unsubscribe(b"")

    def resume(self) -> None:
        self._events.subscribe(b"")

    def read(self, upto: int) -> None:
        """Read until the index has all of the first `upto` messages."""
        self.read_until(lambda: self.next >= upto)

    def read_until(self, is_reached: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
        """Read until something is so; fail if it is not in time."""
        ends_s = time.monotonic() + within_s
        asked_s = time.monotonic()
        while not is_reached():
            assert time.monotonic() < ends_s, f"{len(self.index)} blocks after {self.next} messages"
            if not self._events.poll(10):
                if time.monotonic() - asked_s > _SILENT_S:  # what was sent before it had subscribed shows no gap
                    self._replay()
                    asked_s = time.monotonic()
                continue
            asked_s = time.monotonic()
            topic, sequence, batch = self._events.recv_multipart()
            number = int.from_bytes(sequence, "big")
            if number < self.next - 1:  # numbers begin again; that of the last message is sent again while all is quiet
                self.next = 0
                self.index.clear()
            if number > self.next:
                self._replay()
            if number == self.next:
                self._apply(topic, batch)

    def _replay(self) -> None:
        self.replays += 1
        socket = self._context.socket(zmq.DEALER)
        socket.connect(self._replay_endpoint)
        socket.send_multipart((b"", self.next.to_bytes(8, "big")))
        while True:
            assert socket.poll(int(PATIENCE_S * 1000))
            empty, topic, sequence, batch = socket.recv_multipart()
            assert empty == b""
            if int.from_bytes(sequence, "big", signed=True) == -1:
                break
            if int.from_bytes(sequence, "big") == self.next:
                self._apply(topic, batch)
        socket.close(linger=0)

    def _apply(self, topic: bytes, batch: bytes) -> None:
        self.next += 1
        self.topics.add(topic.decode())
        apply(self.index, topic.decode(), msgpack.unpackb(batch)[1])

    def close(self) -> None:
        self._context.destroy(linger=0)


def apply(index: set[Entry], topic: str, events: Sequence[Mapping[str, Any]]) -> None:
    """What a router's index does. A block that is stored twice, or removed without being there, is a fault of ours."""
    for event in events:
        if event["type"] == "AllBlocksCleared":
            name = topic.split("@")[1]  # llm-d drops all of its blocks, of every model
            index.difference_update({entry for entry in index if entry[0].split("@")[1] == name})
            continue
        for block_hash in event["block_hashes"]:
            entry = (topic, event["medium"], event["group_idx"], block_hash)
            if event["type"] == "BlockStored":
                assert entry not in index, "stored twice"
                index.add(entry)
            else:
                assert entry in index, "removed what is not there"
                index.remove(entry)
