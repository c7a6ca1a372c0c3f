"""Which pages are saved and which blocks are loaded, against brute force over sets of tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.canonical.attention import AttentionPages
from connector.canonical.slices import HeadGrid
from connector.jobs import LoadPiece
from connector.scheduler.load_plan import plan_load
from connector.scheduler.save_plan import PageToSave, final_pages
from kvstore.api import LeaseId, Staged
from kvstore.errors import InternalError
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.model.spans import span_ending_at

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
        assert piece.block_ids
        assert piece.first_block + len(piece.block_ids) <= piece.span_blocks
        for index, block_id in enumerate(piece.block_ids):
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
        [table],
        local_tokens=local_blocks * BLOCK,
        resume_tokens=resume_blocks * BLOCK,
        block_tokens=BLOCK,
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
    (piece,) = plan_load(
        staged([(0, 128)], 128), [[3, 1, 2, 9, 9, 9, 9, 9]], local_tokens=16, resume_tokens=48, block_tokens=BLOCK
    )
    assert (piece.first_block, piece.block_ids, piece.span_blocks) == (1, (1, 2), 8)


@pytest.mark.parametrize("table", [[5, 0, 6, 7], [0, 5, 6, 7], [5, 6, 7, 0], [5, 6, 7], []])
def test_null_and_missing_blocks_are_refused(table: list[int]) -> None:
    """A load that would write to the null block, or has no block to write to, is not planned at all."""
    with pytest.raises(InternalError, match="null block"):
        plan_load(staged([(0, 64)], 64), [table], local_tokens=0, resume_tokens=64, block_tokens=BLOCK)


def save_all(
    finals: list[int], prompt: int, page: int, present: dict[int, int], *, saved: int = 0, groups: int = 1
) -> tuple[list[list[PageToSave]], int]:
    """What a request saves in steps that end at `finals`."""
    steps = []
    for final in finals:
        pages, saved = final_pages(
            saved_tokens=saved,
            final_tokens=final,
            prompt_tokens=prompt,
            page_tokens=page,
            block_tokens=BLOCK,
            present=present,
            wanted_groups=groups,
        )
        steps.append(list(pages))
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
    assert sorted(saved_page.stop_tokens for saved_page in saved) == sorted(wanted)
    for final, before, step in zip(finals, [0, *finals], steps, strict=False):
        for saved_page in step:
            assert before < saved_page.stop_tokens <= final
    for saved_page in saved:
        span = span_ending_at(saved_page.stop_tokens, page)
        assert (saved_page.start_tokens, saved_page.stop_tokens) == (span.start, span.stop)
        assert (saved_page.boundary_index + 1) * BLOCK == saved_page.stop_tokens
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
    assert all(page.stop_tokens <= min(final, prompt) for page in pages)
    assert cursor <= min(final, prompt)
    # the cursor never goes back, even when vLLM counts from zero again after a preemption
    _, again = save_all([min(more, final)], prompt, page_blocks * BLOCK, {}, saved=cursor)
    assert again == cursor


def test_tails() -> None:
    """A prompt of 100 tokens with pages of 48 has two pages and no tail; of 112, a tail of one block."""
    (pages,), _ = save_all([100], 100, 48, {})
    assert [(page.start_tokens, page.stop_tokens) for page in pages] == [(0, 48), (48, 96)]
    (pages,), _ = save_all([112], 112, 48, {})
    assert [(page.start_tokens, page.stop_tokens) for page in pages] == [(0, 48), (48, 96), (96, 112)]
    (pages,), cursor = save_all([15], 15, 48, {})
    assert (pages, cursor) == ([], 0)


def test_a_tail_waits_for_its_blocks() -> None:
    """Half a prompt's last page makes no tail: only the prompt's own end does."""
    steps, _ = save_all([50, 80, 95, 96, 100, 150], 100, 256, {})
    assert [[page.stop_tokens for page in step] for step in steps] == [[], [], [], [96], [], []]


def test_generated_tokens_are_not_saved() -> None:
    """What the model wrote behind the prompt is not in any page."""
    steps, cursor = save_all([64, 500], 70, 32, {})
    assert [page.stop_tokens for step in steps for page in step] == [32, 64]
    assert cursor == 64


def test_every_group_must_be_there() -> None:
    """A boundary at which one group is missing is saved again."""
    (pages,), _ = save_all([96], 96, 32, {32: 0b11, 64: 0b01, 96: 0b10}, groups=0b11)
    assert [page.stop_tokens for page in pages] == [64, 96]


def test_plan_sizes_match_the_pages() -> None:
    """A page plan's size is proportional to its blocks, which the scheduler side's credits rely on."""
    plan = AttentionPages(
        num_layers=3, grid=HeadGrid(4, 2), first_head=0, block_tokens=BLOCK, cell_bytes=100, head_stride=100
    )
    assert [plan.decoded_bytes(blocks) for blocks in (1, 2, 7)] == [600, 1200, 4200]
