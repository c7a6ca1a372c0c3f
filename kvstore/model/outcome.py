"""What became of a request's prompt: told by the engine that asked, kept for whoever asks later why it was a miss."""

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
        namespace: Where it was looked up; `None`: the engine has no namespace, or did not look.
        prompt_tokens: Of the prompt.
        cap_tokens: The furthest point that it could have been resumed from.
        local_tokens: What the engine held itself.
        resume_tokens: Up to where it was resumed, from the engine's cache or ours.
        reason: Why no further; empty when it reached `cap_tokens`. The words are in docs/explain.md.
        detail: What the reason rests on, plain values.
        stop: The next boundary that it needed, or `None` where that is not the reason.
        groups: A bit for each group that was whole at `stop`.
        first: Hash of its first boundary, salt and adapter included; and
        content: `content_digest` of the tokens up to there. Equal contents under different hashes are prompts that
            were kept apart.
        tenant: Whose engine it was; the service sets it from the verified credential.
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
    """16 bytes that tell token sequences apart, whatever else their pages depend on."""
    return hashlib.blake2b(array("Q", tokens).tobytes(), digest_size=CONTENT_BYTES).digest()
