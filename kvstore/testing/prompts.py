"""A small model and its prompts for tests of page stores: every record of a prompt, sealed and right for its layout."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvstore.api import PrefixQuery
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.record import Record, seal
from kvstore.model.keys import Boundary, NamespaceId, PrefixHash, RecordKey
from kvstore.model.kinds import FullAttention, Recurrent, SlidingWindow
from kvstore.model.layout import GroupLayout, Layout
from kvstore.model.namespace import NamespaceDescription, describe_layout

ATTENTION = Layout(64, (GroupLayout(FullAttention(), 2),))
"""One group, two slices, pages of 64 tokens."""

WINDOWED = Layout(64, (GroupLayout(FullAttention(), 2), GroupLayout(SlidingWindow(100), 2)))
"""A sliding window of 100 tokens beside full attention."""

HYBRID = Layout(64, (GroupLayout(FullAttention(), 2), GroupLayout(Recurrent(), 3)))
"""A recurrent state beside full attention."""


def describe(layout: Layout, name: str = "test", tenant: str = "", weights_id: str = "") -> NamespaceDescription:
    """A namespace with this layout; another name, and other weights, are another namespace."""
    fields = {"model": name, "layout": describe_layout(layout)} | ({"weights_id": weights_id} if weights_id else {})
    return NamespaceDescription.from_fields(fields, tenant)


@dataclass(frozen=True)
class Prompt:
    """A prompt of `num_tokens` tokens; prompts of one `name` share their prefix.

    Attributes:
        layout: The model's.
        name: What its tokens depend on.
        num_tokens: Its length; boundaries are the multiples of `step_tokens` up to here.
        step_tokens: Distance of boundaries.
        model: Name of the namespace.
        payload_bytes: Of each record.
        tenant: Whose namespace it is.
        weights_id: What its pages were computed with; empty: the description does not say.
    """

    layout: Layout
    name: str
    num_tokens: int
    step_tokens: int = 16
    model: str = "test"
    payload_bytes: int = 1000
    tenant: str = ""
    weights_id: str = ""
    description: NamespaceDescription = field(init=False)

    def __post_init__(self) -> None:
        description = describe(self.layout, self.model, self.tenant, self.weights_id)
        object.__setattr__(self, "description", description)

    @property
    def namespace(self) -> NamespaceId:
        return self.description.id

    def boundary(self, tokens: int) -> Boundary:
        return Boundary(tokens, PrefixHash(hashlib.sha256(f"{self.name}:{tokens}".encode()).digest()))

    def query(self, *, local_tokens: int = 0, cap_tokens: int | None = None) -> PrefixQuery:
        """What an engine asks with this prompt."""
        boundaries = range(self.step_tokens, self.num_tokens + 1, self.step_tokens)
        return PrefixQuery(
            self.namespace,
            tuple(self.boundary(tokens) for tokens in boundaries),
            local_tokens=local_tokens,
            cap_tokens=self.num_tokens if cap_tokens is None else cap_tokens,
            step_tokens=self.step_tokens,
        )

    def key(self, tokens: int, group: int = 0, slice_: int = 0) -> RecordKey:
        return RecordKey(self.namespace, self.boundary(tokens).prefix, group, slice_)

    def record(self, tokens: int, group: int = 0, slice_: int = 0, *, seed: int = 0) -> Record:
        """One sealed record; another `seed` gives other bytes under the same name."""
        key = self.key(tokens, group, slice_)
        kind, span = self.layout.groups[group].record_at(tokens, self.layout.page_tokens)
        numbers = np.random.default_rng([seed, group, slice_, int.from_bytes(key.prefix[:4], "little")])
        data = bytearray(HEADER_BYTES) + bytearray(numbers.bytes(self.payload_bytes))
        return seal(
            HeaderV1.unsealed(
                key, kind, span, codec_chain=0, decoded_bytes=self.payload_bytes, created_ms=1_700_000_000_000
            ),
            data,
        )

    def record_keys(self, tokens: Iterable[int] | None = None) -> list[RecordKey]:
        """Of all slices of all groups at these boundaries; by default every page (and its states), and the end."""
        return [self.key(*place) for place in self._places(tokens)]

    def records(self, tokens: Iterable[int] | None = None) -> list[Record]:
        """The records of `record_keys`."""
        return [self.record(*place) for place in self._places(tokens)]

    def _places(self, tokens: Iterable[int] | None) -> list[tuple[int, int, int]]:
        if tokens is None:
            page_tokens = self.layout.page_tokens
            ends = set(range(page_tokens, self.num_tokens + 1, page_tokens))
            tokens = sorted(ends | {self.num_tokens // self.step_tokens * self.step_tokens})
        return [
            (at, index, slice_)
            for at in tokens
            for index, group in enumerate(self.layout.groups)
            for slice_ in range(group.num_slices)
        ]
