"""The sockets of cache events: ZeroMQ, with the frames of vLLM's publisher."""

from __future__ import annotations

import errno
import logging
import queue
import socket
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from math import ceil
from typing import Literal

import zmq

from kvstore.errors import InvalidRequest
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.store.cache_events.encoding import Event, encode_batch

_log = logging.getLogger(__name__)

KEPT, _KEPT_BYTES = 10_000, 64 << 20
"""Batches that can be replayed. A subscriber that is further behind must begin with an empty index."""
_BATCH_BYTES = 1_024
"""What a batch takes beside its bytes."""
_SUBSCRIBER_BATCHES = 1_000
"""Batches that wait for one subscriber. It loses what comes beyond, and sees that by the sequence."""
_BEHIND, _BEHIND_BYTES = 1_000, 8 << 20
"""Batches that wait for the thread."""
_MESSAGE_BYTES_MAX = 1_024
"""Of a frame from a peer: subscriptions and requests for a replay have a few bytes."""
_REPLAYS_MAX, _REPLAY_BATCHES = 64, 16
"""Replays at a time, and batches that wait for one of their peers."""
_REQUESTS_WAITING = 16
SILENT_S = 30
"""A peer that reads nothing for this long is cut off, and what waits for it is dropped."""
_TURN_S, _REPLAY_TURN_S = 0.05, 0.002
"""How long the next part of a replay may wait, whose peer has read nothing, and of one whose peer reads."""
AGAIN_S = 5.0
"""After so long without a message, an empty batch is sent, and then that message again."""
_WAKES = 4_096
"""Bytes that are read at a time from those that wake the thread."""
_CLOSE_S = 2.0
_END = (-1).to_bytes(8, "big", signed=True)


class EventPublisher:
    """Sends batches of events to all subscribers, and again to those that ask for it.

    A message has three frames: topic, sequence (u64, big-endian), batch. All topics share one sequence. A subscriber
    that finds a gap sends the first missing number to the replay socket, as vLLM's subscribers do. It gets what is
    kept, in order, and then an empty message with the sequence -1.

    When nothing new comes, an empty batch follows, and this message is sent again from time to time. A subscriber that
    came later, or lost the last messages, sees a gap before it. No batch with events is sent twice, except in a replay:
    llm-d counts how often a block was stored, and forgets it after as many removals.

    Publishing never waits: a thread of its own has the sockets. What waits for a peer is bounded, and shares its memory
    with the batches that are kept.

    Args:
        endpoint: As in vLLM: addresses with `*` or `::`, of `ipc://` and of `inproc://` are bound, others connected.
        replay_endpoint: Bound; empty: there is no replay.
        first: The number of the first message.
        clock: For the time in a batch.

    Raises:
        InvalidRequest: An address cannot be used.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str = "", *, first: int = 0, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._clock = clock
        self._waiting: queue.SimpleQueue[tuple[bytes, bytes] | Literal["begin", "all", "end"]] = queue.SimpleQueue()
        self._put_bytes = self._taken_bytes = 0  # each is changed by one thread
        self._kept: deque[tuple[int, list[zmq.Frame]]] = deque()  # sequence; topic, sequence, batch
        self._kept_bytes = 0
        self._running: OrderedDict[bytes, int] = OrderedDict()  # peers, and the sequence that is next for each
        self._first = first
        self._sequence = count(first)
        self._has_dropped = self._is_asked = self._is_too_much = False
        self._empty = -1  # the number of the last empty batch
        self._sent_s = clock.monotonic_s()
        self._context = zmq.Context()
        self._events = self._socket(zmq.PUB, _SUBSCRIBER_BATCHES)
        self._replays: zmq.Socket[bytes] | None = None
        try:
            _open(self._events, endpoint, "events_endpoint", must_bind=False)
            if replay_endpoint:
                self._replays = self._socket(zmq.ROUTER, _REPLAY_BATCHES)
                self._replays.setsockopt(zmq.RCVHWM, _REQUESTS_WAITING)
                self._replays.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else it drops without a word
                _open(self._replays, replay_endpoint, "events_replay_endpoint", must_bind=True)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._waker, self._woken = socket.socketpair()  # its closed end refuses bytes, so `publish` may come too late
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kvstore-events", daemon=True)
        self._thread.start()

    @property
    def is_behind(self) -> bool:
        """Whether the thread has more to send than it should: the caller publishes later."""
        waiting_bytes = self._put_bytes - self._taken_bytes
        return self._waiting.qsize() >= _BEHIND or waiting_bytes >= _BEHIND_BYTES

    def publish(self, topic: str, events: Sequence[Event]) -> None:
        """Send one batch. Returns at once."""
        batch = encode_batch(self._clock.wall_ms() / 1000, events)
        self._put_bytes += len(batch)
        self._waiting.put((topic.encode(), batch))
        self._wake()

    @property
    def lacks_some(self) -> bool:
        """Whether a subscriber has asked for messages since the last `begin_again`, or the start, that are no longer
        kept. False if those up to `told_all` were too many."""
        return self._is_asked and not self._is_too_much

    def begin_again(self) -> None:
        """Keep nothing of what was published so far. Numbers from 0 on begin at 0 again, as with a restart."""
        self._waiting.put("begin")
        self._wake()

    def told_all(self) -> None:
        """All that subscribers are to know was published since `begin_again`."""
        self._waiting.put("all")
        self._wake()

    def close(self) -> None:
        """Send what waits, for two seconds at most, and close the sockets. Idempotent."""
        self._waiting.put("end")
        self._wake()
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._waker.close()
            self._woken.close()

    def _wake(self) -> None:
        with suppress(OSError):  # full: the thread is to wake anyway; closed: there is none
            self._waker.send(b"\0")

    def _socket(self, kind: int, most: int) -> zmq.Socket[bytes]:
        """A socket on which peers cannot leave much: neither what they send nor what they do not read."""
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, most)
        socket.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_BYTES_MAX)
        socket.setsockopt(zmq.TCP_MAXRT, SILENT_S * 1000)
        return socket

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken.fileno(), zmq.POLLIN)
        if self._replays is not None:
            poller.register(self._replays, zmq.POLLIN)
        try:
            is_replaying = False
            while True:
                if self._waiting.empty():
                    self._sleep(poller, is_replaying=is_replaying)
                try:
                    batch = self._waiting.get_nowait()
                except queue.Empty:
                    self._send_again()
                else:
                    if batch == "end":
                        return
                    if batch == "begin":
                        self._drop_all()
                        continue
                    if batch == "all":
                        self._told_all()
                        continue
                    self._taken_bytes += len(batch[1])
                    self._send(*batch)
                if self._replays is not None:
                    self._take_request(self._replays)
                    is_replaying = self._replay(self._replays)
        except zmq.ZMQError:
            _log.exception("cache events are no longer published: restart the service")
        finally:
            self._context.destroy(linger=int(_CLOSE_S * 500))

    def _sleep(self, poller: zmq.Poller, *, is_replaying: bool) -> None:
        """Return when there is a batch or a request for a replay, or when the next part of one or a repetition is due.

        Args:
            is_replaying: Whether the peer of a replay has read something in the last turn.
        """
        until_s: float | None = None
        if self._kept:
            until_s = max(0.0, self._sent_s + AGAIN_S - self._clock.monotonic_s())
        if self._running:
            until_s = _REPLAY_TURN_S if is_replaying else _TURN_S
        ready = poller.poll(None if until_s is None else ceil(until_s * 1000))
        if any(one == self._woken.fileno() for one, _ in ready):
            self._woken.recv(_WAKES)

    def _send(self, topic: bytes, batch: bytes) -> None:
        sequence = next(self._sequence)
        # frames of ZeroMQ's own: sent again, to any number of peers, they are not copied
        frames = [zmq.Frame(part, copy=True) for part in (topic, sequence.to_bytes(8, "big"), batch)]
        self._events.send_multipart(frames, copy=False)
        self._sent_s = self._clock.monotonic_s()
        self._kept.append((sequence, frames))
        self._kept_bytes += _kept_bytes(frames)
        while len(self._kept) > KEPT or self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= _kept_bytes(self._kept.popleft()[1])
            self._has_dropped = True

    def _drop_all(self) -> None:
        self._kept.clear()
        self._kept_bytes, self._empty, self._has_dropped, self._is_asked = 0, -1, False, False
        # a replay that runs ends here: it would go on with equal numbers of other messages
        self._running = OrderedDict.fromkeys(self._running, sys.maxsize)
        if not self._first:
            self._sequence = count()

    def _told_all(self) -> None:
        self._is_too_much = self._has_dropped
        if self._is_too_much:
            _log.warning(
                "cache events: all pages take more than the %d batches or %d MiB that can be replayed. Until this "
                "service is restarted, a router that comes late does not learn of all. Fewer names in events_node "
                "take less.",
                KEPT,
                _KEPT_BYTES >> 20,
            )

    def _send_again(self) -> None:
        """If nothing was sent for a while: send an empty batch, or the last message again if that was one."""
        if not self._kept or self._clock.monotonic_s() - self._sent_s < AGAIN_S:
            return
        sequence, frames = self._kept[-1]
        if sequence == self._empty:
            self._events.send_multipart(frames, copy=False)
            self._sent_s = self._clock.monotonic_s()
        else:
            self._send(frames[0].bytes, encode_batch(self._clock.wall_ms() / 1000, ()))
            self._empty = self._kept[-1][0]

    def _take_request(self, replays: zmq.Socket[bytes]) -> None:
        """Begin a replay, if one is asked for. A peer has one at a time. Of too many, the one is given up that had no
        progress for longest."""
        if not replays.poll(0):
            return
        frames = list[bytes]()
        while True:
            frame = replays.recv()
            if len(frames) < 4:
                frames.append(frame)
            if not replays.getsockopt(zmq.RCVMORE):
                break
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        self._running[frames[0]] = first = int.from_bytes(frames[2], "big")
        self._is_asked |= self._has_dropped and first < self._kept[0][0]
        if len(self._running) > _REPLAYS_MAX:
            self._running.popitem(last=False)

    def _replay(self, replays: zmq.Socket[bytes]) -> bool:
        """Send the next part of each replay, as far as its peer reads. Returns whether any peer has read."""
        has_progress = False
        for peer in list(self._running):
            before = self._running[peer]
            try:
                is_done = self._replay_part(replays, peer)
            except zmq.Again:
                is_done = False
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                is_done = True
            if is_done:
                del self._running[peer]
            elif self._running[peer] != before:
                self._running.move_to_end(peer)
                has_progress = True
        return has_progress

    def _replay_part(self, replays: zmq.Socket[bytes], peer: bytes) -> bool:
        """Whether that was the last part.

        Raises:
            zmq.Again: The peer must read first.
        """
        head = [zmq.Frame(peer, copy=True), zmq.Frame(b"", copy=True)]
        oldest = self._kept[0][0] if self._kept else 0
        start = max(0, self._running[peer] - oldest)
        for index in range(start, min(start + 2 * _REPLAY_BATCHES, len(self._kept))):
            sequence, frames = self._kept[index]
            replays.send_multipart([*head, *frames], zmq.NOBLOCK, copy=False)
            self._running[peer] = sequence + 1
        if self._kept and self._running[peer] <= self._kept[-1][0]:
            return False
        replays.send_multipart((peer, b"", b"", _END, b""), zmq.NOBLOCK)
        return True


def _kept_bytes(frames: Sequence[zmq.Frame]) -> int:
    return _BATCH_BYTES + sum(map(len, frames))


def _open(socket: zmq.Socket[bytes], endpoint: str, field: str, *, must_bind: bool) -> None:
    try:
        if must_bind or "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise InvalidRequest(
                "another process listens there, as vLLM's own publisher does at tcp://*:5557: name a free port",
                field=field,
                seen=endpoint,
            ) from error
        raise InvalidRequest(
            f"expected an address that can be used, like tcp://*:5557: {error}", field=field, seen=endpoint
        ) from error
