"""Traces of requests, as far as every layer needs to know of them: a parent to pass on, and spans where they are on.

Nothing here knows a tracing library. Where traces are off there is no `Tracing`, and a request costs a comparison with
`None`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Protocol

__all__ = ["Tracing", "trace_parent"]

trace_parent: ContextVar[str] = ContextVar("kvstore_trace_parent", default="")
"""The W3C `traceparent` of whoever asks a store now; a client tells it to a service that traces. Empty: none."""


class Tracing(Protocol):
    """Makes spans. They nest in a task, and in the tasks and threads that it starts."""

    def span(self, name: str, parent: str | None = None, **attributes: str | int) -> AbstractContextManager[object]:
        """A span for the length of a block; an exception that leaves the block is told.

        Args:
            name: What runs, like `kvstore.lookup`.
            parent: A `traceparent`; empty or unreadable: a trace of its own begins; `None`: the span that is current.
            attributes: By name, without secrets.
        """
        ...

    def current(self) -> str:
        """The `traceparent` of the current span; empty: there is none."""
        ...

    def failed(self, reason: str) -> None:
        """Say of the current span that what it is about went wrong."""
        ...
