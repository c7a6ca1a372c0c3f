"""Identifiers of a namespace, a token prefix, one record; and the hash chain over the prefixes of plain tokens."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

NAMESPACE_BYTES = 16
PREFIX_BYTES = 32

NamespaceId = NewType("NamespaceId", bytes)
"""16 bytes: digest of everything that must be equal for two engines' bytes to be interchangeable."""

PrefixHash = NewType("PrefixHash", bytes)
"""32 bytes: digest of all tokens, and of everything else that the KV depends on, up to a boundary."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """A token position at which a prefix may be resumed: the number of tokens before it, and their hash."""

    tokens: int
    prefix: PrefixHash


@dataclass(frozen=True, slots=True, order=True)
class RecordKey:
    """Identifies a record; its name is this key as text, and its header repeats it.

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

_ROOT = b"kvstore prefix v1\0"


def prefix_root(cache_salt: str | None) -> bytes:
    """The input of the chain's first hash; an adapter's digest is appended to it."""
    salt = b"" if cache_salt is None else b"\1" + cache_salt.encode()
    return _ROOT + len(salt).to_bytes(4, "little") + salt


class PlainChain:
    """Computes the hash at every multiple of 16 tokens, for operators' queries: docs/formats/prefix-hash-v1.md without
    adapters, media and embeddings. The connector hashes prompts that may have those.

    Args:
        cache_salt: The prompt's `cache_salt`; `None`: it has none.
    """

    def __init__(self, cache_salt: str | None = None) -> None:
        self._link = hashlib.sha256(prefix_root(cache_salt)).digest()
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens of the whole links so far."""
        return self._tokens

    def copy(self) -> PlainChain:
        """A chain that continues the same tokens on its own."""
        made = PlainChain.__new__(PlainChain)
        made._link, made._tokens = self._link, self._tokens
        return made

    def extend(self, token_ids: Sequence[int], every: int = LINK_TOKENS) -> list[Boundary]:
        """Append tokens and return their boundaries. Tokens after the last whole link are ignored, not kept.

        Args:
            every: Only boundaries at multiples of this are returned.

        Raises:
            OverflowError: A token id does not fit 32 bits.
        """
        packed = array("I", token_ids[: len(token_ids) // LINK_TOKENS * LINK_TOKENS])
        if sys.byteorder == "big":
            packed.byteswap()
        data = packed.tobytes()
        link_bytes = LINK_TOKENS * packed.itemsize
        found = []
        link, tokens, sha256 = self._link, self._tokens, hashlib.sha256
        for at in range(0, len(data), link_bytes):
            link = sha256(link + data[at : at + link_bytes]).digest()
            tokens += LINK_TOKENS
            if tokens % every == 0:
                found.append(Boundary(tokens, PrefixHash(link)))
        self._link, self._tokens = link, tokens
        return found
