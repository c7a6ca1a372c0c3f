"""What the contract of `PageStore` is tested with: a store, what happens behind its back, and short calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import pytest

from kvstore.api import Lookup, PageStore, SaveOutcome, Staged
from kvstore.format.record import Record
from kvstore.model.keys import RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.testing.prompts import ATTENTION, HYBRID, WINDOWED, Prompt
from kvstore.testing.waiting import soon

T = TypeVar("T")

LEASE_S = 0.4
"""Leases of the stores under test: long enough to load, short enough to wait for their end."""

LAYOUTS = [
    pytest.param(ATTENTION, id="attention"),
    pytest.param(WINDOWED, id="window"),
    pytest.param(HYBRID, id="hybrid"),
]


@dataclass
class StoreNode:
    """A store under test and what the suite needs to do behind its back.

    Attributes:
        store: The store.
        lose: Makes the node lose one record everywhere, silently.
        drain: Waits until everything saved has reached the slower tiers; returns what is left.
        num_pinned_bytes: Bytes that leases hold at this moment.
    """

    store: PageStore
    lose: Callable[[RecordKey], Awaitable[None]]
    drain: Callable[[Deadline], Awaitable[int]]
    num_pinned_bytes: Callable[[], int]


async def save_one(store: PageStore, record: Record) -> None:
    """Save a record that must be new."""
    assert await store.save(record, deadline=soon()) is SaveOutcome.STORED


async def save_all(store: PageStore, prompt: Prompt) -> list[Record]:
    """Open the prompt's namespace and save all of its records; returns them."""
    assert await store.open_namespace(prompt.description, deadline=soon()) == prompt.namespace
    records = prompt.records()
    for record in records:
        await save_one(store, record)
    return records


async def look_up(store: PageStore, prompt: Prompt) -> Lookup:
    """`lookup` of the whole prompt."""
    return await store.lookup(prompt.query(), deadline=soon())


async def stage_all(store: PageStore, prompt: Prompt) -> Staged:
    """`stage` of the whole prompt."""
    return await store.stage(prompt.query(), deadline=soon())


async def cancel_after(turns: int, call: Awaitable[T]) -> T | None:
    """Run a call for some turns of the loop, cancel it, and return its answer if it came first."""
    task = asyncio.ensure_future(call)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return None
