"""The contract of a codec chain: a lossless encoding of canonical bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import CorruptRecord, InvalidRequest

Buffer: TypeAlias = bytes | bytearray | memoryview
ByteArray: TypeAlias = NDArray[np.uint8]


class Chain(ABC):
    """One codec chain. Stateless, safe from any thread, deterministic, bit-exact.

    Attributes:
        id: Its id in record headers; an id never changes its meaning.
        name: For people.
    """

    id: ClassVar[int]
    name: ClassVar[str]

    @abstractmethod
    def encode(self, source: ByteArray, target: ByteArray) -> int | None:
        """Write the payload of `source` to the start of `target` and return its bytes.

        Args:
            source: Canonical bytes.
            target: As long as `source`. Bytes after the payload are undefined afterwards.

        Returns:
            Payload bytes, or `None`: this chain cannot encode `source`, or gains too little to be worth decoding.
        """

    @abstractmethod
    def decode_into(self, payload: ByteArray, target: ByteArray) -> None:
        """Decode `payload` into `target`, filling it.

        Allocates no more than the size of `target`, even if the payload claims more.

        Raises:
            CorruptRecord: The payload does not decode to exactly `len(target)` bytes. `target` is undefined then.
        """


def as_bytes(buffer: Buffer) -> ByteArray:
    """The buffer's bytes as an array over the same memory.

    Raises:
        InvalidRequest: The buffer is not contiguous.
    """
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise InvalidRequest("a codec needs contiguous bytes", strides=view.strides)
    return np.frombuffer(view.cast("B"), np.uint8) if view.nbytes else np.empty(0, np.uint8)


def as_writable_bytes(buffer: bytearray | memoryview) -> ByteArray:
    """Like `as_bytes`, for a writable buffer.

    Raises:
        InvalidRequest: The buffer is read-only or not contiguous.
    """
    if memoryview(buffer).readonly:
        raise InvalidRequest("a codec's target must be writable")
    return as_bytes(buffer)


def words(data: ByteArray, width: int) -> NDArray[Any]:
    """The bytes as little-endian unsigned words over the same memory, at any alignment."""
    return data.view(f"<u{width}")


class Raw(Chain):
    """Copies the bytes. numpy's copy releases the GIL; a slice assignment between memoryviews would hold it."""

    id: ClassVar[int] = 0
    name: ClassVar[str] = "raw"

    def encode(self, source: ByteArray, target: ByteArray) -> int | None:
        np.copyto(target[: source.size], source)
        return source.size

    def decode_into(self, payload: ByteArray, target: ByteArray) -> None:
        if payload.size != target.size:
            raise CorruptRecord("raw payload has the wrong size", expected=target.size, seen=payload.size)
        np.copyto(target, payload)
