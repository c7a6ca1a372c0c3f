"""Long operations: watched, cancelled, bounded, visible to their tenant, and what each of them does."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvstore.catalog.base import Addition, LeaveReason, Leaving, Removal
from kvstore.catalog.entry import Level
from kvstore.catalog.local import LocalCatalog
from kvstore.format.names import format_name
from kvstore.model.keys import NamespaceId, PlainChain, RecordKey
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.service.admin.jobs import deletions, gc
from kvstore.service.admin.jobs.board import JobBoard
from kvstore.service.admin.jobs.job import Job, JobKind
from kvstore.service.admin.problems import Refused
from kvstore.service.authentication import Grant
from kvstore.testing.keys import write_keys
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.waiting import soon, until
from kvstore.tiers.base import Entry
from kvstore.tiers.filesystem.tier import FilesystemTier
from tests.unit.admin.service_harness import ServiceHarness, ended, open_service, prompt_of


async def held(made: ServiceHarness, prompt: Prompt) -> int:
    await made.store.open_namespace(prompt.description, deadline=soon())
    return (await made.store.lookup(prompt.query(), deadline=soon())).resume_tokens


async def test_a_boundary_is_deleted_with_its_descendants(
    made: ServiceHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """A boundary is deleted with all that continue it; earlier boundaries and pinned ones stay. Without `confirm`
    nothing is deleted, and the report is the same.
    """
    caplog.set_level(logging.INFO, "kvstore.audit")
    prompt = await made.save(prompt_of("a"))
    body = {"namespace": prompt.namespace.hex(), "prefix": prompt.boundary(192).prefix.hex()}
    async with made.client("red") as client:
        told = await ended(client, await client.post("/v1/deletions", json=body))
        assert (told["state"], told["is_dry_run"], told["kind"]) == ("done", True, "deletion")
        gone = told["report"]["by_tier"]["filesystem"]
        assert (gone["num_boundaries"], told["progress"]) == (4, {"done": 4, "total": 4, "unit": "boundaries"})
        assert await held(made, prompt) == 336
        pin = {"namespace": prompt.namespace.hex(), "prefix": prompt.boundary(192).prefix.hex(), "expires_in_s": 60}
        assert (await client.post("/v1/pins", json=pin)).status_code == 201
        done = await ended(client, await client.post("/v1/deletions?confirm=true", json=body))
        assert (done["report"]["num_pinned"], done["report"]["by_tier"]["filesystem"]["num_boundaries"]) == (1, 3)
        assert done["report"]["is_complete"] and await held(made, prompt) == 192
        unused = await ended(client, await client.post("/v1/deletions", json={**body, "unused_s": 3600}))
        assert unused["report"]["by_tier"] == {}
        assert (
            f"job={done['job']} kind=deletion state=done dry_run=False done=4 unit=boundaries who='red/" in caplog.text
        )


@pytest.mark.parametrize("is_alone", [False, True])
async def test_a_boundary_that_is_pinned_during_its_deletion(
    made: ServiceHarness, monkeypatch: pytest.MonkeyPatch, *, is_alone: bool
) -> None:
    """After the pins were read: it stays, counts as pinned and not as deleted, and alone its deletion is refused."""
    prompt = await made.save(prompt_of("a"))
    namespace, last = prompt.namespace, prompt.boundary(336).prefix
    read_pins = deletions.pins_of

    async def read_too_early(*arguments: Any) -> Any:
        pins = await read_pins(*arguments)
        await made.catalog.pin(namespace, [last], SYSTEM_CLOCK.wall_ms() // 1000 + 60, deadline=soon())
        return pins

    monkeypatch.setattr(deletions, "pins_of", read_too_early)
    async with made.client("red") as client:
        if is_alone:
            one = await client.delete(f"/v1/prefixes/{namespace.hex()}/{last.hex()}?confirm=true")
            assert one.status_code == 409
            assert await held(made, prompt) == 336
        else:
            body = {"namespace": namespace.hex(), "prefix": prompt.boundary(256).prefix.hex()}
            done = await ended(client, await client.post("/v1/deletions?confirm=true", json=body))
            assert (done["report"]["num_pinned"], done["report"]["by_tier"]["filesystem"]["num_boundaries"]) == (1, 2)
    assert await made.catalog.get(namespace, last, deadline=soon()) is not None


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_one_users_prompts_are_deleted_by_salt(tmp_path: Path, is_encrypted: bool) -> None:
    """Two users send the same tokens with their own salts. One user's prompts, given by the salt and their first
    tokens, are deleted with all later turns; the other's stay. The same with keyed names.
    """
    system, prompt = list(range(64)), Prompt(ATTENTION, "tokens", 64, tenant="red")
    keys = {"encryption_keys": str(write_keys(tmp_path / "keys.toml", [("red", 1, 1)]))} if is_encrypted else {}
    async with open_service(tmp_path, **keys) as made, made.client("red") as client:
        for user in ("anna", "ben"):
            for turn in (1, 2, 3):
                await made.save_pages(prompt, PlainChain(user).extend(system + [turn] * 64 * turn))
        body = {"namespace": prompt.namespace.hex(), "token_ids": system, "cache_salt": "anna"}
        told = await ended(client, await client.post("/v1/deletions", json=body))
        assert told["report"]["by_tier"]["filesystem"]["num_boundaries"] == 1 + 1 + 2 + 3
        done = await ended(client, await client.post("/v1/deletions?confirm=true", json=body))
        assert done["report"]["by_tier"] == told["report"]["by_tier"]
        for user, resumes in (("anna", 0), ("ben", 64 * 3)):
            asked = {"namespace": prompt.namespace.hex(), "token_ids": system + [2] * 128, "cache_salt": user}
            assert (await client.post("/v1/lookup", json=asked)).json()["resume_tokens"] == resumes
        alone = await client.post("/v1/deletions", json={"namespace": prompt.namespace.hex(), "cache_salt": "anna"})
        assert (alone.status_code, alone.json()["field"]) == (422, "body.token_ids")
        assert "tokens" in alone.json()["detail"]


async def test_a_running_job_is_cancelled(made: ServiceHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that hangs in the tier is listed as running, to its own tenant only. Cancelled, it ends, and hidden
    boundaries are visible again. A second cancellation changes nothing.
    """
    prompt = await made.save(prompt_of("a"))
    began, go_on = asyncio.Event(), asyncio.Event()

    async def hang(*_: object, **__: object) -> None:
        began.set()
        await go_on.wait()

    monkeypatch.setattr(made.store.operations, "delete", hang)
    body = {"namespace": prompt.namespace.hex()}
    async with made.client("red") as client, made.client("blue") as blue, made.client("red reader") as reader:
        job = (await client.post("/v1/deletions?confirm=true", json=body)).json()["job"]
        await began.wait()
        for one in (client, reader):
            assert [(job["job"], job["state"]) for job in (await one.get("/v1/jobs")).json()["jobs"]] == [
                (job, "running")
            ]
        assert (await blue.get("/v1/jobs")).json()["jobs"] == []
        assert (await blue.delete(f"/v1/jobs/{job}")).status_code == 404
        assert (await reader.delete(f"/v1/jobs/{job}")).status_code == 403
        cancelled = (await client.delete(f"/v1/jobs/{job}")).json()
        assert cancelled["state"] == "cancelled" and cancelled["ended_s"] is not None
        assert (await client.delete(f"/v1/jobs/{job}")).json() == cancelled
        entry = await made.catalog.get(prompt.namespace, prompt.boundary(128).prefix, deadline=soon())
        assert entry is not None and not entry.leaving


async def test_a_job_that_is_cancelled_while_it_hides_boundaries_shows_them_again(
    made: ServiceHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog has hidden them and has yet to answer: else retention would delete them later."""
    prompt, began, start = await made.save(prompt_of("a")), threading.Event(), LocalCatalog.start_leaving

    async def hang(*args: Any, **more: Any) -> None:
        await start(*args, **more)
        began.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(LocalCatalog, "start_leaving", hang)
    async with made.client("red") as client:
        body = {"namespace": prompt.namespace.hex()}
        job = (await client.post("/v1/deletions?confirm=true", json=body)).json()["job"]
        await asyncio.to_thread(began.wait)
        entry = await made.catalog.get(prompt.namespace, prompt.boundary(128).prefix, deadline=soon())
        assert entry is not None and entry.leaving
        assert (await client.delete(f"/v1/jobs/{job}")).json()["state"] == "cancelled"
        entry = await made.catalog.get(prompt.namespace, prompt.boundary(128).prefix, deadline=soon())
        assert entry is not None and not entry.leaving


async def test_jobs_are_bounded_and_end_with_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant's third job is refused while two run; another tenant's is not. The service stops although jobs hang."""
    began = asyncio.Semaphore(0)
    async with open_service(tmp_path) as made:
        red, blue = await made.save(prompt_of("a")), await made.save(prompt_of("b", "blue"))

        async def hang(*_: object, **__: object) -> None:
            began.release()
            await asyncio.Event().wait()

        monkeypatch.setattr(made.store.operations, "delete", hang)
        async with made.client("red") as client, made.client("blue") as other:
            for _ in range(2):
                started = await client.post("/v1/deletions?confirm=true", json={"namespace": red.namespace.hex()})
                assert started.status_code == 202
            refused = await client.post("/v1/gc")
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
            assert refused.json()["detail"] == "2 of your jobs are running: wait for one, or cancel it"
            started = await other.post("/v1/deletions?confirm=true", json={"namespace": blue.namespace.hex()})
            assert started.status_code == 202
            for _ in range(3):
                await began.acquire()
    assert not [thread for thread in threading.enumerate() if thread.name == "kvstore-admin"]


async def test_jobs_of_tenants_keep_no_operator_out() -> None:
    """Three tenants run as many jobs as they may: a fourth waits, and operators have two of their own."""
    board = JobBoard(None)

    async def hang(_: Job) -> None:
        await asyncio.Event().wait()

    def start(tenant: str | None) -> None:
        board.start(JobKind.GC, Grant(tenant), hang, about={})

    for tenant in ("a", "a", "b", "b", "c", "c"):
        start(tenant)
    with pytest.raises(Refused, match="too many jobs of other tenants are running: try again later"):
        start("d")
    for _ in range(2):
        start(None)
    with pytest.raises(Refused, match="2 of your jobs are running: wait for one"):
        start(None)
    await board.aclose()


async def test_what_serves_no_hit_is_collected(made: ServiceHarness, tmp_path: Path) -> None:
    """Retired weights, a boundary that lacks a slice with all that continue it, an interrupted deletion, and a record
    that the catalog lacks: a dry run finds them, the next run deletes them and nothing else.
    """
    old = await made.save(Prompt(ATTENTION, "a", 128, tenant="red", weights_id="old"))
    kept = await made.save(prompt_of("a"))
    broken = await made.save(Prompt(ATTENTION, "broken", 64 * 4, tenant="red", model="broken"))
    key = broken.key(128, 0, 1)
    await made.store.operations.delete([key], Level.COLD, deadline=soon())
    await made.catalog.remove([Removal(key, Level.COLD, None, LeaveReason.LOST)], deadline=soon())
    cut = await made.save(Prompt(ATTENTION, "cut", 64, tenant="red", model="cut"))
    leaving = Leaving(cut.namespace, cut.boundary(64).prefix)
    await made.catalog.start_leaving([leaving], Level.COLD, deadline=soon())
    lost = await made.save(Prompt(ATTENTION, "lost", 64, tenant="red", model="lost"))
    await made.catalog.remove(
        [Removal(key, Level.COLD, None, LeaveReason.LOST) for key in lost.record_keys()], deadline=soon()
    )
    orders = made.store.operations.operator_rules
    assert orders is not None
    await orders.retire("red", "old", is_retired=True, deadline=soon())
    expected = {"retired": 2, "incomplete": 3, "unfinished": 1, "orphans": 1}
    async with made.client("operator") as client, made.client("red") as red:
        fresh = await ended(red, await red.post("/v1/gc"))
        assert fresh["report"]["incomplete"] == {} and fresh["report"]["orphans"] == {}
        pushed = pytest.MonkeyPatch()
        pushed.setattr("kvstore.service.admin.jobs.gc.UNUSED_S", 0)  # a minute has passed
        waiting = await ended(red, await red.post("/v1/gc"))
        assert waiting["report"]["incomplete"] == {}  # memory has what the tier lacks, and may have still to write it
        await made.store.operations.forget([key])
        for confirm in (False, True):
            job = await ended(client, await client.post("/v1/gc", params={"confirm": confirm}))
            notes = [] if confirm else [gc.MAY_BE_LIVE]
            assert (job["state"], job["error"], job["report"]["notes"]) == ("done", None, notes)
            found = {kind: job["report"][kind]["filesystem"]["num_boundaries"] for kind in expected}
            assert found == expected
        again = await ended(client, await client.post("/v1/gc"))
        pushed.undo()
        assert all(again["report"][kind] == {} for kind in expected)
    assert await held(made, kept) == 336
    for key in (*old.record_keys(), *lost.record_keys(), *cut.record_keys()):
        assert not (tmp_path / "records" / format_name(key)).exists()
    await orders.retire("red", "old", is_retired=False, deadline=soon())
    assert (await held(made, old), await held(made, broken)) == (0, 64)


async def test_a_record_whose_entry_is_on_its_way_is_no_orphan(
    made: ServiceHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record is stored first and reported to the catalog then, which may be slow. What was found counts as deleted
    only once it is.
    """
    monkeypatch.setattr(gc, "UNUSED_S", 1.0)
    await made.save(Prompt(ATTENTION, "a", 64, tenant="red"))
    is_taken, add = asyncio.Event(), made.catalog.add

    async def slow(additions: Sequence[Addition], *, deadline: Deadline) -> list[bool]:
        await is_taken.wait()
        return await add(additions, deadline=deadline)

    monkeypatch.setattr(made.catalog, "add", slow)
    fresh = Prompt(ATTENTION, "fresh", 64, tenant="red")
    saving = asyncio.create_task(made.save(fresh))
    paths = [tmp_path / "records" / format_name(key) for key in fresh.record_keys()]
    await until(lambda: any(path.exists() for path in paths))
    async with made.client("operator") as client:
        started = await client.post("/v1/gc?confirm=true")

        async def job() -> Any:
            return (await client.get(f"/v1/jobs/{started.json()['job']}")).json()

        waiting = await until(job, holds=lambda job: "compared again" in job["progress"]["unit"])
        assert waiting["report"]["orphans"] == {}
        is_taken.set()
        await saving
        assert (await ended(client, started))["report"]["orphans"] == {}  # nothing was deleted
    assert all(path.exists() for path in paths)


@pytest.mark.parametrize("is_marked_again", [False, True])
async def test_a_catalog_that_loses_entries_makes_no_orphans(
    made: ServiceHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_marked_again: bool
) -> None:
    """In the middle of a garbage collection: what the catalog lacks then is kept, and the report says why. Also if it
    is complete again at the end.
    """
    monkeypatch.setattr(gc, "UNUSED_S", 0)
    prompt = await made.save(Prompt(ATTENTION, "a", 64, tenant="red"))
    scan = FilesystemTier.scan

    async def lose(tier: FilesystemTier, *namespace: NamespaceId) -> AsyncIterator[Entry]:
        async for entry in scan(tier, *namespace):
            yield entry
        await made.catalog.mark_incomplete(deadline=soon())
        lost = [Removal(key, Level.COLD, None, LeaveReason.LOST) for key in prompt.record_keys()]
        await made.catalog.remove(lost, deadline=soon())
        if is_marked_again:
            assert await made.catalog.mark_complete(await made.catalog.epoch(deadline=soon()), deadline=soon())

    monkeypatch.setattr(FilesystemTier, "scan", lose)
    async with made.client("operator") as client:
        job = await ended(client, await client.post("/v1/gc?confirm=true"))
    assert job["report"]["notes"] == ["orphans of filesystem were kept: the catalog is not complete any more"]
    assert job["report"]["orphans"] == {}
    assert all((tmp_path / "records" / format_name(key)).exists() for key in prompt.record_keys())


async def test_the_write_back_is_paused_drained_and_resumed(made: ServiceHarness) -> None:
    """While the write-back is paused, saves wait and a drain is refused. Resumed, the drain ends when everything is
    written. All three are events.
    """
    prompt = prompt_of("a")
    await made.store.open_namespace(prompt.description, deadline=soon())
    async with made.client("operator") as client:
        paused = (await client.post("/v1/tiers/cold/pause")).json()
        assert paused == {"tier": "filesystem", "level": "cold", "write_back": "paused", "waiting_records": 0}
        for record in prompt.records():
            await made.store.save(record, deadline=soon())
        listed = (await client.get("/v1/tiers")).json()["tiers"]
        assert [(one["write_back"], one["usage"]["waiting_records"]) for one in listed] == [
            ("running", 0),
            ("paused", 12),
        ]
        refused = await client.post("/v1/tiers/cold/drain")
        assert refused.status_code == 409 and "resume" in refused.json()["detail"]
        assert (await client.post("/v1/tiers/cold/resume")).json()["write_back"] == "running"
        job = await ended(client, await client.post("/v1/tiers/cold/drain"))
        assert (job["state"], job["kind"]) == ("done", "drain")
        assert (await client.get("/v1/tiers")).json()["tiers"][1]["usage"]["waiting_records"] == 0
        told = (await client.get("/v1/events", params={"follow": "false", "limit": 3})).json()["events"]
        assert [event["text"] for event in reversed(told)] == [
            "the write-back to the cold tier was paused",
            "the write-back to the cold tier was resumed",
            "a drain of the write-back to the cold tier was started",
        ]
        assert (await client.post("/v1/tiers/hot/pause")).status_code == 404
        assert (await client.post("/v1/tiers/memory/pause")).status_code == 422


async def test_a_tier_is_verified_and_reindexed(made: ServiceHarness, tmp_path: Path) -> None:
    """A corrupt record is named, quarantined and removed from the catalog. A reindex adds what the catalog lost."""
    prompt = await made.save(prompt_of("a"))
    path = tmp_path / "records" / format_name(prompt.key(128))
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    async with made.client("operator") as client:
        job = await ended(client, await client.post("/v1/tiers/cold/verify"))
        report = job["report"]
        assert (job["state"], report["num_records"], report["num_whole"], report["num_bad"]) == ("done", 12, 11, 1)
        assert report["bad"][0]["name"] == format_name(prompt.key(128))
        found = (await client.get(f"/v1/namespaces/{prompt.namespace.hex()}")).json()["held"]["filesystem"]
        assert found["num_records"] == 11
        with closing(sqlite3.connect(tmp_path / "records" / "catalog.db")) as lost, lost:
            lost.executescript("DELETE FROM entries; DELETE FROM totals; DELETE FROM facts WHERE name = 'complete'")
        job = await ended(client, await client.post("/v1/reindex"))
        assert (job["state"], job["report"]["cold"]["num_records"]) == ("done", 11)
        assert await made.catalog.is_complete(deadline=soon())


async def test_a_name_that_no_record_can_have_ends_no_collection(
    made: ServiceHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tier lists a group and a slice that the namespace does not have; it has nothing there when it is asked."""
    prompt = await made.save(Prompt(ATTENTION, "a", 64, tenant="red"))
    key, scan = prompt.record_keys()[0], FilesystemTier.scan

    async def list_more(tier: FilesystemTier, *namespace: NamespaceId) -> AsyncIterator[Entry]:
        yield Entry(RecordKey(key.namespace, key.prefix, 7, 0), 100)
        yield Entry(RecordKey(key.namespace, key.prefix, 0, 300), 100)
        async for entry in scan(tier, *namespace):
            yield entry

    monkeypatch.setattr(FilesystemTier, "scan", list_more)
    async with made.client("operator") as client:
        job = await ended(client, await client.post("/v1/gc?confirm=true"))
    assert (job["state"], job["error"], job["report"]["orphans"]) == ("done", None, {})
