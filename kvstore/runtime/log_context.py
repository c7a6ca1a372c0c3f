"""The request that a log line belongs to: set where the handling of a request starts, read where a line is written."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

__all__ = ["NO_REQUEST", "RequestContext", "request_context"]


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
