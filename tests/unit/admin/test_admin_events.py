"""`/v1/events` and `/v1/history`: who sees what, and how following begins and ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvstore.api import Outcome
from kvstore.eviction.holdings import Quota
from kvstore.runtime.events import Event, EventKind
from kvstore.service.admin.resources import events
from kvstore.testing.waiting import soon
from tests.unit.admin.service_harness import ServiceHarness, open_service, prompt_of


@asynccontextmanager
async def following(client: httpx.AsyncClient, last: str = "") -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """The events as they are sent."""
    headers = {"Last-Event-ID": last} if last else {}
    async with client.stream("GET", "/v1/events", headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")

        async def events() -> AsyncIterator[dict[str, Any]]:
            fields: dict[str, str] = {}
            async for line in answer.aiter_lines():
                name, _, value = line.partition(": ")
                if name:
                    fields[name] = value
                elif "data" in fields:
                    event = json.loads(fields["data"])
                    assert (fields["id"], fields["event"]) == (event["id"], event["kind"])
                    yield event
                    fields = {}

        yield events()


async def listed(client: httpx.AsyncClient, **query: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await client.get("/v1/events", params={"follow": "false", **query})).json()["events"]
    return found


async def test_events_are_sent_as_they_happen(made: ServiceHarness) -> None:
    """A follower gets the kept events, then new ones. After a disconnection it continues after the last event that it
    saw.
    """
    tell = made.store.events.add
    async with made.client("operator") as client:
        async with following(client) as events:
            assert (await anext(events))["kind"] == "started"
            tell(EventKind.EVICTED, "one left")
            seen = await anext(events)
            assert (seen["text"], seen["severity"]) == ("one left", "info")
        tell(EventKind.EVICTED, "two left")
        async with following(client, seen["id"]) as events:
            assert (await anext(events))["text"] == "two left"
        assert [one["text"] for one in await listed(client)] == ["two left", "one left", "the service started"]
        assert [one["text"] for one in await listed(client, limit=1)] == ["two left"]


async def test_an_event_that_comes_while_they_are_read_is_sent_once(
    made: ServiceHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's thread adds events at any time."""
    kept = made.store.events
    read, late = kept.after, ["late"]

    def after(number: int) -> list[Event]:
        while late:
            kept.add(EventKind.EVICTED, late.pop())
        return read(number)

    monkeypatch.setattr(kept, "after", after)
    async with made.client("operator") as client, following(client) as found:
        assert [(await anext(found))["text"] for _ in range(2)] == ["the service started", "late"]
        await asyncio.sleep(1.0)  # some rounds
        kept.add(EventKind.EVICTED, "next")
        assert (await anext(found))["text"] == "next"


async def test_a_tenant_sees_its_own_and_public_events(made: ServiceHarness) -> None:
    """Red and blue each see their own quarantined records and changes, and that a tier failed, without the reason. Only
    operators see events on all tenants.
    """
    red, blue = await made.save(prompt_of("a", "red")), await made.save(prompt_of("b", "blue"))
    tell = made.store.events.add
    tell(EventKind.TIER_DOWN, "tier s3 is off", is_public=True, detail={"tier": "s3", "reason": "10.0.0.7 refused"})
    tell(EventKind.EVICTED, "12 left", detail={"tier": "s3"})
    for prompt in (red, blue):
        tell(
            EventKind.QUARANTINED, f"of {prompt.name}", namespace=prompt.namespace.hex(), detail={"reason": "checksum"}
        )
    async with made.client("operator") as client:
        await client.delete(f"/v1/prefixes/{red.namespace.hex()}/{red.boundary(336).prefix.hex()}?confirm=true")
        assert len(await listed(client)) == 6
    async with made.client("red") as client:
        body = {"namespace": red.namespace.hex(), "prefix": red.boundary(64).prefix.hex(), "expires_in_s": 60}
        assert (await client.post("/v1/pins", json=body)).status_code == 201
        seen = await listed(client)
        texts = ["a prefix was pinned", "a prefix was deleted", "of a", "tier s3 is off", "the service started"]
        assert [one["text"] for one in seen] == texts
        assert seen[0]["detail"]["who"].startswith("red/") and "who" not in seen[1]["detail"]
        assert seen[3]["detail"] == {"tier": "s3"} and set(seen[4]["detail"]) == {"release"}
    async with made.client("blue") as client:
        assert [one["text"] for one in await listed(client)] == ["of b", "tier s3 is off", "the service started"]
        async with following(client) as events:
            assert [(await anext(events))["text"] for _ in range(3)][-1] == "of b"


async def test_a_call_that_changes_nothing_is_no_event(made: ServiceHarness) -> None:
    """The pin that is not there, the quota that is set already, and the end of one that is not: done, and no event."""
    prompt = await made.save(prompt_of("a", "red"))
    place = f"/v1/pins/{prompt.namespace.hex()}/{prompt.boundary(64).prefix.hex()}"
    body = {"namespace": prompt.namespace.hex(), "prefix": prompt.boundary(64).prefix.hex(), "expires_in_s": 60}
    async with made.client("operator") as client:

        async def changes() -> list[str]:
            return [one["text"] for one in await listed(client) if one["kind"] == "admin"]

        assert (await client.delete(place)).status_code == 204
        assert (await client.delete("/v1/quotas/red")).status_code == 204
        assert (await client.post("/v1/tiers/cold/resume")).status_code == 200
        assert await changes() == []
        assert (await client.post("/v1/pins", json=body)).status_code == 201
        for _ in range(2):
            assert (await client.delete(place)).status_code == 204
            assert (await client.put("/v1/quotas/red", json={"maximum_bytes": 4096})).status_code == 200
        assert await changes() == ["a quota was set", "a pin was removed", "a prefix was pinned"]


async def test_operator_rules_that_take_effect_are_events(made: ServiceHarness) -> None:
    """A quota and retired weights, set at any service, are reported once by each service where they take effect, and so
    is their end.
    """
    orders = made.store.operations.operator_rules
    assert orders is not None
    await orders.set_quota("red", Quota(4096, 1 << 20), deadline=soon())
    await orders.retire(None, "w1", is_retired=True, deadline=soon())
    await made.port.watcher.step()
    await made.port.watcher.step()
    await orders.set_quota("red", None, deadline=soon())
    await made.port.watcher.step()
    async with made.client("operator") as operator, made.client("red") as red, made.client("blue") as blue:
        told = [one for one in await listed(operator) if one["kind"] == "settings"]
        removed, weights, held = [one["text"] for one in told]
        assert "in force" in held and "removed" in removed and "w1 are retired" in weights
        assert told[-1]["detail"] == {"tenant": "red", "guaranteed_bytes": 4096, "maximum_bytes": 1 << 20}
        assert [one["text"] for one in await listed(red)] == [removed, held, "the service started"]
        assert [one["text"] for one in await listed(blue)] == ["the service started"]


async def test_dry_runs_and_refusals_are_no_events(made: ServiceHarness) -> None:
    """A dry run, a refused request and a read add no event."""
    red = await made.save(prompt_of("a", "red"))
    async with made.client("red") as client, made.client("red reader") as reader:
        path = f"/v1/namespaces/{red.namespace.hex()}"
        await client.delete(path)
        assert (await reader.delete(f"{path}?confirm=true")).status_code == 403
        await client.post("/v1/lookup", json={"namespace": red.namespace.hex(), "token_ids": []})
        assert [one["kind"] for one in await listed(client)] == ["started"]
        await client.delete(f"{path}?confirm=true")
        assert (await listed(client))[0]["detail"]["records"] > 0


async def test_followers_are_few_and_leave(made: ServiceHarness) -> None:
    """The ninth follower of one token is refused; when the others have left, a new one is admitted."""
    async with made.client("red") as client:
        async with asyncio.TaskGroup() as group:
            inside, leave = asyncio.Semaphore(0), asyncio.Event()

            async def follow() -> None:
                async with following(client) as events:
                    await anext(events)
                    inside.release()
                    await leave.wait()

            for _ in range(8):
                group.create_task(follow())
            for _ in range(8):
                await inside.acquire()
            refused = await client.get("/v1/events")
            assert refused.status_code == 503 and "retry-after" in refused.headers
            leave.set()
        while True:  # the service learns of each end by itself
            async with client.stream("GET", "/v1/events") as answer:
                if answer.status_code == 200:
                    break


async def test_followers_of_tenants_keep_no_operator_out(made: ServiceHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "FOLLOWERS_MAX", 1)
    clients = made.client("red"), made.client("blue"), made.client("operator")
    async with clients[0] as red, clients[1] as blue, clients[2] as operator, following(red):
        assert (await blue.get("/v1/events")).status_code == 503
        async with following(operator) as found:
            assert (await anext(found))["kind"] == "started"


async def test_following_ends_with_the_time_and_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A response ends after its time, with comments in between that keep it alive, or when the service stops."""
    monkeypatch.setattr("kvstore.service.admin.resources.events._HEARTBEAT_S", 0.0)
    async with open_service(tmp_path) as made, made.client("operator") as client:
        with monkeypatch.context() as patched:
            patched.setattr("kvstore.service.admin.resources.events._FOLLOW_S", 0.1)
            whole = (await client.get("/v1/events")).text
            assert whole.startswith("retry: 2000\n\n") and "\n: still here\n\n" in whole
        async with client.stream("GET", "/v1/events") as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            await made.port.aclose()
            assert [line async for line in lines][-1] == ""  # ended, not cut off


async def test_wrong_numbers_are_refused(made: ServiceHarness) -> None:
    """An invalid `Last-Event-ID` is refused."""
    async with made.client("red") as client:
        answer = await client.get("/v1/events?follow=false", headers={"Last-Event-ID": "abc"})
        assert answer.status_code == 422 and "last-event-id" in answer.json()["field"].lower()


async def test_history_is_all_or_the_tenants_own(made: ServiceHarness) -> None:
    """Operators see what the service counted; a tenant sees its own requests and no totals of others."""
    red = await made.save(prompt_of("a", "red"))
    made.store.report(Outcome("r1", red.namespace, 336, 320, 0, 256, "nothing_stored", tenant="red"))
    made.store.report(Outcome("b1", None, 1000, 1000, 0, 0, "too_short", tenant="blue"))
    await made.port.watcher.step()
    async with made.client("operator") as client:
        for hours in (1, 6):
            whole = (await client.get("/v1/history", params={"hours": hours})).json()
            assert (whole["of"], whole["step_s"], len(whole["at_s"])) == ("service", hours * 60, 60)
            assert sum(whole["requests"]["part"]) == sum(whole["requests"]["miss"]) == 1
            assert sum(whole["tokens"]["prompt"]) == 1336 and sum(whole["tokens"]["resumed"]) == 256
            assert set(whole["reasons"]) == {"nothing_stored", "too_short"} == set(whole["words"])
            assert sum(whole["lookups"]["all"]) == 1
            held = (await client.get("/v1/tiers")).json()["tiers"]
            known = [num_bytes for num_bytes in whole["tier_bytes"]["filesystem"] if num_bytes is not None]
            assert known[-1] == held[1]["usage"]["used_bytes"] > 0  # a step that has just begun has no sample
    async with made.client("red") as client:
        own = (await client.get("/v1/history")).json()
        assert (
            own["of"] == "tenant" and sum(own["tokens"]["prompt"]) == 336 and set(own["reasons"]) == {"nothing_stored"}
        )
        assert (own["lookups"], own["tier_bytes"], own["served_records"], own["away"]) == (None, {}, {}, {})
