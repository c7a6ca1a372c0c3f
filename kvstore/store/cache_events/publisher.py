"""The sockets of cache events: ZeroMQ, with the frames of vLLM's publisher."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Sequence
from itertools import count

import zmq

from kvstore.errors import InvalidRequest
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.store.cache_events.encoding import Event, encode_batch

_log = logging.getLogger(__name__)

_KEPT, _KEPT_BYTES = 10_000, 64 << 20
"""Batches that can be replayed. A subscriber that is further behind must begin with an empty index."""
_SUBSCRIBER_BATCHES = 10_000
"""Batches that wait for one subscriber. It loses what comes beyond, and sees that by the sequence."""
_BEHIND = 1_000
_TURN_S = 0.05
"""How long a request for a replay may wait."""
_CLOSE_S = 2.0
_END = (-1).to_bytes(8, "big", signed=True)


class EventPublisher:
    """Sends batches of events to all subscribers, and again to those that ask for it.

    A message has three frames: topic, sequence (u64, big-endian), batch. All topics share one sequence. A subscriber
    that finds a gap sends the first missing number to the replay socket, as vLLM's subscribers do. It gets what is
    kept, in order, and then an empty message with the sequence -1.

    Publishing never waits: a thread of its own has the sockets.

    Args:
        endpoint: As in vLLM: addresses with `*` or `::`, of `ipc://` and of `inproc://` are bound, others connected.
        replay_endpoint: Bound; empty: there is no replay.
        clock: For the time in a batch.

    Raises:
        InvalidRequest: An address cannot be used.
    """

    def __init__(self, endpoint: str, replay_endpoint: str = "", *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._waiting: queue.SimpleQueue[tuple[bytes, bytes] | None] = queue.SimpleQueue()
        self._kept: deque[tuple[bytes, bytes, bytes]] = deque()  # topic, sequence, batch
        self._kept_bytes = 0
        self._sequence = count()
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.PUB)
        self._events.set_hwm(_SUBSCRIBER_BATCHES)
        self._replays: zmq.Socket[bytes] | None = None
        try:
            _open(self._events, endpoint, "events_endpoint", must_bind=False)
            if replay_endpoint:
                self._replays = self._context.socket(zmq.ROUTER)
                self._replays.set_hwm(_KEPT + 1)  # beyond, this socket drops without a word
                _open(self._replays, replay_endpoint, "events_replay_endpoint", must_bind=True)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kvstore-events", daemon=True)
        self._thread.start()

    @property
    def is_behind(self) -> bool:
        """Whether the thread has more to send than it should: the caller publishes later."""
        return self._waiting.qsize() >= _BEHIND

    def publish(self, topic: str, events: Sequence[Event]) -> None:
        """Send one batch. Returns at once."""
        self._waiting.put((topic.encode(), encode_batch(self._clock.wall_ms() / 1000, events)))

    def close(self) -> None:
        """Send what waits, for two seconds at most, and close the sockets. Idempotent."""
        self._waiting.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            while True:
                try:
                    batch = self._waiting.get(timeout=_TURN_S)
                except queue.Empty:
                    pass
                else:
                    if batch is None:
                        return
                    self._send(*batch)
                if self._replays is not None and self._replays.poll(0):
                    self._replay(self._replays)
        except zmq.ZMQError:
            _log.exception("cache events are no longer published: restart the service")
        finally:
            self._context.destroy(linger=int(_CLOSE_S * 500))

    def _send(self, topic: bytes, batch: bytes) -> None:
        sequence = next(self._sequence).to_bytes(8, "big")
        self._events.send_multipart((topic, sequence, batch))
        self._kept.append((topic, sequence, batch))
        self._kept_bytes += len(batch)
        while len(self._kept) > _KEPT or self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[2])

    def _replay(self, replays: zmq.Socket[bytes]) -> None:
        frames = replays.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        peer, empty, first = frames
        for topic, sequence, batch in self._kept:
            if sequence >= first:  # big-endian: the order of the bytes is that of the numbers
                replays.send_multipart((peer, empty, topic, sequence, batch))
        replays.send_multipart((peer, empty, b"", _END, b""))


def _open(socket: zmq.Socket[bytes], endpoint: str, field: str, *, must_bind: bool) -> None:
    try:
        if must_bind or "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise InvalidRequest(
            f"expected an address that can be used, like tcp://*:5557: {error}", field=field, seen=endpoint
        ) from error
