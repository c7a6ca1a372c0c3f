"""How many follow the events at a time."""

from __future__ import annotations

from collections import Counter

from kvstore.service.admin.problems import Refused

__all__ = ["Followers"]

_ALL_MAX, _OF_ONE_MAX = 64, 8
"""Of 128 connections that the port has; nobody keeps the others out."""


class Followers:
    """How many follow, and who. Belongs to the administration's loop."""

    def __init__(self) -> None:
        self._by_name: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._by_name.total()

    def enter(self, name: str) -> None:
        """One more.

        Raises:
            Refused: 503: there are too many.
        """
        if len(self) >= _ALL_MAX or self._by_name[name] >= _OF_ONE_MAX:
            raise Refused(503, "too many follow the events already", headers={"Retry-After": "10"})
        self._by_name[name] += 1

    def leave(self, name: str) -> None:
        """One less."""
        self._by_name[name] -= 1
        self._by_name += Counter()  # without zeros
