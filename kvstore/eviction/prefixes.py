"""The boundaries that a tier holds, as a forest of prefixes: what policies rank and what may leave next."""

from __future__ import annotations

__all__ = ["Key", "Node", "spread"]

Key = bytes | int
"""Names a boundary: its prefix hash in the store (alone, or with its namespace in front), a number in a trace."""

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
    """One boundary that is held: all records of all groups at it, which come and go together.

    A boundary is *free* when nothing hangs on it: no longer prefix that is held, and no pin. Only free boundaries may
    leave, so a prefix loses its end first and never gets a hole, and a state never outlives the pages below it.

    Attributes:
        key: Names the boundary; from it alone follows every token below.
        parent: The boundary below, `None` for the first of a prompt or where it is not held.
        tokens: Tokens below the boundary.
        num_bytes: Bytes of its records, headers included.
        pool: Index of the budget that it counts against.
        num_holds: Held boundaries and pins that hang on it.
        num_uses: Lookups that it served since it came.
        last_use: When it came or was last used, on the caller's clock.
        rank: The policy's: the lowest leaves first.
        queue: The policy's: which of its queues ranks it.
        is_held: False once it has left.
    """

    __slots__ = (
        *("is_held", "key", "last_use", "num_bytes", "num_holds", "num_uses", "parent", "pool", "queue", "rank"),
        "tokens",
    )

    def __init__(
        self, key: Key, parent: Node | None, *, tokens: int, num_bytes: int, pool: int = 0, last_use: float = 0.0
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
        self.queue = 0
        self.is_held = True

    @property
    def is_free(self) -> bool:
        return self.num_holds == 0

    @property
    def span_tokens(self) -> int:
        """Tokens that it adds to the prefix below it."""
        return self.tokens - (self.parent.tokens if self.parent is not None else 0)

    def __repr__(self) -> str:
        return f"Node({self.key!r}, tokens={self.tokens}, bytes={self.num_bytes}, holds={self.num_holds})"
