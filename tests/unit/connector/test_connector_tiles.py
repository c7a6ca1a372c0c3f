"""Triton's kernels for tiles equal numpy's codec: bytes, verdicts and bounds."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from kvstore.codec import TILES
from kvstore.codec.tiles import HEAD_BYTES, TilesHead, read_head
from kvstore.format.record import read_record
from tests.golden.make_golden import CASES, FOLDER
from tests.unit.codec.tile_pages import activations, hostile_payloads, page_of_all_kinds, payload_of, special_pages
from tests.unit.connector.interpreted_tiles import Kernels, interpreted_kernels

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    """Triton's interpreter, which is the same for all tests."""
    with interpreted_kernels() as kernels:
        yield kernels


def test_kernels_equal_numpy_on_special_pages(kernels: Kernels) -> None:
    """Every bit pattern, constant pages, all numbers of patches, odd ends, and pages that are stored raw."""
    pages = special_pages()
    payloads = {name: payload_of(page) for name, page in pages.items()}
    for name, seen in zip(pages, kernels.encode(list(pages.values())), strict=True):
        assert seen == (payloads[name] or b""), name
    stored = {name: payload for name, payload in payloads.items() if payload is not None}
    heads = [read_head(payload, len(pages[name])) for name, payload in stored.items()]
    decoded, num_wrong = kernels.decode(list(stored.values()), heads)
    assert num_wrong == 0
    for name, page in zip(stored, decoded, strict=True):
        assert page == pages[name], name


@pytest.mark.parametrize("tiles_of_page", [100, pytest.param(1024, marks=pytest.mark.full)])
def test_kernels_equal_numpy_on_random_tiles(kernels: Kernels, tiles_of_page: int) -> None:
    """Pages with all shares of patches and of whole tiles; ten thousand tiles in the full run."""
    num_tiles = 0
    for seed in range(10):
        page = activations(4096 * tiles_of_page - seed, seed, odd=(seed % 5) * 0.001, noise=(seed % 3) * 0.05)
        payload = payload_of(page)
        assert payload is not None
        head = read_head(payload, len(page))
        assert kernels.encode([page]) == [payload]
        assert kernels.decode([payload], [head]) == ([page], 0)
        num_tiles += head.num_tiles
    assert num_tiles == 10 * tiles_of_page


def test_a_page_of_more_tiles_than_are_looked_at_together(kernels: Kernels) -> None:
    """Whole tiles before and behind the bound of 1,024 are numbered through."""
    page = activations(4096 * 1030, 5, odd=0.001, noise=0.01)
    payload = payload_of(page)
    assert payload is not None
    assert read_head(payload, len(page)).num_whole > 1
    assert kernels.encode([page]) == [payload]


@pytest.mark.parametrize("num_elements", [8, 4096, 3 * 4096 + 1000])
def test_pages_of_one_size_are_encoded_together(kernels: Kernels, num_elements: int) -> None:
    """Each as by itself, between others of all kinds; one that gains too little is left as it is."""
    generator = np.random.default_rng(3)
    pages = [
        activations(num_elements, 1),
        generator.bytes(2 * num_elements),
        bytes(2 * num_elements),
        activations(num_elements, 2, odd=0.004),
        generator.bytes(2 * num_elements),
        activations(num_elements, 3, noise=0.3),
    ]
    for page, (seen, written) in zip(pages, kernels.encode_together(pages), strict=True):
        assert seen == (payload_of(page) or b"")
        assert seen or written == page


def test_kernels_read_golden_files(kernels: Kernels) -> None:
    """Tiles of a released writer decode to the known bytes, and are written as they were."""
    cases = [case for case in CASES if case.chain == TILES]
    payloads = [bytes(read_record((FOLDER / f"{case.name}.kvr").read_bytes()).payload) for case in cases]
    heads = [read_head(payload, case.decoded_bytes) for case, payload in zip(cases, payloads, strict=True)]
    assert kernels.decode(payloads, heads) == ([case.decoded for case in cases], 0)
    assert kernels.encode([case.decoded for case in cases]) == payloads


def test_a_kernel_finds_every_flipped_bit(kernels: Kernels) -> None:
    """A bit that is flipped behind the head, wherever it is, makes at least one tile wrong."""
    page = page_of_all_kinds()
    payload = payload_of(page)
    assert payload is not None
    head = read_head(payload, len(page))
    assert head.num_slots and head.num_whole
    generator = np.random.default_rng(3)
    ends = (HEAD_BYTES, head.codes_start, head.slots_start, head.whole_start, head.sums_start, head.payload_bytes)
    places = [place for start, stop in pairwise(ends) for place in generator.integers(start, stop, 8)]
    places += [place for stop in ends[1:] for place in (stop - 1, stop - 4)]
    for place in places:
        damaged = bytearray(payload)
        damaged[place] ^= 1 << int(generator.integers(8))
        _, num_wrong = kernels.decode([bytes(damaged)], [head])
        assert num_wrong > 0, place


def test_a_wrong_tile_counts_and_its_page_is_not_the_only_one(kernels: Kernels) -> None:
    """Of three pages of one launch the second has two wrong tiles, which are counted; the others are right."""
    pages = [activations(4096 * 5 - seed, seed, odd=0.001) for seed in range(3)]
    payloads = [payload_of(page) or b"" for page in pages]
    heads = [read_head(payload, len(page)) for payload, page in zip(payloads, pages, strict=True)]
    damaged = bytearray(payloads[1])
    for tile in (1, 3):
        damaged[heads[1].codes_start + 2048 * tile] ^= 1
    decoded, num_wrong = kernels.decode([payloads[0], bytes(damaged), payloads[2]], heads)
    assert (decoded[0], decoded[2], num_wrong) == (pages[0], pages[2], 2)


def test_a_hostile_payload_stays_within_bounds(kernels: Kernels) -> None:
    """Slots that name tiles and elements that there are not, under right sums: wrong, and nothing else is written."""
    page = page_of_all_kinds()
    payload = payload_of(page)
    assert payload is not None
    head = read_head(payload, len(page))
    for hostile in hostile_payloads(payload, len(page))[1::2]:  # with wrong sums they are not worse
        assert kernels.decode([hostile], [head])[1] > 0
    generator = np.random.default_rng(4)
    noise = payload[:HEAD_BYTES] + generator.bytes(len(payload) - HEAD_BYTES)
    assert kernels.decode([noise], [head])[1] == head.num_tiles


def test_the_other_pages_seed_is_wrong(kernels: Kernels) -> None:
    """Tiles of one page are wrong under the head of another one, even if its table is the same."""
    page = activations(4096 * 4)
    payload = payload_of(page)
    assert payload is not None
    head = read_head(payload, len(page))
    other = TilesHead(head.decoded_bytes, head.num_slots, head.num_whole, head.seed ^ 1, head.table)
    assert kernels.decode([payload], [other])[1] == head.num_tiles


def test_tensors_that_do_not_fit_are_refused(kernels: Kernels) -> None:
    """Other sizes, odd addresses, other types, gaps, another device: the caller is wrong, and nothing is ordered."""
    said = kernels.misuses()
    assert len(said) == 5
    assert all("expected contiguous bytes" in text or "expected aligned memory" in text for text in said)
