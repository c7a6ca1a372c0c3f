"""What second sight may write to the cold tier of what nobody was promised: what was seen before."""

from __future__ import annotations

from collections import Counter

from kvstore.api import PrefixQuery
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.model.layout import Layout
from kvstore.testing.prompts import Prompt

__all__ = ["RULE", "Sightings"]

RULE = "second_sight"

Name = tuple[NamespaceId, PrefixHash]


class Sightings:
    """What clients have looked up and saved, and so may be in the cold tier."""

    def __init__(self) -> None:
        self._looked_up: Counter[Name] = Counter()
        self._saved: set[Name] = set()
        self._may_be_kept: set[Name] = set()

    def looks_up(self, query: PrefixQuery, layout: Layout) -> None:
        """A lookup begins."""
        self._looked_up.update((query.namespace, boundary.prefix) for boundary in query.boundaries)
        self.looked_up(query, layout)

    def looked_up(self, query: PrefixQuery, layout: Layout) -> None:
        """A lookup has ended: whatever was seen before, with all below it, may be kept."""
        seen = [
            boundary.tokens
            for boundary in query.boundaries
            if self._looked_up[name := (query.namespace, boundary.prefix)] > 1 or name in self._saved
        ]
        reached = max(seen, default=0)
        last = query.boundaries[-1].tokens
        if reached >= last // layout.page_tokens * layout.page_tokens:
            reached = last if seen else 0  # what is behind the last page goes with it
        self._keep(query, reached)

    def saves(self, prompt: Prompt, key: RecordKey, tokens: int, *, waits: bool) -> None:
        """A save begins; one that waits for a slower tier gets there, with the start of its prompt."""
        self._saved.add((key.namespace, key.prefix))
        if waits:
            self._keep(prompt.query(), tokens)

    def _keep(self, query: PrefixQuery, tokens: int) -> None:
        self._may_be_kept.update(
            (query.namespace, boundary.prefix) for boundary in query.boundaries if boundary.tokens <= tokens
        )

    def may_be_kept(self, key: RecordKey) -> bool:
        return (key.namespace, key.prefix) in self._may_be_kept
