"""Calls from one event loop to another in a thread of its own: results, errors, cancellation, and the end."""

from __future__ import annotations

import asyncio
import contextvars
import socket
import threading
import time
import weakref

import pytest

from kvstore.errors import Closed, Unavailable
from kvstore.runtime.io_loops import IoLoop, call_on, open_io_loops
from kvstore.runtime.pauses import collector_paused
from kvstore.testing.waiting import until

_request: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="")


async def test_work_runs_in_the_thread_in_the_callers_context() -> None:
    """The work sees the caller's context variables, and its result comes back."""
    _request.set("mine")

    async def work() -> tuple[str, str]:
        await asyncio.sleep(0)
        return threading.current_thread().name, _request.get()

    async with open_io_loops(2) as (first, second):
        assert await first.run(work) == ("kvstore-io-0", "mine")
        assert await second.run(work) == ("kvstore-io-1", "mine")


async def test_one_thread_is_the_callers_own() -> None:
    """A number of one starts no thread."""
    before = threading.active_count()
    async with open_io_loops(1) as io_loops:
        assert io_loops == [] and threading.active_count() == before


async def test_errors_are_those_of_the_work() -> None:
    """An error of the work is raised to the caller."""

    async def work() -> None:
        raise Unavailable("no answer")

    async with open_io_loops(2) as (io_loop, _):
        with pytest.raises(Unavailable, match="no answer"):
            await io_loop.run(work)


async def test_a_cancelled_call_has_ended() -> None:
    """A caller that is cancelled while the work takes long to end: the call ends after the work, not before."""
    started, ended = threading.Event(), threading.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            time.sleep(0.1)  # for example a receive that is on its way
            ended.set()

    async with open_io_loops(2) as (io_loop, _):
        call = asyncio.ensure_future(io_loop.run(work))
        await asyncio.to_thread(started.wait)
        call.cancel()
        await asyncio.sleep(0)
        call.cancel()  # a second time, while it waits for the end
        with pytest.raises(asyncio.CancelledError):
            await call
        assert ended.is_set()


async def test_a_result_that_comes_with_the_cancellation_is_lost() -> None:
    """The work ends while its caller is cancelled: the caller is cancelled all the same."""

    async def work() -> str:
        return "done"

    async with open_io_loops(2) as (io_loop, _):
        call = asyncio.ensure_future(io_loop.run(work))
        await asyncio.sleep(0)
        time.sleep(0.05)  # the work has ended, and this loop does not know it yet
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_closing_ends_what_runs() -> None:
    """A loop is closed with calls in flight, also with one that was made just before: each ends, and later ones are
    refused."""
    started = threading.Event()

    async def work() -> None:
        started.set()
        await asyncio.Event().wait()

    io_loop = IoLoop("to close")
    running = asyncio.ensure_future(io_loop.run(work))
    await asyncio.to_thread(started.wait)
    just_made = [asyncio.ensure_future(io_loop.run(work)) for _ in range(50)]
    await asyncio.sleep(0)
    await io_loop.aclose()
    ended = await asyncio.wait_for(asyncio.gather(running, *just_made, return_exceptions=True), 10)
    assert all(isinstance(end, Closed) for end in ended), ended
    with pytest.raises(Closed):
        await io_loop.run(work)
    io_loop.soon(lambda: None)
    await io_loop.aclose()


async def test_callbacks_run_on_their_loop() -> None:
    """A callback runs at once on its own loop, from another thread later on that loop, and never once it is closed."""
    loop, seen = asyncio.get_running_loop(), []

    def note() -> None:
        seen.append(threading.current_thread())

    call_on(loop, note)
    assert seen == [threading.main_thread()]
    await asyncio.to_thread(call_on, loop, note)
    await asyncio.sleep(0)
    assert seen == [threading.main_thread()] * 2
    closed = asyncio.new_event_loop()
    closed.close()
    call_on(closed, note)
    assert len(seen) == 2


@pytest.mark.parametrize("is_late", [False, True])
async def test_what_failed_work_held_is_freed_at_once(is_late: bool) -> None:
    """Without the cyclic collector, also after a cancellation: buffers of records would last until it runs."""

    class Buffer:
        pass

    made: list[weakref.ref[Buffer]] = []
    begun = asyncio.Event()

    async def work() -> None:
        buffer = Buffer()
        made.append(weakref.ref(buffer))
        home.call_soon_threadsafe(begun.set)
        if is_late:
            try:
                await asyncio.sleep(60)
            finally:
                raise Unavailable("no answer", buffer=len(made))
        raise Unavailable("no answer")

    home = asyncio.get_running_loop()
    with collector_paused():
        async with open_io_loops(2) as (io_loop, _):
            call = asyncio.create_task(io_loop.run(work))
            await begun.wait()
            if is_late:
                call.cancel()
            with pytest.raises(asyncio.CancelledError if is_late else Unavailable):
                await call
            del call
            await until(lambda: made[0]() is None)


async def test_a_loop_with_an_open_connection_ends() -> None:
    """uvloop warns of the connection while it closes the loop, and closes it. Were the warning an error, as others are
    in tests, the loop would wait for the connection for ever."""
    io_loop, opened, server = IoLoop("left open"), list[object](), socket.create_server(("127.0.0.1", 0))

    async def connect() -> None:
        opened.append(await asyncio.get_running_loop().create_connection(asyncio.Protocol, *server.getsockname()))

    await io_loop.run(connect)
    thread = next(one for one in threading.enumerate() if one.name == "left open")
    closing = threading.Thread(target=asyncio.run, args=(io_loop.aclose(),), daemon=True)  # so that a failure ends
    closing.start()
    thread.join(10.0)
    assert not thread.is_alive()
    server.close()
