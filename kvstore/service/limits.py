"""What one connection and one service may hold at a time."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import InvalidRequest
from kvstore.format.record import MAX_RECORD_BYTES

__all__ = ["ServiceLimits"]


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
