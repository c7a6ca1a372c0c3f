"""What a load costs: a prompt's records, from a service's memory to the blocks of a rank on processors."""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.ceilings import memcpy
from benchmarks.measure import Amounts, Row, Work, measure
from benchmarks.node import Node, temporary_folder
from kvstore.testing.program import Say

_LAYERS, _HEADS, _CHANNELS, _BLOCK_TOKENS = 32, 8, 256, 16
_TOKEN_BYTES = _LAYERS * _HEADS * _CHANNELS * 2
"""Of attention of a model of 8 billion parameters, in bfloat16."""
_MEMORY_BYTES = 256 << 20


def load_rows(amounts: Amounts, say: Say) -> list[Row]:
    """A row for each `compression`: whole loads, stages not counted, beside a copy of the same bytes in one thread."""
    from benchmarks.gpu.kit import InlineStreams, Kit  # which need torch
    from benchmarks.gpu.service import Model

    class OnHost(Kit):
        def __init__(self) -> None:
            super().__init__("load")
            self.is_gpu, self.streams = False, InlineStreams()

        def tell(self, name: str, **values: Any) -> None:
            pass

    num_tokens = max(amounts.total_bytes // _TOKEN_BYTES // 256, 1) * 256
    model = Model("8B", num_tokens, _BLOCK_TOKENS, (_LAYERS, _HEADS, _CHANNELS))
    say(f"load: {model.num_bytes:,} bytes of {num_tokens:,} tokens")
    return [_load_row(OnHost(), model, compression, amounts) for compression in ("planes", "none")]


def _load_row(kit: Any, model: Any, compression: str, amounts: Amounts) -> Row:
    from benchmarks.gpu.service import rank_on

    source, target = bytearray(b"\1" * model.num_bytes), bytearray(b"\2" * model.num_bytes)
    with (
        temporary_folder() as folder,
        Node(folder, "service", memory_bytes=2 * model.num_bytes + _MEMORY_BYTES) as node,
        rank_on(kit, model, node.url, compression=compression) as rank,
    ):
        rank.fill()
        rank.save()
        row = asyncio.run(
            measure(
                "load" if compression == "planes" else "load, not compressed",
                _Load(rank, node),
                memcpy([source], [target]),
                size_bytes=model.num_bytes,
                num_bytes=model.num_bytes,
                in_flight=1,
                repetitions=amounts.repetitions,
            )
        )
        rank.check()
    return row


class _Load(Work):
    def __init__(self, rank: Any, node: Node) -> None:
        self._rank = rank
        self._node = node
        self._jobs: Any = None

    async def before(self) -> None:
        self._jobs = await asyncio.to_thread(self._rank.prepare, "request")

    def cpu_s(self) -> float:
        return super().cpu_s() + self._node.cpu_s()

    async def run(self) -> None:
        await asyncio.to_thread(self._rank.load_once, self._jobs)
