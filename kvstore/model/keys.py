"""Identifiers of a namespace, a token prefix, one record; and the hash chain over the prefixes of plain tokens."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import chain
from struct import Struct
from typing import NamedTuple, NewType

NAMESPACE_BYTES = 16
PREFIX_BYTES = 32

NamespaceId = NewType("NamespaceId", bytes)
"""16 bytes: digest of everything that must be equal for two engines' bytes to be interchangeable."""

PrefixHash = NewType("PrefixHash", bytes)
"""32 bytes: digest of all tokens, and of everything else that the KV depends on, up to a boundary."""


_PREFIX = Struct(f"{PREFIX_BYTES}s")


class Boundary(NamedTuple):
    """A token position at which a prefix may be resumed: the number of tokens before it, and their hash."""

    tokens: int
    prefix: PrefixHash


_boundary = partial(tuple.__new__, Boundary)


def boundaries_at(tokens: Sequence[int], prefixes: bytes) -> list[Boundary]:
    """Many boundaries at once, much quicker than by calls of the class: long prompts have thousands.

    Args:
        tokens: For each boundary.
        prefixes: The 32 bytes of each, one after the other.
    """
    pairs = zip(tokens, chain.from_iterable(_PREFIX.iter_unpack(prefixes)), strict=True)
    return list(map(_boundary, pairs))


class RecordKey(NamedTuple):
    """Identifies a record; its name is this key as text, and its header repeats it. A tuple, as dictionaries hash some
    thousand of them for each long prompt.

    Attributes:
        namespace: The namespace; only engines with the same one may read it.
        prefix: Hash of the token prefix that *ends* where the record ends.
        group: Index of the canonical group in the namespace's layout.
        slice: Index of the slice in the group's grid.
    """

    namespace: NamespaceId
    prefix: PrefixHash
    group: int
    slice: int

    def __str__(self) -> str:
        return f"{self.namespace.hex()[:8]}/{self.prefix.hex()[:12]}.g{self.group}.s{self.slice}"


LINK_TOKENS = 16
"""Tokens of a link of the chain: boundaries are multiples of it."""

_LINK = Struct(f"{4 * LINK_TOKENS}s")
_ROOT = b"kvstore prefix v1\0"


def prefix_root(cache_salt: str | None) -> bytes:
    """The input of the chain's first hash; an adapter's digest is appended to it."""
    salt = b"" if cache_salt is None else b"\1" + cache_salt.encode()
    return _ROOT + len(salt).to_bytes(4, "little") + salt


Recall = Callable[[Hashable, bytes, Callable[[], bytes]], bytes]
"""Takes all that a result depends on, which is a place and a text, and a function that computes it. It may return what
an earlier call with both computed; what the function raises is raised, and nothing is kept."""


def _packed(token_ids: Sequence[int]) -> bytes:
    """As little-endian numbers of 32 bits."""
    words = token_ids if isinstance(token_ids, array) and token_ids.typecode == "I" else array("I", token_ids)
    if sys.byteorder == "big":
        words = words[:]
        words.byteswap()
    return words.tobytes()


class PlainChain:
    """Computes the hash at multiples of 16 tokens, for questions of operators and routers: the formats' prefix hash
    (docs/formats/prefix-hash-v1.md) without adapters, media and embeddings. The connector hashes prompts that may have
    those.

    Args:
        cache_salt: The prompt's `cache_salt`; `None`: it has none.
        step_tokens: Distance of the boundaries, a multiple of 16.
    """

    def __init__(self, cache_salt: str | None = None, step_tokens: int = LINK_TOKENS) -> None:
        self._link = hashlib.sha256(prefix_root(cache_salt)).digest()
        self._tokens = 0
        self._step_tokens = step_tokens

    @property
    def tokens(self) -> int:
        """Tokens of the whole links so far."""
        return self._tokens

    def copy(self) -> PlainChain:
        """A chain that continues the same tokens on its own."""
        made = PlainChain.__new__(PlainChain)
        made._link, made._tokens, made._step_tokens = self._link, self._tokens, self._step_tokens
        return made

    def extend(self, token_ids: Sequence[int]) -> list[Boundary]:
        """Append tokens and return their boundaries. Tokens after the last whole 16 are ignored, not kept.

        Raises:
            OverflowError: A token id does not fit 32 bits.
        """
        words = token_ids[: len(token_ids) // LINK_TOKENS * LINK_TOKENS]
        return self._append(len(words), self._hashes(_packed(words))) if words else []

    def extend_with(
        self, text: bytes, num_tokens: int, read: Callable[[bytes], Sequence[int]], recall: Recall
    ) -> list[Boundary]:
        """As `extend`, of tokens that may be known as they are written.

        Args:
            text: What is written.
            num_tokens: How many tokens it stands for; a multiple of 16.
            read: Returns them. Called if their hashes are not known; what it raises is raised, and nothing is appended.
            recall: Keeps their hashes.
        """
        place = (self._link, self._tokens, num_tokens, self._step_tokens)
        return self._append(num_tokens, recall(place, text, lambda: self._hashes(_packed(read(text)))))

    def _append(self, num_tokens: int, hashes: bytes) -> list[Boundary]:
        """Go on behind tokens with these hashes, as `_hashes` returns them."""
        tokens, step_tokens = self._tokens, self._step_tokens
        self._link, self._tokens = hashes[-PREFIX_BYTES:], tokens + num_tokens
        ends = range((tokens // step_tokens + 1) * step_tokens, self._tokens + 1, step_tokens)
        return boundaries_at(ends, hashes[:-PREFIX_BYTES])

    def _hashes(self, data: bytes) -> bytes:
        """The hashes at the boundaries of the next tokens, and at their end."""
        link, sha256 = self._link, hashlib.sha256
        links = [link := sha256(link + words).digest() for (words,) in _LINK.iter_unpack(data)]
        # all links are kept for a moment: a test for each one would take longer
        first = (self._step_tokens - self._tokens % self._step_tokens) // LINK_TOKENS - 1
        return b"".join([*links[first :: self._step_tokens // LINK_TOKENS], link])
