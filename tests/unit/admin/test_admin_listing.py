"""Walks over entries while the servers of a cluster change: the caller's own cursor is refused as a mistake of the
caller, one of the walk as a walk to repeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import cast

import pytest

from kvstore.catalog import base
from kvstore.catalog.base import Addition, NamespaceTotals, Step
from kvstore.catalog.entry import Level
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.model.keys import NamespaceId
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.tracing import RequestContext, request_context
from kvstore.service.admin import catalog_access, listing
from kvstore.service.admin.catalog_access import CatalogAccess, Namespace
from kvstore.service.admin.context import AdminContext
from kvstore.service.admin.data_loop import DataLoop
from kvstore.service.admin.port import Administered
from kvstore.settings import Settings
from kvstore.store.upkeep.operations import StoreOperations
from kvstore.testing.dict_catalog import CatalogBooks, DictCatalog
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.waiting import soon, until

PROMPT = Prompt(ATTENTION, "listed", 640)


class ChangedCatalog(DictCatalog):
    """Its servers change after each step."""

    async def step(self, namespace: NamespaceId, cursor: str, *, count: int, deadline: Deadline) -> Step:
        if cursor:
            raise InvalidRequest("no longer valid", field="cursor")
        return await super().step(namespace, cursor, count=count, deadline=deadline)


@pytest.fixture
async def namespace(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Namespace]:
    monkeypatch.setattr(base, "STEP_ENTRIES", 4)
    catalog = ChangedCatalog(CatalogBooks())
    await catalog.register(PROMPT.namespace, ATTENTION, "", deadline=soon())
    await catalog.add([Addition(key, Level.COLD, 100, 0) for key in PROMPT.record_keys()], deadline=soon())
    yield Namespace(PROMPT.namespace, PROMPT.description, ATTENTION, catalog)


async def test_a_walk_of_the_service_is_to_be_repeated(namespace: Namespace) -> None:
    """As when all of a namespace is deleted: nobody has named a cursor."""
    with pytest.raises(Unavailable, match="servers changed during a walk"):
        async for _ in listing.steps_of(namespace, soon()):
            pass


async def test_a_cursor_of_the_caller_is_refused(namespace: Namespace) -> None:
    with pytest.raises(InvalidRequest):
        async for _ in listing.steps_of(namespace, soon(), "00" * 32):
            pass


@pytest.mark.parametrize("what", ["scans", "calls"])
async def test_turns_go_round_among_tenants(what: str) -> None:
    """A tenant with many lists, or calls of the store, delays another one's by those that run and one more, not by
    all of them.
    """
    loop = DataLoop(asyncio.get_running_loop())
    context = AdminContext(cast(Administered, None), loop, loop, cast(CatalogAccess, None), lambda: False)
    order: list[str] = []
    is_open = asyncio.Event()

    async def held(*_: object) -> None:
        order.append(request_context.get().tenant)
        await is_open.wait()

    class Slow(DictCatalog):
        async def step(self, namespace: NamespaceId, cursor: str, *, count: int, deadline: Deadline) -> Step:
            await held()
            return await super().step(namespace, cursor, count=count, deadline=deadline)

    catalog = Slow(CatalogBooks())
    await catalog.register(PROMPT.namespace, ATTENTION, "", deadline=soon())
    namespace = Namespace(PROMPT.namespace, PROMPT.description, ATTENTION, catalog)

    async def ask(tenant: str) -> None:
        request_context.set(RequestContext(tenant=tenant))
        if what == "scans":
            await listing.list_entries(context, namespace, limit=1)
        else:
            await loop.call(held)

    asking = [asyncio.create_task(ask(tenant)) for tenant in ("red",) * 8 + ("blue",)]
    at_once = 2 if what == "scans" else 4
    await until(lambda: len(order) == at_once)
    is_open.set()
    await asyncio.gather(*asking)
    assert order.index("blue") == at_once + 1


async def test_requests_do_not_wait_while_totals_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cluster that asks every slot, which may take a minute. Whose a namespace is needs one answer, and a
    request that needs totals too waits for its own time only.
    """
    are_read = asyncio.Event()

    class Slow(DictCatalog):
        async def totals(self, *, deadline: Deadline) -> Mapping[NamespaceId, NamespaceTotals]:
            are_read.set()
            await asyncio.Event().wait()
            raise AssertionError

    catalog = Slow(CatalogBooks())
    await catalog.register(PROMPT.namespace, ATTENTION, "red", deadline=soon())
    loop = DataLoop(asyncio.get_running_loop())
    monkeypatch.setattr(catalog_access, "open_catalog", lambda *_, **__: nullcontext(catalog))
    operations = cast(StoreOperations, SimpleNamespace(check_hot=None))
    access = CatalogAccess(cast(Settings, SimpleNamespace(hot=None)), loop, operations)
    reading = asyncio.create_task(access.totals())
    await are_read.wait()
    async with asyncio.timeout(5):
        assert await access.tenant_of(PROMPT.namespace) == "red"
        with pytest.raises(Unavailable):
            await access.totals(0.0)
    reading.cancel()
