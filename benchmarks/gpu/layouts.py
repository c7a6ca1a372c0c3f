"""How vLLM 0.32 lays caches out, recorded: the kit runs where vLLM is not installed. A test compares with vLLM itself.

Every layout that one of its backends may ask for, for three layers of ten blocks: heads outside tokens and inside,
blocks outside layers, blocks of several kernel blocks, elements of one byte, latent vectors, and a hybrid whose
attention and states are two views of one int8 allocation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["HYBRID", "NUM_BLOCKS", "NUM_LAYERS", "RECORDED", "Recorded"]

NUM_LAYERS = 3
NUM_BLOCKS = 10
_DTYPES = {1: torch.uint8, 2: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Recorded:
    """The layers of one group in their common allocation.

    Attributes:
        name: What it is: kind, layout, tokens of a block.
        element_bytes: Bytes of an element.
        allocation_bytes: Of the allocation.
        starts: Byte of each layer's first element.
        shape: `[blocks, heads, tokens, channels]`, or with kernel blocks in dimension 1; a state is one token.
        stride: In elements.
    """

    name: str
    element_bytes: int
    allocation_bytes: int
    starts: tuple[int, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The layers over uint8 `[allocation_bytes]`."""
        typed = memory.view(_DTYPES[self.element_bytes])
        return [torch.as_strided(typed, self.shape, self.stride, start // self.element_bytes) for start in self.starts]


RECORDED = (
    Recorded("attention LBHNC 16", 2, 491520, (0, 163840, 327680), (10, 4, 16, 128), (8192, 2048, 128, 1)),
    Recorded("attention LBNHC 16", 2, 491520, (0, 163840, 327680), (10, 4, 16, 128), (8192, 128, 512, 1)),
    Recorded("attention LHBNC 16", 2, 491520, (0, 163840, 327680), (10, 4, 16, 128), (2048, 20480, 128, 1)),
    Recorded("attention BLHNC 16", 2, 491520, (0, 16384, 32768), (10, 4, 16, 128), (24576, 2048, 128, 1)),
    Recorded("attention BLNHC 16", 2, 491520, (0, 16384, 32768), (10, 4, 16, 128), (24576, 128, 512, 1)),
    Recorded("attention BHLNC 16", 2, 491520, (0, 4096, 8192), (10, 4, 16, 128), (24576, 6144, 128, 1)),
    Recorded("attention LBHNC 16 fp8", 1, 245760, (0, 81920, 163840), (10, 4, 16, 128), (8192, 2048, 128, 1)),
    Recorded("attention LBNHC 16 fp8", 1, 245760, (0, 81920, 163840), (10, 4, 16, 128), (8192, 128, 512, 1)),
    Recorded("attention LHBNC 16 fp8", 1, 245760, (0, 81920, 163840), (10, 4, 16, 128), (2048, 20480, 128, 1)),
    Recorded("attention BLHNC 16 fp8", 1, 245760, (0, 8192, 16384), (10, 4, 16, 128), (24576, 2048, 128, 1)),
    Recorded("attention BLNHC 16 fp8", 1, 245760, (0, 8192, 16384), (10, 4, 16, 128), (24576, 128, 512, 1)),
    Recorded("attention BHLNC 16 fp8", 1, 245760, (0, 2048, 4096), (10, 4, 16, 128), (24576, 6144, 128, 1)),
    Recorded("attention LBNHC 64", 2, 1966080, (0, 655360, 1310720), (10, 4, 64, 128), (32768, 128, 512, 1)),
    Recorded(
        "attention LBNHC 64 in kernel blocks of 16",
        2,
        1966080,
        (0, 655360, 1310720),
        (10, 4, 4, 16, 128),
        (32768, 8192, 128, 512, 1),
    ),
    Recorded(
        "attention LBHNC 64 in kernel blocks of 16",
        2,
        1966080,
        (0, 655360, 1310720),
        (10, 4, 4, 16, 128),
        (32768, 8192, 2048, 128, 1),
    ),
    Recorded("latent 576 LBNHC 64", 2, 2211840, (0, 737280, 1474560), (10, 1, 64, 576), (36864, 576, 576, 1)),
    Recorded("latent 576 BLNHC 64", 2, 2211840, (0, 73728, 147456), (10, 1, 64, 576), (110592, 576, 576, 1)),
    Recorded("latent 576 LBNHC 64 fp8", 1, 1105920, (0, 368640, 737280), (10, 1, 64, 576), (36864, 576, 576, 1)),
    Recorded("hybrid attention LBNHC 32", 2, 983040, (0, 327680, 655360), (10, 4, 32, 128), (16384, 128, 512, 1)),
    Recorded("hybrid state LBNHC 32", 1, 983040, (0, 327680, 655360), (10, 1, 1, 25152), (32768, 25152, 25152, 1)),
)
HYBRID = ("hybrid attention LBNHC 32", "hybrid state LBNHC 32")
"""Two of them that share an allocation, each with blocks of its own."""
