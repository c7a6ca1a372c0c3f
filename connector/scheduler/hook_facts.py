"""The facts of a request and of a step, as vLLM's hooks pass them to the scheduler side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from connector.prefix_hash import PromptContent
from connector.request_parameters import Handoff, RequestFlags


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """What decides whether, and under which identity, a request is cached.

    Attributes:
        tokens: All its tokens: the prompt, later also what is generated. vLLM appends to this sequence.
        cache_salt: vLLM's isolation salt.
        uncacheable: Why its pages have no known identity; `None` if they have one.
        content: What its pages depend on beside tokens and salt.
        handoff: What a prefill engine promised for it.
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
class StateOffer:
    """A recurrent state that vLLM writes in a step: at a boundary, in one of vLLM's groups."""

    vllm_group: int
    block_id: int
    boundary_tokens: int


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the engine computes in one step. All mappings are by request id.

    Attributes:
        final_tokens: Tokens whose cache content is final after this step's forward.
        tables: For each of vLLM's groups the request's block ids; read only when a page is saved.
        offers: The recurrent states that this step's forward writes.
        preempted: Requests that lost their blocks.
        computed_tokens: Tokens that were computed before this step.
        is_shared: The step may do other work than computing them, so how long it takes tells nothing of that.
    """

    final_tokens: Mapping[str, int]
    tables: Mapping[str, Sequence[Sequence[int]]]
    offers: Mapping[str, Sequence[StateOffer]] = field(default_factory=dict)
    preempted: Sequence[str] = ()
    computed_tokens: Mapping[str, int] = field(default_factory=dict)
    is_shared: bool = False
