"""A client and a service in one loop: cancelled calls, progress, credit, dying clients, buffers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.api import Deadline, PrefixQuery, Progress, Retention, SaveOutcome, Staged
from kvstore.client import ClientOptions, RemoteStore, connect, parse_address
from kvstore.client.connection import Connection
from kvstore.errors import CorruptRecord, InvalidRequest, Unavailable
from kvstore.format.record import Record
from kvstore.model.keys import Boundary, PrefixHash
from kvstore.model.prompt_hint import EndedPrompt
from kvstore.service.limits import ServiceLimits
from kvstore.service.server import Server
from kvstore.store.tiered import TieredStore
from kvstore.testing.faults import FaultyTier
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.steered_store import SteeredStore
from kvstore.testing.waiting import soon, until
from kvstore.tiers.memory import MemoryTier
from kvstore.wire import messages

PROMPT = Prompt(ATTENTION, "calls", 256, payload_bytes=2 << 20)
RECORDS = {record.key: bytes(record.data) for record in PROMPT.records()}


class ProgressingStore(SteeredStore):
    """Reports these bytes of each stage, every 50 ms, before it begins."""

    progress_steps: Sequence[int] = ()

    async def stage(self, query: PrefixQuery, *, deadline: Deadline, progress: Progress | None = None) -> Staged:
        for step in self.progress_steps:
            await asyncio.sleep(0.05)
            if progress is not None:
                progress(step)
        return await super().stage(query, deadline=deadline)


class Node:
    """A store behind a real server, and clients of it."""

    def __init__(self, server: Server, behind: ProgressingStore, url: str) -> None:
        self.server, self.behind, self.url = server, behind, url
        self.clients: list[RemoteStore] = []
        self.opened: dict[RemoteStore, list[Connection]] = {}

    async def client(self, **options: Any) -> RemoteStore:
        self.clients.append(connect(self.url, options=ClientOptions(**options)))
        await self.clients[-1].wait_ready(deadline=soon())
        self.opened[self.clients[-1]] = self.clients[-1].pool.connections()
        return self.clients[-1]

    def has_stayed(self, client: RemoteStore) -> bool:
        """Whether the client still has its first connections."""
        return client.pool.connections() == self.opened[client]

    async def staged(self, client: RemoteStore) -> Staged:
        await client.open_namespace(PROMPT.description, deadline=soon())
        for record in PROMPT.records():
            await client.save(record, deadline=soon())
        return await client.stage(PROMPT.query(), deadline=soon())


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    behind = ProgressingStore(TieredStore(MemoryTier(256 << 20)))
    limits = ServiceLimits(receive_bytes=5 << 20, save_credit_bytes=5 << 20)
    server = Server(behind, limits)
    await server.listen([parse_address(f"unix:{tmp_path / 's'}")])
    node = Node(server, behind, str(server.addresses[0]))
    yield node
    for client in node.clients:
        await client.aclose()
    await server.aclose()
    await behind.aclose()


async def test_long_prompts_that_end_together_do_not_end_the_connection(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an outage: the connection takes some at a time, or it would end, and the leases with it."""
    ended: list[EndedPrompt] = []
    monkeypatch.setattr(node.behind, "end_prompt", ended.append)
    client = await node.client()
    await client.open_namespace(PROMPT.description, deadline=soon())
    boundaries = tuple(Boundary(64 * number, PrefixHash(number.to_bytes(32, "big"))) for number in range(1, 4097))
    for number in range(64):
        client.end_prompt(EndedPrompt(f"r{number}", PROMPT.namespace, boundaries, 16, boundaries[-1].tokens))
    await until(lambda: len(ended) == 64, 20)
    assert node.has_stayed(client)


async def test_records_are_received_into_the_callers_buffer(node: Node) -> None:
    """`allocate` gets the exact size once; the record stands in that buffer, without another copy."""
    client = await node.client()
    staged = await node.staged(client)
    assert staged.lease is not None
    asked: list[tuple[int, bytearray]] = []

    def allocate(num_bytes: int) -> memoryview:
        asked.append((num_bytes, bytearray(num_bytes + 5)))
        return memoryview(asked[-1][1])

    record = await client.load(staged.lease, staged.keys[0], deadline=soon(), allocate=allocate)
    [(num_bytes, buffer)] = asked
    assert num_bytes == record.num_bytes
    assert record.data.obj is buffer
    assert bytes(record.data) == RECORDS[staged.keys[0]]


async def test_allocators_that_fail_cost_their_own_call_only(node: Node) -> None:
    """It raises, or returns something useless: that load fails with it, the connection and other loads go on."""
    client = await node.client(num_data_connections=1)
    staged = await node.staged(client)
    assert staged.lease is not None

    def broken(num_bytes: int) -> memoryview:
        raise MemoryError("no room")

    loads = [
        client.load(staged.lease, staged.keys[0], deadline=soon(), allocate=broken),
        client.load(staged.lease, staged.keys[0], deadline=soon(), allocate=lambda n: memoryview(bytearray(n - 1))),
        client.load(staged.lease, staged.keys[0], deadline=soon(), allocate=lambda n: memoryview(bytes(n))),
        client.load(staged.lease, staged.keys[1], deadline=soon()),
    ]
    outcomes = await asyncio.gather(*loads, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [MemoryError, InvalidRequest, InvalidRequest, Record]
    assert node.has_stayed(client)


async def test_cancelled_loads_do_not_touch_their_buffers_again(node: Node) -> None:
    """Loads are cancelled after each number of loop turns: from then on the buffer stays as it is; others go on."""
    client = await node.client(num_data_connections=1)
    staged = await node.staged(client)
    assert staged.lease is not None
    partial = 0
    for turns in range(0, 60, 2):
        buffer = bytearray(3 << 20)
        load = asyncio.ensure_future(
            client.load(staged.lease, staged.keys[0], deadline=soon(), allocate=lambda n, b=buffer: memoryview(b)[:n])
        )
        other = asyncio.ensure_future(client.load(staged.lease, staged.keys[1], deadline=soon()))
        for _ in range(turns):
            await asyncio.sleep(0)
        was_done = load.done()
        load.cancel()
        await asyncio.wait([load])
        before = bytes(buffer)
        partial += not was_done and any(before[:4])
        assert bytes((await other).data) == RECORDS[staged.keys[1]]
        await client.status(deadline=soon())
        assert bytes(buffer) == before
    assert partial > 0  # some were cancelled in the middle of their payload
    assert node.has_stayed(client)


async def test_deadlines_are_kept_and_told(node: Node) -> None:
    """A slow store: the client gives up at its deadline, the service has given up by then, the next call works."""
    client = await node.client()
    node.behind.held.add("status")
    begun_s = time.monotonic()
    with pytest.raises(Unavailable, match="did not end before its deadline"):  # the service's own words
        await client.status(deadline=Deadline.after(0.2))
    assert 0.1 < time.monotonic() - begun_s < 10
    node.behind.held.clear()
    assert await client.status(deadline=soon())


async def test_progress_keeps_a_stage_alive_and_its_lack_ends_it(node: Node) -> None:
    """Bytes that grow postpone the stall, equal ones do not; what was cancelled by the stall is cancelled there."""
    client = await node.client(stall_timeout_s=0.2)
    await node.staged(client)
    node.behind.progress_steps = [1, 2, 3, 4, 5, 6, 7, 8]  # 50 ms each: twice the stall time in all
    told: list[int] = []
    staged = await client.stage(PROMPT.query(), deadline=soon(), progress=told.append)
    assert staged.resume_tokens == 256
    assert told == sorted(set(told))
    assert told[0] == 1
    node.behind.progress_steps = [1] * 20
    begun_s = time.monotonic()
    with pytest.raises(Unavailable, match="no progress in time"):
        await client.stage(PROMPT.query(), deadline=soon())
    assert 0.2 <= time.monotonic() - begun_s < 30
    await until(lambda: node.server.describe()["requests_running"] == 0)


async def test_the_first_stage_has_more_time(node: Node) -> None:
    """A service that was just started may be slow once: the first stage survives a silence that ends the second one."""
    client = await node.client(stall_timeout_s=0.2, first_stall_timeout_s=10.0)
    node.behind.progress_steps = [1] * 20  # 50 ms each, and none of them progress
    assert (await node.staged(client)).lease
    with pytest.raises(Unavailable, match="no progress in time"):
        await client.stage(PROMPT.query(), deadline=soon())


async def test_leases_end_with_their_client(node: Node) -> None:
    """A client goes without a word: its leases are released and its running calls cancelled; others keep theirs."""
    dying, staying = await node.client(), await node.client()
    await node.staged(dying)
    kept = await node.staged(staying)
    assert node.behind.num_leases == 2
    node.behind.held.add("lookup")
    waiting = asyncio.ensure_future(dying.lookup(PROMPT.query(), deadline=soon()))
    await until(lambda: node.server.describe()["requests_running"] == 1)
    await dying.aclose()
    with pytest.raises(Exception, match=r"closed|went away"):
        await waiting
    await until(lambda: node.behind.num_leases == 1)
    assert kept.lease is not None and await staying.renew(kept.lease, deadline=soon())
    await until(lambda: node.behind.cancelled == ["lookup"])


async def test_stages_that_nobody_waits_for_leave_no_lease(node: Node) -> None:
    """A stage is cancelled just as its answer comes: the lease in it is given back."""
    client = await node.client()
    await node.staged(client)
    for turns in range(0, 40):
        stage = asyncio.ensure_future(client.stage(PROMPT.query(), deadline=soon()))
        for _ in range(turns):
            await asyncio.sleep(0)
        stage.cancel()
        await asyncio.wait([stage])
        if not stage.cancelled() and (lease := stage.result().lease) is not None:
            await client.release(lease)
    await until(lambda: node.behind.num_leases == 1)  # the first one, of `staged`


async def test_a_stage_cancelled_in_the_turn_of_its_answer_leaves_no_lease(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer has come and its caller has not run yet: only the connection knows the lease."""
    client = await node.client()
    await node.staged(client)
    answered = Connection._answered

    def answered_and_cancelled(self: Connection, message: messages.Reply, payload: memoryview | None) -> None:
        answered(self, message, payload)
        stage.cancel()

    monkeypatch.setattr(Connection, "_answered", answered_and_cancelled)
    stage = asyncio.ensure_future(client.stage(PROMPT.query(), deadline=soon()))
    await asyncio.wait([stage])
    assert stage.cancelled()
    monkeypatch.undo()
    await until(lambda: node.behind.num_leases == 1)  # the first one, of `staged`


async def test_received_saves_outlive_their_sender(node: Node) -> None:
    """A client saves and goes before the answer: what the service has received in full is stored."""
    client = await node.client()
    await client.open_namespace(PROMPT.description, deadline=soon())
    node.behind.held.add("save")
    record = PROMPT.record(64)
    save = asyncio.ensure_future(client.save(record, deadline=soon()))
    await until(lambda: node.server.describe()["requests_running"] == 1)
    for connection in client.pool.connections():
        connection.close()
    with pytest.raises(Unavailable):
        await save
    node.behind.held.clear()
    memory = node.behind.inner.memory
    await until(lambda: record.key in memory)
    assert bytes((await memory.get(record.key, deadline=soon())).data) == bytes(record.data)


async def test_savers_wait_for_credit_and_for_room(node: Node) -> None:
    """Many savers at once against a small budget: never more than it is held, all are stored, none is refused."""
    clients = [await node.client() for _ in range(3)]
    prompts = [Prompt(ATTENTION, f"saver {n}", 256, payload_bytes=2 << 20) for n in range(3)]
    peak = 0

    async def watch() -> None:
        nonlocal peak
        while True:
            used = node.server.describe()["receive_bytes_used"]
            assert isinstance(used, int)
            peak = max(peak, used)
            await asyncio.sleep(0)

    watching = asyncio.ensure_future(watch())
    await clients[0].open_namespace(PROMPT.description, deadline=soon())
    saves = [
        client.save(record, deadline=soon())
        for client, prompt in zip(clients, prompts, strict=True)
        for record in prompt.records()
    ]
    assert set(await asyncio.gather(*saves)) == {SaveOutcome.STORED}
    watching.cancel()
    assert 0 < peak <= 5 << 20
    assert all(node.has_stayed(client) for client in clients)


async def test_saves_without_room_end_at_their_deadline(node: Node) -> None:
    """The service is full of unfinished saves: a further one is given up in time, and later ones work."""
    first, second = await node.client(), await node.client()
    await first.open_namespace(PROMPT.description, deadline=soon())
    node.behind.held.add("save")
    stuck = [asyncio.ensure_future(first.save(r, deadline=soon())) for r in PROMPT.records([64])]
    await until(lambda: node.server.describe()["requests_running"] == 2)
    begun_s = time.monotonic()
    with pytest.raises(Unavailable):
        await second.save(PROMPT.record(128), deadline=Deadline.after(0.2))
    assert time.monotonic() - begun_s < 10
    node.behind.held.clear()
    assert set(await asyncio.gather(*stuck)) == {SaveOutcome.STORED}
    await asyncio.sleep(0.05)
    assert await second.save(PROMPT.record(128), deadline=soon()) is SaveOutcome.STORED
    assert node.has_stayed(second)


async def test_too_large_records_are_refused_before_they_are_sent(node: Node) -> None:
    """A record over the service's limit is not sent."""
    client = await node.client()
    with pytest.raises(InvalidRequest, match="too large"):
        await client.save(Prompt(ATTENTION, "x", 64, payload_bytes=6 << 20).record(64), deadline=soon())


async def test_another_record_than_asked_for_is_corrupt(node: Node) -> None:
    """The service answers a load with a wrong record: the client finds it by its header."""
    client = await node.client()
    staged = await node.staged(client)
    assert staged.lease is not None
    node.behind.on_load = lambda _: PROMPT.record(128)
    with pytest.raises(CorruptRecord, match="another record"):
        await client.load(staged.lease, staged.keys[0], deadline=soon())


async def test_bugs_in_the_store_cost_one_answer(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """The store raises what it never should: the caller gets an `InternalError`, the log the traceback."""
    client = await node.client()
    node.behind.errors["status"] = ZeroDivisionError()
    with pytest.raises(Exception, match="ZeroDivisionError") as raised:
        await client.status(deadline=soon())
    assert type(raised.value).__name__ == "InternalError"
    assert "Traceback" in caplog.text
    await client.open_namespace(PROMPT.description, deadline=soon())
    assert node.has_stayed(client)


async def test_a_retention_hint_reaches_the_store(tmp_path: Path) -> None:
    """Of two records, the one that is of use for a short time only does not go to the slower tier."""
    cold = FaultyTier(MemoryTier(64 << 20), name="s3")
    behind = TieredStore(MemoryTier(64 << 20), cold=cold)
    server = Server(behind)
    await server.listen([parse_address(f"unix:{tmp_path / 's'}")])
    client = connect(str(server.addresses[0]))
    first, second = PROMPT.records()[:2]
    await client.open_namespace(PROMPT.description, deadline=soon())
    assert await client.save(first, retention=Retention.SHORT, deadline=soon()) is SaveOutcome.STORED
    assert await client.save(second, deadline=soon()) is SaveOutcome.STORED
    assert await behind.drain(soon()) == 0
    assert cold.keys_put == [second.key]
    await client.aclose()
    await server.aclose()
    await behind.aclose()
