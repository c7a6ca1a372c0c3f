"""The bytes that are moved: bf16-like pages for the codec, sealed records for the stores."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.api import PrefixQuery
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.record import Record, seal
from kvstore.model.kinds import FullAttention
from kvstore.model.layout import GroupLayout, Layout
from kvstore.model.namespace import NamespaceDescription
from kvstore.testing.prompts import Prompt, describe

__all__ = ["VALUE_OVERHEAD_BYTES", "Batch", "RecordPages", "benchmark_namespace", "bf16_page"]

_CHANNELS = 128
_PAGE_TOKENS = 64
_LAYOUT = Layout(_PAGE_TOKENS, (GroupLayout(FullAttention(), 1),))
_MODEL = "benchmark"
VALUE_OVERHEAD_BYTES = 64
"""Redis puts a header in front of a value: a record that is this much shorter than a size class fills it exactly."""


def bf16_page(size_bytes: int, *, seed: int) -> npt.NDArray[np.uint8]:
    """A page as an attention layer fills it: gaussian values, each channel at its own log-normal scale, in bf16."""
    generator = np.random.default_rng(seed)
    scales = np.exp(generator.standard_normal(_CHANNELS, dtype=np.float32))
    num_rows = -(-size_bytes // (2 * _CHANNELS))
    values = generator.standard_normal((num_rows, _CHANNELS), dtype=np.float32) * scales
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
    page: npt.NDArray[np.uint8] = rounded.astype("<u2").reshape(-1).view(np.uint8)
    return page[:size_bytes].copy()


@dataclass(frozen=True, slots=True)
class Batch:
    """Records of one prompt, and the question that stages them all."""

    prompt: Prompt
    records: Sequence[Record]

    @property
    def query(self) -> PrefixQuery:
        return self.prompt.query()


class RecordPages:
    """Buffers of incompressible records, sealed under new names for each batch, and buffers to receive them.

    A new batch takes the buffers of the one before, whose records must not be used any more.

    Args:
        size_bytes: Of a record in its Redis value; the record itself is 64 bytes shorter.
        num_pages: Records of a batch.
    """

    def __init__(self, size_bytes: int, num_pages: int) -> None:
        self.record_bytes = size_bytes - VALUE_OVERHEAD_BYTES
        generator = np.random.default_rng(size_bytes)
        self.sources = [bytearray(generator.bytes(self.record_bytes)) for _ in range(num_pages)]
        self.targets = [memoryview(bytearray(b"\1") * self.record_bytes) for _ in range(num_pages)]

    @property
    def num_bytes(self) -> int:
        return self.record_bytes * len(self.sources)

    def first(self, num_pages: int) -> RecordPages:
        """The first `num_pages`, in the same buffers."""
        fewer = copy(self)
        fewer.sources, fewer.targets = self.sources[:num_pages], self.targets[:num_pages]
        return fewer

    def batch(self) -> Batch:
        """Seal every buffer under a name that no other batch has."""
        num_tokens = _PAGE_TOKENS * len(self.sources)
        name = f"{self.record_bytes} bytes, batch {next(_batch_numbers)}"
        prompt = Prompt(_LAYOUT, name, num_tokens, step_tokens=_PAGE_TOKENS, model=_MODEL)
        return Batch(prompt, [_sealed(prompt, index, buffer) for index, buffer in enumerate(self.sources, start=1)])


def benchmark_namespace() -> NamespaceDescription:
    """What a service must open before it takes a batch."""
    return describe(_LAYOUT, _MODEL)


_batch_numbers = itertools.count()


def _sealed(prompt: Prompt, page: int, buffer: bytearray) -> Record:
    tokens = page * _PAGE_TOKENS
    kind, span = _LAYOUT.groups[0].record_at(tokens, _PAGE_TOKENS)
    payload_bytes = len(buffer) - HEADER_BYTES
    header = HeaderV1.unsealed(
        prompt.key(tokens), kind, span, codec_chain=0, decoded_bytes=payload_bytes, created_ms=1_700_000_000_000
    )
    return seal(header, buffer)
