"""Content beside tokens: when it changes, hashes change from there on; what is no content changes nothing."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.prefix_hash import AdapterRequest, EmbeddedPrompt, MediaItem, PrefixChain, PromptContent

TOKENS = tuple((7919 * position) % 128_000 for position in range(96))
IMAGE = MediaItem("image", "a" * 64, 20, 30)
ADAPTER = hashlib.sha256(b"an adapter").digest()


def hashes(content: PromptContent, *, adapter: bytes | None = None, salt: str | None = None) -> dict[int, bytes]:
    chain = PrefixChain(16, salt, content)
    if adapter is not None:
        chain.set_adapter(adapter)
    chain.extend(TOKENS[:40])
    chain.extend(TOKENS)
    return {boundary.tokens: bytes(boundary.prefix) for boundary in chain.boundaries}


PLAIN = hashes(PromptContent())


def changed(found: dict[int, bytes], other: dict[int, bytes] | None = None) -> set[int]:
    """Boundaries whose hash is another one."""
    other = PLAIN if other is None else other
    return {tokens for tokens in other if found[tokens] != other[tokens]}


def embedded(num_tokens: int, *, dtype: str = "float32", fill: int = 7, is_token: bytes = b"") -> EmbeddedPrompt:
    return EmbeddedPrompt(dtype, 8, memoryview(bytes([fill]) * (8 * num_tokens)), is_token)


def with_adapter(number: int = 1, path: str = "/adapters/one") -> PromptContent:
    return PromptContent(adapter=AdapterRequest(number, path))


def test_the_described_chain() -> None:
    """Root and links are the bytes that docs/formats/prefix-hash-v1.md tells, computed here a second time."""
    salted = b"\x01salt"
    link = hashlib.sha256(
        b"kvstore prefix v1\x00" + struct.pack("<I", len(salted)) + salted + b"\x01" + ADAPTER
    ).digest()
    rows = embedded(40, is_token=bytes(40))
    expected = {}
    for start in range(0, 96, 16):
        rest = b""
        if start in (16, 32, 48):
            rest += b"M" + struct.pack("<I", 5) + b"image" + struct.pack("<I", 64) + b"a" * 64
            rest += struct.pack("<qQ", start - 20, 30)
        if start < 40:
            count = min(16, 40 - start)
            inner = struct.pack("<I", 7) + b"float32" + struct.pack("<Q", 8) + struct.pack("<I", count) + bytes(count)
            rest += b"E" + hashlib.sha256(inner + bytes([7]) * 8 * count).digest()
        link = hashlib.sha256(link + struct.pack("<16I", *TOKENS[start : start + 16]) + rest).digest()
        expected[start + 16] = link
    content = PromptContent(adapter=AdapterRequest(1, "/x"), media=(IMAGE,), embedded=rows)
    assert hashes(content, adapter=ADAPTER, salt="salt") == expected


def test_an_adapter_is_its_content() -> None:
    """Another digest changes everything; another number or path of the same content changes nothing."""
    one = hashes(with_adapter(), adapter=ADAPTER)
    assert changed(one) == set(PLAIN)
    assert changed(hashes(with_adapter(), adapter=hashlib.sha256(b"b").digest()), one) == set(PLAIN)
    assert hashes(with_adapter(7, "/elsewhere"), adapter=ADAPTER) == one


def test_an_adapter_is_no_salt() -> None:
    """A salt with an adapter's bytes is not that adapter."""
    salt = ADAPTER.decode("latin-1")
    found = {bytes(hashes(PromptContent(), salt=salt)[16]), bytes(hashes(with_adapter(), adapter=ADAPTER)[16])}
    assert len(found | {PLAIN[16]}) == 3


def test_an_adapter_without_digest_is_not_hashed() -> None:
    """A chain whose adapter nobody has read cannot be taken for one without adapter."""
    with pytest.raises(AssertionError, match="without digest"):
        hashes(with_adapter())


@pytest.mark.parametrize(
    "other",
    [
        replace(IMAGE, identifier="b" * 64),
        replace(IMAGE, modality="video"),
        replace(IMAGE, start_tokens=21),
        replace(IMAGE, num_tokens=29),
    ],
)
def test_media_count_from_where_they_begin(other: MediaItem) -> None:
    """An item changes every hash from its first link on, and so does whatever of it changes; what is before stays."""
    found = hashes(PromptContent(media=(IMAGE,)))
    assert changed(found) == {tokens for tokens in PLAIN if tokens > 20}
    assert changed(hashes(PromptContent(media=(other,))), found) == {tokens for tokens in PLAIN if tokens > 20}


def test_the_order_of_media_is_that_of_the_prompt() -> None:
    """Two items hash as they stand, however they are listed; exchanged they are another prompt."""
    first, second = replace(IMAGE, num_tokens=10), MediaItem("image", "b" * 64, 40, 10)
    found = hashes(PromptContent(media=(first, second)))
    assert hashes(PromptContent(media=(second, first))) == found
    swapped = (replace(first, identifier="b" * 64), replace(second, identifier="a" * 64))
    assert changed(hashes(PromptContent(media=swapped)), found) == {tokens for tokens in PLAIN if tokens > 20}


def test_names_of_media_have_ends() -> None:
    """What belongs to the modality and what to the identifier cannot be shifted."""
    one, other = MediaItem("image", "xa", 20, 4), MediaItem("imagex", "a", 20, 4)
    assert hashes(PromptContent(media=(one,)))[32] != hashes(PromptContent(media=(other,)))[32]


@pytest.mark.parametrize(
    "other",
    [
        embedded(40, fill=8),
        embedded(40, dtype="bfloat16"),
        embedded(40, is_token=bytes(39) + b"\x01"),
        EmbeddedPrompt("float32", 4, memoryview(bytes([7]) * 320)),
    ],
)
def test_embeddings_count_as_far_as_they_go(other: EmbeddedPrompt) -> None:
    """Rows, type and width of embeddings change hashes; a longer prompt that begins with them keeps the common ones."""
    found = hashes(PromptContent(embedded=embedded(40)))
    assert changed(found) == set(PLAIN)
    assert changed(hashes(PromptContent(embedded=other)), found)
    longer = hashes(PromptContent(embedded=embedded(64)))
    assert changed(longer, found) == {tokens for tokens in PLAIN if tokens > 32}


@given(st.integers(0, 95), st.binary(min_size=8, max_size=8))
def test_each_row_counts(at: int, row: bytes) -> None:
    """A changed row changes every hash behind it and none before."""
    rows = bytearray([7] * 8 * 96)
    rows[at * 8 : at * 8 + 8] = row
    before = hashes(PromptContent(embedded=embedded(96)))
    after = hashes(PromptContent(embedded=EmbeddedPrompt("float32", 8, memoryview(rows))))
    expected = set() if row == bytes([7] * 8) else {tokens for tokens in PLAIN if tokens > at}
    assert changed(after, before) == expected
