"""`Parents`: which boundary comes before which, from the prompts that were looked up last."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import MappingProxyType

from kvstore.api import PrefixQuery
from kvstore.model.keys import NamespaceId, PrefixHash
from kvstore.model.layout import Layout

_QUERIES_KEPT = 64
_QUERY_BOUNDARIES_KEPT = 131_072
"""Boundaries of all queries that are kept, except the last: they are indexed in one go, in some 30 ms."""
_PARENTS_KEPT = 200_000
_NONE: Mapping[PrefixHash, PrefixHash] = MappingProxyType({})


class Parents:
    """The parents of boundaries, for a bounded number of prompts. A query is indexed when a parent is asked for.

    Each namespace has its own. Equal prompts have equal hashes in all of them, but pages of other sizes; and no tenant
    says which boundary another one's needs.
    """

    def __init__(self) -> None:
        self._queries: deque[tuple[PrefixQuery, int]] = deque(maxlen=_QUERIES_KEPT)
        self._parents: dict[NamespaceId, dict[PrefixHash, PrefixHash]] = {}
        self._num_parents = 0

    def learn(self, query: PrefixQuery, layout: Layout) -> None:
        """Remember a prompt's boundaries: the next saves are likely to be among them, and need their parents."""
        self._queries.append((query, layout.page_tokens))
        num_kept = 0
        for number, (kept, _) in enumerate(reversed(self._queries)):
            num_kept += len(kept.boundaries)
            if number and num_kept > _QUERY_BOUNDARIES_KEPT:
                while len(self._queries) > number:
                    self._queries.popleft()
                return

    def of(self, namespace: NamespaceId, prefix: PrefixHash) -> PrefixHash | None:
        """The boundary that comes before this one in its prompt; `None`: it is the first, or not known here."""
        if prefix not in self._parents.get(namespace, _NONE):
            while self._queries:
                self._index(*self._queries.pop())
        return self._parents.get(namespace, _NONE).get(prefix)

    def _index(self, query: PrefixQuery, page_tokens: int) -> None:
        if self._num_parents > _PARENTS_KEPT:
            self._parents.clear()
            self._num_parents = 0
        found: dict[PrefixHash, PrefixHash] = {}
        parent: PrefixHash | None = None
        for boundary in query.boundaries:
            if parent is not None:
                found[boundary.prefix] = parent
            if boundary.tokens % page_tokens == 0:
                parent = boundary.prefix
        if found:
            known = self._parents.setdefault(query.namespace, {})
            before = len(known)
            known |= found
            self._num_parents += len(known) - before
