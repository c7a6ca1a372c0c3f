"""The boundaries that a tier holds, as trees of prefixes."""

from __future__ import annotations

from kvstore.model.prompt_hint import NORMAL_PRIORITY

Key = bytes | int
"""Names a boundary: its prefix hash in the store (alone, or with its namespace in front), a number in a trace."""

NORMAL = NORMAL_PRIORITY
"""The priority of a boundary without a hint, from 0 to 100."""

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def spread(key: Key) -> int:
    """64 bits that look random and are the same in every process, unlike `hash`."""
    if isinstance(key, bytes):
        return int.from_bytes(key[-8:], "little")  # the end of a SHA-256
    if isinstance(key, int):
        mixed = (key + 1) * _GOLDEN & _MASK
        return (mixed ^ mixed >> 29) * _GOLDEN & _MASK
    raise TypeError(f"a boundary is named by bytes or a number, seen {type(key).__name__}")


class Node:
    """One boundary that is held: all records of all groups at it, which are added and evicted together.

    A boundary is *free* when it has neither a held child (the next longer prefix) nor a pin. Only free boundaries are
    evicted, so a prefix loses its end first and never gets a hole, and a state never outlives the pages before it.

    Attributes:
        key: Names the boundary, and so all tokens of its prefix.
        parent: The next shorter boundary; `None` for the first of a prompt, or where it is not held.
        tokens: Its position, in tokens.
        num_bytes: Bytes of its records, headers included.
        pool: Index of the pool that it counts against.
        num_holds: Its held children plus its pins.
        num_uses: Lookups that it served since it was added.
        last_use: When it was added or last used, on the caller's clock.
        rank: Set by the policy: the lowest is evicted first.
        is_held: False once it was removed.
        owner: Whose it is: hints change the order only among boundaries of one owner.
        priority: From a hint, see `hints.py`; of one owner's boundaries the lowest is evicted first.
    """

    __slots__ = (
        "is_held",
        "key",
        "last_use",
        "num_bytes",
        "num_holds",
        "num_uses",
        "owner",
        "parent",
        "pool",
        "priority",
        "rank",
        "tokens",
    )

    def __init__(
        self,
        key: Key,
        parent: Node | None,
        *,
        tokens: int,
        num_bytes: int,
        pool: int = 0,
        last_use: float = 0.0,
        owner: str = "",
    ) -> None:
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.num_bytes = num_bytes
        self.pool = pool
        self.num_holds = 0
        self.num_uses = 0
        self.last_use = last_use
        self.rank = 0.0
        self.is_held = True
        self.owner = owner
        self.priority = NORMAL

    @property
    def span_tokens(self) -> int:
        """Tokens between its parent and it. Pages under keys are all at the same position: each counts as a page."""
        before = self.parent.tokens if self.parent is not None else 0
        return self.tokens - before if before < self.tokens else self.tokens

    def __repr__(self) -> str:
        return f"Node({self.key!r}, tokens={self.tokens}, bytes={self.num_bytes}, holds={self.num_holds})"
