"""What the KV of a prefix depends on beside token ids: the adapter, media items, embeddings given instead of tokens.

All of it is content: an adapter's files, not its name or path; an item's hash, not its origin.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["AdapterRequest", "EmbeddedPrompt", "MediaItem", "PromptContent", "UncacheableContent"]


class UncacheableContent(Exception):
    """What a request depends on is not known for certain; `reason` is a word for a counter."""

    def __init__(self, reason: str, explanation: str) -> None:
        super().__init__(explanation)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class AdapterRequest:
    """A LoRA adapter as a request names it.

    Attributes:
        number: vLLM's id of the adapter that it has loaded, or will load, for this request.
        path: Folder of its files.
    """

    number: int
    path: str


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One image, video or sound in a prompt.

    Attributes:
        modality: e.g. `image`.
        identifier: What stands for its content: a hash, or a text that a trusted user chose.
        start_tokens: Its first token.
        num_tokens: Its tokens.
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
        row_bytes: One token's embedding.
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
