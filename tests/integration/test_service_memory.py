"""The memory of a service while ten times its budget goes through it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from kvstore.api import Ack, SaveOutcome
from kvstore.client import RemoteStore, connect
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.serve import Service
from kvstore.testing.servers import redis_server
from kvstore.testing.waiting import soon

pytestmark = pytest.mark.servers

MIB = 1 << 20
BEYOND_BYTES = 256 * MIB
PAGES_AT_ONCE = 8


def prompt_of(number: int, num_tokens: int = 512) -> Prompt:
    """Pages of two slices, of a MiB each."""
    return Prompt(ATTENTION, f"prompt {number}", num_tokens, payload_bytes=MIB)


def peak_bytes(service: Service) -> int:
    """The most memory that the process ever had resident, shared memory included."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{service.pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


async def client_of(service: Service) -> RemoteStore:
    client = connect(service.url)
    await client.wait_ready(deadline=soon())
    await client.open_namespace(prompt_of(0).description, deadline=soon())
    return client


@pytest.mark.parametrize(
    ("outage", "ack"),
    [
        pytest.param("", Ack.MEMORY, id="memory"),
        pytest.param("", Ack.HOT, id="hot"),
        pytest.param("frozen", Ack.MEMORY, id="with Redis frozen"),
    ],
)
async def test_saves_beyond_the_budget_are_dropped(tmp_path: Path, outage: str, ack: Ack) -> None:
    """Saves as fast as the service takes them, its Redis small, or frozen: what finds no room is dropped, and at no
    moment does the process hold more than its budget and 256 MiB."""
    budget_bytes, outcomes = 64 * MIB, list[SaveOutcome]()
    with redis_server(maxmemory_bytes=128 * MIB) as hot:
        flags = {"hot": hot.url, "cold": f"file://{tmp_path}/records", "disk_bytes": "256MiB"}
        with Service(tmp_path, {**flags, "memory_bytes": str(budget_bytes)}) as service:
            client = await client_of(service)
            if outage:
                hot.freeze()
            for first in range(0, 10 * budget_bytes // (2 * MIB), PAGES_AT_ONCE):
                pages = [prompt_of(number, 64).records() for number in range(first, first + PAGES_AT_ONCE)]
                saves = [client.save(record, ack=ack, deadline=soon()) for page in pages for record in page]
                outcomes += await asyncio.gather(*saves)
            peak = peak_bytes(service)
            await client.aclose()
    assert SaveOutcome.STORED in outcomes
    if ack is Ack.MEMORY:
        assert outcomes.count(SaveOutcome.STORED) > len(outcomes) // 2
    assert peak < budget_bytes + BEYOND_BYTES, peak


async def push(client: RemoteStore, number: int) -> int:
    outcomes = await asyncio.gather(*(client.save(one, deadline=soon()) for one in prompt_of(number).records()))
    assert set(outcomes) <= {SaveOutcome.STORED, SaveOutcome.BUSY, SaveOutcome.FULL}
    return outcomes.count(SaveOutcome.STORED)


async def load(client: RemoteStore, number: int) -> int:
    staged = await client.stage(prompt_of(number).query(), deadline=soon())
    if staged.lease is None:
        return 0
    for key in staged.keys:
        await client.load(staged.lease, key, deadline=soon())
    await client.release(staged.lease)
    return len(staged.keys)


async def test_saves_and_loads_of_two_engines(tmp_path: Path) -> None:
    """Two engines save 1.3 GB into a service of 128 MiB and load what Redis kept of it: it stays under 384 MiB."""
    budget_bytes, arguments = 128 * MIB, ("--maxmemory", "512mb", "--maxmemory-policy", "allkeys-lru")
    with redis_server(arguments=arguments) as hot:
        flags = {"hot": hot.url, "cold": "memory:", "memory_bytes": str(budget_bytes)}
        with Service(tmp_path, flags) as service:
            clients = [await client_of(service) for _ in range(2)]
            num_saved = num_loaded = 0
            for number in range(0, 80, 2):
                saved = await asyncio.gather(*(push(client, number + at) for at, client in enumerate(clients)))
                num_saved += sum(saved)
                num_loaded += sum(await asyncio.gather(*(load(client, max(0, number - 20)) for client in clients)))
            assert num_saved * MIB >= 8 * budget_bytes
            assert num_loaded > 100
            peak = peak_bytes(service)
            assert peak < budget_bytes + BEYOND_BYTES, peak
            for client in clients:
                await client.aclose()
