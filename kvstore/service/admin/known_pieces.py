"""The hashes of pieces of long prompts: a router asks at each turn of a conversation, and the prompt of a turn begins
as the last one's.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Hashable
from functools import partial

from kvstore.model.keys import Recall
from kvstore.runtime.bounded_map import BoundedMap, SharedRoom

_ROOM_BYTES = 64 << 20
_TENANT_BYTES = 32 << 20
"""Some 400 prompts of 131,072 tokens with a boundary each 64 tokens, at 32 bytes a boundary."""
_PIECES_MAX = 16_384
_KEEPING_BYTES = 500
"""What a map takes for an entry, its key included."""
_SECRET = secrets.token_bytes(16)
"""Goes in front of each text: the key of Python's own hashes may be set for a whole fleet, by `PYTHONHASHSEED`."""

_Piece = tuple[Hashable, int]
"""Its place, and Python's hash of its text: 64 bits of SipHash, which is quicker than SHA-256. Like that, and unlike
XXH3, it is made for texts that others choose: without the secret they can write none that is taken for another one.
By chance, one in 2^64 texts is: then a router gets a wrong answer."""


class KnownPieces:
    """The latest results, by tenant of the token that asks. The time of an answer depends on whether pieces of a prompt
    were known, so they are known to their tenant alone. Belongs to the administration's loop.

    Args:
        room_bytes: Of all tenants together.
        tenant_bytes: Of one tenant.
    """

    def __init__(self, room_bytes: int = _ROOM_BYTES, tenant_bytes: int = _TENANT_BYTES) -> None:
        self._room = SharedRoom(room_bytes)
        self._tenant_bytes = tenant_bytes
        self._of_tenant: dict[str | None, BoundedMap[_Piece, bytes]] = {}

    def of(self, tenant: str | None) -> Recall:
        """Those of one tenant; `None`: of operators' tokens."""
        if (kept := self._of_tenant.get(tenant)) is None:
            kept = self._of_tenant[tenant] = BoundedMap(self._room, _PIECES_MAX, self._tenant_bytes)
        return partial(_recall, kept)

    @property
    def used_bytes(self) -> int:
        """Bytes of all tenants' pieces."""
        return self._room.used_bytes


def _recall(kept: BoundedMap[_Piece, bytes], place: Hashable, text: bytes, compute: Callable[[], bytes]) -> bytes:
    key = place, hash(_SECRET + text)
    value = kept.entries.get(key)
    if value is None:
        value = compute()
    kept.put(key, value, _KEEPING_BYTES + sys.getsizeof(value))  # again: what was used last is dropped last
    return value
