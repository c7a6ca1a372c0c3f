"""Which boundary of a namespace ends with which block: a router may know a prompt by its blocks' hashes alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from kvstore.model.keys import Boundary, NamespaceId
from kvstore.model.page_blocks import PageBlocks
from kvstore.store.cache_events.pages import Page

_COMPARED = 16
"""Pages of one hash that are compared. A boundary has one in each group, and several names while keys change."""


class Ends:
    """The named pages by the hash of their last block, which names the whole prefix up to there."""

    def __init__(self) -> None:
        self._pages: dict[NamespaceId, dict[bytes, dict[Page, None]]] = {}

    def __contains__(self, namespace: NamespaceId) -> bool:
        """Whether any page of a namespace is named."""
        return namespace in self._pages

    def add(self, page: Page) -> None:
        """Take a page in."""
        if last := _last_hash(page.blocks):
            self._pages.setdefault(page.blocks.namespace, {}).setdefault(last, {})[page] = None

    def remove(self, page: Page) -> None:
        """Take a page out that is in here."""
        last, of_namespace = _last_hash(page.blocks), self._pages.get(page.blocks.namespace)
        if of_namespace is None or last not in of_namespace:
            return
        of_namespace[last].pop(page, None)
        if not of_namespace[last]:
            del of_namespace[last]
        if not of_namespace:
            del self._pages[page.blocks.namespace]

    def boundaries(self, namespace: NamespaceId, hashes: Iterable[bytes]) -> Iterator[Boundary]:
        """The boundaries at which pages end whose last blocks have these hashes.

        Args:
            hashes: Of a prompt's blocks, in order. Those that no page ends with, or that do not ascend, are left out.

        Returns:
            Strictly ascending.
        """
        of_namespace, last_tokens = self._pages.get(namespace, {}), 0
        for block in hashes:
            if (pages := of_namespace.get(block)) is None:
                continue
            latest = list(islice(reversed(pages), _COMPARED))
            boundary = next((page for page in latest if page.media), latest[0]).blocks.boundary
            if boundary.tokens > last_tokens:
                last_tokens = boundary.tokens
                yield boundary


def _last_hash(blocks: PageBlocks) -> bytes:
    return blocks.hash_at(blocks.num_blocks - 1) if blocks.num_blocks else b""
