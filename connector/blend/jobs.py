"""What the scheduler side orders of the ranks that blend, and what they report: plain values that pickle."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.model.layout import Span


@dataclass(frozen=True, slots=True)
class BlendJob:
    """One request to blend.

    Attributes:
        request_id: vLLM's; reported as finished exactly once.
        tokens: Its prompt.
        cache_salt: Its salt.
        spans: Its documents, ascending.
        block_ids: Its blocks, from the prompt's first token on.
        start_tokens: The first token whose block is written: vLLM has the blocks before it.
        stop_tokens: Behind the last token whose block is written; vLLM computes the rest.
        is_audited: The prompt is also computed in full, and the difference reported.
    """

    request_id: str
    tokens: tuple[int, ...]
    cache_salt: str
    spans: tuple[Span, ...]
    block_ids: tuple[int, ...]
    start_tokens: int
    stop_tokens: int
    is_audited: bool


@dataclass(frozen=True, slots=True)
class BlendReport:
    """What became of a blended request.

    Attributes:
        request_id: vLLM's.
        blended_tokens: Tokens of it in blocks.
        recomputed_tokens: How many of them were computed in all layers.
        documents: Its documents.
        stored_documents: How many of them were stored; the others were computed alone, and are stored now.
        error: Why it was not blended; empty: it was.
    """

    request_id: str
    blended_tokens: int = 0
    recomputed_tokens: int = 0
    documents: int = 0
    stored_documents: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class BlendAudit:
    """The difference between a blended request and the same computed in full.

    Attributes:
        request_id: vLLM's.
        kl: Of the next token's distribution, exact to blended, in nats; `None`: the audit was given up.
        key_differences: By layer, the root of the mean square of the difference by that of the exact keys.
        value_differences: The same of values.
    """

    request_id: str
    kl: float | None
    key_differences: tuple[float, ...] = ()
    value_differences: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class BlendReports:
    """The reports of one step."""

    blended: tuple[BlendReport, ...] = ()
    audits: tuple[BlendAudit, ...] = ()
