"""Records with wrong bytes that still decode: what verification is there to find."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from kvstore.codec import PLANES2, PLANES4, RAW
from kvstore.format.header_v1 import HEADER_BYTES
from kvstore.format.names import parse_name
from kvstore.format.record import read_record

__all__ = ["damaged", "last_record_of_each_group"]

_LOWEST_EXPONENT_BIT = 0x80


def damaged(record: bytes) -> bytes:
    """Change the lowest bit of its numbers' exponents: bf16 and fp32 keep it in the second byte from above."""
    header = read_record(record).header
    if header.codec_chain == PLANES2:  # the planes behind the first are stored as they are
        start, stop, step = len(record) - header.decoded_bytes // 2, len(record), 1
    elif header.codec_chain == PLANES4:
        start, step = len(record) - header.decoded_bytes // 4 * 3, 1
        stop = start + header.decoded_bytes // 4
    elif header.codec_chain == RAW:
        start, stop, step = HEADER_BYTES + 2, len(record), 4
    else:
        raise AssertionError(f"no damage known for codec chain {header.codec_chain}")
    changed = bytearray(record)
    changed[start:stop:step] = bytes(byte ^ _LOWEST_EXPONENT_BIT for byte in changed[start:stop:step])
    return bytes(changed)


def last_record_of_each_group(files: Iterable[Path], name: Callable[[Path], str]) -> dict[int, Path]:
    """Of one prompt's records, by group, the first slice's that ends last: no hit of full length goes without it."""
    last: dict[int, tuple[int, Path]] = {}
    for file in files:
        key, stop = parse_name(name(file)), read_record(file.read_bytes()).header.span.stop
        if key.slice == 0 and stop > last.get(key.group, (0, file))[0]:
            last[key.group] = (stop, file)
    return {group: file for group, (_, file) in last.items()}
