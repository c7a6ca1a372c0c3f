"""Records that are copied and summed in one pass."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import xxhash

from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.record import RunningChecksum, copy_and_sum, open_record, seal
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.model.kinds import RecordKind
from kvstore.model.layout import Span

KIB = 1 << 10


@pytest.mark.parametrize("num_bytes", [0, 1, 256 * KIB - 1, 256 * KIB, 256 * KIB + 1, 1024 * KIB + 17])
def test_a_copy_and_its_checksum(num_bytes: int) -> None:
    """All bytes are copied, whatever their number, and the checksum is that of one pass. A record sealed with it is the
    one that is sealed without."""
    source = memoryview(np.random.default_rng(num_bytes).bytes(num_bytes))
    data, checksum = bytearray(HEADER_BYTES + num_bytes), RunningChecksum()
    copy_and_sum(source, memoryview(data)[HEADER_BYTES:], checksum)
    assert data[HEADER_BYTES:] == source and checksum.digest() == xxhash.xxh3_128_digest(source)
    header = HeaderV1.unsealed(
        RecordKey(NamespaceId(bytes(16)), PrefixHash(bytes(32)), 0, 0),
        RecordKind.PAGE,
        Span(0, 1),
        codec_chain=0,
        decoded_bytes=num_bytes,
        created_ms=1,
    )
    sealed = seal(header, data, checksum.digest())
    assert open_record(sealed.data) == sealed == seal(header, bytearray(data))


def test_the_checksum_is_that_of_the_copy() -> None:
    """Bytes that change right after they were copied reach neither the copy nor its checksum."""
    source, target = np.zeros(1024 * KIB, np.uint8), bytearray(1024 * KIB)

    class Checksum:
        inner = RunningChecksum()

        def update(self, piece: memoryview) -> None:
            source[:] += 1
            self.inner.update(piece)

    copy_and_sum(source.data, memoryview(target), cast(RunningChecksum, Checksum()))
    assert Checksum.inner.digest() == xxhash.xxh3_128_digest(target)
    assert len(set(target)) > 1  # it was copied in pieces
