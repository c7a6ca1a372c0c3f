"""The pages that engines have named, bounded in number and bytes: of too many, the oldest of the tenant leave that has
most."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvstore.model.keys import NamespaceId, PrefixHash
from kvstore.model.media import Medium
from kvstore.model.page_blocks import PageBlocks

Place = tuple[NamespaceId, PrefixHash]
"""A boundary."""

_PAGE_BYTES, _HOLD_BYTES = 2_048, 300
"""About what a page takes beside its hashes and tokens, and what `Holders` has for each hash and group on two media."""


@dataclass(eq=False, slots=True)
class Page:
    """A named page.

    Attributes:
        tenant: Whose it is.
        whole: A bit for each slice that it has.
        media: Where subscribers believe it to be.
    """

    blocks: PageBlocks
    tenant: str
    whole: int
    media: list[Medium] = field(default_factory=list)

    @property
    def place(self) -> Place:
        return self.blocks.namespace, self.blocks.boundary.prefix

    @property
    def num_bytes(self) -> int:
        """About the memory that it takes."""
        blocks = self.blocks
        return (
            _PAGE_BYTES + len(blocks.hashes) + len(blocks.tokens) + _HOLD_BYTES * blocks.num_blocks * len(blocks.groups)
        )


class Pages:
    """Pages in the order in which they came, of all tenants.

    Args:
        most: How many.
        bytes_max: How many bytes they may take in all.
    """

    def __init__(self, most: int, bytes_max: int) -> None:
        self._most = most
        self._bytes_max = bytes_max
        self._of: dict[str, OrderedDict[Page, None]] = {}
        self._bytes: dict[str, int] = {}
        self._num_pages = 0
        self.used_bytes = 0

    def __len__(self) -> int:
        return self._num_pages

    def add(self, page: Page) -> None:
        """Take a page in, as the latest of its tenant."""
        self._of.setdefault(page.tenant, OrderedDict())[page] = None
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
