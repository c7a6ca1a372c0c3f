"""Negative cache: records that a slower tier should have had and did not, or whose bytes are bad."""

from __future__ import annotations

from collections import OrderedDict

from kvstore.model.keys import RecordKey
from kvstore.runtime.clock import Clock

__all__ = ["AbsentKeys"]

_KEYS_MAX = 65_536


class AbsentKeys:
    """A bounded set of keys that expire.

    Presence in the cold tier is partly guessed. Without this memory a wrong guess would be repeated by every lookup,
    the writer would be told that the record is there, and the hole would never be filled.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s: OrderedDict[RecordKey, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_s)

    def __contains__(self, key: RecordKey) -> bool:
        until_s = self._until_s.get(key)
        if until_s is None:
            return False
        if until_s <= self._clock.monotonic_s():
            del self._until_s[key]
            return False
        return True

    def add(self, key: RecordKey, seconds: float) -> None:
        """Remember `key` for `seconds`; beyond the limit the oldest entry is dropped."""
        self._until_s[key] = self._clock.monotonic_s() + seconds
        self._until_s.move_to_end(key)
        while len(self._until_s) > _KEYS_MAX:
            self._until_s.popitem(last=False)

    def remove(self, key: RecordKey) -> None:
        """Forget `key`: it was written again."""
        self._until_s.pop(key, None)
