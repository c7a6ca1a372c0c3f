"""What a round publishes of the blocks that came and left."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvstore.model.keys import Boundary, NamespaceId, PrefixHash
from kvstore.model.media import MEDIA
from kvstore.model.page_blocks import BlockGroup, PageBlocks
from kvstore.store.cache_events.changes import BlockCounts, Changes
from kvstore.store.cache_events.pages import Page
from kvstore.store.cache_events.placements import Topics

MEMORY, DIRECTORY = MEDIA["memory"], MEDIA["filesystem"]
pages = st.lists(st.integers(1, 6), min_size=1, max_size=5)


def blocks_of(numbers: list[int], parent: int = 0, width: int = 8) -> PageBlocks:
    return PageBlocks(
        namespace=NamespaceId(bytes(16)),
        boundary=Boundary(64, PrefixHash(bytes(32))),
        group=0,
        model="m",
        hash_bytes=width,
        hashes=b"".join(number.to_bytes(width, "big") for number in numbers),
        parent=parent.to_bytes(width, "big") if parent else b"",
        block_tokens=16,
        groups=(BlockGroup(0, "full_attention"),),
    )


@given(st.lists(st.tuples(pages, st.booleans()), max_size=30))
def test_a_block_comes_with_its_first_page_and_leaves_with_its_last(steps: list[tuple[list[int], bool]]) -> None:
    """Pages may have blocks in common, and a hostile one has a block twice: each is told once, at its first place."""
    counts, plain = BlockCounts(), Counter[int]()
    there: list[list[int]] = []
    for numbers, comes in steps:
        if comes:
            first = [number for number in dict.fromkeys(numbers) if not plain[number]]
            assert [numbers[index] for index in counts.add("m", numbers, MEMORY, 0)] == first
            there.append(numbers)
            plain.update(set(numbers))
        elif there:
            left = there.pop(len(there) // 2)
            plain.subtract(set(left))
            last = [number for number in dict.fromkeys(left) if not plain[number]]
            assert counts.remove("m", left, MEMORY, 0) == last
        assert all(counts.has("m", number) == (plain[number] > 0) for number in range(1, 7))
    for left in there:
        counts.remove("m", left, MEMORY, 0)
    assert not list(counts.removals())


def test_pages_are_published_in_the_order_in_which_they_came() -> None:
    """Also those of different media: a page in memory may follow one that is in a directory alone."""
    changes = Changes(Topics(("node:here",), "pool:kvstore").of, BlockCounts())
    for numbers, parent, medium in (([9], 0, MEMORY), ([1, 2], 0, DIRECTORY), ([3, 4], 2, MEMORY)):
        changes.there(Page(blocks_of(numbers, parent), "", 1), medium)
    ((topic, events),) = changes.batches()
    assert topic == "kv@node:here@m"
    assert [event["block_hashes"] for event in events] == [[9], [1, 2], [3, 4]]


def test_hashes_that_are_no_numbers() -> None:
    """Of 32 bytes: they are published, counted and taken back as bytes."""
    counts, page = BlockCounts(), Page(blocks_of([1, 2], 7, width=32), "", 1)
    hashes = [number.to_bytes(32, "big") for number in (1, 2)]
    for note, kind in ((Changes.there, "BlockStored"), (Changes.gone, "BlockRemoved")):
        changes = Changes(Topics(("node:here",), "pool:kvstore").of, counts)
        note(changes, page, MEMORY)
        ((_, (event,)),) = changes.batches()
        assert (event["type"], event["block_hashes"]) == (kind, hashes)
    assert not counts.has("m", hashes[0])
