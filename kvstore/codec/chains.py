"""The codec chains by id, and the calls of the connector.

buffer = bytearray(HEADER_BYTES + max_payload_bytes(page_bytes))
encoded = encode(chain, page, memoryview(buffer)[HEADER_BYTES:])
record = seal(header_with(encoded.chain), memoryview(buffer)[: HEADER_BYTES + encoded.payload_bytes])
...
decode_into(record.header.codec_chain, record.payload, pinned_page)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.codec.base import Buffer, ByteArray, Chain, Raw, as_bytes, as_writable_bytes
from kvstore.codec.planes import Planes, Planes2, Planes4, join_planes, split_planes
from kvstore.codec.tiles import Tiles
from kvstore.codec.zstd import Zstd
from kvstore.errors import InvalidRequest, UnsupportedFormat

CHAINS: dict[int, Chain] = {chain.id: chain for chain in (Raw(), Planes2(), Planes4(), Zstd(), Tiles())}

RAW = Raw.id
PLANES2 = Planes2.id
PLANES4 = Planes4.id
ZSTD = Zstd.id
TILES = Tiles.id


@dataclass(frozen=True, slots=True)
class Encoded:
    """The result of an encoding.

    Attributes:
        chain: Id of the chain that was used: the requested one, or `RAW` where that cannot encode the bytes or gains
            less than 5%.
        payload_bytes: Bytes written to the target.
    """

    chain: int
    payload_bytes: int


def chain_for_element_bytes(element_bytes: int) -> int:
    """The best chain for elements of a size: planes for 2 and 4 bytes, zstd for 1 (fp8, int8), else raw."""
    return {1: ZSTD, 2: PLANES2, 4: PLANES4}.get(element_bytes, RAW)


def max_payload_bytes(decoded_bytes: int) -> int:
    """The size that `encode` needs for its target, for any chain: a payload is never larger than its content."""
    return decoded_bytes


def encode(chain: int, source: Buffer, target: bytearray | memoryview, *, plane_width: int = 1) -> Encoded:
    """Write the payload of `source` to the start of `target`, without an intermediate copy.

    The same source makes the same payload within one release; other releases may encode it differently, but all decode
    it to the same bytes.

    Args:
        chain: A known chain id, e.g. from `chain_for_element_bytes`.
        source: Canonical bytes, contiguous. Bytes that are already in the record's buffer need no `encode` for `RAW`:
            seal them there.
        target: Writable, contiguous, at least `max_payload_bytes(len(source))` long, not overlapping `source`.
            Bytes after the payload are undefined afterwards.
        plane_width: 1: `source` is the canonical bytes. 2, 4 or 8: a device has split them into the byte planes of
            elements of that many bytes, highest plane first. The payload is the same.

    Raises:
        InvalidRequest: Unknown chain, the target is too small or read-only, or `source` cannot be planes of that width.
    """
    if chain not in CHAINS:
        raise InvalidRequest(f"codec chain must be one of {sorted(CHAINS)}", chain=chain)
    source_bytes, target_bytes = as_bytes(source), as_writable_bytes(target)
    if target_bytes.size < max_payload_bytes(source_bytes.size):
        raise InvalidRequest(
            "target is too small for the payload",
            expected=max_payload_bytes(source_bytes.size),
            seen=target_bytes.size,
        )
    target_bytes = target_bytes[: source_bytes.size]
    if plane_width > 1:
        return _encode_planes(chain, _whole(source_bytes, plane_width), target_bytes, plane_width)
    for candidate in (chain, RAW):
        payload_bytes = CHAINS[candidate].encode(source_bytes, target_bytes)
        if payload_bytes is not None:
            return Encoded(candidate, payload_bytes)
    raise AssertionError("the raw chain takes everything")


def _encode_planes(chain: int, planes: ByteArray, target: ByteArray, width: int) -> Encoded:
    known = CHAINS[chain]
    if isinstance(known, Planes) and known.width == width:
        payload_bytes = known.encode_planes(planes, target)
        if payload_bytes is not None:
            return Encoded(chain, payload_bytes)
    elif chain != RAW:
        canonical = np.empty_like(planes)
        join_planes(planes, width, canonical)
        return encode(chain, canonical.data, target.data)
    join_planes(planes, width, target)
    return Encoded(RAW, planes.size)


def decode_into(chain: int, payload: Buffer, target: bytearray | memoryview, *, plane_width: int = 1) -> None:
    """Decode `payload` into `target`, filling it, without an intermediate copy.

    Allocates at most the size of `target` (a plane's scratch, kept per thread), even if the payload claims more.
    The caller sizes `target` by what it expects, never by an unchecked header.

    Args:
        chain: `codec_chain` of the record's header.
        payload: The stored payload, verified.
        target: Writable, contiguous, exactly the decoded size.
        plane_width: 1: write the canonical bytes. 2, 4 or 8: leave them as the byte planes of elements of that many
            bytes, highest plane first, for a device that joins them.

    Raises:
        CorruptRecord: The payload does not decode to exactly `len(target)` bytes. `target` is undefined then.
        UnsupportedFormat: A chain that this release does not know.
        InvalidRequest: `target` is read-only or not contiguous, or cannot be planes of that width.
    """
    known = CHAINS.get(chain)
    if known is None:
        raise UnsupportedFormat("payload has an unknown codec chain", expected=sorted(CHAINS), seen=chain)
    payload_bytes, target_bytes = as_bytes(payload), as_writable_bytes(target)
    if plane_width == 1:
        known.decode_into(payload_bytes, target_bytes)
    elif isinstance(known, Planes) and known.width == plane_width:
        known.decode_planes_into(payload_bytes, _whole(target_bytes, plane_width))
    else:
        canonical = np.empty_like(_whole(target_bytes, plane_width))
        known.decode_into(payload_bytes, canonical)
        split_planes(canonical, plane_width, target_bytes)


def _whole(data: ByteArray, width: int) -> ByteArray:
    if width not in (2, 4, 8) or data.size % width:
        raise InvalidRequest("these bytes are not elements of that width", num_bytes=data.size, width=width)
    return data
