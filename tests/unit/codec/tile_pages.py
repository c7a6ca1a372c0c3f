"""Pages for the tests of tiles: what activations look like, and what they do not."""

from __future__ import annotations

import numpy as np

from kvstore.codec import RAW, TILES, decode_into, encode, max_payload_bytes
from kvstore.codec.tiles import TILE_BYTES, read_head
from kvstore.errors import CorruptRecord


def activations(num_elements: int, seed: int = 1, *, odd: float = 0.0, noise: float = 0.0) -> bytes:
    """bf16 from a normal distribution, some of which are any bits.

    Args:
        odd: Share of elements that have any bits.
        noise: Share of whole tiles of which all elements have any bits.
    """
    generator = np.random.default_rng(seed)
    values = (generator.standard_normal(num_elements).astype("<f4").view("<u4") >> 16).astype("<u2")
    chosen = generator.random(num_elements) < odd
    tiles = generator.random(-(-2 * num_elements // TILE_BYTES)) < noise
    chosen |= np.repeat(tiles, TILE_BYTES // 2)[:num_elements]
    values[chosen] = generator.integers(0, 1 << 16, int(chosen.sum()))
    return values.tobytes()


def page_of_all_kinds() -> bytes:
    """Tiles with patches, one that stores its exponents whole, and a short one at the end."""
    return activations(4096 * 4, odd=0.002) + np.random.default_rng(2).bytes(TILE_BYTES) + activations(4096 * 2 + 11)


def all_patterns() -> bytes:
    """All 65,536 values of 16 bits, NaNs, infinities and denormals among them, with as many tiles of few exponents."""
    every = np.arange(1 << 16, dtype="<u2")
    return np.concatenate([every, *[(every & 0x87FF) | 0x3000] * 9]).tobytes()


def special_pages() -> dict[str, bytes]:
    """Pages that a random one is unlikely to be like, by name."""
    generator = np.random.default_rng(5)
    plain = np.frombuffer(activations(40_000), "<u2")
    sixteen = (generator.integers(100, 116, 40_000) << 7).astype("<u2")
    seventeen = (generator.integers(100, 117, 40_000) << 7).astype("<u2")
    one_patch = np.full(40_000, 0x3F80, "<u2")
    one_patch[::5000] = (np.arange(8) * 31 + 1 << 7).astype("<u2")
    with_zeros = plain.copy()
    with_zeros[::3] = 0
    return {
        "every value": all_patterns(),
        "zeros": bytes(80_000),
        "one value": b"\x80\x3f" * 40_000,
        "negative zeros": b"\x00\x80" * 40_000,
        "NaNs": np.where(plain & 64, 0x7FC0, 0xFFFF).astype("<u2").tobytes(),
        "infinities": np.where(plain & 64, 0x7F80, 0xFF80).astype("<u2").tobytes(),
        "denormals": (plain & 0x807F).tobytes(),
        "zeros between": with_zeros.tobytes(),
        "sixteen exponents, equally many": sixteen.tobytes(),
        "seventeen exponents, equally many": seventeen.tobytes(),
        "a few patches in each tile": activations(80_000, odd=0.0015),
        "many patches in each tile": activations(80_000, odd=0.012),
        "some tiles of noise": activations(100_000, noise=0.1),
        "patches and noise": activations(100_000, odd=0.001, noise=0.1),
        "the last element is a patch": one_patch.tobytes()[: 4 * 8192 + 2],
        "the last tile is noise": activations(36_864) + generator.bytes(5001),
        **{f"{cut} bytes less": activations(40_000)[: 80_000 - cut] for cut in (1, 2, 3, 5, 6)},
        "a tile": activations(4096),
        "a tile and a byte": activations(20_480) + b"\x7f",
        "a tile and three bytes": activations(20_480) + b"\x7f\x3f\x12",
        "most of a tile": activations(3900),
        "too short": activations(3000),
        "empty": b"",
        "one byte": b"\x01",
        "noise": generator.bytes(80_000),
        "fp32": generator.standard_normal(20_000).astype("<f4").tobytes(),
    }


def hostile_payloads(payload: bytes, decoded_bytes: int) -> list[bytes]:
    """Payloads whose slots are none of the format: those of the first tile, of all tiles, and these with right sums."""
    head = read_head(payload, decoded_bytes)
    made = []
    for slot in (
        0x7FFFFFFF,
        0xFFFFFFFF,
        0x40000000 | head.num_whole,
        0x5FFFFFFF,
        0xC0000000,
        1,
        0x80F00000,
        0xA0000105,
    ):
        first = bytearray(payload)
        first[head.slots_start : head.slots_start + 4 * head.num_slots] = slot.to_bytes(4 * head.num_slots, "little")
        every = bytearray(payload)
        every[head.slots_start : head.whole_start] = slot.to_bytes(4, "little") * (head.num_tiles * head.num_slots)
        behind_a_gap = bytearray(first)
        behind_a_gap[head.slots_start : head.slots_start + 8] = bytes(4) + (0x80000105).to_bytes(4, "little")
        made += [
            bytes(each) for damaged in (first, every, behind_a_gap) for each in (damaged, _with_right_sums(damaged))
        ]
    return made


def _with_right_sums(payload: bytearray) -> bytearray:
    """Write the sums that a reader computes, as somebody would who wants it to take the payload."""
    right = bytearray(payload)
    decoded_bytes = int.from_bytes(payload[32:40], "little")
    head = read_head(right, decoded_bytes)
    for _ in range(head.num_tiles):
        try:
            decode_into(TILES, right, bytearray(decoded_bytes))
        except CorruptRecord as error:
            place = head.sums_start + 8 * int(str(error.details["tile"]))
            right[place : place + 8] = int(str(error.details["seen"])).to_bytes(8, "little")
    return right


def payload_of(source: bytes) -> bytes | None:
    """The payload that is stored as tiles; `None`: it is stored raw."""
    target = bytearray(max_payload_bytes(len(source)))
    encoded = encode(TILES, source, target)
    if encoded.chain == RAW:
        assert target == source
        return None
    return bytes(target[: encoded.payload_bytes])
