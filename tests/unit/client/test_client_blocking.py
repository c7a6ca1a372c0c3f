"""`BlockingStore`: plain threads, forks, exits."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.api import Deadline, PageStore, SaveOutcome
from kvstore.client import BlockingStore
from kvstore.errors import Closed, InvalidRequest, Unavailable
from kvstore.service.server import Server
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.serve import IN_MEMORY, Service
from kvstore.testing.steered_store import SteeredStore
from kvstore.testing.waiting import eventually, soon, until
from kvstore.wire.address import parse_address

PROMPT = Prompt(ATTENTION, "blocking", 256, payload_bytes=100_000)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path, IN_MEMORY) as service:
        yield service


@pytest.fixture
def store(service: Service) -> Iterator[BlockingStore]:
    with BlockingStore(service.url) as store:
        store.wait_ready(deadline=soon())
        yield store


def test_every_call_from_plain_threads(store: BlockingStore) -> None:
    """A prompt is saved, looked up, staged, renewed, loaded from several threads, discarded, released."""
    assert store.open_namespace(PROMPT.description, deadline=soon()) == PROMPT.namespace
    records = {record.key: record for record in PROMPT.records()}
    futures = [store.submit(lambda to, it=it: to.save(it, deadline=soon())) for it in records.values()]
    assert {future.result(10) for future in futures} == {SaveOutcome.STORED}
    assert store.lookup(PROMPT.query(), deadline=soon()).resume_tokens == 256
    staged = store.stage(PROMPT.query(), deadline=soon())
    lease = staged.lease
    assert lease is not None
    assert store.renew(lease, deadline=soon())
    with ThreadPoolExecutor(4) as threads:
        loaded = list(threads.map(lambda key: store.load(lease, key, deadline=soon()), staged.keys))
    assert [bytes(record.data) for record in loaded] == [bytes(records[key].data) for key in staged.keys]
    store.discard(staged.keys[0], "test", deadline=soon())
    assert store.lookup(PROMPT.query(), deadline=soon()).resume_tokens < 256
    store.release(lease)
    eventually(lambda: store.status(deadline=soon())["leases"]["active"] == 0, 5)


def test_waiting_on_the_loops_own_thread_is_refused(store: BlockingStore) -> None:
    """A callback that waits would wait for ever: the error says what to do instead; `submit` works there."""
    seen: list[object] = []
    done = threading.Event()

    def callback(_: object) -> None:
        try:
            store.status(deadline=soon())
        except InvalidRequest as error:
            seen.append(str(error))
        try:
            store.close()
        except InvalidRequest as error:
            seen.append(str(error))
        store.submit(lambda to: to.status(deadline=soon())).add_done_callback(
            lambda f: (seen.append(f.result()), done.set())
        )

    store.submit(lambda to: to.status(deadline=soon())).add_done_callback(callback)
    assert done.wait(5)
    assert "`submit`" in str(seen[0])
    assert "own thread" in str(seen[1])
    assert isinstance(seen[2], dict)


def test_nobody_waits_past_the_deadline(service: Service, store: BlockingStore) -> None:
    """Frozen service: one deadline, then at once; even a loop whose thread is stuck costs little more."""
    service.freeze()
    for seconds in (0.2, 60.0):
        begun_s = time.monotonic()
        with pytest.raises(Unavailable):
            store.status(deadline=Deadline.after(seconds))
        assert time.monotonic() - begun_s < 5
    service.thaw()
    stuck = threading.Event()

    async def hold_the_loop(_: PageStore) -> None:
        stuck.wait(60.0)

    store.submit(hold_the_loop)
    begun_s = time.monotonic()
    with pytest.raises(Unavailable, match="thread"):
        store.status(deadline=Deadline.after(0.1))
    assert time.monotonic() - begun_s < 30
    stuck.set()


async def test_cancelled_futures_cancel_their_calls(tmp_path: Path) -> None:
    """A future is cancelled: its request is not running any more in the service."""
    behind = SteeredStore()
    behind.held.add("status")
    server = Server(behind)
    await server.listen([parse_address(f"unix:{tmp_path / 's'}")])
    store = BlockingStore(f"unix:{tmp_path / 's'}")
    future = store.submit(lambda to: to.status(deadline=Deadline.after(60)))
    await until(lambda: behind.calls["status"])
    assert future.cancel()
    await until(lambda: behind.cancelled == ["status"])
    await asyncio.to_thread(store.close)
    await server.aclose()
    await behind.aclose()


def test_close_ends_running_calls_and_the_thread(service: Service) -> None:
    """Calls that run fail `Closed`, later ones too; the thread is gone; closing twice is closing once."""
    before = set(threading.enumerate())
    store = BlockingStore(service.url)
    store.wait_ready(deadline=soon())
    service.freeze()
    future = store.submit(lambda to: to.status(deadline=Deadline.after(60)))
    time.sleep(0.05)
    begun_s = time.monotonic()
    store.close()
    store.close()
    assert time.monotonic() - begun_s < 30
    with pytest.raises(Closed):
        future.result(1)
    with pytest.raises(Closed):
        store.status(deadline=soon())
    store.release(b"x" * 16)  # type: ignore[arg-type]  # ignored
    assert "kvstore-client" not in {thread.name for thread in set(threading.enumerate()) - before}


def test_a_call_that_was_given_up_before_the_close_leaves_no_complaint(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a busy loop both are seen at once: nobody waits for the error of such a call any more."""
    store = BlockingStore(service.url)
    held, begun = threading.Event(), threading.Event()

    async def endless(_: PageStore) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def hold(_: PageStore) -> None:
        held.wait(10)

    future = store.submit(endless)
    assert begun.wait(10)
    holding = store.submit(hold)
    future.cancel()
    releasing = threading.Timer(0.2, held.set)
    releasing.start()
    store.close()
    releasing.join()
    holding.result(10)
    del store, future, holding
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("frozen", [False, True])
def test_the_interpreter_exits_without_close(service: Service, frozen: bool) -> None:
    """A program forgets to close, its service well or frozen, a call running: it ends promptly, quietly, status 0."""
    program = f"""
from kvstore.api import Deadline
from kvstore.client import BlockingStore
store = BlockingStore({service.url!r})
store.wait_ready(deadline=Deadline.after(10))
print("ready", flush=True)
input()
store.submit(lambda to: to.status(deadline=Deadline.after(60)))
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        if frozen:
            service.freeze()
        begun_s = time.monotonic()
        process.stdin.write(b"\n")
        _, errors = process.communicate(timeout=20)
        assert time.monotonic() - begun_s < 5
        assert (process.returncode, errors) == (0, b"")


def test_forked_children_neither_use_nor_keep_the_connections(service: Service) -> None:
    """A process forks and is killed; its child lives on: the service sees the parent's end, the child gets `Closed`."""
    program = f"""
import os, signal, sys, time, warnings
warnings.simplefilter("ignore")
from kvstore.api import Deadline
from kvstore.client import BlockingStore
from kvstore.errors import Closed
store = BlockingStore({service.url!r})
store.wait_ready(deadline=Deadline.after(10))
if os.fork() == 0:
    try:
        store.status(deadline=Deadline.after(1))
    except Closed:
        print(os.getpid(), flush=True)
    time.sleep(30)
    os._exit(0)
store.status(deadline=Deadline.after(5))
time.sleep(30)
"""
    with (
        BlockingStore(service.url) as watcher,
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        child = int(process.stdout.readline())
        watcher.wait_ready(deadline=soon())
        assert sessions(watcher) == 6
        process.kill()
        try:
            eventually(lambda: sessions(watcher) == 3, 5)
        finally:
            os.kill(child, 9)


def sessions(store: BlockingStore) -> object:
    described = store.status(deadline=soon())["service"]
    assert isinstance(described, dict)
    return described["sessions"]


def test_a_name_that_is_resolved_too_late_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """The caller that connected has given up and reported it. Other exceptions that no task awaited are logged."""
    with BlockingStore("unix:/nowhere") as store:
        for error in (socket.gaierror(-2, "Name or service not known"), ValueError("lost")):

            async def lose(_: PageStore, error: Exception = error) -> None:
                asyncio.get_running_loop().call_exception_handler({"message": "m", "exception": error})

            store.submit(lose).result(10)
        with pytest.raises(Unavailable):
            store.status(deadline=soon())
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ValueError]
