"""Negative cache: records that a slower tier should have had and did not, or whose bytes are bad."""

from __future__ import annotations

from collections import Counter, OrderedDict

from kvstore.model.keys import PrefixHash, RecordKey
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
        self._num_at: Counter[PrefixHash] = Counter()

    def __len__(self) -> int:
        return len(self._until_s)

    def __contains__(self, key: RecordKey) -> bool:
        until_s = self._until_s.get(key)
        if until_s is None:
            return False
        if until_s <= self._clock.monotonic_s():
            self.remove(key)
            return False
        return True

    def has_any(self, prefix: PrefixHash) -> bool:
        """Whether any key with this prefix was added; it may have expired since."""
        return prefix in self._num_at

    def add(self, key: RecordKey, seconds: float) -> None:
        """Remember `key` for `seconds`; beyond the limit the oldest entry is dropped."""
        self.remove(key)
        self._until_s[key] = self._clock.monotonic_s() + seconds
        self._num_at[key.prefix] += 1
        while len(self._until_s) > _KEYS_MAX:
            self.remove(next(iter(self._until_s)))

    def remove(self, key: RecordKey) -> None:
        """Forget `key`: it was written again."""
        if self._until_s.pop(key, None) is not None:
            self._num_at[key.prefix] -= 1
            if not self._num_at[key.prefix]:
                del self._num_at[key.prefix]
