"""Cache events for pages in the store: each page once for each tier, with vLLM's own hashes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from connector.identity import describe_namespace
from connector.scheduler.cache_events import CacheEvents, PageEvent, RequestHashes
from connector.scheduler.hook_facts import StateOffer
from kvstore.api import Staged
from kvstore.model.keys import RecordKey
from kvstore.model.media import MEDIA, parse_media
from kvstore.testing.waiting import eventually
from tests.unit.connector.saves_harness import SavesHarness
from tests.unit.connector.scheduler_harness import SchedulerHarness, harness
from tests.unit.connector.support import BLOCK, FULL, PAGE, STATES, WEIGHTS, tokens_of
from tests.virtual_time import ManualClock

HASH = BLOCK // 2


@pytest.fixture
def made(tmp_path: Path) -> Iterator[SchedulerHarness]:
    with harness(tmp_path) as made:
        made.side.publish_events(CacheEvents(made.shape))
        yield made


def cache_events(made: SchedulerHarness) -> CacheEvents:
    assert made.side.save_jobs.cache_events is not None
    return made.side.save_jobs.cache_events


def hashes_of(name: str, count: int) -> list[bytes]:
    return [f"{name}-{index}".encode() for index in range(count // HASH)]


def come(made: SchedulerHarness, request_id: str, count: int, name: str | None = None) -> None:
    """A request of which vLLM tells the hashes; two with one name share them."""
    made.new(request_id, count, name)
    cache_events(made).on_new_request(
        request_id, RequestHashes(hashes_of(name or request_id, count), HASH, lora_name="adapter")
    )
    made.hashed(request_id)


def go(made: SchedulerHarness, request_id: str) -> None:
    made.side.on_finished(request_id)
    cache_events(made).on_request_closed(request_id)


def blocks(event: PageEvent) -> list[int]:
    """Numbers of the announced blocks, by the last of each block's hashes."""
    return [(int(block_hash.rpartition(b"-")[2]) + 1) * HASH // BLOCK - 1 for block_hash in event.hashes]


def test_a_page_is_told_when_it_is_stored(made: SchedulerHarness) -> None:
    """Not when it is planned; then with the hashes, tokens, parent and adapter that vLLM's own events would have."""
    count = PAGE + 2 * BLOCK
    come(made, "r", count)
    jobs = made.step({"r": count}).saves
    assert [job.stop_tokens for job in jobs] == [PAGE, count]
    assert cache_events(made).take() == []
    assert cache_events(made).has_pending
    made.ranks_done(jobs[1].job_id)
    made.ranks_done(jobs[0].job_id)
    tail, page = cache_events(made).take()
    assert not cache_events(made).has_pending
    assert {tail.medium, page.medium} == {MEDIA["memory"]}
    assert blocks(page) == list(range(PAGE // BLOCK))
    assert page.parent is None
    assert page.tokens == tuple(tokens_of("r", count)[:PAGE])
    assert page.block_tokens == BLOCK
    assert blocks(tail) == [PAGE // BLOCK, PAGE // BLOCK + 1]
    assert tail.parent == page.hashes[-1]
    assert tail.lora_name == "adapter"


def test_a_page_that_was_not_stored_is_not_told(made: SchedulerHarness) -> None:
    """A failed save, and one that never reached the ranks."""
    come(made, "r", PAGE)
    (job,) = made.step({"r": PAGE}).saves
    made.ranks_done(job.job_id, failed=(job.job_id,))
    come(made, "s", PAGE)
    (job,) = made.step({"s": PAGE}).saves
    made.side.save_jobs.withdraw([job])
    made.ranks_done(job.job_id)
    assert cache_events(made).take() == []
    assert not cache_events(made).has_pending


def test_all_ranks_must_have_stored_it(tmp_path: Path) -> None:
    """Half of a page's slices are no page."""
    with harness(tmp_path, {"tp_size": 2, "rank_heads": 1}) as made:
        made.side.publish_events(CacheEvents(made.shape))
        come(made, "r", 2 * PAGE)
        one, other = made.step({"r": 2 * PAGE}).saves
        made.ranks_done(one.job_id, other.job_id)
        assert cache_events(made).take() == []
        made.ranks_done(one.job_id)
        made.ranks_done(other.job_id, failed=(other.job_id,))
        assert len(cache_events(made).take()) == 1
        assert not cache_events(made).has_pending


def test_a_hit_tells_the_tier_that_it_came_from(made: SchedulerHarness) -> None:
    """Another engine's pages, read from one tier, are announced there, and not again at the next hit."""
    made.keep("prompt", 2 * PAGE)
    come(made, "r", 2 * PAGE + 1, "prompt")
    assert made.ask("r") == 2 * PAGE
    made.admit("r", 2 * PAGE)
    state = made.state("r")
    assert state.loading is not None
    staged = state.loading.future.result()
    for _ in range(2):
        cache_events(made).on_staged(state, staged)
    told = cache_events(made).take()
    assert [(entry.medium, entry.removed) for entry in told] == [(MEDIA["memory"], False)] * 2
    assert sorted(block for entry in told for block in blocks(entry)) == list(range(2 * PAGE // BLOCK))
    made.finished("r")


def staged_page(made: SchedulerHarness, request_id: str, sources: dict[str, int]) -> Staged:
    """The answer to a stage of a request's first page."""
    namespace = describe_namespace(made.facts, made.shape, WEIGHTS).id
    prefix = made.state(request_id).prefix_at(PAGE, made.shape.boundary_tokens)
    return Staged(None, PAGE, (RecordKey(namespace, prefix, 0, 0),), ((0, PAGE),), sources)


def test_a_hit_is_in_memory_wherever_it_came_from(made: SchedulerHarness) -> None:
    """A page that was read from Redis is there, and in this node's memory too: a router that gives no credit for
    shared pools gives it for memory. Which page of several tiers came from which is not known."""
    come(made, "r", PAGE)
    cache_events(made).on_staged(made.state("r"), staged_page(made, "r", {"memory": 1, "s3": 1}))
    assert [event.medium for event in cache_events(made).take()] == [MEDIA["memory"]]
    cache_events(made).on_staged(made.state("r"), staged_page(made, "r", {"redis": 1}))
    assert [event.medium for event in cache_events(made).take()] == [MEDIA["redis"]]


def test_tiers_of_one_name_are_one_medium(made: SchedulerHarness) -> None:
    """Redis and S3 are both vLLM's `STORAGE`, somewhere else: the second says nothing new."""
    come(made, "r", PAGE)
    for tier in ("redis", "s3"):
        cache_events(made).on_staged(made.state("r"), staged_page(made, "r", {tier: 1}))
    assert [event.medium for event in cache_events(made).take()] == [MEDIA["memory"], MEDIA["s3"]]


def test_an_operator_names_tiers(made: SchedulerHarness) -> None:
    """For routers that know more names; what is gone is gone from every medium, under the same names."""
    media = parse_media("redis=SHARED_STORAGE, s3=OBJECT_STORE")
    made.side.publish_events(CacheEvents(made.shape, media=media))
    come(made, "r", PAGE)
    for tier in ("redis", "s3"):
        cache_events(made).on_staged(made.state("r"), staged_page(made, "r", {tier: 1}))
    names = [(event.medium.name, event.medium.locality) for event in cache_events(made).take()]
    assert names == [("CPU", "LOCAL"), ("SHARED_STORAGE", "REMOTE"), ("OBJECT_STORE", "REMOTE")]
    go(made, "r")
    come(made, "again", PAGE, "r")
    made.step({"again": BLOCK})
    gone = cache_events(made).take()
    assert [(event.medium.name, event.medium.locality) for event in gone] == names
    assert all(event.removed for event in gone)


def test_hashes_of_more_than_tokens_come_without_tokens(made: SchedulerHarness) -> None:
    """A salted prompt's page is not the page of an unsalted prompt with its tokens."""
    made.new("r", PAGE)
    known = RequestHashes(hashes_of("r", PAGE), HASH, are_of_tokens=False)
    cache_events(made).on_new_request("r", known)
    made.hashed("r")
    (job,) = made.step({"r": PAGE}).saves
    made.ranks_done(job.job_id)
    (event,) = cache_events(made).take()
    assert (len(event.hashes), event.tokens) == (PAGE // BLOCK, ())


def test_what_is_gone_is_taken_back(made: SchedulerHarness) -> None:
    """A later prompt looks up a published page that the store has dropped: one event says so."""
    come(made, "r", PAGE)
    (job,) = made.step({"r": PAGE}).saves
    made.ranks_done(job.job_id)  # told, though nothing reached this store: as if it had been evicted since
    (stored,) = cache_events(made).take()
    go(made, "r")
    for request_id in ("again", "and again"):
        come(made, request_id, PAGE, "r")
        made.step({request_id: BLOCK})
        go(made, request_id)
    (gone,) = cache_events(made).take()
    assert gone.removed
    assert gone.hashes == stored.hashes
    assert gone.medium == MEDIA["memory"]


def test_pages_are_told_again_after_the_engine_dropped_its_cache(made: SchedulerHarness) -> None:
    """Routers drop all of an engine then. What was not told before is not told either, until it is hit: once."""
    come(made, "r", PAGE)
    (job,) = made.step({"r": PAGE}).saves
    made.ranks_done(job.job_id)
    cache_events(made).on_cleared()
    assert cache_events(made).take() == []
    for _ in range(2):
        cache_events(made).on_staged(made.state("r"), staged_page(made, "r", {"memory": 1}))
    (event,) = cache_events(made).take()
    assert (blocks(event), event.removed) == (list(range(PAGE // BLOCK)), False)


def test_of_too_many_pages_the_oldest_are_taken_back(made: SchedulerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later removal of one that is forgotten could not be told."""
    monkeypatch.setattr("connector.scheduler.cache_events.REMEMBERED_PAGES", 2)
    stored = []
    for name in ("a", "b", "c"):
        come(made, name, PAGE)
        (job,) = made.step({name: PAGE}).saves
        made.ranks_done(job.job_id)
        event, *gone = cache_events(made).take()
        stored.append(event)
    (first,) = gone
    assert (first.removed, first.hashes, first.medium) == (True, stored[0].hashes, stored[0].medium)


def test_what_is_there_is_not_taken_back(made: SchedulerHarness) -> None:
    """The store has the page: nothing is said."""
    made.keep("r", PAGE)
    come(made, "r", PAGE)
    state = made.state("r")
    eventually(lambda: state.lookup is not None and state.lookup.done())
    made.step({"r": PAGE})
    assert cache_events(made).take() == []


def test_hashes_that_do_not_fit_blocks_tell_nothing(made: SchedulerHarness) -> None:
    """vLLM's hashes span more than a block here, so that a block has none of its own."""
    made.new("r", PAGE)
    cache_events(made).on_new_request("r", RequestHashes(hashes_of("r", PAGE), 3 * BLOCK))
    made.hashed("r")
    (job,) = made.step({"r": PAGE}).saves
    made.ranks_done(job.job_id)
    assert cache_events(made).take() == []


def test_a_state_is_told_as_the_block_that_ends_there() -> None:
    """vLLM keeps a recurrent state under the hash of the block that it follows; its pages have their own."""
    at = SavesHarness(STATES, FULL, prompt=4 * BLOCK)
    at.jobs.cache_events = told = CacheEvents(at.shape)
    told.on_new_request("a", RequestHashes(hashes_of("a", 4 * BLOCK), HASH))
    jobs = at.step(4 * BLOCK, [], [1, 2, 3, 4], [], offers=[StateOffer(0, 21, 4 * BLOCK), StateOffer(2, 22, 4 * BLOCK)])
    at.done(jobs)
    entries = told.take()
    (state,) = [entry for entry in entries if entry.group == 0]
    assert blocks(state) == [3]
    assert state.tokens == tuple(at.tokens[3 * BLOCK : 4 * BLOCK])
    assert state.parent == b"a-5"
    assert sorted(block for entry in entries if entry.group == 1 for block in blocks(entry)) == [0, 1, 2, 3]


def test_pages_are_named_when_they_are_stored_and_again_later(made: SchedulerHarness) -> None:
    """A save is named once. A hit names its pages too, but not again within a minute, and only to a service that wants
    it."""
    clock = ManualClock()
    told = CacheEvents(made.shape, names_pages=True, clock=clock)
    made.side.publish_events(told)
    come(made, "r", PAGE)
    (job,) = made.step({"r": PAGE}).saves
    assert told.take_named() == []
    made.ranks_done(job.job_id)
    assert told.has_pending
    (page,) = told.take_named()
    assert (page.namespace, page.boundary.tokens, page.boundary.prefix) == (job.namespace, PAGE, job.prefix)
    assert [page.event] == told.take()
    for seconds, times in ((30.0, 0), (31.0, 1), (1.0, 0)):
        clock.now_s += seconds
        told.on_staged(made.state("r"), staged_page(made, "r", {"memory": 1}))
        assert len(told.take_named()) == times
    assert cache_events(made) is told


def test_nothing_is_named_by_default(made: SchedulerHarness) -> None:
    come(made, "r", PAGE)
    (job,) = made.step({"r": PAGE}).saves
    made.ranks_done(job.job_id)
    assert cache_events(made).take_named() == []
