"""The search for an order of documents: what it promises is there, it is bounded, and it never makes a prompt worse."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from itertools import pairwise

import pytest

from kvstore.model.coverage import longest_resumable
from kvstore.model.keys import Boundary, NamespaceId, PlainChain, PrefixHash
from kvstore.model.kinds import FullAttention, Recurrent, SlidingWindow
from kvstore.model.layout import GroupLayout, Layout
from kvstore.service.admin import documents
from kvstore.service.admin.documents import DocumentUses, OrderSearch, expected_uses
from tests.virtual_time import ManualClock

ATTENTION = (GroupLayout(FullAttention(), 1),)
LAYOUTS = {
    "attention": ATTENTION,
    "window": (GroupLayout(FullAttention(), 1), GroupLayout(SlidingWindow(100), 1)),
    "hybrid": (GroupLayout(FullAttention(), 1), GroupLayout(Recurrent(), 1)),
    "states": (GroupLayout(Recurrent(), 1),),
}


class Stored:
    """What a store has: by hash of a boundary a bit for each group."""

    def __init__(self, layout: Layout, salt: str | None = None) -> None:
        self.layout = layout
        self.bits: dict[PrefixHash, int] = {}
        self.asked: list[int] = []
        self._salt = salt

    def ends(self, token_ids: array[int]) -> list[Boundary]:
        return PlainChain(self._salt, self.layout.page_tokens).extend(token_ids)

    def save(self, token_ids: array[int]) -> None:
        for boundary in self.ends(token_ids):
            self.bits[boundary.prefix] = (1 << len(self.layout.groups)) - 1

    def resume(self, token_ids: array[int]) -> int:
        ends = self.ends(token_ids)
        bits = [self.bits.get(boundary.prefix, 0) for boundary in ends]
        step, tokens = self.layout.page_tokens, [boundary.tokens for boundary in ends]
        return longest_resumable(self.layout, tokens, bits, local_tokens=0, cap_tokens=len(token_ids), step_tokens=step)

    async def ask(self, boundaries: Sequence[Boundary]) -> Sequence[int]:
        self.asked.append(len(boundaries))
        return [self.bits.get(boundary.prefix, 0) for boundary in boundaries]


def joined(head: array[int], pieces: Sequence[array[int]], order: Sequence[int]) -> array[int]:
    made = head[:]
    for index in order:
        made += pieces[index]
    return made


@pytest.mark.parametrize("kinds", LAYOUTS)
@pytest.mark.parametrize("seed", range(40))
async def test_what_is_promised_is_there(kinds: str, seed: int) -> None:
    """Of random documents that end anywhere, some shorter than a page, after random saves of which some lost pages: the
    order found has every document once, restores exactly what is promised, and no less than the usual and the given
    order. The work is bounded.
    """
    numbers = random.Random(seed)
    layout = Layout(numbers.choice([16, 32, 64]), LAYOUTS[kinds])
    stored = Stored(layout, "salt" if seed % 2 else None)
    head = array("I", numbers.choices(range(9), k=numbers.randrange(90)))
    pieces = [array("I", numbers.choices(range(999), k=numbers.randrange(1, 150))) for _ in range(9)]
    for _ in range(4):
        stored.save(joined(head, pieces, numbers.sample(range(9), numbers.randrange(1, 9))))
    for prefix in numbers.sample(sorted(stored.bits), len(stored.bits) // 6):
        stored.bits[prefix] &= numbers.randrange(1 << len(layout.groups))
    chosen = numbers.sample(range(9), 6)
    asked = [pieces[index] for index in chosen]
    usual, given = (numbers.sample(range(6), 6) for _ in range(2))
    found = await OrderSearch(layout, stored.ask, within_s=60.0).run(
        head, asked, usual=usual, given=given, cache_salt="salt" if seed % 2 else None
    )
    assert sorted(found.documents) == list(range(6))
    assert stored.resume(joined(head, asked, found.documents)) >= found.resume_tokens
    if kinds != "states":  # of which a lost one ends the search, although later ones may be there
        assert stored.resume(joined(head, asked, found.documents)) == found.resume_tokens
        for order in (usual, given):
            assert found.resume_tokens >= stored.resume(joined(head, asked, order))
    assert len(stored.asked) <= 2 + documents.ROUNDS_MAX


@pytest.mark.parametrize("seed", range(20))
async def test_a_stored_order_is_found(seed: int) -> None:
    """Whatever is usual: documents that begin a stored prompt are put into its order, with its pages."""
    numbers = random.Random(seed)
    layout, head = Layout(64, ATTENTION), array("I", range(50))
    pieces = [array("I", numbers.choices(range(999), k=numbers.randrange(70, 200))) for _ in range(20)]
    stored = Stored(layout)
    for _ in range(10):  # other orders, all with another first document than the one looked for
        stored.save(joined(head, pieces, numbers.sample(range(14, 20), 6)))
    order = numbers.sample(range(5), 5)
    stored.save(joined(head, pieces, [*order[:4], 19, 18]))
    found = await OrderSearch(layout, stored.ask, within_s=60.0).run(
        head, pieces[:5], usual=numbers.sample(range(5), 5), given=range(5), cache_salt=None
    )
    assert list(found.documents[:4]) == order[:4]
    shared = len(joined(head, pieces, order[:4]))
    assert found.resume_tokens == shared // 64 * 64


async def test_a_search_is_bounded_however_much_is_stored() -> None:
    """Every order is stored: sixty-four documents take no more rounds and questions than their bounds."""
    layout, pieces = Layout(16, ATTENTION), [array("I", [index] * 20) for index in range(64)]

    class All(Stored):
        async def ask(self, boundaries: Sequence[Boundary]) -> Sequence[int]:
            self.asked.append(len(boundaries))
            return [1] * len(boundaries)

    stored = All(layout)
    found = await OrderSearch(layout, stored.ask, within_s=60.0).run(
        array("I"), pieces, usual=range(64), given=range(63, -1, -1), cache_salt=None
    )
    assert found.resume_tokens == 64 * 20 // 16 * 16
    assert len(stored.asked) == 1  # about both orders
    none = Stored(layout)
    await OrderSearch(layout, none.ask, within_s=60.0).run(
        array("I"), pieces, usual=range(64), given=range(64), cache_salt=None
    )
    assert sum(none.asked) <= 64 * 20 // 16 + documents.ROUNDS_MAX * (documents.TRIED + documents.BEAM * 2)


@pytest.mark.parametrize("asked_at_once", [8, 1024])
async def test_orders_of_long_prompts_are_asked_about_in_pieces(
    asked_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only as far as they are stored. What is found is the same."""
    monkeypatch.setattr(documents, "ASKED_AT_ONCE", asked_at_once)
    layout, pieces = Layout(16, ATTENTION), [array("I", [index] * 20) for index in range(64)]
    stored = Stored(layout)
    stored.save(joined(array("I"), pieces, range(12)))
    found = await OrderSearch(layout, stored.ask, within_s=0.0).run(
        array("I"), pieces, usual=range(63, -1, -1), given=range(64), cache_salt=None
    )
    assert found.documents[:12] == tuple(range(12)) and found.resume_tokens == 12 * 20
    assert max(stored.asked) <= max(2 * asked_at_once, 4 * 80)
    assert sum(stored.asked) < (100 if asked_at_once == 8 else 300)


async def test_a_search_ends_in_time() -> None:
    """Counted from its start: what was found until then is the answer, and no further round begins."""

    layout, pieces = Layout(16, ATTENTION), [array("I", [index] * 20) for index in range(4)]
    stored, clock = Stored(layout), ManualClock(0.0)
    stored.save(joined(array("I"), pieces, [3, 2, 1, 0]))

    async def ask(boundaries: Sequence[Boundary]) -> Sequence[int]:
        clock.now_s += 0.002
        return await stored.ask(boundaries)

    order = {"usual": range(4), "given": range(4), "cache_salt": None}
    for within_s, rounds in ((0.0, 0), (0.003, 1), (0.005, 2), (60.0, 4)):
        stored.asked.clear()
        found = await OrderSearch(layout, ask, within_s=within_s, clock=clock).run(array("I"), pieces, **order)
        assert (len(stored.asked), found.resume_tokens) == (1 + rounds, 16 * rounds)


def test_uses_are_counted_for_each_namespace_and_salt() -> None:
    """The share of earlier requests that asked for a document; another namespace, salt or tenant starts at nothing."""
    uses, common, rare = DocumentUses(), array("I", [1, 2]), array("I", [3])
    place = NamespaceId(b"n" * 16)
    for number in range(10):
        uses.note("red", place, None, [common, *([rare] * (number == 9))])
    usual, shares = uses.note("red", place, None, [rare, common, array("I", [4])])
    assert usual[:2] == [1, 0]
    assert shares[1] == pytest.approx(10 / 11, rel=0.01) and shares[0] == pytest.approx(1 / 11, rel=0.01)
    assert shares[2] == 0.0
    for other in (("blue", place, None), ("red", NamespaceId(b"m" * 16), None), ("red", place, "")):
        assert uses.note(*other, [common])[1] == [0.0]


def test_a_document_that_is_sent_twice_was_asked_for_once() -> None:
    """So no more requests begin with it than there are."""
    uses, twice = DocumentUses(), [array("I", [1, 2])] * 2
    for _ in range(10):
        _, shares = uses.note("red", NamespaceId(b"n" * 16), None, twice)
        assert max(expected_uses(shares, 1000)) == 1000.0 and max(shares) < 1.0


def test_what_was_asked_for_long_ago_counts_less() -> None:
    """Counts age, also past the point where they are made small again; the oldest documents are forgotten."""
    uses = DocumentUses(documents_max=5, ageing=2.0, large=1e3)
    old, new = array("I", [1]), array("I", [2])
    place = NamespaceId(b"n" * 16)
    shares = []
    for _ in range(3):
        uses.note("red", place, None, [old])
    for _ in range(30):
        shares.append(uses.note("red", place, None, [new])[1][0])
    assert all(later >= earlier for earlier, later in pairwise(shares))
    assert uses.note("red", place, None, [new, old])[0] == [0, 1]
    for number in range(10, 20):
        uses.note("red", place, None, [array("I", [number])])
    assert uses.note("red", place, None, [new])[1] == [0.0]
