"""What engines tell while their service is killed or frozen: it arrives once, with the time at which it happened.

The service is a real process. Two clients stand for an engine: the scheduler's, which opens the namespace, and a
rank's, which does not.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from kvstore.api import Deadline, Outcome
from kvstore.client import ClientOptions, EmbeddedOptions, connect
from kvstore.client.connection import Connection
from kvstore.client.remote import RemoteStore
from kvstore.client.reports import KEPT, KEPT_S, Reports
from kvstore.errors import Unavailable
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.waiting import soon, until
from tests.virtual_time import ManualClock

PROMPT = Prompt(ATTENTION, "outage", 256)
HEALS_S = 30.0
QUICK = ClientOptions(dead_after_s=0.3, hello_timeout_s=0.3)
"""Gives up a frozen connection while the test looks on."""


def loss(request: str, num_records: int = 4) -> Outcome:
    stop = PROMPT.boundary(64)
    detail = {"records": num_records}
    return Outcome(request, PROMPT.namespace, 0, 0, 0, 0, "save_failed", detail, stop=stop, groups=1)


def failed(request: str) -> Outcome:
    return Outcome(request, PROMPT.namespace, 256, 240, 0, 0, "lookup_failed")


def miss(request: str) -> Outcome:
    return replace(failed(request), reason="nothing_stored", stop=PROMPT.boundary(64))


class Engine:
    """The two clients of an engine at a private service."""

    def __init__(self, scheduler: RemoteStore, rank: RemoteStore, pid: int) -> None:
        self.scheduler = scheduler
        self.rank = rank
        self.pid = pid

    async def status(self) -> Mapping[str, Any]:
        """The service's status once it answers; `rank` is done telling then."""
        await until(lambda: self.rank.status(deadline=Deadline.after(1.0)), HEALS_S, despite=Unavailable)
        return await until(lambda: self.scheduler.status(deadline=Deadline.after(1.0)), HEALS_S, despite=Unavailable)

    async def explain(self, request: str) -> Mapping[str, Any]:
        return await self.scheduler.explain(request, deadline=soon())


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    private = EmbeddedOptions(tmp_path / "e", memory_bytes=32 << 20, disk_bytes=64 << 20, idle_exit_s=0.3)
    scheduler = connect("embedded:", embedded=private, options=QUICK)
    rank = connect("embedded:", embedded=private, options=QUICK)
    try:
        for client in (scheduler, rank):
            await client.wait_ready(deadline=soon())
        await scheduler.open_namespace(PROMPT.description, deadline=soon())
        status: Mapping[str, Any] = await scheduler.status(deadline=soon())
        yield Engine(scheduler, rank, int(status["service"]["pid"]))
    finally:
        await scheduler.aclose()
        await rank.aclose()


async def test_a_killed_service(engine: Engine) -> None:
    """What a save lost as the service died explains the next miss at the service that was started in its place."""
    os.kill(engine.pid, signal.SIGKILL)  # told before, at and after the moment in which the clients notice
    for number in range(50):
        engine.rank.report(loss(f"lost {number}"))
        await asyncio.sleep(0.002)
    engine.scheduler.report(failed("during"))
    status = await engine.status()
    assert status["service"]["pid"] != engine.pid
    assert status["recent"]["losses"] == {"save_failed": 200}
    engine.scheduler.report(miss("after"))
    told = await engine.explain("after")
    assert (told["reason"], told["detail"]["lost_by_request"]) == ("save_failed", "lost 49")
    assert (await engine.explain("during"))["reason"] == "lookup_failed"


async def test_a_frozen_service(engine: Engine) -> None:
    """Frozen for longer than its connections are trusted: after the thaw each report has arrived once."""
    os.kill(engine.pid, signal.SIGSTOP)
    frozen_at_s = time.time()
    try:
        for number in range(100):
            engine.rank.report(loss(f"lost {number}"))
            engine.scheduler.report(failed(f"during {number}"))
            if number % 20 == 5:  # as engines do, whose calls find out that the service is silent
                for client in (engine.scheduler, engine.rank):
                    with pytest.raises(Unavailable):
                        await client.lookup(PROMPT.query(), deadline=Deadline.after(0.05))
            await asyncio.sleep(0.015)
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    thawed_at_s = time.time()
    status = await engine.status()
    for _ in range(2):
        assert status["service"]["pid"] == engine.pid
        assert status["recent"]["losses"] == {"save_failed": 400}
        assert status["recent"]["reasons"]["lookup_failed"] == 100
        assert status["counters"]['saves_lost{reason="save_failed"}'] == 400
        await asyncio.sleep(0.5)  # what an abandoned connection still held has been read by then
        status = await engine.status()
    listed: Any = (await engine.explain(""))["requests"]
    assert {one["request"] for one in listed} == {f"during {number}" for number in range(100)}
    times_s = [datetime.fromisoformat(one["at"]).timestamp() for one in listed]
    assert frozen_at_s - 0.1 < min(times_s) and max(times_s) < thawed_at_s + 0.1, "when it happened"
    assert max(times_s) - min(times_s) > 1.0


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
async def test_telling_waits_for_nothing(engine: Engine, how: signal.Signals) -> None:
    """Neither a report nor the engine's end waits for a service that does not answer."""
    os.kill(engine.pid, how)
    try:
        begun_s = time.monotonic()
        for number in range(KEPT + 100):
            engine.rank.report(loss(f"lost {number}"))
        assert time.monotonic() - begun_s < 2.0
        assert len(engine.rank._reports) == KEPT
        begun_s = time.monotonic()
        await engine.rank.aclose()
        assert time.monotonic() - begun_s < 5.0
    finally:
        if how is signal.SIGSTOP:
            os.kill(engine.pid, signal.SIGCONT)


async def test_what_is_too_much_is_named(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """More reports than are kept: the service learns of the latest, and the log says how many it does not learn of."""
    os.kill(engine.pid, signal.SIGKILL)
    for number in range(KEPT + 100):
        engine.rank.report(loss(f"lost {number}", num_records=1))
    status = await engine.status()
    assert status["recent"]["losses"] == {"save_failed": KEPT}
    assert "does not learn of 100 reports" in caplog.text


async def test_the_last_words_of_an_engine(engine: Engine) -> None:
    """What is told right before a client is closed arrives."""
    engine.rank.report(loss("last"))
    await engine.rank.aclose()
    told = await until(
        lambda: engine.scheduler.status(deadline=soon()), 20, holds=lambda status: status["recent"]["losses"]
    )
    assert told["recent"]["losses"] == {"save_failed": 4}


async def test_a_bounded_number_is_kept_for_a_bounded_time() -> None:
    """The oldest go first."""

    @asynccontextmanager
    async def nobody(deadline: Deadline) -> AsyncIterator[Connection]:
        raise Unavailable("the service is not reachable")
        yield

    clock = ManualClock()
    reports = Reports(nobody, 1.0, clock)
    try:
        for number in range(KEPT + 5):
            reports.add(loss(f"lost {number}"))
        assert len(reports) == KEPT
        clock.now_s += KEPT_S + 1
        reports.add(loss("the last"))
        assert len(reports) == 1
    finally:
        await reports.aclose(None)
    assert len(reports) == 0
