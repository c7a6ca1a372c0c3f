"""Chains 1 and 2: elements split into byte planes; the highest plane holds the exponents and is compressed.

Sign and exponent of real activations take few distinct values and compress well. Mantissas are noise: compressing them
costs time and gains nothing.

Payload: for each plane its stored size as a little-endian u32, then the planes, highest first. A plane with as many
stored bytes as there are elements is raw, one with fewer is one zstd frame. A reader accepts either for every plane.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvstore.codec.base import ByteArray, Chain, words
from kvstore.codec.zstd import TUNED, compress, decompress, worthwhile_bytes
from kvstore.errors import CorruptRecord

_KEPT_SCRATCH_BYTES = 16 << 20
_MAX_PLANE_BYTES = (1 << 32) - 1


class Planes(Chain):
    """Base of both widths; `width` is the size of one element in bytes.

    A device may split and join the elements itself, as `split_planes` does: `encode_planes` and `decode_planes_into`
    write and read the same payloads from and to split elements.
    """

    width: ClassVar[int]

    def encode(self, source: ByteArray, target: ByteArray) -> int | None:
        num_elements, rest = divmod(source.size, self.width)
        if rest:
            return None
        elements = words(source, self.width)
        highest = _scratch.take(num_elements)
        _split(elements, self.width - 1, highest)

        def write_plane(plane: int, place: ByteArray) -> None:
            _split(elements, plane, place)

        return self._write(highest, write_plane, target)

    def encode_planes(self, planes: ByteArray, target: ByteArray) -> int | None:
        """Like `encode`, for elements that are split already."""
        num_elements, rest = divmod(planes.size, self.width)
        if rest:
            return None
        rows = planes.reshape(self.width, num_elements)

        def write_plane(plane: int, place: ByteArray) -> None:
            np.copyto(place, rows[self.width - 1 - plane])

        return self._write(rows[0], write_plane, target)

    def _write(
        self, highest: ByteArray, write_plane: Callable[[int, ByteArray], None], target: ByteArray
    ) -> int | None:
        num_elements = highest.size
        if num_elements > _MAX_PLANE_BYTES:
            return None
        head_bytes = 4 * self.width
        raw_bytes = (self.width - 1) * num_elements
        room = worthwhile_bytes(self.width * num_elements) - head_bytes - raw_bytes
        if room <= 0:
            return None
        compressed = compress(highest, target[head_bytes : head_bytes + room], TUNED)
        if compressed is None:
            return None
        lengths = (compressed, *[num_elements] * (self.width - 1))
        struct.pack_into(f"<{self.width}I", target.data, 0, *lengths)
        start = head_bytes + compressed
        for plane in reversed(range(self.width - 1)):
            write_plane(plane, target[start : start + num_elements])
            start += num_elements
        return start

    def decode_into(self, payload: ByteArray, target: ByteArray) -> None:
        stored = self._stored_planes(payload, target.size)
        num_elements = target.size // self.width
        elements = words(target, self.width)
        for index, plane in enumerate(stored):
            if plane.size < num_elements:
                decoded = _scratch.take(num_elements)
                decompress(plane, decoded)
                plane = decoded  # noqa: PLW2901 - the same plane, decoded
            _join(elements, plane, is_highest=index == 0)

    def decode_planes_into(self, payload: ByteArray, planes: ByteArray) -> None:
        """Like `decode_into`, leaving the elements split."""
        stored = self._stored_planes(payload, planes.size)
        rows = planes.reshape(self.width, planes.size // self.width)
        for row, plane in zip(rows, stored, strict=True):
            if plane.size < row.size:
                decompress(plane, row)
            else:
                np.copyto(row, plane)

    def _stored_planes(self, payload: ByteArray, decoded_bytes: int) -> list[ByteArray]:
        """The planes as they are stored, highest first."""
        num_elements, rest = divmod(decoded_bytes, self.width)
        head_bytes = 4 * self.width
        if rest or payload.size < head_bytes:
            raise CorruptRecord("payload is too short for its planes", decoded_bytes=decoded_bytes, seen=payload.size)
        lengths = struct.unpack_from(f"<{self.width}I", payload.data)
        if head_bytes + sum(lengths) != payload.size or max(lengths) > num_elements:
            raise CorruptRecord("planes do not fill the payload", lengths=lengths, payload_bytes=payload.size)
        starts = accumulate(lengths, initial=head_bytes)
        return [payload[start : start + length] for start, length in zip(starts, lengths, strict=False)]


class Planes2(Planes):
    """bf16, fp16 and other elements of two bytes."""

    id: ClassVar[int] = 1
    name: ClassVar[str] = "planes2+zstd"
    width: ClassVar[int] = 2


class Planes4(Planes):
    """fp32 and other elements of four bytes."""

    id: ClassVar[int] = 2
    name: ClassVar[str] = "planes4+zstd"
    width: ClassVar[int] = 4


def split_planes(source: ByteArray, width: int, target: ByteArray) -> None:
    """Elements of `width` bytes to their byte planes, highest first."""
    elements = words(source, width)
    for plane, row in zip(reversed(range(width)), target.reshape(width, -1), strict=True):
        _split(elements, plane, row)


def join_planes(planes: ByteArray, width: int, target: ByteArray) -> None:
    """The inverse of `split_planes`."""
    elements = words(target, width)
    for index, row in enumerate(planes.reshape(width, -1)):
        _join(elements, row, is_highest=index == 0)


def _split(elements: NDArray[Any], plane: int, target: ByteArray) -> None:
    # One vectorised pass; the narrowing drops the higher bytes. A strided copy is slower.
    np.right_shift(elements, 8 * plane, out=target, casting="unsafe")


def _join(elements: NDArray[Any], plane: ByteArray, *, is_highest: bool) -> None:
    # Planes come highest first: each shifts the ones before it up by a byte.
    if is_highest:
        np.copyto(elements, plane)
    else:
        np.left_shift(elements, 8, out=elements)
        np.bitwise_or(elements, plane, out=elements)


class _Scratch(threading.local):
    """Memory for one plane per thread, kept between calls: fresh memory costs a page fault every 4 KiB."""

    def __init__(self) -> None:
        self._kept: ByteArray = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> ByteArray:
        """Memory that is valid until this thread's next `take`."""
        if num_bytes > _KEPT_SCRATCH_BYTES:
            return np.empty(num_bytes, np.uint8)
        if self._kept.size < num_bytes:
            self._kept = np.empty(num_bytes, np.uint8)
        return self._kept[:num_bytes]


_scratch = _Scratch()
