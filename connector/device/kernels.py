"""What a GPU does itself: digests, tiles, copies of rows. Imported where Triton works only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_128_digest

from connector.canonical.runs import BlockRun
from connector.device import row_kernels, tiles
from connector.device.checksums import DigestCheck
from connector.device.rows import CacheGeometry, pack_indexes, plan_rows, scatter_rows
from connector.device.streams import Streams
from connector.logs import LOG
from kvstore.codec import TILES, encode
from kvstore.codec.tiles import TILE_BYTES, TilesHead, read_head
from kvstore.errors import InvalidRequest

_DIGEST_SIZES = (4096, 4104, 5112, 5120, 6208, 40_960, 99_992)
_TILES_BYTES = 100_000
_ROW_PAGE_BYTES = 864


class DeviceKernels:
    """Verifies and decodes the records of one lane; a call's work is done before the next call. Encodes pages and
    copies rows, for any.

    Args:
        streams: Of the device.
        num_bytes: Most bytes of the records of one call.

    Attributes:
        device_bytes: Memory of the device that it has taken.
    """

    fits = DigestCheck.fits
    encode = staticmethod(tiles.encode)
    copies = staticmethod(row_kernels.copies)
    copy_rows = staticmethod(row_kernels.copy_rows)

    def __init__(self, streams: Streams, num_bytes: int) -> None:
        self._digests = DigestCheck(streams, num_bytes)
        self._verdict = streams.device_memory(4).view(torch.int32)
        self._read_back = streams.host_memory(4).view(torch.int32)
        self.device_bytes = self._digests.device_bytes + 4

    @torch.inference_mode()
    def order(
        self,
        memory: torch.Tensor,
        digests: Sequence[tuple[int, int, bytes]],
        encoded: Sequence[tuple[slice, slice, TilesHead]],
    ) -> None:
        """Order the work on the current stream.

        Args:
            memory: uint8, on the device, where the records' payloads are when it is executed.
            digests: Payloads to verify, as `DigestCheck.order` takes them.
            encoded: For each payload in tiles where it is, where its page is written, and its head.
        """
        self._verdict.zero_()
        if digests:
            self._digests.order(memory, digests, self._verdict)
        if encoded:
            sources, targets, heads = zip(*encoded, strict=True)
            tiles.decode(
                [memory[source] for source in sources], [memory[target] for target in targets], heads, self._verdict
            )
        self._read_back.copy_(self._verdict, non_blocking=True)

    @property
    def num_wrong(self) -> int:
        """Payloads and tiles of the last call that are damaged, once its work is done."""
        return int(self._read_back)


def check_kernels(streams: Streams) -> None:
    """Compile the kernels, and try them on this device.

    Raises:
        Exception: Of Triton, of the compiler that it calls, or of the device.
    """
    _check_digests(streams)
    _check_tiles(streams)
    _check_rows(streams)
    LOG.info("kvstore: the GPU verifies records in the service's memory, decodes tiles and copies rows by kernels")


def _check_digests(streams: Streams) -> None:
    generator = torch.Generator().manual_seed(1)
    content = torch.randint(0, 256, (sum(_DIGEST_SIZES),), dtype=torch.uint8, generator=generator)
    payloads, start = [], 0
    for size in _DIGEST_SIZES:
        digest = xxh3_128_digest(content[start : start + size].numpy())
        payloads += [(start, size, digest), (start, size, digest[:-1] + bytes([digest[-1] ^ 1]))]
        start += size
    for some, expected in ((payloads[::2], 0), (payloads, len(_DIGEST_SIZES))):
        _, seen = _run(streams, content, some, [])
        if seen != expected:
            raise InvalidRequest("the GPU computes other checksums", expected=expected, seen=seen)


def check_encoding(streams: Streams) -> None:
    """Compile the kernels that encode tiles, and try them on two pages, of which one gains nothing.

    Raises:
        Exception: As `check_kernels`.
    """
    page, payload = _page_in_tiles()
    noise = torch.randint(0, 256, (page.numel(),), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    pages, encoded = streams.device_memory(2 * page.numel()), streams.device_memory(2 * page.numel())
    sizes, stream = streams.device_memory(8).view(torch.int32), streams.side()

    @torch.inference_mode()
    def work() -> None:
        pages.copy_(torch.cat([page, noise]))
        tiles.encode(pages, encoded, sizes)

    stream.run(work)
    stream.settle()
    seen = encoded.cpu()
    if sizes.tolist() != [payload.size, 0] or not torch.equal(seen[page.numel() :], noise):
        raise InvalidRequest("the GPU encodes to other sizes", expected=payload.size, seen=sizes.tolist())
    if not torch.equal(seen[: payload.size], torch.from_numpy(payload)):
        raise InvalidRequest("the GPU encodes other tiles", bytes=payload.size)


def _page_in_tiles() -> tuple[torch.Tensor, Any]:
    """A page of which one tile's exponents are stored whole, and what a processor encodes it to; both uint8."""
    generator = torch.Generator().manual_seed(1)
    page = torch.randn(_TILES_BYTES // 2, generator=generator).to(torch.bfloat16).view(torch.uint8)
    torch.randint(0, 256, (TILE_BYTES,), dtype=torch.uint8, generator=generator, out=page[TILE_BYTES : 2 * TILE_BYTES])
    payload: Any = np.empty(_TILES_BYTES, np.uint8)
    encoded = encode(TILES, memoryview(page.numpy()), memoryview(payload))
    return page, payload[: encoded.payload_bytes]


def _check_tiles(streams: Streams) -> None:
    page, payload = _page_in_tiles()
    source = slice(0, payload.size)
    target = slice(1 << 17, (1 << 17) + _TILES_BYTES)
    head = read_head(memoryview(payload), _TILES_BYTES)
    content = torch.zeros(target.stop, dtype=torch.uint8)
    content[source] = torch.from_numpy(payload)
    memory, seen = _run(streams, content, [], [(source, target, head)])
    if seen or not torch.equal(memory[target].cpu(), page):
        raise InvalidRequest("the GPU decodes other pages", wrong_tiles=seen)
    content[payload.size // 2] ^= 1
    _, seen = _run(streams, content, [], [(source, target, head)])
    if seen != 1:
        raise InvalidRequest("the GPU finds no damage", expected=1, seen=seen)


def _check_rows(streams: Streams) -> None:
    """Two pages of two runs in three blocks, whose pieces lie apart, to the cache and back."""
    geometry = CacheGeometry((0, 4096), (1024, 1024), (0, 1))
    runs = [BlockRun(0, 64, 72, 0, 144, 2, 200, 72), BlockRun(1, 8, 144, 432, 144)]
    plans = plan_rows(geometry, runs, _ROW_PAGE_BYTES)
    generator = torch.Generator().manual_seed(1)
    pages = torch.randint(0, 256, (2 * _ROW_PAGE_BYTES,), dtype=torch.uint8, generator=generator)
    ids = [[[2, 0, 3], [1, 3, 0]], [[1, 4, 5], [5, 2, 4]]]
    indexes = [pack_indexes([plan] * 2, ids, is_alone=len(plans) == 1, allocate=streams.host_memory) for plan in plans]
    caches = [streams.device_memory(1 << 14) for _ in range(2)]
    placed, read = streams.device_memory(pages.numel()), streams.device_memory(pages.numel())
    stream = streams.side()

    @torch.inference_mode()
    def work() -> None:
        placed.copy_(pages)
        for cache in caches:
            cache.zero_()
        for index in indexes:
            scatter_rows(caches[0], index, placed)
            row_kernels.copy_rows(caches[1], index, placed, to_cache=True)
            row_kernels.copy_rows(caches[1], index, read, to_cache=False)

    stream.run(work)
    stream.settle()
    if not torch.equal(*caches) or not torch.equal(read, placed):
        raise InvalidRequest("the GPU copies other rows", row_bytes=plans[0].unit_bytes)


def _run(
    streams: Streams,
    content: torch.Tensor,
    digests: Sequence[tuple[int, int, bytes]],
    encoded: Sequence[tuple[slice, slice, TilesHead]],
) -> tuple[torch.Tensor, int]:
    """The device's memory afterwards, and how much was wrong."""
    kernels, stream = DeviceKernels(streams, 2 * content.numel()), streams.side()
    memory = streams.device_memory(-(-content.numel() // 512) * 512)

    def work() -> None:
        memory[: content.numel()].copy_(content)
        kernels.order(memory, digests, encoded)

    stream.run(work)
    stream.settle()
    return memory, kernels.num_wrong
