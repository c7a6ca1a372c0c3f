"""The codec's border: chains by id, gains, targets, and the layouts that docs/formats/record-v1.md promises."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import zstandard

from kvstore.codec import (
    CHAINS,
    PLANES2,
    PLANES4,
    RAW,
    ZSTD,
    Encoded,
    chain_for_element_bytes,
    decode_into,
    encode,
    max_payload_bytes,
)
from kvstore.errors import CorruptRecord, InvalidRequest, UnsupportedFormat
from kvstore.format.header_v1 import HEADER_BYTES

GAUSSIAN = np.random.default_rng(7).standard_normal(1 << 18).astype(np.float32)
BF16 = (GAUSSIAN.view(np.uint32) >> 16).astype("<u2").tobytes()
FP16 = GAUSSIAN.astype("<f2").tobytes()
FP32 = GAUSSIAN.astype("<f4").tobytes()
NOISE = np.random.default_rng(8).bytes(1 << 18)


def payload_of(chain: int, source: bytes) -> tuple[Encoded, bytes]:
    target = bytearray(max_payload_bytes(len(source)))
    encoded = encode(chain, source, target)
    return encoded, bytes(target[: encoded.payload_bytes])


def test_chain_ids_are_frozen() -> None:
    """An id in a stored header keeps its meaning for ever."""
    assert {id_: chain.name for id_, chain in CHAINS.items()} == {
        0: "raw",
        1: "planes2+zstd",
        2: "planes4+zstd",
        3: "zstd",
        4: "tiles2",
    }


@pytest.mark.parametrize(("element_bytes", "chain"), [(1, ZSTD), (2, PLANES2), (4, PLANES4), (8, RAW), (3, RAW)])
def test_chain_follows_from_the_element_size(element_bytes: int, chain: int) -> None:
    """Each element size has its chain, and an unknown one is stored raw."""
    assert chain_for_element_bytes(element_bytes) == chain


@pytest.mark.parametrize(
    ("chain", "source", "ratio"),
    [(PLANES2, BF16, 1.44), (PLANES2, FP16, 1.16), (PLANES4, FP32, 1.16)],
    ids=["bf16", "fp16", "fp32"],
)
def test_gaussian_activations_shrink_by_what_was_measured(chain: int, source: bytes, ratio: float) -> None:
    """Activation-like values of each dtype gain what the parameters were tuned for."""
    encoded, payload = payload_of(chain, source)
    assert encoded.chain == chain
    assert len(source) / len(payload) >= ratio
    target = bytearray(len(source))
    decode_into(chain, payload, target)
    assert target == source


@pytest.mark.parametrize("chain", sorted(CHAINS))
def test_noise_is_stored_raw(chain: int) -> None:
    """Bytes that gain less than 5% are stored as they are, and the answer says so."""
    encoded, payload = payload_of(chain, NOISE)
    assert encoded == Encoded(RAW, len(NOISE))
    assert payload == NOISE


@pytest.mark.parametrize(("chain", "width"), [(PLANES2, 2), (PLANES4, 4)])
def test_planes_stand_where_the_specification_says(chain: int, width: int) -> None:
    """Lengths first, then the highest plane as one frame, then the others raw, highest first."""
    source = BF16 if width == 2 else FP32
    num_elements = len(source) // width
    _, payload = payload_of(chain, source)
    lengths = [int.from_bytes(payload[4 * i : 4 * i + 4], "little") for i in range(width)]
    assert lengths[1:] == [num_elements] * (width - 1)
    start = 4 * width
    frame = payload[start : start + lengths[0]]
    parameters = zstandard.get_frame_parameters(frame)
    assert (parameters.content_size, parameters.dict_id, parameters.has_checksum) == (num_elements, 0, False)
    assert parameters.window_size <= 256 << 10
    assert zstandard.ZstdDecompressor().decompress(frame) == source[width - 1 :: width]
    start += lengths[0]
    for plane in reversed(range(width - 1)):
        assert payload[start : start + num_elements] == source[plane::width]
        start += num_elements
    assert start == len(payload)


def test_a_reader_takes_raw_and_compressed_planes_alike() -> None:
    """A payload whose low plane is compressed and whose high plane is raw is as good as what we write."""
    low = zstandard.ZstdCompressor(level=1).compress(bytes(1000))
    high = NOISE[:1000]
    payload = (1000).to_bytes(4, "little") + len(low).to_bytes(4, "little") + high + low
    target = bytearray(2000)
    decode_into(PLANES2, payload, target)
    assert target[1::2] == high
    assert target[::2] == bytes(1000)


def test_encoding_goes_straight_behind_a_headers_space_at_any_alignment() -> None:
    """Targets and sources that start at odd addresses are read and written in place, nothing beside them is touched."""
    for offset in (HEADER_BYTES, 1, 3):
        buffer = bytearray(b"\xee" * (offset + len(BF16) + 5))
        source = memoryview(b"x" * offset + BF16)[offset:]
        encoded = encode(PLANES2, source, memoryview(buffer)[offset:])
        assert buffer[:offset] == b"\xee" * offset
        target = bytearray(b"\xdd" * (offset + len(BF16)))
        stored = memoryview(buffer)[offset : offset + encoded.payload_bytes].toreadonly()
        decode_into(PLANES2, stored, memoryview(target)[offset:])
        assert target == b"\xdd" * offset + BF16


@pytest.mark.parametrize("shape", [(256, 512), (131072,)])
def test_buffers_of_other_shapes_and_formats_are_bytes_to_the_codec(shape: tuple[int, ...]) -> None:
    """A contiguous array of another format is read and written as its bytes."""
    source = np.frombuffer(BF16, "<u2")[:131072].reshape(shape)
    target = bytearray(source.nbytes)
    encoded = encode(PLANES2, memoryview(source), target)
    back = np.empty_like(source)
    decode_into(encoded.chain, memoryview(target)[: encoded.payload_bytes], memoryview(back))
    assert np.array_equal(back, source)


def test_wrong_arguments_are_refused() -> None:
    """Unknown chains, read-only, short and scattered targets are the caller's mistake and are named."""
    with pytest.raises(InvalidRequest, match="codec chain"):
        encode(99, b"abcd", bytearray(4))
    with pytest.raises(InvalidRequest, match="too small"):
        encode(RAW, b"abcd", bytearray(3))
    with pytest.raises(InvalidRequest, match="writable"):
        encode(RAW, b"abcd", memoryview(b"abcd"))
    with pytest.raises(InvalidRequest, match="writable"):
        decode_into(RAW, b"abcd", memoryview(b"abcd"))
    with pytest.raises(InvalidRequest, match="contiguous"):
        decode_into(RAW, b"abcd", memoryview(bytearray(8))[::2])


def test_an_unknown_chain_of_a_record_asks_for_an_upgrade() -> None:
    """A chain that a newer release wrote is no damage: it must not be quarantined as corrupt."""
    with pytest.raises(UnsupportedFormat):
        decode_into(5, b"abcd", bytearray(4))


@pytest.mark.parametrize("chain", [PLANES2, PLANES4])
@pytest.mark.parametrize("lengths", [(0, 0, 0, 0), (8, 9, 8, 8), (0xFFFFFFFF, 8, 8, 8), (8, 8, 8, 7)])
def test_plane_lengths_that_lie_are_corrupt(chain: int, lengths: tuple[int, ...]) -> None:
    """Lengths that do not add up, are too long or name an empty frame are refused."""
    width = 2 if chain == PLANES2 else 4
    head = b"".join(length.to_bytes(4, "little") for length in lengths[:width])
    with pytest.raises(CorruptRecord):
        decode_into(chain, head + bytes(8 * width + 1), bytearray(8 * width))


def test_threads_do_not_disturb_each_other() -> None:
    """Eight threads encode and decode different pages at once; each gets its own page back."""
    failures: list[int] = []

    def work(seed: int) -> None:
        source = np.roll(np.frombuffer(BF16, "<u2"), seed * 1000).tobytes()[: 200_000 + 2 * seed]
        target, back = bytearray(len(source)), bytearray(len(source))
        for _ in range(5):
            encoded = encode(PLANES2, source, target)
            decode_into(encoded.chain, memoryview(target)[: encoded.payload_bytes], back)
            if back != source:
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
