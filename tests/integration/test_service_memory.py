"""The service's memory while ten times its budget goes through it: saved, written to Redis, staged again and loaded."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from benchmarks.node import Node
from kvstore.api import SaveOutcome
from kvstore.client import RemoteStore, connect
from kvstore.runtime.deadline import Deadline
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.servers import redis_server

pytestmark = pytest.mark.servers

BUDGET_BYTES = 128 << 20
BEYOND_BYTES = 256 << 20
PAYLOAD_BYTES = 1 << 20
NUM_PROMPTS = 80


def soon() -> Deadline:
    return Deadline.after(60)


def prompt_of(number: int) -> Prompt:
    """Eight pages of two slices: 16 MiB."""
    return Prompt(ATTENTION, f"prompt {number}", 512, payload_bytes=PAYLOAD_BYTES)


def peak_bytes(pid: int) -> int:
    """The most memory that the process ever had resident, shared memory included."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


async def push(client: RemoteStore, number: int) -> int:
    prompt = prompt_of(number)
    outcomes = await asyncio.gather(*(client.save(record, deadline=soon()) for record in prompt.records()))
    assert set(outcomes) <= {SaveOutcome.STORED, SaveOutcome.BUSY, SaveOutcome.FULL}
    return outcomes.count(SaveOutcome.STORED)


async def load(client: RemoteStore, number: int) -> int:
    prompt = prompt_of(number)
    staged = await client.stage(prompt.query(), deadline=soon())
    if staged.lease is None:
        return 0
    for key in staged.keys:
        await client.load(staged.lease, key, deadline=soon())
    await client.release(staged.lease)
    return len(staged.keys)


async def test_ten_times_the_budget(tmp_path: Path) -> None:
    """Two engines save 1.3 GB into a service of 128 MiB and load what Redis kept of it: it stays under 384 MiB."""
    arguments = ("--maxmemory", "512mb", "--maxmemory-policy", "allkeys-lru")
    with (
        redis_server(arguments=arguments) as server,
        Node(tmp_path, "node", hot=server.url, memory_bytes=BUDGET_BYTES) as node,
    ):
        clients = [connect(node.url) for _ in range(2)]
        for client in clients:
            await client.wait_ready(deadline=soon())
            await client.open_namespace(prompt_of(0).description, deadline=soon())
        num_saved = num_loaded = 0
        for number in range(0, NUM_PROMPTS, 2):
            saved = await asyncio.gather(*(push(client, number + at) for at, client in enumerate(clients)))
            num_saved += sum(saved)
            num_loaded += sum(await asyncio.gather(*(load(client, max(0, number - 20)) for client in clients)))
        assert num_saved * PAYLOAD_BYTES >= 8 * BUDGET_BYTES
        assert num_loaded > 100
        peak = peak_bytes(node.pid)
        assert peak < BUDGET_BYTES + BEYOND_BYTES, peak
        for client in clients:
            await client.aclose()
