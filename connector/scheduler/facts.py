"""What the scheduler side is told of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from connector.prefix_hash import PromptContent
from connector.request_parameters import Handoff, RequestFlags

__all__ = [
    "Offer",
    "PromptFacts",
    "StepFacts",
]


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


@dataclass(frozen=True, slots=True)
class Offer:
    """A recurrent state that vLLM just made: in one step's forward, at a boundary, in one of its groups."""

    vllm_group: int
    block_id: int
    boundary_tokens: int


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the engine computes in one step.

    Attributes:
        final_tokens: By request, tokens whose cache content is final after this step's forward.
        tables: By request, for each of vLLM's groups its current block ids; only looked up when a page is saved.
        offers: By request, the recurrent states that this step's forward writes.
        preempted: Requests that lost their blocks.
        computed_tokens: By request, tokens that were computed before this step.
    """

    final_tokens: Mapping[str, int]
    tables: Mapping[str, Sequence[Sequence[int]]]
    offers: Mapping[str, Sequence[Offer]] = field(default_factory=dict)
    preempted: Sequence[str] = ()
    computed_tokens: Mapping[str, int] = field(default_factory=dict)
