"""What the scheduler side is told of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from connector.content import PromptContent
from connector.handoff import Handoff
from connector.request_flags import RequestFlags

__all__ = ["PromptFacts"]


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """The facts of a request that decide whether, and under which identity, it is cached.

    Attributes:
        request_id: vLLM's.
        tokens: All its tokens: the prompt now, later what is generated too; vLLM appends to it.
        cache_salt: vLLM's isolation salt, or `None`.
        uncacheable: Why it is not known what its pages depend on, or `None`.
        content: What they depend on beside tokens and salt, or `None` for nothing.
        flags: What the request asks of the cache.
        handoff: What a prefill engine has promised of it, or `None`.
        trace: W3C `traceparent` of its span in vLLM; empty if vLLM does not trace.
    """

    request_id: str
    tokens: Sequence[int]
    cache_salt: str | None = None
    uncacheable: str | None = None
    content: PromptContent | None = None
    flags: RequestFlags = field(default_factory=RequestFlags)
    handoff: Handoff | None = None
    trace: str = ""
