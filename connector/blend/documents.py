"""Documents in the store: pages named by content, in a namespace apart from all prefixes'."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import torch

from connector.blend.recompute import FIRST_POSITION, LayerStates
from connector.facts import CellFacts, EngineFacts
from connector.identity import CacheShape, GroupShape, describe_model, read_shape
from kvstore.api import Deadline
from kvstore.client import BlockingStore, PageDoor, describe_pages
from kvstore.model.namespace import NamespaceDescription

PAGE_TOKENS = 256
_FORMAT = 2


def describe_documents(facts: EngineFacts, weights_id: str) -> NamespaceDescription:
    """The namespace of an engine's documents.

    A prefix's namespace has no field `documents`, so none can be equal to one of these. Pages are divided into slices
    of heads as prefixes' are, so engines of all tensor-parallel sizes share them.
    """
    content = facts.groups[0].content
    assert isinstance(content, CellFacts)
    return describe_pages(
        {
            **describe_model(facts, weights_id),
            "documents": {
                "format": _FORMAT,
                "first_position": FIRST_POSITION,
                "layers": list(facts.groups[0].layer_names),
                "heads": content.total_heads,
                "head_size": content.head_size,
                "head_size_v": content.head_size_v,
                "dtype": content.dtype,
            },
        },
        page_tokens=PAGE_TOKENS,
        num_slices=_shape(facts).slices.num_slices,
    )


def _shape(facts: EngineFacts) -> GroupShape:
    shape = read_shape(facts)
    assert isinstance(shape, CacheShape), shape  # of others nothing is cached
    return shape.groups[0]


def document_root(cache_salt: str, first_token: int) -> bytes:
    """What the names of documents begin with: whose they are, and what they were computed behind.

    Args:
        cache_salt: Of the request. Requests with different ones share nothing, as in vLLM's own cache.
        first_token: Of the prompt.
    """
    salt = cache_salt.encode("utf-8", "surrogatepass")
    return len(salt).to_bytes(8, "little") + salt + first_token.to_bytes(8, "little")


def page_keys(root: bytes, tokens: Sequence[int]) -> list[bytes]:
    """The names of a document's pages, in order: each of all tokens up to its end, and of `document_root`. Documents
    with the same beginning share its pages.
    """
    digest = hashlib.sha256(root)
    keys = []
    for start in range(0, len(tokens), PAGE_TOKENS):
        page = tokens[start : start + PAGE_TOKENS]
        digest.update(array("q", page).tobytes())
        keys.append(digest.digest())
    return keys


class DocumentStore:
    """Reads and writes a rank's heads of documents. For threads other than the engine's: it waits for the store.

    Args:
        store: Stays the caller's.
        facts: Of the rank.
        weights_id: Of its model.
        dtype: Of keys and values.
        timeout_s: The longest that reading the documents of a prompt takes, or storing one.

    Attributes:
        timeout_s: As given.
    """

    def __init__(
        self, store: BlockingStore, facts: EngineFacts, weights_id: str, dtype: torch.dtype, *, timeout_s: float
    ) -> None:
        content = facts.groups[0].content
        assert isinstance(content, CellFacts)
        held = _shape(facts).slices.slices_of(facts.tp_rank, facts.tp_size)
        description = describe_documents(facts, weights_id)
        self._door = PageDoor(store, description, slices=held, element_bytes=dtype.itemsize, timeout_s=timeout_s)
        self.timeout_s = timeout_s
        self._dtype = dtype
        self._num_layers = len(facts.groups[0].layer_names)
        self._heads = content.rank_heads
        self._slice_heads = content.rank_heads // len(held)
        self._sizes = content.head_size, content.head_size_v

    def read(self, root: bytes, tokens: Sequence[int], deadline: Deadline) -> LayerStates | None:
        """A document's keys and values, or `None` if a page of it is not there, or lacks a slice of any rank.

        Raises:
            KVStoreError: The store does not answer, or it is too late.
        """
        states = self._empty(len(tokens))
        keys = page_keys(root, tokens)
        places = self._pages(states, len(tokens))
        pages = [[torch.empty(place.shape, dtype=self._dtype) for place in page] for page in places]
        views = [[_view(piece) for piece in page] for page in pages]
        if self._door.read_into(keys, views, timeout_s=deadline.remaining_s) < len(keys):
            return None
        for page_places, page in zip(places, pages, strict=True):
            for place, piece in zip(page_places, page, strict=True):
                place.copy_(piece)
        return states

    def write(self, root: bytes, tokens: Sequence[int], document: LayerStates, deadline: Deadline) -> None:
        """Store a document's keys and values; a page that is stored stays as it is.

        Raises:
            KVStoreError: The store does not answer, or refuses it, or it is too late.
        """
        keys = page_keys(root, tokens)
        pages = [[_view(part.contiguous()) for part in page] for page in self._pages(document, len(tokens))]
        self._door.write_from(keys, pages, timeout_s=deadline.remaining_s)

    def _pages(self, states: LayerStates, num_tokens: int) -> list[list[torch.Tensor]]:
        """The parts of each page, in order: of each slice of heads, of each layer keys, then values."""
        layers = [part for pair in zip(states.keys, states.values, strict=True) for part in pair]
        heads = [slice(first, first + self._slice_heads) for first in range(0, self._heads, self._slice_heads)]
        rows = [slice(start, start + PAGE_TOKENS) for start in range(0, num_tokens, PAGE_TOKENS)]
        return [[part[page, share] for share in heads for part in layers] for page in rows]

    def _empty(self, num_tokens: int) -> LayerStates:
        key_size, value_size = self._sizes
        keys = [torch.empty(num_tokens, self._heads, key_size, dtype=self._dtype) for _ in range(self._num_layers)]
        values = [torch.empty(num_tokens, self._heads, value_size, dtype=self._dtype) for _ in range(self._num_layers)]
        return LayerStates(keys, values)


def _view(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())  # numpy has no bfloat16
