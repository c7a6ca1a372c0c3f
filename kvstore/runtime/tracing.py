"""Request tracing as every layer sees it: the `traceparent` to pass on, and an interface to make spans.

Independent of a tracing library. Where tracing is off there is no `Tracing`, and a request costs a comparison with
`None`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Protocol

__all__ = ["Tracing", "trace_parent"]

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
