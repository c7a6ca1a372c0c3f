"""Chain 4 of the codec, `kvstore.codec.tiles`, on the device: orders Triton kernels that decode and encode it.

Nothing here waits for the device. Everything is ordered on the current stream, and what it says is read back later: the
number of wrong tiles, the size of a payload. Without a GPU Triton's interpreter runs the same kernels
(`TRITON_INTERPRET=1` before Triton is first imported), as the tests do. Import this module only where tiles are used:
it imports Triton, which a processor's engine may lack.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from connector.device import tile_kernels
from connector.device.base import TILES_ALIGN_BYTES
from kvstore.codec import tiles
from kvstore.codec.tiles import TilesHead
from kvstore.errors import InternalError

_GROUP_ON_GPU = 1
"""Tiles of one program."""
_GROUP_INTERPRETED_MAX = 256
"""The interpreter takes a while for each program, even for a small one."""
_CHUNK = 1024
"""Tiles that the single program of a choice looks at together."""
_WARPS = 4


def decode(
    payloads: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    heads: Sequence[TilesHead],
    verdict: torch.Tensor,
) -> None:
    """Order the decoding of several payloads on the current stream, with one launch. It waits for nothing.

    Args:
        payloads: uint8 `[payload bytes]` each, on the device, at multiples of 16 bytes.
        targets: uint8 `[decoded bytes]` each, on the device, at multiples of 16 bytes. Wrong tiles are undefined.
        heads: Of these payloads, as `read_head` has read and checked them.
        verdict: int32 `[1]` on the device: the number of wrong tiles is added. Nothing may be used before it is read.

    Raises:
        InternalError: A tensor does not have the size that its head says, or stands elsewhere; nothing was ordered.
    """
    if not heads:
        return
    rows = []
    for payload, target, head in zip(payloads, targets, heads, strict=True):
        _check(payload, head.payload_bytes, verdict.device)
        _check(target, head.decoded_bytes, verdict.device)
        low, high = (int.from_bytes(half, "little") for half in (head.table[:8], head.table[8:]))
        row = (payload.data_ptr(), target.data_ptr(), head.decoded_bytes, head.num_slots, head.num_whole)
        rows.append([_signed(value) for value in (*row, head.seed, low, high)])
    table = _to_device(torch.tensor(rows, dtype=torch.int64), verdict.device)
    num_tiles = max(head.num_tiles for head in heads)
    group = _group(verdict.device, num_tiles)
    grid = (triton.cdiv(num_tiles, group), len(heads))
    is_gpu = verdict.device.type == "cuda"
    tile_kernels.decode_kernel[grid](table, verdict, GROUP=group, NATIVE=is_gpu, num_warps=_WARPS)


def encode(source: torch.Tensor, target: torch.Tensor, result: torch.Tensor) -> None:
    """Order the encoding of adjacent pages of one size on the current stream. It waits for nothing.

    Each payload is, byte for byte, that of `kvstore.codec.encode`.

    Args:
        source: uint8 `[pages x page bytes]` on the device, at a multiple of 16 bytes. Several pages are each a multiple
            of 16 bytes long.
        target: The same size there too, not overlapping: each payload begins where its page did. Bytes behind it are
            undefined afterwards.
        result: int32 `[pages]` on the device: bytes of the payload, or 0: the page gains too little, and the target has
            it as it is.

    Raises:
        InternalError: A tensor has another size, or stands elsewhere; nothing was ordered.
    """
    num_pages, device = result.numel(), result.device
    num_bytes, rest = divmod(source.numel(), num_pages)
    if rest or (num_pages > 1 and num_bytes % TILES_ALIGN_BYTES):
        raise InternalError("expected pages of one size", bytes=source.numel(), pages=num_pages)
    _check(source, num_pages * num_bytes, device)
    _check(target, num_pages * num_bytes, device)
    worthwhile = tiles.worthwhile_sizes(num_bytes)
    if not worthwhile:
        result.zero_()
        target.copy_(source)
        return
    num_tiles = -(-num_bytes // tiles.TILE_BYTES)
    counts = torch.zeros(num_pages, 256, dtype=torch.int32, device=device)
    codes = torch.empty(num_pages, 256, dtype=torch.int32, device=device)
    plan = torch.empty(num_pages, tile_kernels.PLAN_FIELDS, dtype=torch.int64, device=device)
    sums = torch.empty(num_pages, num_tiles, dtype=torch.int64, device=device)
    patches = torch.empty(num_pages, num_tiles, dtype=torch.int32, device=device)
    whole = torch.empty(num_pages, num_tiles, dtype=torch.int32, device=device)
    group = _group(device, num_tiles)
    grid = (triton.cdiv(num_tiles, group), num_pages)
    sizes = (num_bytes, num_tiles)
    tile_kernels.survey_kernel[grid](source, *sizes, sums, counts, GROUP=group, num_warps=_WARPS)
    tile_kernels.choose_table_kernel[(num_pages,)](
        counts, sums, num_tiles, codes, plan, CHUNK=_CHUNK, num_warps=2 * _WARPS
    )
    tile_kernels.count_kernel[grid](source, *sizes, codes, plan, patches, GROUP=group, num_warps=_WARPS)
    tile_kernels.choose_slots_kernel[(num_pages,)](
        patches, *sizes, worthwhile[-1], plan, whole, target, result, CHUNK=_CHUNK, num_warps=_WARPS
    )
    tile_kernels.write_kernel[grid](
        source, *sizes, codes, plan, sums, patches, whole, target, result, GROUP=group, num_warps=_WARPS
    )


def _check(tensor: torch.Tensor, num_bytes: int, device: torch.device) -> None:
    if tensor.dtype != torch.uint8 or tensor.numel() != num_bytes or not tensor.is_contiguous():
        raise InternalError("expected contiguous bytes", expected=num_bytes, seen=tuple(tensor.shape))
    if tensor.device != device or tensor.data_ptr() % TILES_ALIGN_BYTES:
        raise InternalError(
            "expected aligned memory of the device", align_bytes=TILES_ALIGN_BYTES, device=tensor.device
        )


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    # from pinned memory, since a copy from other memory may wait for the stream
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def _group(device: torch.device, num_tiles: int) -> int:
    if device.type == "cpu":
        return min(triton.next_power_of_2(num_tiles), _GROUP_INTERPRETED_MAX)
    return _GROUP_ON_GPU
