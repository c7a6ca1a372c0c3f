"""Lookups of the largest size, as many as one connection may send at once: the event loop is never held for long, and
other clients are served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.catalog.sqlite.catalog import SqliteCatalog
from kvstore.model.kinds import FullAttention, Recurrent
from kvstore.model.layout import GroupLayout, Layout
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.meters import Meters
from kvstore.store.limits import StoreLimits
from kvstore.store.recorder import Recorder
from kvstore.store.tiered import TieredStore
from kvstore.testing.attacked import AttackedService, beside
from kvstore.testing.catalog_contract import mark_complete
from kvstore.testing.loop_held import LoopHeld
from kvstore.testing.prompts import Prompt
from kvstore.testing.servers import RedisServer
from kvstore.tiers.filesystem import FilesystemTier
from kvstore.tiers.memory import MemoryTier
from kvstore.wire import convert, messages
from kvstore.wire.address import UnixAddress, parse_address
from kvstore.wire.frames import pack_head
from kvstore.wire.messages import encode

GREEDY = "greedy"

WIDEST = Layout(64, tuple(GroupLayout(FullAttention() if at % 2 else Recurrent(), 32) for at in range(64)))
"""As many groups and slices as a layout may have."""
FOUR = Layout(16, tuple(GroupLayout(FullAttention(), 8) for _ in range(4)))
DEEPEST = Layout(16, (GroupLayout(FullAttention(), 8),))
HELD_S_MAX = 0.2
"""The event loop's thread computes at most so long without a turn for others: some milliseconds, on a slow machine."""


async def save_one_at_each(service: AttackedService, prompt: Prompt, token: str) -> None:
    """Save a record of one slice of one group at each boundary."""
    client = service.client(token)
    await client.open_namespace(prompt.description, deadline=Deadline.after(60))
    for boundary in prompt.query().boundaries:
        await client.save(prompt.record(boundary.tokens, 1), deadline=Deadline.after(60))
    await client.aclose()


@pytest.mark.parametrize("place", ["memory", "catalog", "directory"])
@pytest.mark.parametrize("layout", [WIDEST, DEEPEST], ids=["widest", "deepest"])
async def test_no_lookup_holds_the_event_loop(
    tmp_path: Path, layout: Layout, place: str, tell: Callable[[str], None]
) -> None:
    """The longest prompts that one message can carry, of the layouts with the most groups and with the most boundaries:
    looked up and staged in memory alone, with a catalog, and with a directory that has none."""
    num_boundaries = min(100_000, (1 << 20) // len(layout.groups))
    prompt = Prompt(layout, "long", num_boundaries * 16, payload_bytes=100)
    query, deadline = prompt.query(), Deadline.after(120)
    meters = Meters()
    recorder, cold = None, None
    if place != "memory":
        cold = await FilesystemTier.open(tmp_path / "records", budget_bytes=1 << 30)
    if place == "catalog":
        recorder = Recorder(await SqliteCatalog.open(tmp_path / "catalog"), Instruments(meters=meters))
        await mark_complete(recorder.catalog)
    limits = StoreLimits(stage_bytes=64 << 20, stall_timeout_s=30.0)
    store = TieredStore(
        MemoryTier(128 << 20), None, cold, recorder=recorder, limits=limits, instruments=Instruments(meters=meters)
    )
    await store.open_namespace(prompt.description, deadline=deadline)
    for record in prompt.records(range(layout.page_tokens, layout.page_tokens * 3, layout.page_tokens)):
        await store.save(record, deadline=deadline)
    held = LoopHeld()
    async with held.watching():
        found = await store.lookup(query, deadline=deadline)
        staged = await store.stage(query, deadline=deadline)
    tell(f"{place}, {len(layout.groups)} groups: {held.longest_s * 1e3:.0f} ms")
    await store.aclose()
    if recorder is not None:
        await recorder.aclose()
        await recorder.catalog.aclose()
    if cold is not None:
        await cold.aclose()
    assert found.resume_tokens == staged.resume_tokens == 2 * layout.page_tokens
    assert held.longest_s < HELD_S_MAX


async def pipelined(service: AttackedService, prompt: Prompt, number: int, token: str = "") -> None:
    """Look a prompt up a number of times in one go, and read all answers."""
    address = parse_address(service.url)
    assert isinstance(address, UnixAddress)
    reader, writer = await asyncio.open_unix_connection(address.path, limit=64 << 20)
    writer.write(pack_head(encode(messages.Hello(1, token=token))))
    writer.write(pack_head(encode(messages.OpenNamespace(number, 60_000, prompt.description.canonical))))
    await reader.readuntil(b"namespace_opened")
    fields = convert.query_fields(prompt.query())
    for request in range(number):
        writer.write(pack_head(encode(messages.Lookup(request, 60_000, **fields))))
        await writer.drain()
    answered = 0
    async with asyncio.timeout(120):
        while answered < number:
            data = await reader.readuntil(b"type\xa9looked_up")
            assert b"refused" not in data
            answered += 1
    writer.close()


@pytest.mark.parametrize(
    ("attack", "num_connections", "place"),
    [("deep", 1, "directory"), ("deep", 1, "redis"), ("wide", 1, "directory"), ("wide", 4, "redis")],
)
@pytest.mark.servers
async def test_pipelined_lookups_delay_nobody(
    folder: Path,
    shared_redis: RedisServer,
    full: bool,
    attack: str,
    num_connections: int,
    place: str,
    tell: Callable[[str], None],
) -> None:
    """One connection, or several of one tenant, ask at once for 300 lookups of 8,192 boundaries, or of as many groups
    and slices as a layout may have, where each boundary has a record: another client's lookups are answered."""
    tenant = GREEDY if num_connections > 1 else ""
    layout, num_boundaries, number = (FOUR, 8192, 40) if attack == "deep" else (WIDEST, 512, 8)
    prompt = Prompt(layout, "long", num_boundaries * 16, model=f"long {attack}", tenant=tenant)
    hot = shared_redis.url if place == "redis" else None

    async def ask() -> None:
        if attack == "wide":
            await save_one_at_each(service, prompt, tenant)
        each = (300 if full else number) // num_connections
        await asyncio.gather(*(pipelined(service, prompt, each, tenant) for _ in range(num_connections)))

    with AttackedService(folder, hot=hot, tokens={tenant: tenant} if tenant else None) as service:
        seen = await beside(service, ask)
    tell(f"{attack}, {num_connections} connections, {place}: {seen}")
    seen.check(full=full)
