"""Requests of operators never delay engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvstore.catalog.base import STEP_ENTRIES, Addition, Step
from kvstore.catalog.entry import Level
from kvstore.catalog.sqlite.catalog import SqliteCatalog
from kvstore.client import connect
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.testing.prompts import Prompt
from kvstore.testing.store_node import save_all
from kvstore.testing.waiting import soon
from tests.unit.admin.service_harness import ServiceHarness, open_service, prompt_of

MANY = 5000


@pytest.fixture
async def large(tmp_path: Path) -> AsyncIterator[tuple[ServiceHarness, Prompt]]:
    """A prompt, and thousands of further entries of its namespace."""
    async with open_service(tmp_path) as made:
        prompt = await made.save(prompt_of("a"))
        prefixes = [PrefixHash(number.to_bytes(32, "big")) for number in range(1, MANY + 1)]
        keys = [RecordKey(prompt.namespace, prefix, 0, 0) for prefix in prefixes]
        await made.catalog.add([Addition(key, Level.COLD, 100, 64) for key in keys], deadline=soon())
        yield made, prompt


async def test_engines_are_served_while_a_list_hangs(
    large: tuple[ServiceHarness, Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The administration's thread is blocked in the middle of a list. Meanwhile an engine opens, looks up, stages,
    loads and saves. Then the list is answered in full.
    """
    made, prompt = large
    inside, go_on = threading.Event(), threading.Event()
    step = SqliteCatalog.step

    async def stuck(self: SqliteCatalog, *arguments: object, **options: object) -> Step:
        inside.set()
        go_on.wait()  # the thread, not just the task
        return await step(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(SqliteCatalog, "step", stuck)
    query = {"namespace": prompt.namespace.hex(), "order": "hits", "limit": 1000}
    async with made.client("red") as client, asyncio.TaskGroup() as group:
        listing = group.create_task(client.get("/v1/prefixes", params=query))
        try:
            await asyncio.to_thread(inside.wait)
            assert not listing.done()
            engine = connect(str(made.server.addresses[0]), token="blue engine token")
            other = Prompt(prompt.layout, "b", 128, tenant="blue")
            await save_all(engine, other)
            assert (await engine.lookup(other.query(), deadline=soon())).resume_tokens == 128
            staged = await engine.stage(other.query(), deadline=soon())
            assert staged.lease is not None
            for key in staged.keys:
                await engine.load(staged.lease, key, deadline=soon())
            await engine.aclose()
            assert not listing.done()
        finally:
            go_on.set()
        page = (await listing).json()
    assert page["is_complete"] and len(page["prefixes"]) == 1000


async def test_lists_read_in_bounded_steps(
    large: tuple[ServiceHarness, Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every order, no step reads more than its bound, no page exceeds its limit, all pages together have every
    entry, and nothing runs on the data loop.
    """
    made, prompt = large
    counts: list[int] = []
    step, call = SqliteCatalog.step, asyncio.run_coroutine_threadsafe
    calls: list[object] = []

    async def counted(
        self: SqliteCatalog, namespace: NamespaceId, cursor: str, *, count: int, deadline: Deadline
    ) -> Step:
        found = await step(self, namespace, cursor, count=count, deadline=deadline)
        counts.append(len(found.prefixes))
        return found

    def noted(work: Coroutine[Any, Any, object], loop: asyncio.AbstractEventLoop) -> Future[object]:
        calls.append(work)
        return call(work, loop)

    monkeypatch.setattr(SqliteCatalog, "step", counted)
    async with made.client("red") as client:
        await pages(client, prompt, "stored", limit=1000)  # the namespace's manifest is read once
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", noted)
        for order in ("stored", "idle"):
            listed = await pages(client, prompt, order, limit=1000)
            assert len(listed) == len(set(listed)) == MANY + 6
        pins = (await client.get("/v1/pins", params={"namespace": prompt.namespace.hex()})).json()
        assert pins == {"pins": [], "next_cursor": None, "is_complete": True}
    assert max(counts) <= STEP_ENTRIES
    assert calls == []


async def pages(client: httpx.AsyncClient, prompt: Prompt, order: str, *, limit: int) -> list[str]:
    listed: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        query = {"namespace": prompt.namespace.hex(), "order": order, "limit": limit, "cursor": cursor}
        page = (await client.get("/v1/prefixes", params=query)).json()
        assert len(page["prefixes"]) <= limit
        listed += [one["prefix"] for one in page["prefixes"]]
        cursor = page["next_cursor"]
    return listed


async def test_a_page_that_runs_out_of_time_is_incomplete(
    large: tuple[ServiceHarness, Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that runs out of time has the entries of one step, is not complete, and its cursor continues."""
    made, prompt = large
    monkeypatch.setattr("kvstore.service.admin.listing._PAGE_S", 0.0)
    async with made.client("red") as client:
        query = {"namespace": prompt.namespace.hex(), "limit": 1000}
        page = (await client.get("/v1/prefixes", params=query)).json()
        assert (len(page["prefixes"]), page["is_complete"]) == (STEP_ENTRIES, False)
        assert len(await pages(client, prompt, "stored", limit=1000)) == MANY + 6
        page = (await client.get("/v1/prefixes", params={**query, "order": "hits", "limit": 10})).json()
        assert (len(page["prefixes"]), page["is_complete"]) == (10, False) and page["next_cursor"]


async def test_a_namespace_is_deleted_over_several_calls(
    large: tuple[ServiceHarness, Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that runs out of time is not complete; repeated calls delete everything."""
    made, prompt = large
    monkeypatch.setattr("kvstore.service.admin.jobs.deletions._DELETE_S", 0.0)
    path, num_deleted, num_calls = f"/v1/namespaces/{prompt.namespace.hex()}?confirm=true", 0, 0
    async with made.client("red") as client:
        while True:
            num_calls += 1
            deleted = (await client.delete(path)).json()
            num_deleted += deleted["by_tier"]["filesystem"]["num_boundaries"]
            if deleted["is_complete"]:
                break
        held = (await client.get(f"/v1/namespaces/{prompt.namespace.hex()}")).json()
    assert (num_deleted, held["num_boundaries"]) == (MANY + 6, 0)
    assert num_calls > 1
