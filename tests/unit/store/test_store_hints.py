"""Hints in the store: prefetch within bounds, demotion, release, marks for retention, and what is told of each."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from retention_harness import BOUNDARY_BYTES, LAYOUT, OTHER, open_retained
from store_harness import MIB, fill, opened, slow_tier, stage

from kvstore.api import PrefixQuery
from kvstore.catalog.coordination import LocalMarkBook
from kvstore.errors import Unavailable
from kvstore.eviction.candidates import Candidate
from kvstore.eviction.hints import RETAINED, Hint
from kvstore.model.keys import Boundary, NamespaceId, PrefixHash
from kvstore.model.prompt_hint import EndedPrompt, Wishes, ends_of_pages, read_wishes
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.store.hints.hints import HINTS_BURST
from kvstore.store.retention.hint_marks import HintMarks, Mark
from kvstore.store.retention.policy_choice import PolicyChoice
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, HYBRID, Prompt
from kvstore.testing.records import NAMESPACE
from kvstore.testing.waiting import soon, until


def ended(prompt: Prompt, request: str = "r1", **wishes: object) -> EndedPrompt:
    """The prompt as its engine ends it."""
    query = prompt.query()
    boundaries = ends_of_pages(query.boundaries, prompt.layout.page_tokens)
    said = Wishes(**wishes)  # type: ignore[arg-type]
    return EndedPrompt(request, prompt.namespace, boundaries, 16, prompt.num_tokens, said, tenant=prompt.tenant)


def status(store: TieredStore, request: str = "r1") -> dict[str, str]:
    return store.hints.prompts.of_request(request, "").hints


class TestPrefetch:
    @pytest.mark.parametrize("layout", [ATTENTION, HYBRID])
    async def test_a_prompt_is_in_memory_before_it_is_asked_for(self, layout) -> None:
        """Only the cold tier has it; after the prefetch a stage reads memory alone, and its bytes count as used."""
        prompt, cold = Prompt(layout, "a", 250), slow_tier("s3")
        await fill(cold, prompt)
        async with opened(prompt, cold=cold) as store:
            store.end_prompt(ended(prompt, prefetch=True))
            await until(lambda: status(store)["prefetch"] != "waiting")
            assert status(store)["prefetch"].startswith("fetched: ")
            assert store.memory.pinned_bytes == 0
            fetched = store.meters.get("prefetched_bytes", outcome="fetched")
            assert fetched > 0 == store.meters.get("prefetched_bytes", outcome="used")
            staged = await stage(store, prompt)
            assert (staged.resume_tokens, staged.sources) == (240, {"memory": len(staged.keys)})
            assert store.meters.get("prefetched_bytes", outcome="used") == fetched
            assert store.meters.get("prefetched_bytes", outcome="wasted") == 0

    async def test_what_nobody_uses_takes_an_eighth_of_the_memory(self) -> None:
        """A prompt that is larger than that is fetched up to there; a further one finds no room until it is used."""
        prompt = Prompt(ATTENTION, "a", 64 * 40, payload_bytes=64 << 10)  # 5 MiB
        other, cold = Prompt(ATTENTION, "b", 640, payload_bytes=64 << 10), slow_tier("s3")
        for one in (prompt, other):
            await fill(cold, one)
        async with opened(prompt, cold=cold) as store:
            store.end_prompt(ended(prompt, prefetch=True))
            await until(lambda: status(store)["prefetch"] != "waiting")
            assert status(store)["prefetch"].startswith("part: ")
            fetched = store.meters.get("prefetched_bytes", outcome="fetched")
            assert 1.5 * MIB < fetched <= 2 * MIB
            store.end_prompt(ended(other, "r2", prefetch=True))
            await until(lambda: status(store, "r2")["prefetch"] != "waiting")
            assert store.meters.get("prefetched_bytes", outcome="fetched") <= 2 * MIB
            staged = await stage(store, prompt)
            assert staged.resume_tokens > 0 and staged.lease is not None
            await store.release(staged.lease)
            store.end_prompt(ended(other, "r3", prefetch=True))
            await until(lambda: status(store, "r3")["prefetch"] != "waiting")
            assert store.meters.get("prefetched_bytes", outcome="fetched") > fetched + MIB // 2

    async def test_what_leaves_unused_is_wasted(self) -> None:
        """Others need the memory first."""
        prompt, cold = Prompt(ATTENTION, "a", 640, payload_bytes=64 << 10), slow_tier("s3")
        await fill(cold, prompt)
        async with opened(prompt, cold=cold) as store:
            store.end_prompt(ended(prompt, prefetch=True))
            await until(lambda: status(store)["prefetch"] != "waiting")
            fetched = store.meters.get("prefetched_bytes", outcome="fetched")
            other = Prompt(ATTENTION, "b", 64 * 140, payload_bytes=64 << 10)
            for record in other.records():
                store.memory.insert(record)
            assert store.meters.get("prefetched_bytes", outcome="wasted") == fetched > 0
            staged = await stage(store, prompt)
            assert staged.sources.get("s3", 0) > 0 == store.meters.get("prefetched_bytes", outcome="used")

    async def test_few_wait_and_fewer_run(self) -> None:
        """While the tier hangs, a tenant's prefetches beyond its bound are refused; those that waited run later."""
        prompt, cold = Prompt(ATTENTION, "a", 640), slow_tier("s3")
        await fill(cold, prompt)
        cold.get_s = 0.2
        async with opened(prompt, cold=cold) as store:
            for number in range(30):
                store.end_prompt(ended(prompt, f"r{number}", prefetch=True))
            told = [status(store, f"r{number}")["prefetch"] for number in range(30)]
            assert told.count("refused: too many prefetches wait") == 30 - 16
            await until(lambda: status(store, "r15")["prefetch"] != "waiting")
            assert status(store, "r15")["prefetch"].startswith("in_memory: ")

    async def test_nothing_stored_and_a_tier_that_fails(self) -> None:
        """Neither is an error; both are told."""
        prompt, cold = Prompt(ATTENTION, "a", 640), slow_tier("s3")
        async with opened(prompt, cold=cold) as store:
            store.end_prompt(ended(prompt, prefetch=True))
            await until(lambda: status(store)["prefetch"] != "waiting")
            assert status(store)["prefetch"].startswith("nothing_stored: 0 bytes")


async def test_why_hints_have_no_effect() -> None:
    """A namespace that is not open is another cause than a prompt without a page."""
    prompt, other = Prompt(ATTENTION, "a", 256), Prompt(ATTENTION, "b", 256, model="other")
    async with opened(prompt) as store:
        short = replace(ended(prompt, "short", release=True), boundaries=())
        for one in (short, ended(other, "closed", release=True)):
            store.end_prompt(one)
        assert status(store, "short")["dropped"] == "the prompt has no page"
        assert status(store, "closed")["dropped"].startswith("the namespace is not open")
        assert store.meters.get("hints", hint="release", outcome="not_open") == 1


async def test_a_demoted_prompt_leaves_memory_where_a_slower_tier_has_it() -> None:
    """What no slower tier has stays, and so does what is leased."""
    prompt, cold = Prompt(ATTENTION, "a", 256), slow_tier("s3")
    await fill(cold, prompt, tokens=[64, 128, 192])
    async with opened(prompt, cold=cold) as store:
        for record in prompt.records():
            store.memory.insert(record)
        leased = await stage(store, replace(prompt, num_tokens=64))
        store.end_prompt(ended(prompt, demote=True))
        await until(lambda: "demote" in status(store))
        held = {key for key in prompt.record_keys() if key in store.memory}
        assert held == {*prompt.record_keys([64]), *prompt.record_keys([256])}
        assert status(store)["demote"] == "4 records left memory, 0 the hot tier"
        assert leased.lease is not None


async def test_a_demoted_prompt_leaves_the_hot_tier_where_the_cold_one_has_it() -> None:
    """So that Redis keeps room for prompts that come back sooner."""
    prompt, hot, cold = Prompt(ATTENTION, "a", 256), slow_tier("redis"), slow_tier("s3")
    await fill(cold, prompt, tokens=[64, 128])
    await fill(hot, prompt)
    async with opened(prompt, hot=hot, cold=cold) as store:
        store.end_prompt(ended(prompt, demote=True))
        await until(lambda: "demote" in status(store))
        sizes = await hot.inner.head(prompt.record_keys(), deadline=soon())
        assert [size is not None for size in sizes] == [False] * 4 + [True] * 4


@pytest.mark.parametrize("where", ["memory", "hot"])
async def test_the_last_copy_of_a_record_is_never_demoted(where: str) -> None:
    """Of one record the cold tier lacks a slice, which no lookup asks for: that slice stays where it is."""
    prompt, hot, cold = Prompt(ATTENTION, "a", 256), slow_tier("redis"), slow_tier("s3")
    await fill(cold, prompt)
    missing = prompt.record_keys([128])[-1]
    assert await cold.inner.delete(missing, deadline=soon())
    if where == "hot":
        await fill(hot, prompt)
    async with opened(prompt, hot=hot if where == "hot" else None, cold=cold) as store:
        if where == "memory":
            for record in prompt.records():
                store.memory.insert(record)
        store.end_prompt(ended(prompt, demote=True))
        await until(lambda: "demote" in status(store))
        sizes = await hot.inner.head(prompt.record_keys(), deadline=soon())
        kept = [key for key, size in zip(prompt.record_keys(), sizes, strict=True) if size is not None]
        if where == "memory":
            kept = [key for key in prompt.record_keys() if key in store.memory]
        assert kept == [missing]


async def test_a_released_prompt_leaves_memory_first() -> None:
    """Though it was used last."""
    prompt, other = Prompt(ATTENTION, "a", 256), Prompt(ATTENTION, "b", 256)
    async with opened(prompt, memory_bytes=16 * MIB) as store:
        for record in (*other.records(), *prompt.records()):
            store.memory.insert(record)
        store.end_prompt(ended(prompt, release=True))
        await asyncio.sleep(0)
        large = Prompt(ATTENTION, "c", 64, payload_bytes=15 * MIB).records()[0]
        store.memory.insert(large)
        first = Prompt(ATTENTION, "d", 64, payload_bytes=MIB - 30_000).records()[0]
        store.memory.insert(first)
        held = [sum(key in store.memory for key in one.record_keys()) for one in (prompt, other)]
        assert held[1] == 8 > held[0]


async def test_few_releases_and_demotions_wait() -> None:
    """Each has its prompt in memory. Those beyond the bound are refused, those of another tenant are not; later ones
    are taken again.
    """
    prompt, cold = Prompt(ATTENTION, "a", 256), slow_tier("s3")
    other = Prompt(ATTENTION, "a", 256, tenant="other")
    await fill(cold, prompt)
    async with opened(prompt, cold=cold) as store:
        await store.open_namespace(other.description, deadline=soon())
        for number in range(100):
            store.end_prompt(ended(prompt, f"r{number}", **{"demote" if number % 2 else "release": True}))
        store.end_prompt(ended(other, "other", demote=True))
        refused = [number for number in range(100) if "refused" in str(status(store, f"r{number}"))]
        assert refused == list(range(64, 100))
        assert store.hints.prompts.of_request("other", "other").hints == {}
        await until(lambda: "demote" in status(store, "r63"))
        store.end_prompt(ended(prompt, "later", demote=True))
        await until(lambda: status(store, "later").get("demote") == "0 records left memory, 0 the hot tier")


async def test_a_tenant_that_says_too_much_is_not_heard() -> None:
    """Beyond the rate wishes are dropped, and told so; another tenant's are taken."""
    prompt = Prompt(ATTENTION, "a", 64, tenant="noisy")
    quiet = Prompt(ATTENTION, "a", 64, tenant="quiet")
    async with opened(prompt) as store:
        await store.open_namespace(quiet.description, deadline=soon())
        for number in range(int(HINTS_BURST) + 500):
            store.end_prompt(ended(prompt, f"r{number}", retain_s=10))
        store.end_prompt(ended(quiet, "q", retain_s=10))
        dropped = store.meters.get("hints", hint="retain_s", outcome="over_rate")
        assert 0 < dropped <= 500
        assert store.meters.get("hints", hint="retain_s", outcome="taken") == HINTS_BURST + 501 - dropped
        last = store.hints.prompts.of_request(f"r{int(HINTS_BURST) + 499}", "noisy")
        assert last.hints == {"dropped": "over the rate of hints"}
        assert "eviction" in store.hints.prompts.of_request("q", "quiet").hints


async def test_a_prompt_is_found_by_its_tenant_alone() -> None:
    """By the start of its id, or its session; for others it does not exist."""
    prompt = Prompt(ATTENTION, "a", 64, tenant="red")
    async with opened(prompt) as store:
        store.end_prompt(ended(prompt, "chatcmpl-1-x", session="s"))
        store.end_prompt(ended(prompt, "chatcmpl-2-x", session="s"))
        prompts = store.hints.prompts
        assert prompts.of_request("chatcmpl-1", "red").prompt.request == "chatcmpl-1-x"
        assert prompts.of_session("s", "red").prompt.request == "chatcmpl-2-x"
        assert prompts.of_session("s", None).prompt.request == "chatcmpl-2-x"
        with pytest.raises(Exception, match="several requests start like this"):
            prompts.of_request("chatcmpl", "red")
        for call in (lambda: prompts.of_request("chatcmpl-1", "blue"), lambda: prompts.of_session("s", "")):
            with pytest.raises(Exception, match="no request that ended recently"):
                call()


def test_wishes_that_make_no_sense_are_named() -> None:
    """Each with what was expected; the others count."""
    wrong = {"retain_s": -1, "priority": 101, "release": "yes", "prefetch": 1, "demote": None, "session": "x" * 257}
    wishes, complaints = read_wishes({**wrong, "colour": 1})
    assert wishes == Wishes() and [name for name, _ in complaints] == list(wrong)
    assert complaints[0] == ("retain_s", "expected seconds from 0 to 604800, seen -1")
    assert read_wishes({"retain_s": 60, "priority": 0, "session": "a"})[0] == Wishes(60.0, 0, session="a")


async def make_follow(choice: PolicyChoice, tenant: str) -> None:
    """Have the tenant's hints gain in the trial: prompts that return lose their place to those that do not."""
    for number in range(400):
        for talk, hint in ((f"kept {number % 4}", Hint(RETAINED, 3600.0)), (f"once {number}", Hint(0, 3600.0))):
            names = [PrefixHash(hashlib.sha256(f"{talk} {at}".encode()).digest()) for at in range(3)]
            boundaries = tuple(Boundary(16 * (at + 1), name) for at, name in enumerate(names))
            choice.observe(PrefixQuery(NAMESPACE, boundaries, 0, 48, 16), LAYOUT, tenant)
            choice.hint(EndedPrompt("r", NAMESPACE, boundaries, 16, 48), hint, 16)
    await choice.settle(15 * BOUNDARY_BYTES, BOUNDARY_BYTES, is_near=True)
    assert choice.follows(tenant)


async def hinted_choice(instruments: Instruments) -> PolicyChoice:
    choice = PolicyChoice([Candidate("lru")], marks=HintMarks(LocalMarkBook(), instruments), clock=instruments.clock)
    return choice


def mark(choice: PolicyChoice, path: list[PrefixHash], wishes: Wishes, namespace: NamespaceId = NAMESPACE) -> None:
    boundaries = tuple(Boundary(16 * (at + 1), name) for at, name in enumerate(path))
    hint = Hint.of(wishes)
    assert hint is not None
    choice.hint(EndedPrompt("r", namespace, boundaries, 16, 16 * len(path), wishes), hint, 16)


async def test_retention_evicts_what_was_released_and_keeps_what_is_retained(tmp_path: Path) -> None:
    """Of three prompts the oldest is retained and the youngest released: the youngest leaves first, then the middle."""
    async with open_retained(tmp_path) as world:
        choice = await hinted_choice(Instruments(world.clock, world.meters))
        await make_follow(choice, "")
        retention = world.retention(choice=choice, budget_bytes=9 * BOUNDARY_BYTES, start_share=0.9, stop_share=0.5)
        kept, middle = await world.save("kept", 3), await world.save("middle", 3)
        released = await world.save("released", 3)
        mark(choice, kept, Wishes(retain_s=600))
        mark(choice, released, Wishes(release=True))
        world.clock.now_s += 60
        assert await retention.round() > 0
        assert await world.held(released) == [0, 0, 0]
        assert await world.held(kept) == [3, 3, 3]
        assert sum(await world.held(middle)) < 9
        world.clock.now_s += 600  # the retention is over
        await world.save("new", 6)
        world.clock.now_s += 60
        assert await retention.round() > 0
        assert sum(await world.held(kept)) < 9
        await retention.aclose()


async def test_hints_of_one_tenant_change_nothing_for_another(tmp_path: Path) -> None:
    """One retains all of its own, and its oldest are older than the other's: its oldest leave all the same."""
    async with open_retained(tmp_path) as world:
        choice = await hinted_choice(Instruments(world.clock, world.meters))
        await make_follow(choice, "paying")
        retention = world.retention(choice=choice, budget_bytes=9 * BOUNDARY_BYTES, start_share=0.9, stop_share=0.6)
        loud = [await world.save(f"loud {number}", 1, OTHER) for number in range(6)]
        other = await world.save("other", 3)
        for path in loud:
            mark(choice, path, Wishes(retain_s=600), OTHER)
        world.clock.now_s += 60
        assert await retention.round() > 0
        assert await world.held(other) == [3, 3, 3]
        left = [(await world.held(path, OTHER))[0] for path in loud]
        assert 0 < sum(left) < 18
        await retention.aclose()


async def test_every_mark_that_is_lost_is_counted(tmp_path: Path) -> None:
    """The book does not answer when marks are passed on: as many are lost as waited. One that cannot be read loses
    none: they stay there.
    """

    class Away(LocalMarkBook):
        async def put(self, namespace: NamespaceId, marks: Mapping[bytes, bytes], *, deadline: Deadline) -> bool:
            raise Unavailable("away")

        async def read(self, namespace: NamespaceId, *, deadline: Deadline) -> Mapping[bytes, bytes]:
            raise Unavailable("away")

    async with open_retained(tmp_path) as world:
        marks = HintMarks(Away(), Instruments(world.clock, world.meters))
        for name in "abc":
            path = await world.save(name, 1)
            prompt = EndedPrompt(name, NAMESPACE, (Boundary(16, path[0]),), 16, 16)
            marks.add(prompt, Hint(80, 60.0), 16)
        with pytest.raises(Unavailable):
            await marks.flush(world.deadline)
        assert world.meters.get("hints_dropped", reason="unavailable") == 3
        assert await marks.read([NAMESPACE], world.deadline) == {}
        assert world.meters.get("hints_dropped", reason="unavailable") == 3


async def test_marks_end(tmp_path: Path) -> None:
    """By time and by use; those of boundaries that never came are forgotten too."""
    async with open_retained(tmp_path) as world:
        marks = HintMarks(LocalMarkBook(), Instruments(world.clock, world.meters))
        path = await world.save("a", 2)
        boundaries = tuple(Boundary(16 * (at + 1), name) for at, name in enumerate(path))
        marks.add(EndedPrompt("r", NAMESPACE, boundaries, 16, 32), Hint(80, 60.0), 16)
        read = await marks.read([NAMESPACE], world.deadline)
        now_s = world.clock.now_s
        assert read == {NAMESPACE + path[1]: Mark(now_s, now_s + 60, 80)}
        (found,) = read.values()
        assert Mark.unpack(found.pack()) == found and Mark.unpack(b"x") is None
        assert not found.is_over(now_s, now_s) and found.is_over(now_s + 6, now_s) and found.is_over(now_s, now_s + 60)
        await marks.drop(read, world.deadline)
        assert await marks.read([NAMESPACE], world.deadline) == {}
