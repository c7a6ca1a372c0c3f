"""The pages that engines have named, of which there is a bounded number: of too many, the oldest of the tenant that has
most leave. They are also found by the hash of their last block, since a router may know a prompt by hashes alone.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

from kvstore.model.keys import Boundary, NamespaceId, PrefixHash
from kvstore.model.media import Medium
from kvstore.model.page_blocks import PageBlocks

Place = tuple[NamespaceId, PrefixHash]
"""A boundary."""

_PAGE_BYTES, _HOLD_BYTES = 2_048, 300
"""About what a page takes beside hashes and tokens, and what `BlockCounts` has for each hash and group on two media."""
_COMPARED = 16
"""Pages with one last hash that are compared. A boundary has one in each group, and several names while keys change."""


@dataclass(eq=False, slots=True)
class Page:
    """A page whose blocks an engine has named.

    Attributes:
        tenant: Whose it is.
        whole: A bit for each slice that it has.
        media: Where subscribers believe it to be.
        num_bytes: About the memory that it takes.
    """

    blocks: PageBlocks
    tenant: str
    whole: int
    media: list[Medium] = field(default_factory=list)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        blocks = self.blocks
        hold_bytes = _HOLD_BYTES * blocks.num_blocks * len(blocks.groups)
        self.num_bytes = _PAGE_BYTES + len(blocks.hashes) + len(blocks.tokens) + hold_bytes

    @property
    def place(self) -> Place:
        return self.blocks.namespace, self.blocks.boundary.prefix


class Pages:
    """Named pages of all tenants in the order in which they came, to know which one leaves when there are too many.

    Args:
        most: How many.
        bytes_max: How many bytes they may take in all.
    """

    def __init__(self, most: int, bytes_max: int) -> None:
        self._most = most
        self._bytes_max = bytes_max
        self._of: defaultdict[str, OrderedDict[Page, None]] = defaultdict(OrderedDict)
        self._bytes: dict[str, int] = {}
        self._num_pages = 0
        self.used_bytes = 0

    def __len__(self) -> int:
        return self._num_pages

    def __iter__(self) -> Iterator[Page]:
        return chain.from_iterable(self._of.values())

    def add(self, page: Page) -> None:
        """Take a page in, as the latest of its tenant."""
        self._of[page.tenant][page] = None
        self._count(page, 1)

    def remove(self, page: Page) -> None:
        """Take a page out that is in here."""
        pages = self._of[page.tenant]
        del pages[page]
        self._count(page, -1)
        if not pages:
            del self._of[page.tenant], self._bytes[page.tenant]

    def excess(self) -> Page | None:
        """The page that must leave next; `None`: the rest fits."""
        if self._num_pages <= self._most and self.used_bytes <= self._bytes_max:
            return None
        return next(iter(self._of[max(self._bytes, key=self._bytes.__getitem__)]))

    def _count(self, page: Page, sign: int) -> None:
        num_bytes = sign * page.num_bytes
        self._bytes[page.tenant] = self._bytes.get(page.tenant, 0) + num_bytes
        self._num_pages += sign
        self.used_bytes += num_bytes


class PagesByHash:
    """The named pages by the hash of their last block. As it depends on all blocks before it, it names the whole prefix
    that ends there.
    """

    def __init__(self) -> None:
        self._pages: dict[NamespaceId, dict[bytes, dict[Page, None]]] = {}

    def __contains__(self, namespace: NamespaceId) -> bool:
        """Whether any page of a namespace is named."""
        return namespace in self._pages

    def namespaces(self) -> Iterable[NamespaceId]:
        """Those of which some page is named."""
        return self._pages.keys()

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
