"""Which boundaries are worth keeping at all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import ClassVar

from kvstore.eviction.prefixes import Key, spread

__all__ = ["Admission", "AdmitAll", "BySize", "SecondSight"]


class Admission(ABC):
    """Decides how much of a prompt to save. Pure.

    A prefix without its start is useless, so the answer is a count: how many boundaries from the start to save.
    """

    name: ClassVar[str]

    @abstractmethod
    def admit(self, path: Sequence[Key], tokens: Sequence[int]) -> int:
        """How many of a prompt's boundaries, from its start, may be held; called once for each prompt.

        Args:
            path: The prompt's boundaries, ascending.
            tokens: Position of each, in tokens.
        """

    @abstractmethod
    def admits_unasked(self, tokens: int) -> bool:
        """Whether a boundary may be held that no lookup has asked for, e.g. one of generated tokens.

        Args:
            tokens: Its position, in tokens.
        """


class AdmitAll(Admission):
    """Admits everything."""

    name: ClassVar[str] = "all"

    def admit(self, path: Sequence[Key], tokens: Sequence[int]) -> int:
        return len(path)

    def admits_unasked(self, tokens: int) -> bool:
        return True


class SecondSight(Admission):
    """Admits what was offered before: a prompt that is seen only once then costs no write.

    Args:
        remembered: Boundaries that are remembered, in four bytes each. A newer one may overwrite an older one, so a
            boundary that comes again only after many times `remembered` others is not recognised. It would not be held
            long enough for a third use anyway, where `remembered` is about the number of boundaries held.
    """

    name: ClassVar[str] = "second_sight"

    def __init__(self, remembered: int) -> None:
        self._marks = array("I", bytes(4 * max(1, remembered)))

    def admit(self, path: Sequence[Key], tokens: Sequence[int]) -> int:
        marks, size = self._marks, len(self._marks)
        known = 0
        for index, key in enumerate(path):
            bits = spread(key)
            place, mark = bits % size, (bits >> 32) | 1  # never 0, which marks an empty place
            if marks[place] == mark:
                known = index + 1  # all shorter ones were offered with it, even if their marks are overwritten
            else:
                marks[place] = mark
        return known

    def admits_unasked(self, tokens: int) -> bool:
        return False


class BySize(Admission):
    """Admits long prompts: a short one is computed about as quickly as it is fetched.

    Args:
        min_tokens: Shorter prompts are not kept.
    """

    name: ClassVar[str] = "by_size"

    def __init__(self, min_tokens: int) -> None:
        self._min_tokens = min_tokens

    def admit(self, path: Sequence[Key], tokens: Sequence[int]) -> int:
        return len(path) if tokens and self.admits_unasked(tokens[-1]) else 0

    def admits_unasked(self, tokens: int) -> bool:
        return tokens >= self._min_tokens
