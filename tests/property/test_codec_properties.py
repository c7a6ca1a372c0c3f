"""Codecs: every byte string comes back, and no payload makes a reader crash, overrun or over-allocate."""

from __future__ import annotations

import tracemalloc

import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.codec import CHAINS, RAW, ZSTD, decode_into, encode, max_payload_bytes
from kvstore.errors import CorruptRecord

GUARD = b"\xa5" * 32
CHAIN_IDS = st.sampled_from(sorted(CHAINS))
PATTERNED = st.builds(
    lambda seed, times, tail: seed * times + tail,
    st.binary(min_size=1, max_size=24),
    st.integers(0, 400),
    st.binary(max_size=7),
)


def encoded(chain: int, source: bytes) -> tuple[int, bytes]:
    """The payload of `source`, after checking that nothing around its target was touched."""
    room = max_payload_bytes(len(source))
    buffer = bytearray(GUARD + bytes(room) + GUARD)
    result = encode(chain, source, memoryview(buffer)[len(GUARD) : len(GUARD) + room])
    assert buffer.startswith(GUARD) and buffer.endswith(GUARD)
    return result.chain, bytes(buffer[len(GUARD) : len(GUARD) + result.payload_bytes])


def decoded(chain: int, payload: bytes, decoded_bytes: int) -> bytes:
    """What `payload` decodes to, after checking that nothing around its target was touched, even if it is refused."""
    buffer = bytearray(GUARD + bytes(decoded_bytes) + GUARD)
    try:
        decode_into(chain, payload, memoryview(buffer)[len(GUARD) : len(GUARD) + decoded_bytes])
    finally:
        assert buffer.startswith(GUARD) and buffer.endswith(GUARD)
    return bytes(buffer[len(GUARD) : -len(GUARD)])


@settings(max_examples=300)
@given(CHAIN_IDS, st.one_of(st.binary(max_size=2000), PATTERNED))
@example(1, b"")
@example(2, b"\0" * 4_000_000)
def test_arbitrary_bytes_come_back(chain: int, source: bytes) -> None:
    """Bytes of any length and content decode to themselves, and their payload is never larger than they are."""
    used, payload = encoded(chain, source)
    assert used in (chain, RAW)
    assert len(payload) <= len(source)
    assert used == RAW or len(payload) <= 0.95 * len(source)
    assert decoded(used, payload, len(source)) == source


@given(CHAIN_IDS, PATTERNED)
def test_encoding_is_deterministic(chain: int, source: bytes) -> None:
    """The same bytes make the same payload, also after other bytes were encoded."""
    first = encoded(chain, source)
    encoded(chain, source[::-1] + b"something else" * 50)
    assert encoded(chain, source) == first


@settings(max_examples=300)
@given(CHAIN_IDS, st.binary(max_size=300), st.integers(0, 600))
def test_garbage_is_refused_or_decodes_within_bounds(chain: int, payload: bytes, decoded_bytes: int) -> None:
    """Bytes that no writer made are corrupt, or by chance a payload; nothing else happens."""
    try:
        assert len(decoded(chain, payload, decoded_bytes)) == decoded_bytes
    except CorruptRecord:
        assert chain != RAW or len(payload) != decoded_bytes


@settings(max_examples=300)
@given(CHAIN_IDS, PATTERNED, st.data())
def test_a_damaged_payload_is_refused_or_decodes_within_bounds(chain: int, source: bytes, data: st.DataObject) -> None:
    """A payload with changed, lost or added bytes never writes outside its target."""
    used, payload = encoded(chain, source)
    damaged = bytearray(payload)
    for at in data.draw(st.lists(st.integers(0, max(0, len(damaged) - 1)), max_size=4)):
        if damaged:
            damaged[at] ^= data.draw(st.integers(1, 255))
    damaged = damaged[: len(damaged) - data.draw(st.integers(0, 3))] + data.draw(st.binary(max_size=3))
    try:
        decoded(used, bytes(damaged), len(source))
    except CorruptRecord:
        return
    assert used != RAW or len(damaged) == len(source)


@given(CHAIN_IDS, PATTERNED, st.integers(-5, 5).filter(bool))
def test_a_payload_that_lies_about_its_size_is_refused(chain: int, source: bytes, more: int) -> None:
    """A target of any other size than the canonical bytes had is refused, not filled in part."""
    if len(source) + more < 0:
        return
    used, payload = encoded(chain, source)
    with pytest.raises(CorruptRecord):
        decoded(used, payload, len(source) + more)


@given(CHAIN_IDS, PATTERNED, st.integers(1, 1000))
def test_a_truncated_payload_is_refused(chain: int, source: bytes, lost: int) -> None:
    """A payload whose end is missing is refused, wherever it ends."""
    used, payload = encoded(chain, source)
    if not payload:
        return
    with pytest.raises(CorruptRecord):
        decoded(used, payload[: -min(lost, len(payload))], len(source))


def test_a_decompression_bomb_is_refused_before_it_is_decoded() -> None:
    """A small frame of 64 MiB of zeros, stored as a page of 4 KiB, is corrupt and costs next to no memory."""
    bomb = zstandard.ZstdCompressor(level=3).compress(bytes(64 << 20))
    assert len(bomb) < 64 << 10
    halves = (len(bomb).to_bytes(4, "little"), (0).to_bytes(4, "little"))
    tracemalloc.start()
    try:
        for chain, payload in ((ZSTD, bomb), (1, b"".join(halves) + bomb), (2, halves[0] + halves[1] * 3 + bomb)):
            with pytest.raises(CorruptRecord):
                decoded(chain, payload, 4096)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def frame(content: bytes, window_exponent: int) -> bytes:
    """A valid frame of one raw block, with a window of `2 ** (10 + window_exponent)` bytes (RFC 8878, 3.1.1)."""
    descriptor = bytes([0b10_0_00_0_00, window_exponent << 3])  # content size in 4 bytes, window given, no checksum
    block = (len(content) << 3 | 1).to_bytes(3, "little") + content
    return b"\x28\xb5\x2f\xfd" + descriptor + len(content).to_bytes(4, "little") + block


def test_a_frame_that_asks_for_a_large_window_is_refused() -> None:
    """The window a frame asks for is memory of the reader: 256 KiB is read, 512 KiB and 128 MiB are refused."""
    content = bytes(range(200))
    assert decoded(ZSTD, frame(content, 8), 200) == content
    for exponent in (9, 17):
        with pytest.raises(CorruptRecord):
            decoded(ZSTD, frame(content, exponent), 200)


def test_a_frame_without_content_size_is_refused() -> None:
    """A frame that does not say what it holds cannot be bounded beforehand, so it is not read."""
    stream = zstandard.ZstdCompressor(level=1).compressobj()
    unknown = stream.compress(b"abc" * 100) + stream.flush()
    with pytest.raises(CorruptRecord):
        decoded(ZSTD, unknown, 300)
