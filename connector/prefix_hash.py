"""The prefix hash: our own SHA-256 chain over everything on which the KV of a prefix depends.

A link covers 16 tokens: `link = SHA-256(previous link + tokens as uint32 little-endian + rest)`. The rest is empty
unless the link contains media or embeddings. The root covers what applies to the whole request: `cache_salt`, and the
digest of its adapter. All of it is content: an adapter's files and not its name or path, an item's hash and not its
origin. Nothing depends on vLLM's block size or hash algorithm, on `PYTHONHASHSEED`, on the Python version or on file
paths, so engines with different settings share pages. Specified in docs/formats/prefix-hash-v1.md.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.errors import InvalidRequest
from kvstore.model.keys import LINK_TOKENS, Boundary, PrefixHash, prefix_root

_LINK_BYTES = LINK_TOKENS * 4


class PrefixChain:
    """Hashes of a growing token sequence at every multiple of `step_tokens`.

    Takes time linear in the tokens: for long prompts too long for the scheduler's thread.

    Args:
        step_tokens: Distance between boundaries.
        cache_salt: vLLM's `cache_salt` of the request.
        content: The parts of the prompt that are not tokens.

    Attributes:
        adapter: The adapter whose digest must be set before the first `extend`, or `None`.
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
        self.boundaries: list[Boundary] = []

    def set_adapter(self, digest: bytes) -> None:
        """Set the digest of the adapter's content, on which the root depends."""
        assert self.adapter is not None
        assert self._hashed_tokens == 0
        assert len(digest) == hashlib.sha256().digest_size
        self._link = hashlib.sha256(self._root + b"\1" + digest).digest()
        self.adapter = None

    def extend(self, tokens: Sequence[int], num_tokens: int = sys.maxsize) -> None:
        """Hash what `tokens` (the whole sequence so far), or the first of them, have beyond the last call, by whole
        links.
        """
        assert self.adapter is None, "an adapter without digest"
        stop = min(len(tokens), num_tokens) // LINK_TOKENS * LINK_TOKENS
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


class UncacheableContent(Exception):
    """It is not certain what a request's pages depend on; `reason` is the label of a counter."""

    def __init__(self, reason: str, explanation: str) -> None:
        super().__init__(explanation)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class AdapterRequest:
    """A LoRA adapter as a request names it.

    Attributes:
        number: vLLM's number of the adapter.
        path: The folder of its files.
        identities: Of these files, before vLLM read them; `None`: not known.
    """

    number: int
    path: str
    identities: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One image, video or sound in a prompt.

    Attributes:
        modality: e.g. `image`.
        identifier: Stands for its content: a hash, or a text that a trusted user chose.
    """

    modality: str
    identifier: str
    start_tokens: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class EmbeddedPrompt:
    """Embeddings that are given instead of token ids.

    Attributes:
        dtype: Their type in words.
        row_bytes: Bytes of one token's embedding.
        rows: All of them; `len(rows)` is tokens times `row_bytes`.
        is_token: For each token 1 if its id counts instead of its row; empty: all rows count.
    """

    dtype: str
    row_bytes: int
    rows: memoryview
    is_token: bytes = b""

    def digest(self, start: int, stop: int) -> bytes:
        """SHA-256 of the rows of these tokens, as far as there are any; empty if there are none."""
        rows = self.rows[start * self.row_bytes : stop * self.row_bytes]
        if not rows:
            return b""
        total = hashlib.sha256(_framed(self.dtype.encode()) + self.row_bytes.to_bytes(8, "little"))
        total.update(_framed(self.is_token[start:stop]))
        total.update(rows)
        return total.digest()


@dataclass(frozen=True, slots=True)
class PromptContent:
    """The parts of a prompt that are not token ids. A plain prompt has none."""

    adapter: AdapterRequest | None = None
    media: tuple[MediaItem, ...] = ()
    embedded: EmbeddedPrompt | None = None

    def media_in_links(self, link_tokens: int) -> Mapping[int, bytes]:
        """By start of a link of `link_tokens` tokens, which parts of which media items are in it."""
        found: defaultdict[int, bytes] = defaultdict(bytes)
        for item in sorted(self.media, key=lambda item: (item.start_tokens, item.modality, item.identifier)):
            first = item.start_tokens // link_tokens * link_tokens
            for start in range(first, item.start_tokens + item.num_tokens, link_tokens):
                found[start] += (
                    b"M"
                    + _framed(item.modality.encode())
                    + _framed(item.identifier.encode())
                    + (start - item.start_tokens).to_bytes(8, "little", signed=True)
                    + item.num_tokens.to_bytes(8, "little")
                )
        return found


def _framed(data: bytes) -> bytes:
    """The data with its length in front, so that what follows cannot be mistaken for part of it."""
    return len(data).to_bytes(4, "little") + data
