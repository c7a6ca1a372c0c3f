"""The prefix hash: our own SHA-256 chain over everything the KV of a prefix depends on.

A link covers 16 tokens: `link = SHA-256(previous link + tokens as uint32 little-endian)`. The root holds what the whole
request has in common (`cache_salt`). Nothing in it depends on vLLM's block size or hash algorithm, on
`PYTHONHASHSEED`, on the Python version or on file paths, so engines with different settings meet.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

from kvstore.errors import InvalidRequest
from kvstore.model.keys import Boundary, PrefixHash

__all__ = ["LINK_TOKENS", "PrefixChain"]

LINK_TOKENS = 16
_LINK_BYTES = LINK_TOKENS * 4
_ROOT = b"kvstore prefix v1\0"


class PrefixChain:
    """Hashes of a growing token sequence at every multiple of `step_tokens`.

    Takes time linear in the tokens; for long prompts too long for the scheduler's thread.
    """

    def __init__(self, step_tokens: int, cache_salt: str | None = None) -> None:
        if step_tokens <= 0 or step_tokens % LINK_TOKENS:
            raise InvalidRequest(f"boundaries must be multiples of {LINK_TOKENS} tokens", step_tokens=step_tokens)
        self._step_tokens = step_tokens
        salt = b"" if cache_salt is None else b"\1" + cache_salt.encode()
        self._link = hashlib.sha256(_ROOT + len(salt).to_bytes(4, "little") + salt).digest()
        self._hashed_tokens = 0
        self.boundaries: list[Boundary] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Hash what `tokens` (the whole sequence so far) has beyond the last call, in whole links."""
        stop = len(tokens) // LINK_TOKENS * LINK_TOKENS
        packed = array("I", tokens[self._hashed_tokens : stop])
        if sys.byteorder == "big":
            packed.byteswap()
        data = memoryview(packed).cast("B")
        link, position, step = self._link, self._hashed_tokens, self._step_tokens
        for offset in range(0, len(data), _LINK_BYTES):
            link = hashlib.sha256(link + data[offset : offset + _LINK_BYTES]).digest()
            position += LINK_TOKENS
            if position % step == 0:
                self.boundaries.append(Boundary(position, PrefixHash(link)))
        self._link, self._hashed_tokens = link, position
