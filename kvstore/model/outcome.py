"""The outcome of a request: reported by its engine, kept to explain later why its prompt was not resumed further."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.model.keys import Boundary, NamespaceId, PrefixHash

__all__ = ["CONTENT_BYTES", "Outcome", "content_digest"]

CONTENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request, and why its prompt was not resumed any further.

    Attributes:
        request: The engine's id of it.
        namespace: Where it was looked up; `None`: the engine has no namespace, or made no lookup.
        prompt_tokens: Length of the prompt.
        cap_tokens: The furthest point that it could have been resumed from.
        local_tokens: Tokens in the engine's own cache.
        resume_tokens: The point from which it was resumed, from the engine's cache or the store.
        reason: Why not further; empty when it reached `cap_tokens`. The values are listed in docs/explain.md.
        detail: Details of the reason, plain values.
        stop: The next boundary that it needed, or `None` where that is not the reason.
        groups: A bit for each group that was complete at `stop`.
        first: Hash of its first boundary, salt and adapter included.
        content: `content_digest` of the tokens up to `first`. Equal contents with different hashes show prompts whose
            caches are kept separate.
        tenant: The engine's tenant; the service sets it from the verified credential.
    """

    request: str
    namespace: NamespaceId | None
    prompt_tokens: int
    cap_tokens: int
    local_tokens: int
    resume_tokens: int
    reason: str = ""
    detail: Mapping[str, object] = field(default_factory=dict)
    stop: Boundary | None = None
    groups: int = 0
    first: PrefixHash | None = None
    content: bytes = b""
    tenant: str = ""


def content_digest(tokens: Sequence[int]) -> bytes:
    """A 16-byte digest of the token ids alone, without salt, adapter or media."""
    return hashlib.blake2b(array("Q", tokens).tobytes(), digest_size=CONTENT_BYTES).digest()
