"""Identifiers: of a namespace, a token prefix, one record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

__all__ = ["NAMESPACE_BYTES", "PREFIX_BYTES", "Boundary", "NamespaceId", "PrefixHash", "RecordKey"]

NAMESPACE_BYTES = 16
PREFIX_BYTES = 32

NamespaceId = NewType("NamespaceId", bytes)
"""16 bytes: digest of everything that must be equal for two engines' bytes to be interchangeable."""

PrefixHash = NewType("PrefixHash", bytes)
"""32 bytes: digest of all tokens (and whatever else the KV depends on) up to a boundary."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """A token position at which a prefix may be resumed.

    Attributes:
        tokens: Number of tokens before the position.
        prefix: Hash of exactly these tokens.
    """

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
