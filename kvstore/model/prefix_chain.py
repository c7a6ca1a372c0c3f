"""The prefix hashes of plain tokens, for operators' queries: docs/formats/prefix-hash-v1.md without adapters, media and
embeddings. The connector hashes prompts that may have those.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

from kvstore.model.keys import Boundary, PrefixHash

__all__ = ["LINK_TOKENS", "PlainChain", "prefix_root"]

LINK_TOKENS = 16
"""Tokens of a link of the chain: boundaries are multiples of it."""

_ROOT = b"kvstore prefix v1\0"


def prefix_root(cache_salt: str | None) -> bytes:
    """The input of the chain's first hash; an adapter's digest is appended to it."""
    salt = b"" if cache_salt is None else b"\1" + cache_salt.encode()
    return _ROOT + len(salt).to_bytes(4, "little") + salt


class PlainChain:
    """Computes the hash at every multiple of 16 tokens, link by link.

    Args:
        cache_salt: The prompt's `cache_salt`; `None`: it has none.
    """

    def __init__(self, cache_salt: str | None = None) -> None:
        self._link = hashlib.sha256(prefix_root(cache_salt)).digest()
        self._tokens = 0

    def extend(self, token_ids: Sequence[int]) -> list[Boundary]:
        """Append tokens and return their boundaries. Tokens after the last whole link are ignored, not kept.

        Raises:
            OverflowError: A token id does not fit 32 bits.
        """
        packed = array("I", token_ids[: len(token_ids) // LINK_TOKENS * LINK_TOKENS])
        if sys.byteorder == "big":
            packed.byteswap()
        data = packed.tobytes()
        link_bytes = LINK_TOKENS * packed.itemsize
        found = []
        for at in range(0, len(data), link_bytes):
            self._link = hashlib.sha256(self._link + data[at : at + link_bytes]).digest()
            self._tokens += LINK_TOKENS
            found.append(Boundary(self._tokens, PrefixHash(self._link)))
        return found
