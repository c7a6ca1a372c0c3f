"""Hits of any size that a model can produce are answered, by a service and its client, without holding the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.api import LeaseId, Staged
from kvstore.client import ClientOptions, connect
from kvstore.errors import InvalidRequest
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.record import Record, seal
from kvstore.model.kinds import FullAttention, Recurrent, SlidingWindow
from kvstore.model.layout import GroupLayout, Layout
from kvstore.runtime.pauses import collector_paused
from kvstore.service.server import Server
from kvstore.store.limits import StoreLimits
from kvstore.store.tiered import TieredStore
from kvstore.testing.loop_held import LoopHeld
from kvstore.testing.prompts import Prompt
from kvstore.testing.waiting import soon
from kvstore.tiers.memory import MemoryTier
from kvstore.wire import convert, messages
from kvstore.wire.address import parse_address
from kvstore.wire.frames import pack_head

LARGE = Layout(256, tuple(GroupLayout(FullAttention(), 5) for _ in range(5)))
"""25 slices: with pages of 256 tokens, 102,400 records for 1 Mi tokens."""
MIXED = Layout(
    64,
    (GroupLayout(FullAttention(), 8), GroupLayout(SlidingWindow(1000), 4), GroupLayout(Recurrent(), 3)),
)


def small_records(prompt: Prompt) -> list[Record]:
    """Every record of a prompt, with a payload of 8 bytes."""
    layout, made = prompt.layout, []
    ends = range(layout.page_tokens, prompt.num_tokens + 1, layout.page_tokens)
    tokens = {prompt.boundary(at).prefix: at for at in ends}
    for key in prompt.record_keys(ends):
        kind, span = layout.groups[key.group].record_at(tokens[key.prefix], layout.page_tokens)
        header = HeaderV1.unsealed(key, kind, span, codec_chain=0, decoded_bytes=8, created_ms=1_700_000_000_000)
        made.append(seal(header, bytearray(HEADER_BYTES + 8)))
    return made


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Client and service share this process, whose hundreds of thousands of test records a collection would go over."""
    with collector_paused():
        yield


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(("layout", "num_tokens", "num_records"), [(LARGE, 1 << 20, 102_400), (MIXED, 1 << 16, 8259)])
async def test_a_hit_of_any_size_is_answered(
    tmp_path: Path, layout: Layout, num_tokens: int, num_records: int, tell: Callable[[str], None]
) -> None:
    """All records of a prompt of 1 Mi tokens are staged at once, each can be loaded, and the lease ends as usual."""
    prompt = Prompt(layout, "long", num_tokens, step_tokens=layout.page_tokens)
    memory = MemoryTier(1 << 30)
    store = TieredStore(memory, limits=StoreLimits(stage_bytes=700 << 20))
    for record in small_records(prompt):
        memory.insert(record)
    server = Server(store)
    await server.listen([parse_address(f"unix:{tmp_path / 's'}")])
    # client and service share this loop: what the one computes is no stall of the other
    client = connect(str(server.addresses[0]), options=ClientOptions(stall_timeout_s=20.0))
    await client.open_namespace(prompt.description, deadline=soon())
    held = LoopHeld()
    direct = await store.stage(prompt.query(), deadline=soon())
    staged = await client.stage(prompt.query(), deadline=soon())
    assert staged.resume_tokens == num_tokens and len(staged.keys) == num_records
    assert (staged.keys, staged.spans, staged.sources) == (direct.keys, direct.spans, direct.sources)
    assert staged.lease is not None and direct.lease is not None
    for key in (staged.keys[0], staged.keys[-1]):
        assert (await client.load(staged.lease, key, deadline=soon())).key == key
    async with held.watching():
        again = await store.stage(prompt.query(), deadline=soon())
        await server.answers._work.run(num_records, convert.staged_reply, 1, again, prompt.query(), layout)
        assert again.lease is not None
        await store.release(again.lease)
    tell(f"{num_records} records: {held.longest_s * 1e3:.0f} ms")
    for lease in (staged.lease, direct.lease):
        await store.release(lease)
    assert memory.pinned_bytes == 0
    await client.aclose()
    await server.aclose()
    await store.aclose()
    assert held.longest_s < 0.6


def test_what_is_packed_comes_back() -> None:
    """With states, windows and tails; an answer to a client that does not ask for packing has none, and what was not
    asked for is refused."""
    prompt = Prompt(MIXED, "mixed", 1000)
    query = prompt.query()
    keys = tuple(prompt.record_keys([64, 128, 1000 // 16 * 16]))
    spans = []
    for key in keys:
        tokens = next(one.tokens for one in query.boundaries if one.prefix == key.prefix)
        _, span = MIXED.groups[key.group].record_at(tokens, MIXED.page_tokens)
        spans.append((span.start, span.stop))
    staged = Staged(LeaseId(bytes(16)), 992, keys, tuple(spans), {"memory": len(keys)}, 77, 3.0)
    packed, plain = convert.staged_reply(1, staged, query, MIXED), convert.staged_reply(1, staged)
    assert packed.chosen and not packed.prefixes and not plain.chosen
    assert len(pack_head(messages.encode(packed))) < len(pack_head(messages.encode(plain))) / 10
    assert convert.parse_staged(packed, query, MIXED) == convert.parse_staged(plain) == staged
    with pytest.raises(InvalidRequest, match="chosen"):
        convert.parse_staged(packed)
    partial = Staged(LeaseId(bytes(16)), 992, keys[1:], tuple(spans[1:]), {"memory": len(keys) - 1})
    reply = convert.staged_reply(1, partial, query, MIXED)
    assert not reply.chosen and convert.parse_staged(reply, query, MIXED) == partial
