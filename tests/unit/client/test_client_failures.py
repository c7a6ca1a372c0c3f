"""A real service process is killed and frozen under a client: bounded time, and healing without help."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from kvstore.api import Deadline, LeaseId, SaveOutcome, Staged
from kvstore.client import ClientOptions, ClientTls, RemoteStore, connect
from kvstore.errors import Unavailable
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.serve import IN_MEMORY, Service
from kvstore.testing.servers.ports import free_address
from kvstore.testing.waiting import until
from kvstore.wire import messages
from kvstore.wire.frames import PREFIX_BYTES, pack_head
from kvstore.wire.messages import encode

PROMPT = Prompt(ATTENTION, "failures", 256, payload_bytes=1 << 20)
TOKEN = "shown over TCP, and not looked at on a Unix socket"
CALL_S = 0.3
AT_ONCE_S = 5.0
"""The machines are shared: an immediate answer may come late, but not as late as the deadline of such a call."""
PATIENT_S = 60.0
HEALS_S = 20.0


@pytest.fixture(params=["unix", "tcp"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Service:
    if request.param == "unix":
        return Service(tmp_path, IN_MEMORY)
    token_file = tmp_path / "token"
    token_file.touch(mode=0o600)
    token_file.write_text(TOKEN)
    return Service(tmp_path, IN_MEMORY | {"listen": f"tcp://{free_address()}", "token_file": str(token_file)})


@pytest.fixture
async def client(service: Service) -> AsyncIterator[RemoteStore]:
    with service:
        client = connect(service.url, token=TOKEN)
        await client.wait_ready(deadline=Deadline.after(10))
        yield client
        await client.aclose()


async def save_all(client: RemoteStore) -> Staged:
    """Save a prompt and stage it."""
    await client.open_namespace(PROMPT.description, deadline=Deadline.after(5))
    outcomes = await asyncio.gather(*[client.save(r, deadline=Deadline.after(5)) for r in PROMPT.records()])
    assert set(outcomes) <= {SaveOutcome.STORED, SaveOutcome.EXISTS}
    staged = await client.stage(PROMPT.query(), deadline=Deadline.after(5))
    assert staged.resume_tokens == 256
    return staged


def calls(
    client: RemoteStore, staged: Staged, seconds: float = PATIENT_S
) -> dict[str, Callable[[], Awaitable[object]]]:
    lease = staged.lease or LeaseId(b"")
    record = PROMPT.record(64, seed=1)

    def soon() -> Deadline:
        return Deadline.after(seconds)

    return {
        "lookup": lambda: client.lookup(PROMPT.query(), deadline=soon()),
        "stage": lambda: client.stage(PROMPT.query(), deadline=soon()),
        "load": lambda: client.load(lease, staged.keys[0], deadline=soon()),
        "save": lambda: client.save(record, deadline=soon()),
    }


async def fails_at_once(call: Awaitable[object]) -> None:
    begun_s = time.monotonic()
    with pytest.raises(Unavailable):
        await call
    assert time.monotonic() - begun_s < AT_ONCE_S


async def heals(client: RemoteStore) -> None:
    """The client is of use again by itself, namespaces included."""

    async def is_of_use() -> bool:
        await client.lookup(PROMPT.query(), deadline=Deadline.after(CALL_S))
        await client.save(PROMPT.record(64), deadline=Deadline.after(CALL_S))
        return True

    await until(is_of_use, HEALS_S, despite=Unavailable)


@pytest.mark.parametrize("verb", ["lookup", "stage", "load", "save"])
async def test_a_frozen_service_costs_one_deadline(service: Service, client: RemoteStore, verb: str) -> None:
    """SIGSTOP before a call: it ends at its deadline, all later calls at once; after SIGCONT all is as before."""
    staged = await save_all(client)
    service.freeze()
    try:
        await fails_at_once(calls(client, staged, CALL_S)[verb]())
        for call in calls(client, staged).values():
            await fails_at_once(call())
    finally:
        service.thaw()
    await heals(client)
    assert staged.lease is not None
    loaded = await client.load(staged.lease, staged.keys[0], deadline=Deadline.after(5))
    assert bytes(loaded.data) in {bytes(record.data) for record in PROMPT.records()}


async def test_a_service_frozen_in_the_middle_of_loads_heals(service: Service, client: RemoteStore) -> None:
    """SIGSTOP while payloads are on their way: bounded, and after the thaw their late bytes disturb no other call."""
    staged = await save_all(client)
    assert staged.lease is not None
    loads = [
        asyncio.ensure_future(client.load(staged.lease, key, deadline=Deadline.after(CALL_S)))
        for key in staged.keys * 8
    ]
    await asyncio.sleep(0.004)
    service.freeze()
    begun_s = time.monotonic()
    outcomes = await asyncio.gather(*loads, return_exceptions=True)
    service.thaw()
    assert time.monotonic() - begun_s < AT_ONCE_S
    assert any(isinstance(outcome, Unavailable) for outcome in outcomes)
    await heals(client)
    by_key = {record.key: bytes(record.data) for record in PROMPT.records()}
    for key in staged.keys:
        assert bytes((await client.load(staged.lease, key, deadline=Deadline.after(5))).data) == by_key[key]


@pytest.mark.parametrize("verb", ["lookup", "stage", "load", "save"])
async def test_a_killed_service_fails_calls_at_once(service: Service, client: RemoteStore, verb: str) -> None:
    """SIGKILL during a call, which waits in a frozen service: it fails then, later ones at once; a restart heals."""
    staged = await save_all(client)
    service.freeze()
    call = asyncio.ensure_future(calls(client, staged)[verb]())
    await asyncio.sleep(0.05)
    service.kill()
    await fails_at_once(call)
    for later in calls(client, staged).values():
        await fails_at_once(later())
    service.start()
    await heals(client)
    assert (await save_all(client)).resume_tokens == 256


async def test_one_warning_and_one_all_clear(
    service: Service, client: RemoteStore, caplog: pytest.LogCaptureFixture
) -> None:
    """However many calls fail and attempts are made: one warning with the next step, one line when it is back."""
    caplog.set_level(logging.INFO, "kvstore.client")
    await save_all(client)
    service.kill()
    for _ in range(30):
        with pytest.raises(Unavailable):
            await client.status(deadline=Deadline.after(CALL_S))
        await asyncio.sleep(0.02)
    service.start()
    await heals(client)
    await client.wait_ready(deadline=Deadline.after(2))
    await asyncio.sleep(0.05)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "kvstore serve --listen" in caplog.text
    assert "without a restart here" in caplog.text


async def test_a_client_of_nothing_fails_at_once_and_finds_it_later(tmp_path: Path) -> None:
    """The client is made before there is a service; it neither fails nor waits, and connects when there is one."""
    service = Service(tmp_path, IN_MEMORY)
    client = connect(service.url)
    await fails_at_once(client.status(deadline=Deadline.after(PATIENT_S)))
    with service:
        await heals_status(client)
    await client.aclose()


async def test_a_service_frozen_from_the_start_is_given_up_and_found_again(tmp_path: Path) -> None:
    """It accepts but does not greet: calls wait for the first attempt a moment only; thawed, it is used."""
    with Service(tmp_path, IN_MEMORY) as service:
        service.freeze()
        client = connect(service.url, options=ClientOptions(first_attempt_s=0.2, hello_timeout_s=0.5))
        await fails_at_once(client.status(deadline=Deadline.after(PATIENT_S)))
        await fails_at_once(client.status(deadline=Deadline.after(PATIENT_S)))
        service.thaw()
        await heals_status(client)
        await client.aclose()


async def test_a_long_frozen_service_is_connected_to_anew(service: Service, client: RemoteStore) -> None:
    """Silent for longer than a connection is trusted: the client connects again, and recovers as soon as it is
    thawed."""
    await client.aclose()
    client = connect(service.url, token=TOKEN, options=ClientOptions(dead_after_s=0.3, hello_timeout_s=0.3))
    await save_all(client)
    service.freeze()
    await fails_at_once(client.status(deadline=Deadline.after(CALL_S)))
    for _ in range(20):
        await fails_at_once(client.status(deadline=Deadline.after(PATIENT_S)))
        await asyncio.sleep(0.05)
    service.thaw()
    await heals(client)
    await client.aclose()


async def heals_status(client: RemoteStore) -> None:
    await until(lambda: client.status(deadline=Deadline.after(CALL_S)), HEALS_S, despite=Unavailable)


async def test_a_person_waits_for_a_service_that_greets_late(service: Service) -> None:
    """A command that makes one request, as `kvstore doctor` does, does not report a busy service as missing."""
    assert ClientOptions().hello_timeout_s <= 2.0  # as engines wait
    with service:
        service.freeze()
        client = connect(service.url, token=TOKEN, options=ClientOptions.of_a_person("test", 60.0, ClientTls()))
        try:
            asking = asyncio.ensure_future(client.status(deadline=Deadline.after(60.0)))
            await asyncio.sleep(2.2)
            assert not asking.done()
            service.thaw()
            assert "service" in await asking
        finally:
            await client.aclose()


async def test_a_service_that_ends_each_connection_costs_little(tmp_path: Path) -> None:
    """It greets and closes: the client pauses between its attempts, or they would take half a core of the engine."""
    num_greeted = 0

    async def greet_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_greeted
        num_greeted += 1
        await reader.readexactly(PREFIX_BYTES)
        writer.write(pack_head(encode(messages.Welcome(1, "", 1 << 20, 1 << 20, 10))))
        writer.close()

    async with await asyncio.start_unix_server(greet_and_close, tmp_path / "s"):
        client = connect(f"unix:{tmp_path / 's'}")
        client.start()
        await asyncio.sleep(1.0)
        await client.aclose()
    assert 3 <= num_greeted < 30
