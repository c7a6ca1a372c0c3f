"""The prefix hash: frozen values, an independent oracle, and independence from how it is computed."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.prefix_hash import AdapterRequest, EmbeddedPrompt, MediaItem, PrefixChain, PromptContent
from kvstore.errors import InvalidRequest
from kvstore.model.keys import LINK_TOKENS

TOKENS = tuple((7919 * position) % 128_000 for position in range(50))

GOLDEN = {
    None: {
        16: "35386b009c26137c085ec3a9462b1a8696a284a7db8f81ba9db51c791d823136",
        32: "4268e802ed59ef736e5274415adda3e7fabc345abe82ac2bab94dabdd9bcfb2d",
        48: "6d362c4759c4eabb5dc3225a192e08f0f61daef9340c4c765892a1ebcffadaa6",
    },
    "": {16: "d81c0282f7dec632731b99bd157557c06d8522d0f9c6a5998b794395481cf9af"},
    "tenant-a": {48: "5f29891a0c0a0ff018eb892c25022932d5f01e656570ffefa1ff2d9d5c5e937e"},
}
"""Frozen: stored records are named by these, so a change of one of them loses every cache in the world."""

tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=200).map(tuple)


def oracle(tokens: tuple[int, ...], salt: str | None) -> dict[int, bytes]:
    """The chain once more, by its description: boundary -> hash."""
    salted = b"" if salt is None else b"\x01" + salt.encode("utf-8")
    link = hashlib.sha256(b"kvstore prefix v1\x00" + struct.pack("<I", len(salted)) + salted).digest()
    found = {}
    for stop in range(16, len(tokens) + 1, 16):
        link = hashlib.sha256(link + struct.pack("<16I", *tokens[stop - 16 : stop])).digest()
        found[stop] = link
    return found


def hashes(tokens: tuple[int, ...], salt: str | None = None, step_tokens: int = 16) -> dict[int, bytes]:
    chain = PrefixChain(step_tokens, salt)
    chain.extend(tokens)
    return {boundary.tokens: bytes(boundary.prefix) for boundary in chain.boundaries}


@pytest.mark.parametrize("salt", GOLDEN)
def test_golden_hashes(salt: str | None) -> None:
    """The hashes of fixed tokens are what they were when the first record was stored."""
    seen = hashes(TOKENS, salt)
    assert {tokens: seen[tokens].hex() for tokens in GOLDEN[salt]} == GOLDEN[salt]


@given(tokens_lists, st.none() | st.text(max_size=5))
def test_oracle(tokens: tuple[int, ...], salt: str | None) -> None:
    """For any tokens and salt the chain is the described one."""
    assert hashes(tokens, salt) == oracle(tokens, salt)


@given(tokens_lists, st.integers(1, 6))
def test_step_only_selects(tokens: tuple[int, ...], links: int) -> None:
    """Another step keeps the hashes and lists fewer of them, so that engines with other block sizes meet."""
    step = links * LINK_TOKENS
    every = hashes(tokens)
    assert hashes(tokens, step_tokens=step) == {at: every[at] for at in every if at % step == 0}


@given(tokens_lists, st.lists(st.integers(0, 200), max_size=6), st.sampled_from([16, 48]))
def test_any_splitting(tokens: tuple[int, ...], cuts: list[int], step: int) -> None:
    """Tokens that come bit by bit, or twice, give what they give at once."""
    chain, other = PrefixChain(step, "salt"), PrefixChain(step, "salt")
    for cut in [*sorted(cuts), 1000, 1000]:
        chain.extend(tokens[:cut])
        other.extend(tokens, cut)
        assert other.boundaries == chain.boundaries
    assert {boundary.tokens: boundary.prefix for boundary in chain.boundaries} == hashes(tokens, "salt", step)
    assert [boundary.tokens for boundary in chain.boundaries] == list(range(step, len(tokens) + 1, step))


@given(tokens_lists.filter(lambda tokens: len(tokens) >= 16), st.data())
def test_one_token_changes_all_that_follows(tokens: tuple[int, ...], data: st.DataObject) -> None:
    """A changed token changes every hash at and behind it, and none before it."""
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = (*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :])
    before, after = hashes(tokens), hashes(changed)
    assert {stop for stop in before if before[stop] != after[stop]} == {stop for stop in before if stop > at}


def test_salt_changes_everything() -> None:
    """Salts are isolated from each other and from none; an empty salt is a salt."""
    salts = [None, "", "a", "b", "\x01", "ab"]
    found = [value for salt in salts for value in hashes(TOKENS, salt).values()]
    assert len(found) == len(set(found)) == 3 * len(salts)


def test_token_order_matters() -> None:
    """The same tokens in another order are another prefix."""
    assert not set(hashes(TOKENS).values()) & set(hashes(TOKENS[::-1]).values())


@pytest.mark.parametrize("token", [2**32, -1])
def test_tokens_that_are_no_uint32_are_no_hash(token: int) -> None:
    """A token that does not fit is an error, never a hash of something else."""
    with pytest.raises(OverflowError):
        hashes((token, *range(31)))


@pytest.mark.parametrize("step", [0, -16, 8, 24])
def test_steps_that_cut_links(step: int) -> None:
    """Boundaries inside a link do not exist."""
    with pytest.raises(InvalidRequest, match="multiples of 16"):
        PrefixChain(step)


PROMPT = tuple((7919 * position) % 128_000 for position in range(96))
IMAGE = MediaItem("image", "a" * 64, 20, 30)
ADAPTER = hashlib.sha256(b"an adapter").digest()


def content_hashes(
    content: PromptContent, *, adapter: bytes | None = None, salt: str | None = None
) -> dict[int, bytes]:
    chain = PrefixChain(16, salt, content)
    if adapter is not None:
        chain.set_adapter(adapter)
    chain.extend(PROMPT[:40])
    chain.extend(PROMPT)
    return {boundary.tokens: bytes(boundary.prefix) for boundary in chain.boundaries}


PLAIN = content_hashes(PromptContent())


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
        link = hashlib.sha256(link + struct.pack("<16I", *PROMPT[start : start + 16]) + rest).digest()
        expected[start + 16] = link
    content = PromptContent(adapter=AdapterRequest(1, "/x"), media=(IMAGE,), embedded=rows)
    assert content_hashes(content, adapter=ADAPTER, salt="salt") == expected


def test_an_adapter_is_its_content() -> None:
    """Another digest changes everything; another number or path of the same content changes nothing."""
    one = content_hashes(with_adapter(), adapter=ADAPTER)
    assert changed(one) == set(PLAIN)
    assert changed(content_hashes(with_adapter(), adapter=hashlib.sha256(b"b").digest()), one) == set(PLAIN)
    assert content_hashes(with_adapter(7, "/elsewhere"), adapter=ADAPTER) == one


def test_an_adapter_is_no_salt() -> None:
    """A salt with an adapter's bytes is not that adapter."""
    salt = ADAPTER.decode("latin-1")
    found = {
        bytes(content_hashes(PromptContent(), salt=salt)[16]),
        bytes(content_hashes(with_adapter(), adapter=ADAPTER)[16]),
    }
    assert len(found | {PLAIN[16]}) == 3


def test_an_adapter_without_digest_is_not_hashed() -> None:
    """A chain whose adapter has no digest yet is not one without adapter."""
    with pytest.raises(AssertionError, match="without digest"):
        content_hashes(with_adapter())


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
    """An item changes every hash from its first link on, and so does any change of it; earlier hashes stay."""
    found = content_hashes(PromptContent(media=(IMAGE,)))
    assert changed(found) == {tokens for tokens in PLAIN if tokens > 20}
    assert changed(content_hashes(PromptContent(media=(other,))), found) == {tokens for tokens in PLAIN if tokens > 20}


def test_the_order_of_media_is_that_of_the_prompt() -> None:
    """Two items hash as they stand, however they are listed; exchanged they are another prompt."""
    first, second = replace(IMAGE, num_tokens=10), MediaItem("image", "b" * 64, 40, 10)
    found = content_hashes(PromptContent(media=(first, second)))
    assert content_hashes(PromptContent(media=(second, first))) == found
    swapped = (replace(first, identifier="b" * 64), replace(second, identifier="a" * 64))
    assert changed(content_hashes(PromptContent(media=swapped)), found) == {tokens for tokens in PLAIN if tokens > 20}


def test_names_of_media_have_ends() -> None:
    """What belongs to the modality and what to the identifier cannot be shifted."""
    one, other = MediaItem("image", "xa", 20, 4), MediaItem("imagex", "a", 20, 4)
    assert content_hashes(PromptContent(media=(one,)))[32] != content_hashes(PromptContent(media=(other,)))[32]


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
    found = content_hashes(PromptContent(embedded=embedded(40)))
    assert changed(found) == set(PLAIN)
    assert changed(content_hashes(PromptContent(embedded=other)), found)
    longer = content_hashes(PromptContent(embedded=embedded(64)))
    assert changed(longer, found) == {tokens for tokens in PLAIN if tokens > 32}


@given(st.integers(0, 95), st.binary(min_size=8, max_size=8))
def test_each_row_counts(at: int, row: bytes) -> None:
    """A changed row changes every hash behind it and none before."""
    rows = bytearray([7] * 8 * 96)
    rows[at * 8 : at * 8 + 8] = row
    before = content_hashes(PromptContent(embedded=embedded(96)))
    after = content_hashes(PromptContent(embedded=EmbeddedPrompt("float32", 8, memoryview(rows))))
    expected = set() if row == bytes([7] * 8) else {tokens for tokens in PLAIN if tokens > at}
    assert changed(after, before) == expected
