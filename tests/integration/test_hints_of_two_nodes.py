"""Two nodes that share a Redis: where a hint that one of them was given has its effect."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvstore.api import Ack, PrefixQuery
from kvstore.catalog.redis.coordination import RedisMarkBook
from kvstore.compose import open_store
from kvstore.eviction.candidates import Candidate
from kvstore.eviction.hints import RETAINED, Hint
from kvstore.model.keys import Boundary, PrefixHash
from kvstore.model.prompt_hint import EndedPrompt, Wishes, ends_of_pages
from kvstore.runtime.instruments import Instruments
from kvstore.settings import load_settings
from kvstore.store.retention.hint_marks import HintMarks
from kvstore.store.retention.policy_choice import PolicyChoice
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.records import NAMESPACE
from kvstore.testing.servers import RedisServer
from kvstore.testing.waiting import soon, until
from tests.unit.store.retention_harness import BOUNDARY_BYTES, LAYOUT, RetainedTier, open_retained

pytestmark = pytest.mark.servers


@pytest.fixture
async def clients(shared_redis: RedisServer) -> AsyncIterator[list[Redis]]:
    """One of each node."""
    async with AsyncExitStack() as stack:
        made = [
            await stack.enter_async_context(Redis(host=shared_redis.host, port=shared_redis.port)) for _ in range(2)
        ]
        await made[0].flushall()
        yield made


def prompt_of(path: Sequence[PrefixHash], wishes: Wishes | None = None) -> EndedPrompt:
    """A prompt of pages of 16 tokens, as its engine ends it."""
    boundaries = tuple(Boundary(16 * (at + 1), name) for at, name in enumerate(path))
    return EndedPrompt("r", NAMESPACE, boundaries, 16, 16 * len(path), wishes or Wishes())


async def hear_hints_that_gain(choice: PolicyChoice) -> None:
    """Prompts with hints that come to this node: those that return would lose their place to those that do not."""
    for number in range(400):
        for talk, hint in ((f"kept {number % 4}", Hint(RETAINED, 3600.0)), (f"once {number}", Hint(0, 3600.0))):
            path = [PrefixHash(hashlib.sha256(f"{talk} {at}".encode()).digest()) for at in range(3)]
            choice.observe(PrefixQuery(NAMESPACE, prompt_of(path).boundaries, 0, 48, 16), LAYOUT, "")
            choice.hint(prompt_of(path), hint, 16)
    await choice.settle(15 * BOUNDARY_BYTES, BOUNDARY_BYTES, is_near=True)


def node_of(world: RetainedTier, client: Redis) -> tuple[PolicyChoice, HintMarks]:
    """What a node follows when it evicts, and where it passes hints on."""
    marks = HintMarks(RedisMarkBook(client), Instruments(world.clock, world.meters))
    return PolicyChoice([Candidate("lru")], marks=marks, clock=world.clock), marks


@pytest.mark.parametrize("hears", [True, False], ids=["owner hears hints", "owner hears none"])
async def test_what_one_node_retains_or_releases(tmp_path: Path, clients: list[Redis], hears: bool) -> None:
    """Node A is told of a prompt that will be continued and of one that will not; node B evicts from the tier that both
    share. B follows A's hints where the tenant's hints that B itself was given have gained; else it evicts as without.
    """
    async with open_retained(tmp_path) as world:
        (told, passed), (choice, _) = (node_of(world, client) for client in clients)
        if hears:
            await hear_hints_that_gain(choice)
        assert choice.follows("") == hears
        rules = {"budget_bytes": 9 * BOUNDARY_BYTES, "start_share": 0.9, "stop_share": 0.5}
        retention = world.retention(choice=choice, **rules)
        kept, middle, released = [await world.save(name, 3) for name in ("kept", "middle", "released")]
        for path, wishes in ((kept, Wishes(retain_s=600)), (released, Wishes(release=True))):
            hint = Hint.of(wishes)
            assert hint is not None
            told.hint(prompt_of(path, wishes), hint, 16)
        await passed.flush(world.deadline)
        world.clock.now_s += 60
        assert await retention.round() > 0
        held = {name: sum(await world.held(path)) for name, path in (("kept", kept), ("released", released))}
        assert held == ({"kept": 9, "released": 0} if hears else {"kept": 0, "released": 9})
        assert sum(await world.held(middle)) < 9
        await retention.aclose()


async def test_memory_is_each_nodes_own(tmp_path: Path, shared_redis: RedisServer, clients: list[Redis]) -> None:
    """A prefetch fills the memory of the node that was asked, and a demotion empties that node's alone. Redis keeps
    what no cold tier has, so the other node, and later this one, restore the prompt.
    """
    prompt = Prompt(ATTENTION, "shared", 256)
    settings = load_settings({"memory_bytes": "16MiB", "hot": shared_redis.url, "cold": "memory:"})
    boundaries = ends_of_pages(prompt.query().boundaries, ATTENTION.page_tokens)

    def ended(request: str, **wishes: bool) -> EndedPrompt:
        return EndedPrompt(request, prompt.namespace, boundaries, 16, prompt.num_tokens, Wishes(**wishes))  # type: ignore[arg-type]

    def in_memory(store: TieredStore) -> int:
        return sum(key in store.memory for key in prompt.record_keys())

    async with open_store(settings) as first, open_store(settings) as second:
        for store in (first, second):
            await store.open_namespace(prompt.description, deadline=soon())
        for record in prompt.records():
            await second.save(record, ack=Ack.HOT, deadline=soon())
        await second.drain(soon())
        assert second.recorder is not None
        await second.recorder.drain(soon())
        whole = in_memory(second)
        assert (in_memory(first), whole) == (0, len(prompt.record_keys()))

        first.end_prompt(ended("r1", prefetch=True))
        await until(lambda: in_memory(first) == whole)
        kept = first.hints.prompts.of_request("r1", "")
        await until(lambda: kept.hints["prefetch"].startswith("fetched: "))

        first.end_prompt(ended("r2", demote=True, release=True))
        await until(lambda: "demote" in first.hints.prompts.of_request("r2", "").hints)
        assert (
            first.hints.prompts.of_request("r2", "").hints["demote"] == f"{whole} records left memory, 0 the hot tier"
        )
        assert (in_memory(first), in_memory(second)) == (0, whole)
        assert (await first.lookup(prompt.query(), deadline=soon())).resume_tokens == prompt.num_tokens
