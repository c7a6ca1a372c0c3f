"""What peers can make the service hold, and for how long: bounds, unauthenticated connections, stalled peers."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.errors import InvalidRequest
from kvstore.format.record import MAX_RECORD_BYTES

__all__ = ["PROGRESS_BYTES", "Newcomer", "Newcomers", "ServiceLimits", "Stall"]


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Bounds on what peers can make the service hold.

    Attributes:
        receive_bytes: Bytes of saves being received or stored, over all connections; one tenant takes three quarters of
            it at most. Too few stall savers; too many are memory that the tiers do not get.
        save_credit_bytes: Bytes of unanswered saves on one connection: a client's window. 32 MiB keep ten usual
            records in flight.
        max_requests: Unanswered requests on one connection; further ones are answered `Unavailable`.
        request_bytes: Bytes of unanswered lookups, stages and descriptions, over all connections and shared among
            tenants; what does not fit is answered `Unavailable`. The service works with some 5 times as much.
        connection_request_bytes: Such bytes on one connection. Beyond, nothing more is read from it until some are
            answered. The default is 28 prompts of 256 Ki tokens.
        max_loads: Loads of one connection that hold a record at the same time; the others wait their turn.
        receive_timeout_s: A record must have come by then, and by its save's deadline: what is late is dropped, so that
            an engine which stops in the middle of one does not keep the room that others wait for.
        hello_timeout_s: A connection that has not said hello by then is closed. A TLS handshake before may take as
            long.
        newcomers_of_address, newcomers: Connections that have not said hello, of one address and in all. Beyond that
            the one that has waited longest is closed.
        silence_timeout_s: Less than 64 KiB of what a peer has begun to send, or of what it should read, has moved for
            so long: the head ends its connection, the record is dropped, the peer that does not read is cut off.
        unread_bytes: Answers that peers have not read, over all connections. Beyond that those that have read nothing
            for a second are cut off, the largest first.
        stage_progress_s: Progress frames of a stage are at least this far apart.
    """

    receive_bytes: int = 256 << 20
    save_credit_bytes: int = 32 << 20
    max_requests: int = 1024
    request_bytes: int = 32 << 20
    connection_request_bytes: int = 16 << 20
    max_loads: int = 8
    receive_timeout_s: float = 30.0
    hello_timeout_s: float = 5.0
    newcomers_of_address: int = 64
    newcomers: int = 256
    silence_timeout_s: float = 10.0
    unread_bytes: int = 64 << 20
    stage_progress_s: float = 0.02

    def __post_init__(self) -> None:
        counts = (
            "receive_bytes",
            "save_credit_bytes",
            "max_requests",
            "request_bytes",
            "max_loads",
            "newcomers_of_address",
            "newcomers",
        )
        for name in (*counts, "unread_bytes"):
            if getattr(self, name) <= 0:
                raise InvalidRequest("a limit of the service must be positive", field=name, seen=getattr(self, name))

    @property
    def max_payload_bytes(self) -> int:
        """The largest record that is accepted."""
        return min(MAX_RECORD_BYTES, self.receive_bytes)


class Newcomer:
    """One connection among the newcomers; made by `Newcomers.enter`."""

    def __init__(self, of: Newcomers, source: str) -> None:
        self.source = source
        self._of = of
        self._end: Callable[[], object] | None = None

    def end_with(self, end: Callable[[], object]) -> None:
        """Set what ends this connection; no effect once it has left."""
        if self._of.has(self):
            self._end = end

    def leave(self) -> None:
        """The peer has proven who it is, or the connection is lost. Idempotent."""
        self._end = None
        self._of.remove(self)

    def end(self) -> None:
        """End the connection."""
        end, self._end = self._end, None
        self.leave()
        if end is not None:
            end()


class Newcomers:
    """The connections of which nothing is known yet. Belongs to one loop.

    When there are too many, the one that has waited longest is ended, never the one that comes: a peer that says hello
    at once gets in beside any number of silent ones.

    Args:
        per_source_max: For one IPv4 address or one IPv6 network of 64 bits. Connections without an address, those of a
            Unix socket, are bounded only in all: they are our own user's.
        total_max: In all.
    """

    def __init__(self, per_source_max: int, total_max: int) -> None:
        self._per_source_max = per_source_max
        self._total_max = total_max
        self._all: dict[Newcomer, None] = {}  # oldest first
        self._by_source: dict[str, dict[Newcomer, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def has(self, newcomer: Newcomer) -> bool:
        """Whether it has neither left nor been ended."""
        return newcomer in self._all

    def enter(self, address: str) -> Newcomer:
        """One more connection, from `address`; empty: it has none. Ends others where there are too many."""
        source = _source(address)
        mine = self._by_source.get(source, {})
        if source and len(mine) >= self._per_source_max:
            next(iter(mine)).end()
        while len(self._all) >= self._total_max:
            self.end_oldest()
        newcomer = Newcomer(self, source)
        self._all[newcomer] = None
        self._by_source.setdefault(source, {})[newcomer] = None
        return newcomer

    def end_oldest(self) -> None:
        """End the connection that has waited longest, if there is one."""
        oldest = next(iter(self._all), None)
        if oldest is not None:
            oldest.end()

    def remove(self, newcomer: Newcomer) -> None:
        """Forget a connection. Idempotent; called by `Newcomer`."""
        if self._all.pop(newcomer, newcomer) is None:
            mine = self._by_source[newcomer.source]
            del mine[newcomer]
            if not mine:
                del self._by_source[newcomer.source]


def _source(address: str) -> str:
    """What counts as one peer: whoever has an IPv6 address usually has 2^64 of them."""
    if ":" not in address:
        return address
    found = ipaddress.IPv6Address(address.partition("%")[0])
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(found) >> 64 << 64, 64)))


PROGRESS_BYTES = 64 << 10
"""Less than this is no progress: a peer that moves a byte now and then would hold what it likes for ever."""


class Stall:
    """Measures for how long a count of bytes has hardly grown. Made for looks a second apart."""

    def __init__(self) -> None:
        self._from_bytes = -PROGRESS_BYTES
        self._since_s = 0.0

    def seconds(self, num_bytes: int, now_s: float) -> float:
        """Seconds since the count has grown by 64 KiB.

        Args:
            num_bytes: The count.
            now_s: On the monotonic clock.
        """
        if num_bytes - self._from_bytes >= PROGRESS_BYTES:
            self._from_bytes, self._since_s = num_bytes, now_s
        return now_s - self._since_s

    def ended(self) -> float:
        """Nothing has to move: it begins anew at the next look. Returns 0."""
        self._from_bytes = -PROGRESS_BYTES
        return 0.0
