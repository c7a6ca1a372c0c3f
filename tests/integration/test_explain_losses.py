"""A miss because an engine computed what it needed and did not save it: as clients and the doctor see it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.api import Ack, Outcome
from kvstore.client import connect
from kvstore.client.remote import RemoteStore
from kvstore.compose import open_store
from kvstore.doctor.check import Finding, Verdict, run_checks
from kvstore.doctor.service import ServiceAddress, service_check
from kvstore.service.authentication import Grant
from kvstore.service.server import Server
from kvstore.settings import load_settings
from kvstore.testing.prompts import HYBRID, Prompt
from kvstore.testing.tokens import credentials_of
from kvstore.testing.waiting import soon, until
from kvstore.wire.address import parse_address

PROMPT = Prompt(HYBRID, "a", 256)
MIB = 1 << 20
TOKENS = {"red": "a" * 32, "blue": "b" * 32}


class Service:
    """A service on a directory, and clients of it."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.url = f"unix:{folder / 's'}"
        self._folder = folder
        self._stack = stack
        self._running = AsyncExitStack()

    async def start(self) -> None:
        settings = {"hot": "memory:", "cold": f"file://{self._folder}/records", "memory_bytes": "32MiB"}
        store = await self._running.enter_async_context(open_store(load_settings({**settings, "disk_bytes": "64MiB"})))
        credentials = credentials_of({token: Grant(name) for name, token in TOKENS.items()})
        server = Server(store, credentials=credentials)
        self._running.push_async_callback(server.aclose)
        await server.listen([parse_address(self.url)])

    async def stop(self) -> None:
        running, self._running = self._running, AsyncExitStack()
        await running.aclose()

    async def client(self, tenant: str | None = None) -> RemoteStore:
        """A client that has opened the prompt's namespace."""
        made = connect(self.url, token=TOKENS[tenant] if tenant is not None else None)
        self._stack.push_async_callback(made.aclose)
        await made.wait_ready(deadline=soon())
        await made.open_namespace(PROMPT.description, deadline=soon())
        return made


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with AsyncExitStack() as stack:
        made = Service(tmp_path, stack)
        await made.start()
        stack.push_async_callback(made.stop)
        yield made


def loss(request: str, tokens: int, reason: str = "save_busy", *, group: int = 1, **detail: object) -> Outcome:
    """What an engine tells of a record that it did not save."""
    groups, stop = 1 << group, PROMPT.boundary(tokens)
    return Outcome(request, PROMPT.namespace, 0, 0, 0, 0, reason, detail, stop=stop, groups=groups)


def never(**detail: object) -> Outcome:
    """What an engine tells at its start of states that never fit."""
    return Outcome("", PROMPT.namespace, 0, 0, 0, 0, "save_too_large", detail, groups=0b10)


def miss(request: str, tokens: int, groups: int = 0) -> Outcome:
    """What an engine tells of a request that stopped at a boundary."""
    stop = PROMPT.boundary(tokens)
    return Outcome(request, PROMPT.namespace, 256, 240, 0, 0, "nothing_stored", stop=stop, groups=groups)


async def tell(client: RemoteStore, *outcomes: Outcome) -> Mapping[str, Any]:
    """Tell the service, and wait until it has read that; returns its status."""
    for outcome in outcomes:
        client.report(outcome)
    return await client.status(deadline=soon())  # behind it on the same connection


async def explain(client: RemoteStore, request: str) -> Mapping[str, Any]:
    return await client.explain(request, deadline=soon())


async def test_a_state_that_was_not_saved(service: Service) -> None:
    """The first request loses its state; the second one finds its pages and stops for want of that state."""
    engine = await service.client()
    for record in PROMPT.records():
        if record.key.group == 0:
            await engine.save(record, ack=Ack.COLD, deadline=soon())
    await tell(engine, miss("first", 64), loss("first", 192, records=3, waited_s=12.5), miss("second", 192, 0b01))
    told = await explain(engine, "second")
    assert (told["reason"], told["result"], told["stopped_at_tokens"]) == ("save_busy", "miss", 192)
    assert told["why"] == "it was computed, but not saved: the engine's processors were busy"
    assert (told["detail"]["lost_by_request"], told["detail"]["waited_s"]) == ("first", 12.5)
    assert told["detail"]["groups_missing"] == "1 (recurrent)" and told["detail"]["lost_at"] <= told["at"]
    assert "records" not in told["detail"]


async def test_the_request_that_lost_it(service: Service) -> None:
    """Its own miss has its own reason: nothing was stored when it came. What it lost is told beside that."""
    engine = await service.client()
    lost = [loss("first", 192, records=3), loss("first", 128, "save_no_room", group=0), loss("first", 256, records=2)]
    await tell(engine, miss("first", 64), *lost)
    told = await explain(engine, "first")
    assert told["reason"] == "never_stored"
    assert told["detail"]["not_saved"] == "save_busy 5, save_no_room 1"
    assert told["detail"]["first_not_saved_tokens"] == 128


async def test_a_second_one_that_loses_it_too(service: Service) -> None:
    """Its loss came after its miss and is no reason for it; the first one's is, whether told before it or after."""
    engine = await service.client()
    await tell(engine, loss("first", 64, group=0), miss("second", 64), loss("second", 64, "save_no_room", group=0))
    told = await explain(engine, "second")
    assert (told["reason"], told["detail"]["lost_by_request"]) == ("save_busy", "first")
    assert told["detail"]["not_saved"] == "save_no_room 1"
    await tell(engine, miss("third", 128), loss("third", 128, group=0))
    assert (await explain(engine, "third"))["reason"] == "never_stored"
    await tell(engine, miss("fourth", 256), loss("late", 256, "save_failed", group=0))
    assert (await explain(engine, "fourth"))["detail"]["lost_by_request"] == "late", "it was on its way when asked for"


async def test_only_what_was_missing_counts(service: Service) -> None:
    """A loss of a group that was there is no reason, nor is one at another boundary; a removal is a better one."""
    engine = await service.client()
    await tell(engine, loss("first", 64, group=0), miss("a", 64, 0b01), miss("b", 128))
    assert (await explain(engine, "a"))["reason"] == "group_incomplete"
    assert (await explain(engine, "b"))["reason"] == "never_stored"


async def test_what_never_fits(service: Service) -> None:
    """The engine tells at its start: whoever misses a state is told so, with the value that would do."""
    engine = await service.client()
    await tell(
        engine, never(pinned_bytes=128 * MIB, needs_bytes=308 * MIB), loss("a", 64, group=0), miss("b", 64, 0b01)
    )
    told = await explain(engine, "b")
    assert told["reason"] == "save_too_large"
    assert (told["detail"]["pinned_bytes"], told["detail"]["needs_bytes"]) == (128 * MIB, 308 * MIB)
    assert "pinned_bytes" in told["advice"] and "lost_by_request" not in told["detail"]


async def test_a_loss_is_no_request(service: Service) -> None:
    """It is neither listed nor counted as one, and takes no request's place."""
    engine = await service.client()
    status = await tell(engine, miss("a", 64), loss("a", 64, records=7), loss("b", 64, "save_of_the_future"), never())
    listed = await engine.explain("", deadline=soon())
    assert [one["request"] for one in listed["requests"]] == ["a"]  # type: ignore[attr-defined]
    async with asyncio.timeout(20):  # a request is counted once its reason was found
        while not (requests := [name for name in status["counters"] if name.startswith("requests{")]):
            await asyncio.sleep(0.05)
            status = await tell(engine)
    counters = status["counters"]
    assert sum(counters[name] for name in requests) == 1
    assert counters['saves_lost{reason="save_busy"}'] == 7 and counters['saves_lost{reason="other"}'] == 1
    assert sum(status["recent"]["requests"].values()) == 1
    assert status["recent"]["losses"] == {"save_busy": 7, "other": 1}


async def test_tenants_are_told_of_their_own(service: Service) -> None:
    """Another tenant's loss explains nothing, even if its namespace and request are named alike."""
    red, blue = await service.client("red"), await service.client("blue")
    spaces = {name: replace(PROMPT, tenant=name).namespace for name in TOKENS}
    await tell(red, replace(loss("a", 64, group=0), namespace=spaces["red"]))
    await tell(red, replace(loss("a", 128, group=0), namespace=spaces["blue"]))  # not open to it: dropped
    for tokens in (64, 128):
        await tell(blue, replace(miss("a", tokens), namespace=spaces["blue"]))
        told = await explain(blue, "a")
        assert told["reason"] == "never_stored" and "not_saved" not in told["detail"]
    await tell(red, replace(miss("b", 64), namespace=spaces["red"]))
    assert (await explain(red, "b"))["reason"] == "save_busy"


async def test_a_service_that_was_away(service: Service) -> None:
    """What it did not take because it was down it learns of when it is back."""
    engine, other = await service.client(), await service.client()
    await service.stop()
    await until(lambda: engine.pool.now() is None)
    engine.report(loss("first", 64, "save_failed", group=0))
    await service.start()
    await engine.wait_ready(deadline=soon())
    await other.wait_ready(deadline=soon())
    await tell(engine)
    await tell(other, miss("second", 64))
    assert (await explain(other, "second"))["reason"] == "save_failed"


async def test_a_service_of_an_earlier_release_is_not_told(service: Service) -> None:
    """It would take a loss for the outcome of the request."""
    engine = await service.client()
    connection = engine.pool.now()
    assert connection is not None and connection.welcome.losses
    connection.welcome = replace(connection.welcome, losses=False)
    await tell(engine, miss("a", 64), loss("a", 64))
    assert "not_saved" not in (await explain(engine, "a"))["detail"]


async def test_a_bounded_number_is_kept(service: Service) -> None:
    """The oldest are forgotten, and explain nothing any more."""
    engine = await service.client()
    stops = [replace(PROMPT, name=str(number)).boundary(64) for number in range(5000)]
    await tell(engine, *(replace(loss(f"r {number}", 64), stop=stop) for number, stop in enumerate(stops)))
    for number, reason in ((0, "never_stored"), (4999, "save_busy")):
        await tell(engine, replace(miss(f"of {number}", 64), stop=stops[number]))
        assert (await explain(engine, f"of {number}"))["reason"] == reason


async def doctor(service: Service) -> Finding:
    """The finding on saves."""
    check = service_check(ServiceAddress(service.url))
    findings = await asyncio.to_thread(run_checks, [check], timeout_s=20.0)
    return next(finding for finding in findings if finding.name == "service.saves")


async def test_the_doctor_names_what_to_do(service: Service) -> None:
    """Fine while nothing is lost; at an engine's start already what never fits, with the value; then each reason."""
    engine = await service.client()
    found = await doctor(service)
    assert (found.verdict, found.seen) == (Verdict.OK, "no record was lost in the last 5 minutes")
    await tell(engine, never(pinned_bytes=128 * MIB, needs_bytes=308 * MIB - 1))
    found = await doctor(service)
    assert found.verdict is Verdict.WARNING and "need 308MiB of pinned_bytes and it has 128MiB" in found.seen
    assert found.fix == 'set "pinned_bytes":"308MiB" in kv_connector_extra_config of vLLM'
    await tell(engine, loss("a", 64, records=1500), loss("a", 128, "save_stopped"))
    found = await doctor(service)
    assert "1,501 records were computed in the last 5 minutes, but not saved" in found.seen
    assert "(save_busy 1,500, save_stopped 1)" in found.seen
    assert "save_busy: leave processor time" in found.fix and "save_stopped: stop engines with SIGTERM" in found.fix
    assert '"pinned_bytes":"308MiB"' in found.fix
