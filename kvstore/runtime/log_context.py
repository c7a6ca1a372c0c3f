"""Which request a line of the log belongs to: set once where a request is taken up, read where a line is written."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

__all__ = ["NO_REQUEST", "RequestContext", "request_context"]


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What is known of a request. Tasks and threads that it starts inherit it.

    Attributes:
        session: Number of the connection on the data port; 0 for the administration's.
        request: Its id, as the client chose it: on the data port unique among those that run on its connection.
        tenant: Verified; empty for none, or not known yet.
        namespace: Its digest; empty for none.
    """

    session: int = 0
    request: int | str = ""
    tenant: str = ""
    namespace: bytes = b""

    def fields(self) -> dict[str, str]:
        """What is known, by the name that logs give it."""
        request = f"{self.session}.{self.request}" if self.session else str(self.request)
        named = {"request": request, "tenant": self.tenant, "namespace": self.namespace.hex()}
        return {name: value for name, value in named.items() if value}


NO_REQUEST = RequestContext()
request_context: ContextVar[RequestContext] = ContextVar("kvstore_request", default=NO_REQUEST)
"""Of whoever runs now."""
