"""A tenant's `status` covers that tenant alone: nothing that others do shows in it, neither how much nor when."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from kvstore.api import Outcome
from kvstore.cli.status import page_of
from kvstore.cli.status_problems import problems_of
from kvstore.client import ClientOptions, RemoteStore, connect
from kvstore.service.authentication import Grant
from kvstore.service.server import Server
from kvstore.store.limits import StoreLimits
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.store_node import save_all
from kvstore.testing.tokens import credentials_of
from kvstore.testing.waiting import soon
from kvstore.tiers.filesystem import FilesystemTier
from kvstore.tiers.memory import MemoryTier
from kvstore.wire.address import parse_address


async def told(client: RemoteStore) -> Mapping[str, object]:
    """The status that a client gets, without the time."""
    values = dict(await client.status(deadline=soon()))
    service = dict(values["service"])  # type: ignore[call-overload]
    assert service.pop("uptime_s") >= 0
    return {**values, "service": service}


async def be_busy(client: RemoteStore, tenant: str) -> None:
    """Save, look up, lease, discard, report, fail: everything that changes a number."""
    prompt = Prompt(ATTENTION, "busy", 512, payload_bytes=30_000, tenant=tenant)
    await save_all(client, prompt)
    await client.lookup(prompt.query(), deadline=soon())
    await client.stage(prompt.query(), deadline=soon())
    await client.discard(prompt.key(64), "a test", deadline=soon())
    client.report(Outcome("a request", prompt.namespace, 512, 512, 0, 448, reason="nothing_stored"))


async def test_nothing_of_others_shows(tmp_path: Path) -> None:
    """Red's status is the same before, while and after blue works, byte for byte; its own work shows in it. The
    service's own user sees everything."""
    cold = await FilesystemTier.open(tmp_path / "records", budget_bytes=64 << 20)
    store = TieredStore(MemoryTier(16 << 20), None, cold, limits=StoreLimits(stage_bytes=8 << 20))
    server = Server(store, credentials=credentials_of({name: Grant(name) for name in ("red", "blue")}))
    await server.listen([parse_address(f"unix:{tmp_path / 's'}")])
    red, blue, ours = (
        connect(str(server.addresses[0]), options=ClientOptions(token=token, name=f"pid of {token or 'ours'}"))
        for token in ("red", "blue", "")
    )
    await red.wait_ready(deadline=soon())
    before = await told(red)
    working = asyncio.ensure_future(be_busy(blue, "blue"))
    seen = []
    while not working.done():
        seen.append(await told(red))
    await working
    await store.drain(soon())
    seen.append(await told(red))
    assert all(one == before for one in seen), next(one for one in seen if one != before)
    assert "blue" not in str(before)
    await be_busy(red, "red")
    after = await told(red)
    assert after["namespaces"] == 1 and after["leases"]["active"] == 1 and after["leases"]["pinned_bytes"] > 0  # type: ignore[index]
    assert after["recent"]["reasons"] == {"nothing_stored": 1}  # type: ignore[index]
    everything = await told(ours)
    assert everything["namespaces"] == 2 and everything["counters"] and "pid of blue" in str(everything["service"])
    assert everything["recent"]["reasons"] == {"nothing_stored": 2}  # type: ignore[index]
    values = await red.status(deadline=soon())
    assert page_of("here", values) is not None and problems_of(values) is not None  # what the command line shows of it
    for client in (red, blue, ours):
        await client.aclose()
    await server.aclose()
    await store.aclose()
    await cold.aclose()
