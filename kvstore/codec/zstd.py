"""Zstandard frames, encoded and decoded in given memory, sizes checked before decoding; and chain 3, one such frame.

These release the GIL: zstandard's `readinto` in both directions, numpy's copies, shifts and ors, xxhash on large
buffers. These hold it: slice assignment between memoryviews or bytearrays, `bytes(view)`, allocating a large bytearray
(it is zeroed). Both were measured by a second thread that watches for gaps while one call runs.
"""

from __future__ import annotations

import threading
from typing import ClassVar

import zstandard

from kvstore.codec.base import ByteArray, Chain
from kvstore.errors import CorruptRecord

MAX_WINDOW_BYTES = 1 << 18
"""No frame of format v1 has a larger window: bounds the memory that a hostile frame can make a reader allocate."""


def _parameters(hash_log: int, chain_log: int) -> zstandard.ZstdCompressionParameters:
    return zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST,
        min_match=7,
        hash_log=hash_log,
        chain_log=chain_log,
        window_log=18,
        search_log=1,
        target_length=0,
        write_content_size=True,
        write_checksum=False,  # the record's checksum covers the payload
    )


TUNED = _parameters(hash_log=8, chain_log=6)
"""For exponent planes: they contain hardly any matches, so nearly all the time goes into entropy coding."""

LEVEL_1 = _parameters(hash_log=14, chain_log=13)
"""The parameters of level 1 for large inputs, except for the window."""


class Zstd(Chain):
    """One frame over all bytes: for elements of one byte (fp8, int8), whose exponents cannot be split off."""

    id: ClassVar[int] = 3
    name: ClassVar[str] = "zstd"

    def encode(self, source: ByteArray, target: ByteArray) -> int | None:
        return compress(source, target[: worthwhile_bytes(source.size)], LEVEL_1)

    def decode_into(self, payload: ByteArray, target: ByteArray) -> None:
        decompress(payload, target)


def worthwhile_bytes(decoded_bytes: int) -> int:
    """The largest payload that is stored encoded: a gain of less than 5% is not worth the time to decode."""
    return decoded_bytes * 95 // 100


def compress(source: ByteArray, target: ByteArray, parameters: zstandard.ZstdCompressionParameters) -> int | None:
    """Write `source` as one frame to the start of `target`; `None` when it does not fit with a byte to spare."""
    if not source.size or not target.size:
        return None
    # A stream writes into given memory; the one-shot call would allocate memory that must then be copied.
    with _local.compressor(parameters).stream_reader(source.data, size=source.size) as frame:
        written = frame.readinto(target.data)
    return written if written < target.size else None


def decompress(frame: ByteArray, target: ByteArray) -> None:
    """Fill `target` from one frame.

    Raises:
        CorruptRecord: Not a frame of exactly `len(target)` bytes, or its window is too large.
    """
    try:
        says = zstandard.get_frame_parameters(frame.data)
        if says.content_size != target.size or says.window_size > MAX_WINDOW_BYTES:
            raise CorruptRecord(
                "compressed frame has another size than expected",
                expected=target.size, seen=says.content_size, window_bytes=says.window_size,
            )  # fmt: skip
        with _local.decompressor().stream_reader(frame.data) as content:
            seen = content.readinto(target.data)
    except zstandard.ZstdError as error:
        raise CorruptRecord("compressed frame is damaged", error=error) from error
    if seen != target.size:
        raise CorruptRecord("compressed frame is truncated", expected=target.size, seen=seen)


class _Local(threading.local):
    """The compressors of one thread: zstandard's objects must not be used by two threads at once."""

    def __init__(self) -> None:
        self._compressors: dict[int, zstandard.ZstdCompressor] = {}
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)

    def compressor(self, parameters: zstandard.ZstdCompressionParameters) -> zstandard.ZstdCompressor:
        known = self._compressors.get(id(parameters))  # module constants, so their ids are never reused
        if known is None:
            known = self._compressors[id(parameters)] = zstandard.ZstdCompressor(compression_params=parameters)
        return known

    def decompressor(self) -> zstandard.ZstdDecompressor:
        return self._decompressor


_local = _Local()
