"""Which requests and engines may be blended: a request's wish, and every reason to refuse by name. Pure."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from connector.facts import CellFacts, EngineFacts
from connector.settings import ConnectorSettings
from kvstore.errors import InvalidRequest
from kvstore.model.kinds import FullAttention, Latent
from kvstore.model.layout import Span

SALT = "blend:"
"""How the `cache_salt` of a request begins that may get blended blocks: vLLM's own cache is separated by the salt."""

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")
ROPES = ("RotaryEmbedding", "Llama3RotaryEmbedding", "LinearScalingRotaryEmbedding", "YaRNScalingRotaryEmbedding")
"""vLLM's classes whose cosines and sines depend on a token's position alone."""

_DOCUMENTS_MAX = 64
_WHERE = "kv_transfer_params.kvstore.blend"


def may_hold_blended(cache_salt: str | None) -> bool:
    """Whether blocks of a request with this salt may be blended: nothing computed behind them is exact."""
    return cache_salt is not None and cache_salt.startswith(SALT)


def read_spans(wish: object, cache_salt: str | None, num_tokens: int) -> tuple[Span, ...]:
    """The documents that a request wants blended.

    Args:
        wish: `kv_transfer_params.kvstore.blend`: an object whose `documents` are pairs `[start, stop]` of tokens.
        cache_salt: The request's.
        num_tokens: Of its prompt.

    Raises:
        InvalidRequest: It cannot be blended, and why. It is computed instead.
    """
    if not may_hold_blended(cache_salt):
        seen = "none" if cache_salt is None else "another one"
        raise InvalidRequest("blending needs a salt", field="cache_salt", expected=f"to begin with {SALT!r}", seen=seen)
    documents = wish.get("documents") if isinstance(wish, Mapping) else None
    if not isinstance(documents, Sequence) or isinstance(documents, str | bytes):
        raise InvalidRequest(
            "blending needs the documents", field=f"{_WHERE}.documents", expected="pairs [start, stop] of tokens"
        )
    if not 0 < len(documents) <= _DOCUMENTS_MAX:
        raise InvalidRequest(
            "wrong number of documents",
            field=f"{_WHERE}.documents",
            expected=f"1 to {_DOCUMENTS_MAX}",
            seen=len(documents),
        )
    spans: list[Span] = []
    for at, pair in enumerate(documents):
        is_pair = isinstance(pair, Sequence) and len(pair) == 2 and all(type(number) is int for number in pair)
        least = spans[-1].stop if spans else 1  # documents are computed behind the prompt's first token
        if not is_pair or not least <= pair[0] < pair[1] <= num_tokens:
            raise InvalidRequest(
                "this is no document's place",
                field=f"{_WHERE}.documents[{at}]",
                expected=f"[start, stop] with {least} <= start < stop <= {num_tokens}",
                seen=reprlib.repr(pair),
            )
        spans.append(Span(pair[0], pair[1]))
    return tuple(spans)


def refuse_engine(facts: EngineFacts, settings: ConnectorSettings) -> str | None:
    """Why an engine cannot blend, or `None`: by its facts, without its model."""
    kinds = [group.kind for group in facts.groups]
    checks = (
        (any(isinstance(kind, Latent) for kind in kinds), "MLA: its latent vectors have no keys to rotate"),
        (any(kind.is_state for kind in kinds), "hybrid: a recurrent state cannot be put together from documents"),
        (any(not isinstance(kind, FullAttention) for kind in kinds), "sliding window: only full attention is blended"),
        (len(facts.groups) != 1, f"{len(facts.groups)} groups of layers: one is blended"),
        (any(group.drafts for group in facts.groups), "drafts: their cache depends on the next token too"),
        (
            facts.architecture not in ARCHITECTURES,
            f"architecture {facts.architecture}: blended are {', '.join(ARCHITECTURES)}",
        ),
        (facts.pp_size > 1, f"{facts.pp_size} pipeline stages: a rank needs the layers of all to blend"),
        (facts.device != "cpu", f"device {facts.device}: blending was written for processors, and has run on no GPU"),
        (
            facts.quantization != "none",
            f"quantization {facts.quantization}: only plain weights are blended",
        ),
        (_cache_is_narrow(facts), f"cache type {facts.cache_dtype}: keys in it cannot be rotated again"),
        (facts.untested_release is not None, f"vLLM {facts.untested_release} was not tested with this connector"),
        (settings.mode != "both", f"mode {settings.mode}: blending loads and saves documents"),
        (settings.weights_may_change, "weights_may_change: documents would be of older weights"),
    )
    return next((reason for is_so, reason in checks if is_so), None)


def _cache_is_narrow(facts: EngineFacts) -> bool:
    contents: list[Any] = [group.content for group in facts.groups]
    return any(isinstance(content, CellFacts) and content.dtype != facts.compute_dtype for content in contents)


def refuse_rope(rope: str, *, scales_by_position: bool) -> str | None:
    """Why keys of a model cannot be rotated again, or `None`.

    Args:
        rope: Name of vLLM's class.
        scales_by_position: The model also scales its queries by their position, as Llama 4's way does.
    """
    if scales_by_position:
        return "unknown rope: queries are scaled by their position too"
    if rope not in ROPES:
        return f"unknown rope {rope}: known are {', '.join(ROPES)}"
    return None
