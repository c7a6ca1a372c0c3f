"""The outcome of a request, or a record that was not saved: reported by its engine, kept to explain misses later."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.model.keys import Boundary, NamespaceId, PrefixHash

CONTENT_BYTES = 16
_LOST_MAX = 1 << 20
"""The most that one message can add to the counts."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request, and why its prompt was not resumed any further; or a loss.

    A *loss* is a record that an engine computed and did not save; its reason begins with `save_`. Then `request` is the
    one that computed it, `stop` the boundary at which it ends, `groups` the bit of its group, and `detail["records"]`
    the number of records that it stands for, if more than one. A loss without `stop` stands for every record of that
    group in the namespace: none of them can ever be saved.

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
        age_ms: How long before it was sent this happened: a report waits while the service does not answer.
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
    age_ms: int = 0

    @property
    def is_loss(self) -> bool:
        """Whether it reports a record that was not saved, not the outcome of a request."""
        return self.reason.startswith("save_")  # also reasons of a newer engine

    @property
    def num_lost(self) -> int:
        """The records that a loss stands for; 0: it reports records that can never be saved."""
        records = self.detail.get("records", 1)
        return min(max(int(records), 1), _LOST_MAX) if self.stop is not None and isinstance(records, int) else 0


def content_digest(tokens: Sequence[int]) -> bytes:
    """A 16-byte digest of the token ids alone, without salt, adapter or media."""
    return hashlib.blake2b(array("Q", tokens).tobytes(), digest_size=CONTENT_BYTES).digest()
