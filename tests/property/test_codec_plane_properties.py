"""Pages that a device has split into byte planes: the same payloads, and every page comes back split."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codec import CHAINS, PLANES2, PLANES4, RAW, decode_into, encode, max_payload_bytes
from kvstore.errors import CorruptRecord, InvalidRequest

WIDTHS = st.sampled_from([2, 4])
CHAIN_IDS = st.sampled_from(sorted(CHAINS))
NOISE = st.binary(max_size=500).map(lambda seed: seed[: len(seed) // 4 * 4])
SMOOTH = st.builds(
    lambda seed, num: np.random.default_rng(seed).normal(size=num).astype(np.float32).tobytes(),
    st.integers(0, 50),
    st.integers(0, 900),
)
PAGES = st.one_of(NOISE, SMOOTH, st.integers(1, 300).map(lambda num: b"\1\2\3\4" * num))


def planes(page: bytes, width: int) -> bytes:
    """The byte planes of little-endian elements, highest first, by picking bytes."""
    return b"".join(page[plane::width] for plane in reversed(range(width)))


@settings(max_examples=200)
@given(CHAIN_IDS, WIDTHS, PAGES)
def test_split_pages_make_the_same_payload(chain: int, width: int, page: bytes) -> None:
    """Whether a device or the codec splits the elements, the stored bytes are equal."""
    usual, split = bytearray(max_payload_bytes(len(page))), bytearray(max_payload_bytes(len(page)))
    expected = encode(chain, page, usual)
    seen = encode(chain, planes(page, width), split, plane_width=width)
    assert seen == expected
    assert split[: seen.payload_bytes] == usual[: expected.payload_bytes]


@settings(max_examples=200)
@given(CHAIN_IDS, WIDTHS, PAGES)
def test_payloads_come_back_split(chain: int, width: int, page: bytes) -> None:
    """Every chain's payload decodes to planes of either width, raw ones too."""
    target = bytearray(max_payload_bytes(len(page)))
    encoded = encode(chain, page, target)
    split = bytearray(len(page))
    decode_into(encoded.chain, target[: encoded.payload_bytes], split, plane_width=width)
    assert bytes(split) == planes(page, width)


@pytest.mark.parametrize(("chain", "width"), [(PLANES2, 2), (PLANES4, 4)])
def test_damaged_payloads_are_refused(chain: int, width: int) -> None:
    """A payload that is cut, longer, or says other lengths is an error in the split form as well."""
    numbers = np.random.default_rng(1).normal(size=2000).astype("<f4").view("<u4")
    page = (numbers if width == 4 else (numbers >> 16).astype("<u2")).tobytes()
    target = bytearray(max_payload_bytes(len(page)))
    encoded = encode(chain, page, target)
    assert encoded.chain == chain
    payload = bytes(target[: encoded.payload_bytes])
    for damaged in (payload[:-1], payload + b"\0", b"\xff" * 4 + payload[4:], payload[: 4 * width - 1]):
        with pytest.raises(CorruptRecord):
            decode_into(chain, damaged, bytearray(len(page)), plane_width=width)
    with pytest.raises(CorruptRecord):
        decode_into(chain, payload, bytearray(len(page) + width), plane_width=width)


def test_bytes_that_are_no_elements() -> None:
    """A page that is no whole number of elements cannot have been split, and no width but a power of two exists."""
    for width in (2, 4, 3):
        with pytest.raises(InvalidRequest):
            encode(RAW, b"12345", bytearray(5), plane_width=width)
        with pytest.raises(InvalidRequest):
            decode_into(RAW, b"12345", bytearray(5), plane_width=width)
