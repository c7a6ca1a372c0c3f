"""The prefix hash: our own SHA-256 chain over everything the KV of a prefix depends on.

A link covers 16 tokens: `link = SHA-256(previous link + tokens as uint32 little-endian + rest)`; the rest is empty
unless the link contains media or embeddings. The root holds what applies to the whole request: `cache_salt`, and the
digest of its adapter, if any. Nothing depends on vLLM's block size or hash algorithm, on `PYTHONHASHSEED`, on the
Python version or on file paths, so engines with different settings share pages. It is specified in
docs/formats/prefix-hash-v1.md.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Mapping, Sequence

from connector.content import PromptContent
from kvstore.errors import InvalidRequest
from kvstore.model.keys import LINK_TOKENS, Boundary, PrefixHash, prefix_root

__all__ = ["LINK_TOKENS", "PrefixChain"]

_LINK_BYTES = LINK_TOKENS * 4


class PrefixChain:
    """Hashes of a growing token sequence at every multiple of `step_tokens`.

    Takes time linear in the tokens: for long prompts too long for the scheduler's thread.

    Args:
        step_tokens: Distance between boundaries.
        cache_salt: vLLM's `cache_salt` of the request.
        content: What the prompt has beside tokens.
    """

    def __init__(self, step_tokens: int, cache_salt: str | None = None, content: PromptContent | None = None) -> None:
        if step_tokens <= 0 or step_tokens % LINK_TOKENS:
            raise InvalidRequest(f"boundaries must be multiples of {LINK_TOKENS} tokens", step_tokens=step_tokens)
        self._step_tokens = step_tokens
        self._root = prefix_root(cache_salt)
        self._link = hashlib.sha256(self._root).digest()
        self._hashed_tokens = 0
        self._content = content or PromptContent()
        self._media: Mapping[int, bytes] | None = None
        self.adapter = self._content.adapter
        """The adapter whose digest must be told before the first `extend`, or `None`."""
        self.boundaries: list[Boundary] = []

    def tell_adapter(self, digest: bytes) -> None:
        """Set the digest of the adapter's content, which the root depends on."""
        assert self.adapter is not None
        assert self._hashed_tokens == 0
        assert len(digest) == hashlib.sha256().digest_size
        self._link = hashlib.sha256(self._root + b"\1" + digest).digest()
        self.adapter = None

    def extend(self, tokens: Sequence[int]) -> None:
        """Hash what `tokens` (the whole sequence so far) has beyond the last call, in whole links."""
        assert self.adapter is None, "an adapter without digest"
        stop = len(tokens) // LINK_TOKENS * LINK_TOKENS
        packed = array("I", tokens[self._hashed_tokens : stop])
        if sys.byteorder == "big":
            packed.byteswap()
        data = memoryview(packed).cast("B")
        link, position, step = self._link, self._hashed_tokens, self._step_tokens
        plain = not self._content.media and self._content.embedded is None
        for offset in range(0, len(data), _LINK_BYTES):
            rest = b"" if plain else self._rest(position)
            link = hashlib.sha256(link + data[offset : offset + _LINK_BYTES] + rest).digest()
            position += LINK_TOKENS
            if position % step == 0:
                self.boundaries.append(Boundary(position, PrefixHash(link)))
        self._link, self._hashed_tokens = link, position

    def _rest(self, start: int) -> bytes:
        """The content of the link at `start` beside its token ids."""
        if self._media is None:
            self._media = self._content.media_in_links(LINK_TOKENS)
        rest = self._media.get(start, b"")
        embedded = self._content.embedded
        if embedded is not None and (digest := embedded.digest(start, start + LINK_TOKENS)):
            rest += b"E" + digest
        return rest
