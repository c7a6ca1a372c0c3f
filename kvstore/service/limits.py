"""What peers can make the service hold, and for how long: bounds, unauthenticated connections, stalled peers."""

from __future__ import annotations

import ipaddress
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

from kvstore.errors import InvalidRequest
from kvstore.format.record import MAX_RECORD_BYTES
from kvstore.wire import messages
from kvstore.wire.frames import MAX_HEAD_BYTES

_SHORT_BYTES = 1 << 10
"""A request with no more in its fields is short: a load, a save, the lookup of a prompt with 28 boundaries."""
_CONNECTIONS_MAX = 4096
_RESERVED_FILES = 512
"""For tiers, the catalog, the administration port, and connections that have not said hello."""


def _connections_max() -> int:
    """The process's limit of open files less the reserve; where that is little, half of the limit."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return _CONNECTIONS_MAX
    return min(_CONNECTIONS_MAX, max(files - _RESERVED_FILES, files // 2))


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Bounds on what peers can make the service hold.

    Attributes:
        receive_bytes: Bytes of saves being received or stored, over all connections and shared among tenants. Too few
            stall savers; too many are memory that the tiers do not get.
        head_bytes: Bytes of heads over 16 KiB that are being received, likewise. Apart from saves, so that no lookup
            waits behind them. Where there is no room, nothing more is read from a connection until there is some.
        save_credit_bytes: Bytes of unanswered saves on one connection: a client's window. 32 MiB keep ten usual
            records in flight.
        save_memory_bytes: Bytes of memory in which clients make records to save, over all connections and shared among
            tenants. The first to write a page of it pays for it, which is the client. Where there is no more, clients
            send their records.
        save_memory_of_one_bytes: The same for one connection; a client that asks for more gets this much.
        max_requests: Unanswered requests on one connection; further ones are answered `Unavailable`.
        request_bytes: Bytes in the fields of unanswered requests that have more than 1 KiB there, over all connections
            and shared among tenants; what does not fit is answered `Unavailable`. The service needs more: the message
            of a lookup of 16,384 boundaries and the query made of it take 5.1 times its bytes (by `tracemalloc`).
        connection_request_bytes: Such bytes on one connection. Once it has more, nothing is read from it until some
            are answered. The default is 7 prompts of 256 Ki tokens.
        frames_at_once: Frames that have their turn at a time, over all connections and in turns among tenants and
            connections. A turn ends in the next round of the event loop; loads and saves need none. Too many delay
            other clients. Too few slow down engines whose service moves many records. A connection whose frame waits
            is not read.
        max_loads: Loads of one connection that hold a record at the same time; the others wait their turn.
        receive_timeout_s: A record must arrive within this time and by its save's deadline. A late one is dropped, so
            that an engine which stops in the middle of one does not keep the room that others wait for. A late head
            over 16 KiB ends the connection, and so does one that has waited as long for room.
        hello_timeout_s: A connection without a hello is closed then. A TLS handshake before may take as long.
        unauthenticated_of_address: Connections of one address that have not said hello. One more closes the one that
            has waited longest.
        unauthenticated: The same for all addresses together.
        connections: Connections that have said hello, shared among tenants; one more is refused. As many as the
            process's limit of open files allows, at most 4,096.
        silence_timeout_s: How long a peer may move less than 64 KiB of what it has begun to send, or of what it should
            read. Then an unfinished record is dropped; an unfinished head, or unread answers, end the connection.
        unread_bytes: Answers that peers have not read, over all connections. Beyond that, connections whose peers have
            read nothing for a second are ended, the largest first.
        stage_progress_s: Progress frames of a stage are at least this far apart.
    """

    receive_bytes: int = 256 << 20
    head_bytes: int = 64 << 20
    save_credit_bytes: int = 32 << 20
    save_memory_bytes: int = 1 << 30
    save_memory_of_one_bytes: int = 256 << 20
    max_requests: int = 1024
    request_bytes: int = 32 << 20
    connection_request_bytes: int = 4 << 20
    frames_at_once: int = 4
    max_loads: int = 8
    receive_timeout_s: float = 30.0
    hello_timeout_s: float = 5.0
    unauthenticated_of_address: int = 64
    unauthenticated: int = 256
    connections: int = field(default_factory=_connections_max)
    silence_timeout_s: float = 10.0
    unread_bytes: int = 64 << 20
    stage_progress_s: float = 0.02

    def __post_init__(self) -> None:
        for limit in fields(self):
            if (value := getattr(self, limit.name)) <= 0:
                raise InvalidRequest("a limit of the service must be positive", field=limit.name, seen=value)
        if self.head_bytes < MAX_HEAD_BYTES:
            raise InvalidRequest("the largest head must have room", field="head_bytes", seen=self.head_bytes)

    @property
    def max_payload_bytes(self) -> int:
        """The largest record that is accepted."""
        return min(MAX_RECORD_BYTES, self.receive_bytes)


class UnauthenticatedConnection:
    """One entry of `UnauthenticatedConnections`; made by its `enter`."""

    def __init__(self, entries: UnauthenticatedConnections, source: str) -> None:
        self.source = source
        self._entries = entries
        self._end: Callable[[], object] | None = None

    def end_with(self, end: Callable[[], object]) -> None:
        """Set what ends this connection; no effect once it has left."""
        if self._entries.has(self):
            self._end = end

    def leave(self) -> None:
        """The peer is authenticated, or the connection is lost. Idempotent."""
        self._end = None
        self._entries.remove(self)

    def end(self) -> None:
        """End the connection."""
        end, self._end = self._end, None
        self.leave()
        if end is not None:
            end()


class UnauthenticatedConnections:
    """The connections whose peer is not known yet: few for each address, and few in all. Belongs to one loop.

    When there are too many, the connection that has waited longest is ended, never the new one: a peer that says hello
    at once gets in beside any number of silent ones.

    Args:
        per_source_max: For one IPv4 address or one IPv6 network of 64 bits. Connections without an address, those of a
            Unix socket, are bounded only in all: they are our own user's.
        total_max: In all.
    """

    def __init__(self, per_source_max: int, total_max: int) -> None:
        self._per_source_max = per_source_max
        self._total_max = total_max
        self._all: dict[UnauthenticatedConnection, None] = {}  # oldest first
        self._by_source: dict[str, dict[UnauthenticatedConnection, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def has(self, entry: UnauthenticatedConnection) -> bool:
        """Whether a connection has neither left nor been ended."""
        return entry in self._all

    def enter(self, address: str) -> UnauthenticatedConnection:
        """Add a connection from `address`; empty: it has none. Ends others where there are too many."""
        source = source_of(address)
        mine = self._by_source.get(source, {})
        if source and len(mine) >= self._per_source_max:
            next(iter(mine)).end()
        while len(self._all) >= self._total_max:
            self.end_oldest()
        entry = UnauthenticatedConnection(self, source)
        self._all[entry] = None
        self._by_source.setdefault(source, {})[entry] = None
        return entry

    def end_oldest(self) -> None:
        """End the connection that has waited longest, if there is one."""
        oldest = next(iter(self._all), None)
        if oldest is not None:
            oldest.end()

    def remove(self, entry: UnauthenticatedConnection) -> None:
        """Forget a connection. Idempotent; called by the entry itself."""
        if entry in self._all:
            del self._all[entry]
            mine = self._by_source[entry.source]
            del mine[entry]
            if not mine:
                del self._by_source[entry.source]


def source_of(address: str) -> str:
    """What counts as one peer: the holder of an IPv6 address usually has 2^64 of them."""
    if ":" not in address:
        return address
    found = ipaddress.IPv6Address(address.partition("%")[0])
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(found) >> 64 << 64, 64)))


PROGRESS_BYTES = 64 << 10
"""Less than this is no progress: a peer that moves a byte now and then could hold memory for ever."""


class Stall:
    """Measures how long a count of bytes has hardly grown. Made for checks a second apart."""

    def __init__(self) -> None:
        self._from_bytes: int | None = None  # no check since it began
        self._since_s = 0.0

    def seconds(self, num_bytes: int, now_s: float) -> float:
        """Seconds since the count has grown by 64 KiB.

        Args:
            num_bytes: The count. It may begin below zero: of small frames the kernel counts more than their bytes.
            now_s: On the monotonic clock.
        """
        if self._from_bytes is None or num_bytes - self._from_bytes >= PROGRESS_BYTES:
            self._from_bytes, self._since_s = num_bytes, now_s
        return now_s - self._since_s

    def reset(self) -> float:
        """Begin again at the next check, since the peer has nothing to send or to read now. Returns 0."""
        self._from_bytes = None
        return 0.0


def bytes_of(request: messages.Request) -> int:
    """The bytes that a request holds while it is answered; 0 for a short one.

    Those of all its fields: a peer may send 4 MiB as the id of a lease, which may wait long for its turn.
    """
    num_bytes = 0
    values: list[object] = [getattr(request, field.name) for field in fields(request)]
    while values:  # the frame's parser has bounded how many there are
        value = values.pop()
        if isinstance(value, bytes | str):
            num_bytes += len(value)
        elif isinstance(value, Mapping):
            values += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            values += value
    return num_bytes if num_bytes > _SHORT_BYTES else 0
