"""The names of entries: `c1/<namespace>/{<prefix>}`, in the slot of the boundary's records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.model.keys import PREFIX_BYTES, NamespaceId, PrefixHash

ROOT = "c1"
_MGET = "MGET"


def entry_name(namespace: NamespaceId, prefix: PrefixHash) -> str:
    """The name of one entry."""
    return f"{ROOT}/{namespace.hex()}/{{{prefix.hex()}}}"


def parse_entry_name(name: bytes) -> tuple[NamespaceId, PrefixHash] | None:
    """The namespace and the boundary of an entry's name; `None`: not the name of an entry."""
    root, _, rest = name.partition(b"/")
    namespace, _, text = rest.partition(b"/")
    if root != ROOT.encode() or text[:1] != b"{" or text[-1:] != b"}":
        return None
    try:
        place = NamespaceId(bytes.fromhex(namespace.decode())), PrefixHash(bytes.fromhex(text[1:-1].decode()))
    except ValueError:
        return None
    return place if len(place[1]) == PREFIX_BYTES else None


class GetEntries(Sequence[str]):
    """The command `MGET` of entries of a namespace. All names are equally long, so they are packed as one array, not
    one by one: Redis finds the thousands of a long prompt quicker than Python writes them.
    """

    def __init__(self, namespace: NamespaceId, prefixes: Sequence[PrefixHash]) -> None:
        self._namespace = namespace
        self._prefixes = prefixes

    def __len__(self) -> int:
        return 1 + len(self._prefixes)

    def __getitem__(self, index: Any) -> Any:
        at = range(len(self))[index]
        return entry_name(self._namespace, self._prefixes[at - 1]) if at else _MGET

    def packed(self) -> bytes:
        """In Redis' protocol."""
        name = entry_name(self._namespace, PrefixHash(bytes(PREFIX_BYTES)))
        row = f"${len(name)}\r\n{name}\r\n".encode()
        rows = np.tile(np.frombuffer(row, dtype=np.uint8), (len(self._prefixes), 1))
        digits = np.frombuffer(b"".join(self._prefixes).hex().encode(), dtype=np.uint8)
        digits_at = row.index(b"{") + 1
        rows[:, digits_at : digits_at + 2 * PREFIX_BYTES] = digits.reshape(-1, 2 * PREFIX_BYTES)
        return f"*{len(self)}\r\n${len(_MGET)}\r\n{_MGET}\r\n".encode() + rows.tobytes()
