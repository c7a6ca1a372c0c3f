"""The prefix hash: frozen values, an independent oracle, and independence from how it is computed."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.prefix_hash import LINK_TOKENS, PrefixChain
from kvstore.errors import InvalidRequest

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
    """Whatever the tokens and the salt, the chain is the described one."""
    assert hashes(tokens, salt) == oracle(tokens, salt)


@given(tokens_lists, st.integers(1, 6))
def test_step_only_selects(tokens: tuple[int, ...], links: int) -> None:
    """Another step keeps the hashes and tells of fewer of them, so that engines with other block sizes meet."""
    step = links * LINK_TOKENS
    every = hashes(tokens)
    assert hashes(tokens, step_tokens=step) == {at: every[at] for at in every if at % step == 0}


@given(tokens_lists, st.lists(st.integers(0, 200), max_size=6), st.sampled_from([16, 48]))
def test_any_splitting(tokens: tuple[int, ...], cuts: list[int], step: int) -> None:
    """Tokens that come bit by bit, or twice, give what they give at once."""
    chain = PrefixChain(step, "salt")
    for cut in [*sorted(min(cut, len(tokens)) for cut in cuts), len(tokens), len(tokens)]:
        chain.extend(tokens[:cut])
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
