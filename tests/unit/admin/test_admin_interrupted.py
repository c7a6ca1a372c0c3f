"""Jobs that a restart or a crash interrupts are listed with the call that starts them again."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvstore.catalog.coordination import JOBS, FileTextStore
from kvstore.cli.main import main
from kvstore.errors import Unavailable
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.service.admin.jobs.board import JobBoard
from kvstore.service.admin.jobs.job import Job, JobKeeper, JobKind, JobProgress, JobState
from kvstore.service.authentication import Grant
from kvstore.testing.servers.ports import free_ports
from kvstore.testing.waiting import until
from tests.unit.admin.service_harness import ended, open_service, prompt_of
from tests.virtual_time import ManualClock

START_S = 60
HOME = "here unix:/s"


class SharedJobs(FileTextStore):
    """As if others wrote to it too."""

    is_shared = True


def job_of(number: int, kind: JobKind = JobKind.GC, *, tenant: str | None = None, **about: str) -> Job:
    return Job(
        f"{number:016x}",
        kind,
        tenant,
        about,
        False,
        1_700_000_000 + number,
        JobProgress(done=0, total=None, unit="records"),
    )


async def test_the_next_service_lists_an_interrupted_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tenant and the operators see it until it is dismissed. A job that ended is not listed."""
    began = asyncio.Event()

    async def hang(*_: object, **__: object) -> None:
        began.set()
        await asyncio.Event().wait()

    async with open_service(tmp_path) as made:
        prompt = await made.save(prompt_of("a"))
        async with made.client("red") as client:
            assert (await ended(client, await client.post("/v1/gc")))["state"] == "done"
            with monkeypatch.context() as patched:
                patched.setattr(made.store.operations, "delete", hang)
                body = {"namespace": prompt.namespace.hex()}
                job = (await client.post("/v1/deletions?confirm=true", json=body)).json()
                await began.wait()
                assert job["again"] is None
    async with (
        open_service(tmp_path) as made,
        made.client("red") as client,
        made.client("blue") as blue,
        made.client("operator") as operator,
    ):
        [told] = (await client.get("/v1/jobs")).json()["jobs"]
        assert (told["job"], told["state"], told["kind"]) == (job["job"], "interrupted", "deletion")
        assert told["created_s"] == job["created_s"] and told["about"] == job["about"]
        assert "the same kvstore rm as before" in told["again"] and told["error"]
        assert (await operator.get(f"/v1/jobs/{job['job']}")).json() == told
        assert (await blue.get("/v1/jobs")).json()["jobs"] == []
        assert (await blue.delete(f"/v1/jobs/{job['job']}")).status_code == 404
        assert (await client.delete(f"/v1/jobs/{job['job']}")).json() == told
        assert (await client.get("/v1/jobs")).json()["jobs"] == []
        assert (await client.get(f"/v1/jobs/{job['job']}")).status_code == 404


@contextmanager
def served(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A service process over the directory of `open_service`, once it is ready; killed at the end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
        place = folder / "notify"
        place.unlink(missing_ok=True)
        ready.bind(str(place))
        ready.settimeout(START_S)
        flags = ["--listen", f"unix:{folder}/served", "--admin-listen", f"127.0.0.1:{port}"]
        flags += ["--cold", f"file://{folder}/records", "--memory-bytes", "16MiB", "--disk-bytes", "256MiB"]
        command = [sys.executable, "-m", "kvstore.cli", "serve", *flags]
        service = subprocess.Popen(command, env={**os.environ, "NOTIFY_SOCKET": str(place)}, stderr=subprocess.DEVNULL)
        try:
            assert ready.recv(4096).startswith(b"READY=1")
            yield service
        finally:
            service.kill()
            service.wait()


async def test_jobs_of_a_killed_service_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGKILL during a verification: the next service and `kvstore jobs` list it, until the same job is done."""
    async with open_service(tmp_path) as made:
        await made.save(prompt_of("a"))
    [port], book = free_ports(1), tmp_path / "records/jobs.json"
    url = f"http://127.0.0.1:{port}"
    with served(tmp_path, port):
        job = httpx.post(f"{url}/v1/tiers/cold/verify?bytes_per_s=1", timeout=START_S).json()
        await until(lambda: book.exists() and job["job"] in book.read_text())
        assert httpx.get(f"{url}/v1/jobs/{job['job']}", timeout=START_S).json()["state"] == "running"

    def said(*arguments: str) -> str:
        assert main(["jobs", *arguments, "--admin-url", url]) == 0
        return capsys.readouterr().out

    with served(tmp_path, port):
        out = said()
        assert job["job"] in out and "interrupted" in out and "verify cold" in out
        assert f"{job['job']} was interrupted; to start it again: POST /v1/tiers/cold/verify" in out
        shown = said(job["job"])
        assert "to start it again" in shown and "its service ended before it" in shown
        started = httpx.post(f"{url}/v1/tiers/cold/verify", timeout=START_S)
        async with httpx.AsyncClient(base_url=url, timeout=START_S) as client:
            again = await ended(client, started)
            assert again["state"] == "done"
            await until(lambda: book.read_text() == "{}")
        listed: list[dict[str, Any]] = json.loads(said("--json"))["jobs"]
        assert [(one["job"], one["state"]) for one in listed] == [(again["job"], "done")]
        assert main(["jobs", "--cancel", "--admin-url", url]) == 2
        assert "needs the id of a job" in capsys.readouterr().err


async def test_jobs_of_ended_services_are_found(tmp_path: Path) -> None:
    """In a shared book: jobs of the same place count as interrupted at once, those of another place after a minute
    without an update, running ones never. After a week they are forgotten. A node whose clock is behind may still run
    its job, so that is said as well.
    """
    clock = ManualClock(1_700_000_000)
    book = SharedJobs(tmp_path, JOBS)
    here, there = JobKeeper(book, HOME, clock), JobKeeper(book, "there unix:/s", clock)
    mine, theirs = job_of(1, tenant="red"), job_of(2)
    mine.progress, mine.who = JobProgress(done=5, total=9, unit="boundaries"), "red/12345678"
    await here.write(mine)
    await there.write(theirs)
    assert await here.interrupted({mine.id}) == []
    [left] = await here.interrupted(())
    assert (left.id, left.state, left.ended_s) == (mine.id, JobState.INTERRUPTED, clock.now_s)
    assert (left.progress, left.who, left.tenant) == (mine.progress, "red/12345678", "red")
    clock.now_s += 61
    await here.write(mine)
    assert [job.id for job in await here.interrupted({mine.id})] == [theirs.id]
    assert [job.id for job in await here.interrupted(())] == [theirs.id, mine.id]
    told = {job.id: job.error for job in await here.interrupted(())}
    assert "clock" in str(told[theirs.id]) and "clock" not in str(told[mine.id])
    clock.now_s += 8 * 86_400
    assert await here.interrupted(()) == [] and (tmp_path / "jobs.json").read_text() == "{}"


async def test_a_finished_job_removes_interrupted_ones_with_the_same_aim(tmp_path: Path) -> None:
    """A finished job removes interrupted ones with the same aim, but not those of another tier or tenant. A failed job
    removes none.
    """
    keeper = JobKeeper(FileTextStore(tmp_path, JOBS), HOME, ManualClock(1_700_000_000))
    kept = [job_of(2, JobKind.DRAIN, tier="hot"), job_of(3, JobKind.DRAIN, tenant="red", tier="cold")]
    for job in (job_of(1, JobKind.DRAIN, tier="cold"), *kept):
        await keeper.write(job)
    ending = job_of(4, JobKind.DRAIN, tier="cold")
    for state, num_left in ((JobState.FAILED, 3), (JobState.DONE, 2)):
        ending.state = state
        await keeper.write(ending)
        await keeper.ended(ending)
        assert len(await keeper.interrupted(())) == num_left
    assert {job.id for job in await keeper.interrupted(())} == {job.id for job in kept}


async def test_a_job_that_ended_just_before_its_service_was_not_interrupted(tmp_path: Path) -> None:
    """The service stops while the book is slow to forget a job that is done."""
    forgets = asyncio.Event()

    class SlowBook(FileTextStore):
        async def remove(self, names: Collection[str], *, deadline: Deadline) -> None:
            is_first = not forgets.is_set()
            forgets.set()
            if is_first:
                await asyncio.Event().wait()
            await super().remove(names, deadline=deadline)

    async def work(job: Job) -> None:
        await until((tmp_path / "jobs.json").exists)

    board = JobBoard(JobKeeper(SlowBook(tmp_path, JOBS), HOME))
    board.start(JobKind.GC, Grant(None), work, about={})
    await forgets.wait()
    await board.aclose()
    assert await JobKeeper(FileTextStore(tmp_path, JOBS), HOME).interrupted(()) == []


async def test_jobs_run_without_a_book(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The failure is logged once, when a job is to be written there: who only lists them is told. Entries of a later
    release are skipped.
    """
    values = {"kind": "gc", "tenant": None, "about": [], "is_dry_run": True, "created_s": 1, "done": 0, "seen_s": 1}
    values |= {"total": 1, "unit": "records", "who": "", "place": HOME}
    texts = ["{", "[]", '{"kind": "unheard"}', "[" * 2000 + "]" * 2000, json.dumps(values), '{"created_s": 1e999}']
    texts.append(json.dumps({**values, "about": {}, "seen_s": 1.0}).replace("1.0", "1e999"))
    texts.append(json.dumps({**values, "about": {}, "tenant": 5, "seen_s": SYSTEM_CLOCK.wall_ms() // 1000}))
    (tmp_path / "jobs.json").write_text(json.dumps(dict(zip("abcdefgh", texts, strict=True))))
    assert await JobKeeper(FileTextStore(tmp_path, JOBS), HOME).interrupted(()) == []
    (tmp_path / "jobs.json").write_text("{")
    keeper = JobKeeper(FileTextStore(tmp_path, JOBS), HOME)
    job = job_of(1)
    with pytest.raises(Unavailable, match="cannot be read"):
        await keeper.interrupted(())
    assert not caplog.records
    await keeper.write(job)
    await keeper.ended(job)
    assert [record.message for record in caplog.records if "will forget" in record.message] == [
        "a restart will forget the jobs that it interrupts: the jobs cannot be read: repair or delete the file "
        f"path={tmp_path}/jobs.json"
    ]


def test_a_suggested_call_does_no_more_than_the_job() -> None:
    """A dry run stays one. A deletion's salt and age are not stored, so no call without them is suggested."""
    told = {}
    for kind in JobKind:
        job = job_of(1, kind, tier="cold", namespace="0" * 32)
        assert job.again is None
        job.state = JobState.INTERRUPTED
        told[kind] = job.again or ""
        assert told[kind]
    assert told[JobKind.GC] == "kvstore gc --yes" and told[JobKind.DRAIN] == "POST /v1/tiers/cold/drain"
    assert told[JobKind.VERIFY].endswith(", or kvstore verify cold --by-service")
    assert "0" * 32 not in told[JobKind.DELETION]
    trial = job_of(2)
    trial.is_dry_run, trial.state = True, JobState.INTERRUPTED
    assert trial.again == "kvstore gc"
