"""The request that a task works for: its fields in log lines, and its trace."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

trace_parent: ContextVar[str] = ContextVar("kvstore_trace_parent", default="")
"""The W3C `traceparent` of the current caller of a store; a client sends it to a service that traces. Empty: none."""


class Tracing(Protocol):
    """Makes spans. They nest in a task, and in the tasks and threads that it starts."""

    def span(self, name: str, parent: str | None = None, **attributes: str | int) -> AbstractContextManager[object]:
        """A span that lasts for the block; records an exception that leaves the block.

        Args:
            name: What runs, like `kvstore.lookup`.
            parent: A `traceparent`; empty or unreadable: a new trace starts; `None`: the current span.
            attributes: By name, without secrets.
        """
        ...

    def current(self) -> str:
        """The `traceparent` of the current span; empty: there is none."""
        ...

    def failed(self, reason: str) -> None:
        """Mark the current span as failed."""
        ...


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Identifies a request in logs. Tasks and threads that it starts inherit it.

    Attributes:
        session: Number of the connection on the data port; 0 on the admin port.
        request: Its id, as the client chose it: on the data port unique among the connection's running requests.
        tenant: Verified; empty: none, or not known yet.
        namespace: The namespace id; empty: none.
    """

    session: int = 0
    request: int | str = ""
    tenant: str = ""
    namespace: bytes = b""

    def fields(self) -> dict[str, str]:
        """The values that are known, by their names in log lines."""
        request = f"{self.session}.{self.request}" if self.session else str(self.request)
        named = {"request": request, "tenant": self.tenant, "namespace": self.namespace.hex()}
        return {name: value for name, value in named.items() if value}


NO_REQUEST = RequestContext()
request_context: ContextVar[RequestContext] = ContextVar("kvstore_request", default=NO_REQUEST)
"""The request of the current task or thread."""
