"""The checksum of payloads, XXH3-128, computed on a GPU: no processor reads the bytes.

Source: the specification of XXH3 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md), for inputs of more than 240 bytes
without a seed. Eight accumulators of 64 bits take up a stripe of 64 bytes at a time. What a stripe adds depends on no
accumulator, so the sums of all blocks of 16 stripes are computed in parallel. After each block the accumulators are
scrambled. Only that is one step after the other, for all payloads at the same time.

Triton is imported where a GPU is used, and by tests, which run the kernels in its interpreter.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from connector.device.streams import Streams

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""The specification's default secret."""
_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2, _PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME64_4, _PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_START = (_PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3, _PRIME64_4, _PRIME32_2, _PRIME64_5, _PRIME32_1)
_BLOCK_BYTES = 1024
_BLOCKS_AT_ONCE = 16
_SHORTEST_BYTES = 4096
"""Shorter payloads are left to the processor: there could be too many, and the shortest have another algorithm."""
_ROW_BYTES = 40
"""Of a payload: its first word, its size, its first sum, and the low and the high half of its digest."""
_SUM_BYTES = 64
"""Of a block, in the memory that sums are kept in."""


def _secret_words(offset: int, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}Q", _SECRET, offset)


def _constants() -> torch.Tensor:
    """What the kernels need of the specification, int64 `[63]`: eight starting values, and the secret's words for the
    stripes of a block (23), for scrambling (8), for the last stripe (8) and for the two halves of the digest (8 each).
    """
    words = [
        *_START,
        *_secret_words(0, 23),
        *_secret_words(128, 8),
        *_secret_words(121, 8),
        *_secret_words(11, 8),
        *_secret_words(117, 8),
    ]
    return torch.from_numpy(np.array(words, np.uint64).view(np.int64))


class DigestCheck:
    """Verifies payloads on one stream. A call's work is done before the next call.

    Args:
        streams: Of the device.
        num_bytes: Most bytes of the payloads of one call.

    Attributes:
        device_bytes: Memory of the device that it has taken.
    """

    def __init__(self, streams: Streams, num_bytes: int) -> None:
        most = max(1, num_bytes // _SHORTEST_BYTES)
        num_sums = num_bytes // _BLOCK_BYTES + most  # a block that is not whole has a sum too
        self._table = streams.host_memory(_ROW_BYTES * most)
        self._sums = streams.device_memory(_SUM_BYTES * num_sums).view(torch.int64)
        self._on_device = streams.device_memory(_ROW_BYTES * most)
        self._known = _constants().to(self._sums.device)
        self.device_bytes = _SUM_BYTES * num_sums + _ROW_BYTES * most

    @staticmethod
    def fits(num_bytes: int) -> bool:
        """Whether a payload of this size can be verified here."""
        return num_bytes >= _SHORTEST_BYTES and num_bytes % 8 == 0

    def order(self, memory: torch.Tensor, payloads: Sequence[tuple[int, int, bytes]], verdict: torch.Tensor) -> None:
        """Order the verification on the current stream.

        Args:
            memory: uint8, on the device, where the payloads are when it is executed.
            payloads: For each its first byte there, a multiple of eight, its size, which `fits`, and the digest that it
                should have, as records store it.
            verdict: int32 `[1]` on the device: the number of payloads with another digest is added.
        """
        num_bytes = _ROW_BYTES * len(payloads)
        rows: list[tuple[int, int, int, int, int]] = []
        first_sum = most_blocks = 0
        for start, size, digest in payloads:
            high, low = struct.unpack(">qq", digest)
            rows.append((start // 8, size, first_sum, low, high))
            num_blocks = -(-size // _BLOCK_BYTES)
            first_sum += num_blocks
            most_blocks = max(most_blocks, num_blocks)
        table: Any = self._table[:num_bytes].numpy()
        table.view(np.int64).reshape(-1, 5)[:] = rows
        self._on_device[:num_bytes].copy_(self._table[:num_bytes], non_blocking=True)
        on_device, words = self._on_device.view(torch.int64), memory.view(torch.int64)
        _sum_blocks[(len(payloads), -(-most_blocks // _BLOCKS_AT_ONCE))](
            words, on_device, self._sums, self._known, _BLOCKS_AT_ONCE
        )
        _digest[(len(payloads),)](words, on_device, self._sums, self._known, verdict, num_warps=1)


@triton.jit
def _sum_blocks(memory, table, sums, known, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """For each block what its whole stripes add to the accumulators, for `BLOCKS` blocks of a payload."""
    row = table + tl.program_id(0) * 5
    start, num_bytes, first_sum = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    # the last stripe of a payload is always taken up by itself, and with another part of the secret
    num_stripes = (num_bytes - 1) // 64
    num_blocks = (num_bytes + 1023) // 1024
    lanes = tl.arange(0, 8)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    total = tl.zeros((BLOCKS, 8), tl.int64)
    for stripe in range(16):
        within = ((blocks * 16 + stripe < num_stripes) & (blocks < num_blocks))[:, None]
        words = memory + start + blocks[:, None] * 128 + stripe * 8
        data = tl.load(words + lanes[None, :], mask=within, other=0)
        swapped = tl.load(words + (lanes ^ 1)[None, :], mask=within, other=0)
        key = data ^ tl.load(known + 8 + stripe + lanes)[None, :]
        product = (key & 0xFFFFFFFF) * ((key >> 32) & 0xFFFFFFFF)
        total += swapped + tl.where(within, product, 0)
    places = sums + (first_sum + blocks[:, None]) * 8 + lanes[None, :]
    tl.store(places, total, mask=(blocks < num_blocks)[:, None])


@triton.jit
def _digest(memory, table, sums, known, verdict, UNROLLED: tl.constexpr = 16):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    """The digest of one payload from its blocks' sums, compared with the expected one."""
    row = table + tl.program_id(0) * 5
    start, num_bytes, first_sum = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    lanes = tl.arange(0, 8)
    scramble = tl.load(known + 31 + lanes).to(tl.uint64)
    own = sums + first_sum * 8 + lanes
    acc = tl.load(known + lanes).to(tl.uint64)
    num_whole = (num_bytes - 1) // 1024
    for first in range(0, num_whole // UNROLLED * UNROLLED, UNROLLED):
        for step in tl.static_range(UNROLLED):  # unrolled, so that loads do not wait for each other
            acc += tl.load(own + (first + step) * 8).to(tl.uint64)
            acc = _scrambled(acc, scramble)
    for block in range(num_whole // UNROLLED * UNROLLED, num_whole):
        acc = _scrambled(acc + tl.load(own + block * 8).to(tl.uint64), scramble)
    acc += tl.load(own + num_whole * 8).to(tl.uint64)
    last = memory + start + num_bytes // 8 - 8
    data = tl.load(last + lanes)
    key = data ^ tl.load(known + 39 + lanes)
    product = (key & 0xFFFFFFFF) * ((key >> 32) & 0xFFFFFFFF)
    acc += (tl.load(last + (lanes ^ 1)) + product).to(tl.uint64)
    size = num_bytes.to(tl.uint64)
    low = _merged(acc, tl.load(known + 47 + lanes).to(tl.uint64), size * 0x9E3779B185EBCA87)
    high = _merged(acc, tl.load(known + 55 + lanes).to(tl.uint64), ~(size * 0xC2B2AE3D27D4EB4F))
    is_equal = (low == tl.load(row + 3).to(tl.uint64)) & (high == tl.load(row + 4).to(tl.uint64))
    tl.atomic_add(verdict, tl.where(is_equal, 0, 1).to(tl.int32))


@triton.jit
def _scrambled(acc, secret):  # type: ignore[no-untyped-def]
    return (acc ^ (acc >> 47) ^ secret) * 0x9E3779B1


@triton.jit
def _merged(acc, secret, start):  # type: ignore[no-untyped-def]
    """Half of the digest: pairs of accumulators are multiplied to 128 bits, whose halves are combined."""
    even, odd = tl.split(tl.reshape(acc ^ secret, (4, 2)))
    folded = (even * odd) ^ tl.umulhi(even, odd)
    merged = start + tl.sum(folded, 0)
    merged ^= merged >> 37
    merged *= 0x165667919E3779F9
    return merged ^ (merged >> 32)
