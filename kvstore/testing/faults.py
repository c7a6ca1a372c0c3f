"""A tier that can be made to hang, to refuse and to count: for failures no real server can be made to have on cue."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from kvstore.errors import Unavailable
from kvstore.format.record import Record
from kvstore.model.keys import RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.base import PutOutcome, Tier, TierWrapper

T = TypeVar("T")


class FaultyTier(TierWrapper):
    """Passes every call on to a real tier, unless a fault is set.

    Attributes:
        calls: Number of calls by method.
        keys_asked: Every key of every `head`, in order.
        keys_put: The key of every put, in order.
        keys_allowed: Every key that may be evicted, in order.
        down: Every call raises `Unavailable` at once.
        frozen: Every call hangs until its deadline or until this is unset.
        get_limit: Gets after this number hang; `None`: none does.
        get_s: Each get takes this long, and `put_s` each put.
        lost: `get` answers `None` for these, as if they had gone since `head`.
        refused: `put` raises `Unavailable` for these and for no others.
        unanswered: `put` stores these and then raises `Unavailable`, as if the answer had been lost, once for each.
    """

    def __init__(self, inner: Tier, *, name: str | None = None) -> None:
        super().__init__(inner, name)
        self.calls: Counter[str] = Counter()
        self.keys_asked: list[RecordKey] = []
        self.keys_put: list[RecordKey] = []
        self.keys_allowed: list[RecordKey] = []
        self.down = False
        self.frozen = False
        self.get_limit: int | None = None
        self.get_s = self.put_s = 0.0
        self.lost: set[RecordKey] = set()
        self.refused: set[RecordKey] = set()
        self.unanswered: set[RecordKey] = set()

    async def _pass(self, what: str, call: Callable[[], Awaitable[T]], deadline: Deadline) -> T:
        await self._fault(what, deadline)
        return await call()

    async def _fault(self, method: str, deadline: Deadline) -> None:
        self.calls[method] += 1
        if self.down:
            raise Unavailable("a test has set the tier to be down", tier=self.name)
        if self.frozen or (method == "get" and self.get_limit is not None and self.calls["get"] > self.get_limit):
            async with deadline.scope("a call to a frozen tier"):
                await asyncio.Event().wait()

    async def head(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> list[int | None]:
        self.keys_asked += keys
        return await super().head(keys, deadline=deadline)

    async def get(
        self, key: RecordKey, *, deadline: Deadline, allocate: Callable[[int], memoryview] | None = None
    ) -> Record | None:
        await self._fault("get", deadline)
        if self.get_s:
            await asyncio.sleep(self.get_s)
        return None if key in self.lost else await self.inner.get(key, deadline=deadline, allocate=allocate)

    async def put(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        await self._fault("put", deadline)
        if self.put_s:
            await asyncio.sleep(self.put_s)
        if record.key in self.refused:
            raise Unavailable("a test has set the tier to refuse this record", tier=self.name, key=record.key)
        self.keys_put.append(record.key)
        outcome = await self.inner.put(record, deadline=deadline)
        if record.key in self.unanswered:
            self.unanswered.remove(record.key)
            raise Unavailable("a test has set the tier to store this record without an answer", tier=self.name)
        return outcome

    async def put_evictable(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        outcome = await self.put(record, deadline=deadline)
        if outcome is PutOutcome.STORED:
            self.keys_allowed.append(record.key)
        return outcome

    async def allow_eviction(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        await super().allow_eviction(keys, deadline=deadline)
        self.keys_allowed += keys
