"""Documents in the store: pages named by content, in a namespace apart from all prefixes'."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import torch

from connector.blend.recompute import Document, LayerStates
from connector.facts import CellFacts, EngineFacts
from connector.identity import describe_model
from kvstore.client import PageDoor, describe_pages
from kvstore.model.namespace import NamespaceDescription

PAGE_TOKENS = 256
_FORMAT = 1
_FIRST_POSITION = 1
"""A document is computed alone behind the prompt's first token, so its first token has this position."""


def describe_documents(facts: EngineFacts, weights_id: str) -> NamespaceDescription:
    """The namespace of an engine's documents.

    A prefix's namespace has no field `documents`, so none can be equal to one of these.
    """
    content = facts.groups[0].content
    assert isinstance(content, CellFacts)
    return describe_pages(
        {
            **describe_model(facts, weights_id),
            "documents": {
                "format": _FORMAT,
                "first_position": _FIRST_POSITION,
                "layers": list(facts.groups[0].layer_names),
                "heads": content.total_heads,
                "head_size": content.head_size,
                "head_size_v": content.head_size_v,
                "dtype": content.dtype,
            },
        },
        page_tokens=PAGE_TOKENS,
    )


def page_keys(first_token: int, tokens: Sequence[int]) -> list[bytes]:
    """The names of a document's pages, in order: each of all tokens up to its end, and of the first token of the prompt
    behind which it was computed. Documents with the same beginning share its pages.
    """
    digest = hashlib.sha256(array("q", [first_token]).tobytes())
    keys = []
    for start in range(0, len(tokens), PAGE_TOKENS):
        page = tokens[start : start + PAGE_TOKENS]
        digest.update(array("q", page).tobytes())
        keys.append(digest.digest())
    return keys


class DocumentStore:
    """Reads and writes documents. For threads other than the engine's: it waits for the store.

    Args:
        door: To the documents' namespace.
        facts: The engine's.
        dtype: Of keys and values.
    """

    def __init__(self, door: PageDoor, facts: EngineFacts, dtype: torch.dtype) -> None:
        content = facts.groups[0].content
        assert isinstance(content, CellFacts)
        self._door = door
        self._dtype = dtype
        self._num_layers = len(facts.groups[0].layer_names)
        self._heads = content.rank_heads
        self._sizes = content.head_size, content.head_size_v

    def read(self, first_token: int, tokens: Sequence[int]) -> Document | None:
        """A document, or `None` if a page of it is not there.

        Raises:
            KVStoreError: The store does not answer.
        """
        states = self._empty(len(tokens))
        keys = page_keys(first_token, tokens)
        pages = [
            [torch.empty(one[start : start + PAGE_TOKENS].shape, dtype=self._dtype) for one in _parts(states)]
            for start in range(0, len(tokens), PAGE_TOKENS)
        ]
        if self._door.read_into(keys, [[_view(piece) for piece in page] for page in pages]) < len(keys):
            return None
        for index, page in enumerate(pages):
            start = index * PAGE_TOKENS
            for whole, piece in zip(_parts(states), page, strict=True):
                whole[start : start + len(piece)] = piece
        return Document(states, _FIRST_POSITION)

    def write(self, first_token: int, tokens: Sequence[int], document: Document) -> None:
        """Store a document; a page that is stored stays as it is.

        Raises:
            KVStoreError: The store does not answer, or refuses it.
        """
        keys = page_keys(first_token, tokens)
        pages = [
            [_view(one[start : start + PAGE_TOKENS].contiguous()) for one in _parts(document.states)]
            for start in range(0, len(tokens), PAGE_TOKENS)
        ]
        self._door.write_from(keys, pages)

    def _empty(self, num_tokens: int) -> LayerStates:
        key_size, value_size = self._sizes
        keys = [torch.empty(num_tokens, self._heads, key_size, dtype=self._dtype) for _ in range(self._num_layers)]
        values = [torch.empty(num_tokens, self._heads, value_size, dtype=self._dtype) for _ in range(self._num_layers)]
        return LayerStates(keys, values)


def _parts(states: LayerStates) -> list[torch.Tensor]:
    """The order of a page's parts: of each layer keys, then values."""
    return [part for pair in zip(states.keys, states.values, strict=True) for part in pair]


def _view(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())  # numpy has no bfloat16
