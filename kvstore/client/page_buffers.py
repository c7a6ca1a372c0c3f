"""A caller's buffers: pages are encoded from them and decoded to them on threads, and never after its call."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from kvstore.api import LoadedRecord
from kvstore.codec import RAW, decode_into, encode
from kvstore.errors import CorruptRecord, InvalidRequest
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.record import Record, RunningChecksum, copy_and_sum, seal, verify_payload
from kvstore.runtime.buffers import fresh_buffer

Pieces = Sequence[bytes | bytearray | memoryview]
"""A page in the caller's memory: contiguous buffers of any kind, one after the other. With several slices, each slice
is an equal number of them. Where a page is read into them they are writable, and none overlaps another one."""
Views = Sequence[memoryview]
"""The same, as views of bytes."""


class CallEnded(Exception):
    """The caller has left, and its buffers with it."""


class BufferGuard:
    """Ends all use of a caller's buffers before its call returns, also one that gave up waiting."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._users = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the caller has left."""
        return self._closed

    @contextmanager
    def using(self) -> Iterator[None]:
        """Wraps each use, on any thread.

        Raises:
            CallEnded: The call has returned.
        """
        with self._condition:
            if self._closed:
                raise CallEnded
            self._users += 1
        try:
            yield
        finally:
            with self._condition:
                self._users -= 1
                self._condition.notify_all()

    def close(self) -> None:
        """Return when no use is left; later ones are refused."""
        with self._condition:
            self._closed = True
            self._condition.wait_for(lambda: not self._users)


def release(pages: Sequence[Views]) -> None:
    """Free a caller's buffers, so that they can be closed or resized, also while an error of the call is handled."""
    for page in pages:
        for piece in page:
            with suppress(BufferError):  # a thread's array of it is not yet gone
                piece.release()


def encode_page(header: HeaderV1, source: Views, guard: BufferGuard, target: memoryview | None = None) -> Record:
    """A record of the page in a caller's buffers.

    Args:
        header: Of the record, with the codec to try and without the payload's length and checksum.
        source: The page.
        guard: Of the caller's buffers.
        target: Where the record is made: as long as header and page; `None`: in memory of its own.

    Raises:
        CallEnded: The caller has left.
    """
    if target is None:
        target = fresh_buffer(HEADER_BYTES + header.decoded_bytes)
    with guard.using():
        if header.codec_chain == RAW:
            checksum = RunningChecksum()
            for piece, part in zip(source, _parts(target[HEADER_BYTES:], source), strict=True):
                copy_and_sum(piece, part, checksum)
            return seal(header, target, checksum.digest())
        joined = source[0]
        if len(source) > 1:
            joined = fresh_buffer(header.decoded_bytes)
            for piece, part in zip(source, _parts(joined, source), strict=True):
                decode_into(RAW, piece, part)  # a copy that holds no Python lock
        encoded = encode(header.codec_chain, joined, target[HEADER_BYTES:])
    return seal(replace(header, codec_chain=encoded.chain), target[: HEADER_BYTES + encoded.payload_bytes])


def decode_page(loaded: LoadedRecord, target: Views, guard: BufferGuard, field: str) -> None:
    """Write a record's page to a caller's buffers.

    Args:
        loaded: The record.
        target: The buffers.
        guard: Of the caller's buffers.
        field: The caller's argument, for an error.

    Raises:
        CallEnded: The caller has left.
        CorruptRecord: The record is damaged.
        InvalidRequest: The page has another size than the buffers.
    """
    with guard.using(), loaded.reading() as record:
        expected = sum(piece.nbytes for piece in target)
        verify_payload(record)
        header = record.header
        if header.decoded_bytes != expected:  # the record is whole, so the caller's buffers are not what they should be
            raise InvalidRequest(
                "the page that is stored has another size",
                field=field,
                expected=f"buffers of {header.decoded_bytes} bytes",
                seen=f"{expected} bytes",
            )
        if len(target) == 1:
            decode_into(header.codec_chain, record.payload, target[0])
            return
        page = record.payload
        if header.codec_chain != RAW:
            page = fresh_buffer(expected)
            decode_into(header.codec_chain, record.payload, page)
        elif len(page) != expected:
            raise CorruptRecord("raw payload has the wrong size", expected=expected, seen=len(page))
        for piece, part in zip(target, _parts(page, target), strict=True):
            decode_into(RAW, part, piece)


def _parts(page: memoryview, pieces: Views) -> Iterator[memoryview]:
    """A page's bytes, divided as the pieces are."""
    at = 0
    for piece in pieces:
        yield page[at : at + piece.nbytes]
        at += piece.nbytes
