"""Which pages are saved and which blocks are loaded, against brute force over sets of tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.canonical.attention import AttentionPages
from connector.canonical.runs import LayerGeometry
from connector.canonical.slices import HeadGrid, SliceGrid
from connector.facts import CellFacts, GroupFacts
from connector.identity import GroupShape
from connector.jobs import LoadPiece
from connector.scheduler.plans import final_pages, plan_load
from kvstore.api import LeaseId, Staged
from kvstore.errors import InternalError
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.model.kinds import ChunkedLocal, FullAttention, GroupKind, Recurrent, SlidingWindow
from kvstore.model.layout import Span, span_ending_at

BLOCK = 16


def key(number: int, slice_: int = 0) -> RecordKey:
    return RecordKey(NamespaceId(bytes(16)), PrefixHash(number.to_bytes(32, "big")), 0, slice_)


def staged(spans: list[tuple[int, int]], resume_tokens: int, num_slices: int = 1) -> Staged:
    keys = [(key(stop, index), span) for span in spans for stop in span[1:] for index in range(num_slices)]
    return Staged(
        LeaseId(b"lease"), resume_tokens, tuple(key for key, _ in keys), tuple(span for _, span in keys), lease_s=9
    )


def writes(pieces: tuple[LoadPiece, ...], spans: dict[RecordKey, tuple[int, int]]) -> list[tuple[RecordKey, int, int]]:
    """(record, first token of the block in the record, block id) for every block that is written."""
    found = []
    for piece in pieces:
        start, stop = spans[piece.key]
        assert piece.span_blocks * BLOCK == stop - start
        (ids,) = piece.block_ids
        assert ids
        assert piece.first_block + len(ids) <= piece.span_blocks
        for index, block_id in enumerate(ids):
            found.append((piece.key, start + (piece.first_block + index) * BLOCK, block_id))
    return found


@given(st.data())
def test_every_block_between_the_hits_is_written_once(data: st.DataObject) -> None:
    """Each slice of each token from the local hit to the resume point goes to its own block, and nothing else does."""
    page_blocks = data.draw(st.integers(1, 5))
    num_slices = data.draw(st.integers(1, 3))
    resume_blocks = data.draw(st.integers(1, 20))
    local_blocks = data.draw(st.integers(0, resume_blocks - 1))
    page = page_blocks * BLOCK
    spans, stop = [], 0
    while stop < resume_blocks * BLOCK:
        reach = min(page, resume_blocks * BLOCK - stop)
        # the last record may reach past the resume point; records below the local hit may be staged or not
        end = stop + data.draw(st.integers(reach // BLOCK, page_blocks)) * BLOCK if reach < page else stop + page
        if end > local_blocks * BLOCK or data.draw(st.booleans()):
            spans.append((stop, end))
        stop += page
    ids = data.draw(st.permutations(range(1, 40)))
    # blocks below the local hit may be the null block for all that the plan cares
    table = [0] * local_blocks + list(ids[: resume_blocks - local_blocks]) + [0] * data.draw(st.integers(0, 3))
    given_spans = staged(spans, resume_blocks * BLOCK, num_slices)
    pieces = plan_load(
        given_spans,
        GROUPS,
        [table],
        local_tokens=local_blocks * BLOCK,
        resume_tokens=resume_blocks * BLOCK,
    )
    by_key = dict(zip(given_spans.keys, given_spans.spans, strict=True))
    seen = sorted((record.slice, token, block_id) for record, token, block_id in writes(pieces, by_key))
    assert seen == [
        (slice_, block * BLOCK, table[block])
        for slice_ in range(num_slices)
        for block in range(local_blocks, resume_blocks)
    ]


def test_a_shorter_resume_point_uses_part_of_a_record() -> None:
    """vLLM may take less than was staged: the rest of the record is not written."""
    (piece,) = plan_load(staged([(0, 128)], 128), GROUPS, [[3, 1, 2, 9, 9, 9, 9, 9]], local_tokens=16, resume_tokens=48)
    assert (piece.first_block, piece.block_ids, piece.span_blocks) == (1, ((1, 2),), 8)


def test_the_slices_of_a_page_have_their_blocks_in_common() -> None:
    """The engine's steps wait for a plan, and it is sent to every rank: a long hit has a thousand pieces."""
    one, other = plan_load(staged([(0, 64)], 64, 2), GROUPS, [[5, 6, 7, 8]], local_tokens=0, resume_tokens=64)
    assert one.block_ids is other.block_ids


@pytest.mark.parametrize("table", [[5, 0, 6, 7], [0, 5, 6, 7], [5, 6, 7, 0], [5, 6, 7], []])
def test_null_and_missing_blocks_are_refused(table: list[int]) -> None:
    """A load that would write to the null block, or has no block to write to, is not planned at all."""
    with pytest.raises(InternalError, match=r"null block|too short"):
        plan_load(staged([(0, 64)], 64), GROUPS, [table], local_tokens=0, resume_tokens=64)


def save_all(
    finals: list[int], prompt: int, page: int, present: dict[int, int], *, saved: int = 0
) -> tuple[list[list[Span]], int]:
    """What a request saves in steps that end at `finals`."""
    steps = []
    for final in finals:
        pages = list(
            final_pages(
                saved_tokens=saved,
                final_tokens=min(final, prompt),
                tail_tokens=prompt // BLOCK * BLOCK,
                page_tokens=page,
            )
        )
        saved = pages[-1].stop if pages else saved
        steps.append([each for each in pages if not present.get(each.stop)])
    return steps, saved


def boundaries_of(prompt: int, page: int) -> set[int]:
    """Where a prompt's records end: its pages, and the last block boundary."""
    end = prompt // BLOCK * BLOCK
    return (set(range(page, end + 1, page)) | {end}) - {0}


@given(st.data())
def test_each_page_is_saved_once_as_soon_as_it_is_final(data: st.DataObject) -> None:
    """Over any steps, every page and the tail are saved exactly once, in the first step that makes them final."""
    page = data.draw(st.integers(1, 6)) * BLOCK
    prompt = data.draw(st.integers(0, 400))
    finals = sorted([*data.draw(st.lists(st.integers(0, 450), max_size=8)), prompt])
    known = {at: data.draw(st.integers(0, 1)) for at in boundaries_of(prompt, page) if data.draw(st.booleans())}
    steps, cursor = save_all(finals, prompt, page, known)
    wanted = {at for at in boundaries_of(prompt, page) if not known.get(at)}
    saved = [saved_page for step in steps for saved_page in step]
    assert sorted(saved_page.stop for saved_page in saved) == sorted(wanted)
    for final, before, step in zip(finals, [0, *finals], steps, strict=False):
        for saved_page in step:
            assert before < saved_page.stop <= final
    for saved_page in saved:
        span = span_ending_at(saved_page.stop, page)
        assert (saved_page.start, saved_page.stop) == (span.start, span.stop)
    # together with what was there, the block-aligned prompt is covered, each token by one record
    tokens = [
        token
        for at in boundaries_of(prompt, page)
        for token in range(span_ending_at(at, page).start, at)
        if at in wanted or known.get(at)
    ]
    assert sorted(tokens) == list(range(prompt // BLOCK * BLOCK))
    assert cursor == prompt // BLOCK * BLOCK


@given(st.integers(0, 400), st.integers(1, 6), st.integers(0, 400), st.integers(0, 400))
def test_nothing_before_it_is_final(prompt: int, page_blocks: int, final: int, more: int) -> None:
    """No page holds a token that the forward has not computed, and the cursor never passes what is final."""
    (pages,), cursor = save_all([final], prompt, page_blocks * BLOCK, {})
    assert all(page.stop <= min(final, prompt) for page in pages)
    assert cursor <= min(final, prompt)
    # the cursor never goes back, even when vLLM counts from zero again after a preemption
    _, again = save_all([min(more, final)], prompt, page_blocks * BLOCK, {}, saved=cursor)
    assert again == cursor


def test_tails() -> None:
    """A prompt of 100 tokens with pages of 48 has two pages and no tail; of 112, a tail of one block."""
    (pages,), _ = save_all([100], 100, 48, {})
    assert [(page.start, page.stop) for page in pages] == [(0, 48), (48, 96)]
    (pages,), _ = save_all([112], 112, 48, {})
    assert [(page.start, page.stop) for page in pages] == [(0, 48), (48, 96), (96, 112)]
    (pages,), cursor = save_all([15], 15, 48, {})
    assert (pages, cursor) == ([], 0)


def test_a_tail_waits_for_its_blocks() -> None:
    """Half a prompt's last page makes no tail: only the prompt's own end does."""
    steps, _ = save_all([50, 80, 95, 96, 100, 150], 100, 256, {})
    assert [[page.stop for page in step] for step in steps] == [[], [], [], [96], [], []]


def test_generated_tokens_fill_pages() -> None:
    """Behind the prompt's tail whole pages follow as they fill, from the tail's own page on; no further tails."""
    pages = final_pages(saved_tokens=64, final_tokens=200, tail_tokens=64, page_tokens=96)
    assert list(pages) == [Span(0, 96), Span(96, 192)]


def test_the_end_of_a_request_has_a_tail() -> None:
    """When a request ends, what it generated up to the last boundary is a tail as a prompt's end is."""
    pages = final_pages(saved_tokens=192, final_tokens=250, tail_tokens=240, page_tokens=96)
    assert list(pages) == [Span(192, 240)]


def test_plan_sizes_match_the_pages() -> None:
    """A page plan's size is proportional to its blocks, which the scheduler side's credits rely on."""
    layer = LayerGeometry(
        parts=1, part_stride=0, heads=4, head_stride=100, tokens=BLOCK, token_stride=6, content_bytes=6
    )
    plan = AttentionPages(grid=HeadGrid(4, 2), first_slice=0, layers=[layer] * 3)
    assert [plan.decoded_bytes(blocks) for blocks in (1, 2, 7)] == [576, 1152, 4032]


def group(kind: GroupKind, feeds: tuple[int, ...] = (0,), block_tokens: int = BLOCK) -> GroupShape:
    """A group of one layer per feed, of which only the kind and the feeds matter here."""
    content = CellFacts(1, 1, 4, 4, 2, "bfloat16")
    layers = tuple(f"layer.{feed}" for feed in feeds)
    return GroupShape(
        GroupFacts(kind, (layers,), tuple(range(len(feeds))), feeds, block_tokens, content),
        SliceGrid(1),
        HeadGrid(1, 1),
    )


GROUPS = (group(FullAttention()),)


def test_only_the_window_is_written() -> None:
    """vLLM has no blocks below the window; the part of a record that lies there goes nowhere."""
    window = group(SlidingWindow(window_tokens=20))
    table = [0, 0, 0, 0, 9, 8]  # resuming at 96 reads from token 77 on: blocks 4 and 5
    pieces = plan_load(staged([(0, 64), (64, 96)], 96), [window], [table], local_tokens=0, resume_tokens=96)
    assert [(piece.first_block, piece.block_ids) for piece in pieces] == [(0, ((9, 8),))]


def test_a_window_of_a_shorter_hit_is_not_planned() -> None:
    """A window that ends earlier begins earlier, in blocks of which nothing was staged: they would stay as they are."""
    both = (*GROUPS, group(SlidingWindow(window_tokens=20), feeds=(1,)))
    tables = [[1, 2, 3, 4, 0, 0], [0, 0, 5, 6, 0, 0]]
    with pytest.raises(InternalError, match="window is not staged"):
        plan_load(staged([(0, 64), (64, 96)], 96), both, tables, local_tokens=0, resume_tokens=64)


def test_chunks_are_written_from_their_start() -> None:
    """Of chunked attention the current chunk is needed."""
    chunks = group(ChunkedLocal(chunk_tokens=64))
    pieces = plan_load(staged([(64, 128)], 96), [chunks], [[0, 0, 0, 0, 3, 4, 0, 0]], local_tokens=0, resume_tokens=96)
    assert [(piece.first_block, piece.block_ids) for piece in pieces] == [(0, ((3, 4),))]


def test_every_feed_has_its_own_table() -> None:
    """Layers of one group in several of vLLM's groups are placed by several tables."""
    both = group(FullAttention(), feeds=(0, 2))
    (piece,) = plan_load(staged([(0, 32)], 32), [both], [[1, 2], [7, 7], [5, 6]], local_tokens=16, resume_tokens=32)
    assert piece.block_ids == ((2,), (6,))


def test_a_state_goes_to_the_last_block() -> None:
    """A state at the resume point is written to the one block that vLLM allocated for it, and to no other point."""
    state = replace(group(Recurrent(), feeds=(1,)), heads=None)
    tables = [[1, 2, 3], [0, 0, 8]]
    (piece,) = plan_load(staged([(48, 48)], 48), [state], tables, local_tokens=0, resume_tokens=48)
    assert (piece.span_blocks, piece.first_block, piece.block_ids) == (1, 0, ((8,),))
    with pytest.raises(InternalError, match="null block"):
        plan_load(staged([(32, 32)], 32), [state], tables, local_tokens=0, resume_tokens=32)
    with pytest.raises(InternalError, match="not of the resume point"):
        plan_load(staged([(48, 48)], 48), [state], tables, local_tokens=0, resume_tokens=32)
