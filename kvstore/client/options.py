"""The options of a client; the defaults suit a service on the same node."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.errors import InvalidRequest
from kvstore.wire.tls import ClientTls

__all__ = ["ClientOptions"]


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How a client behaves.

    Attributes:
        token: Shown to the service; TCP services may require one.
        name: Shown to people in the service's status.
        num_data_connections: Connections that carry records; two keep one core of the service busy.
        stall_timeout_s: A stage that gets neither an answer nor further bytes for this long ends. Longer than the
            service's own timeout, after which the service answers with what has arrived.
        first_stall_timeout_s: The same until the first stage has ended: a service that was just started delivers its
            first records late on a busy machine. `None`: no difference.
        hello_timeout_s: A connection that is not greeted by then is abandoned and tried again.
        dead_after_s: The client reconnects to a service that answers nothing for this long.
        backoff_s: First pause between two attempts to connect; doubles up to `backoff_max_s`.
        backoff_max_s: The longest pause, and so the longest that recovery takes once the service is back.
        first_attempt_s: Calls wait this long, within their deadlines, for the very first attempt to connect to end: it
            fails at once where nobody listens, but a private service may take so long to start.
        tls: What the client trusts and presents at a `tls://` address.
        shared_memory: Read records from the service's shared memory, if it offers that: one copy instead of two.
    """

    token: str = ""
    name: str = ""
    num_data_connections: int = 2
    stall_timeout_s: float = 0.6
    first_stall_timeout_s: float | None = None
    hello_timeout_s: float = 2.0
    dead_after_s: float = 5.0
    backoff_s: float = 0.05
    backoff_max_s: float = 0.5
    first_attempt_s: float = 20.0
    tls: ClientTls = field(default_factory=ClientTls)
    shared_memory: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.num_data_connections <= 64:
            raise InvalidRequest("1 to 64 data connections", seen=self.num_data_connections)
        for name in ("stall_timeout_s", "hello_timeout_s", "dead_after_s", "backoff_s", "backoff_max_s"):
            if getattr(self, name) <= 0:
                raise InvalidRequest("a time must be positive", field=name, seen=getattr(self, name))

    @classmethod
    def of_a_person(cls, name: str, seconds: float, tls: ClientTls) -> ClientOptions:
        """For a person who asks once and waits: connecting may take all of `seconds`, as it can on a busy machine. An
        engine would rather continue without an answer.
        """
        return cls(name=name, num_data_connections=1, hello_timeout_s=seconds, first_attempt_s=seconds, tls=tls)
