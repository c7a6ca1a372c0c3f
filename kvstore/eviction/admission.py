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

    A prefix without its start is of no use, so the answer is how far to save: the first so many boundaries.
    """

    name: ClassVar[str]

    @abstractmethod
    def admit(self, path: Sequence[Key], tokens: Sequence[int]) -> int:
        """How many of a prompt's boundaries, from its start, may be held; called once for each prompt.

        Args:
            path: The prompt's boundaries, ascending.
            tokens: Tokens below each.
        """

    @abstractmethod
    def admits_unasked(self, tokens: int) -> bool:
        """Whether a boundary may be held of which nobody asked before, e.g. one of generated tokens.

        Args:
            tokens: Tokens below it.
        """


class AdmitAll(Admission):
    """Everything."""

    name: ClassVar[str] = "all"

    def admit(self, path: Sequence[Key], tokens: Sequence[int]) -> int:
        return len(path)

    def admits_unasked(self, tokens: int) -> bool:
        return True


class SecondSight(Admission):
    """What was offered before: most of a conversation's prompts are seen once, and then cost no write.

    Args:
        remembered: Room for so many boundaries, four bytes each. A newer one takes the place of an older one, so what
            comes again only after many times `remembered` others is not recognised: with little room to hold it, it
            would not be there long enough for a third time.
    """

    name: ClassVar[str] = "second_sight"

    def __init__(self, remembered: int) -> None:
        self._marks = array("I", bytes(4 * max(1, remembered)))

    def admit(self, path: Sequence[Key], tokens: Sequence[int]) -> int:
        marks, size = self._marks, len(self._marks)
        known = 0
        for index, key in enumerate(path):
            bits = spread(key)
            place, mark = bits % size, (bits >> 32) | 1  # never the zero of an empty place
            if marks[place] == mark:
                known = index + 1  # what is below was offered with it, even where its mark is gone
            else:
                marks[place] = mark
        return known

    def admits_unasked(self, tokens: int) -> bool:
        return False


class BySize(Admission):
    """Prompts of some length: a short one is computed about as quickly as it is fetched.

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
