"""Chain 0: the canonical bytes as they are."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvstore.codec.base import ByteArray, Chain
from kvstore.errors import CorruptRecord

__all__ = ["Raw"]


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
