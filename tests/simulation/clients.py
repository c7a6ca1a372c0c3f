"""Clients: what engines ask of the service on their node, with every answer checked."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from kvstore.api import Ack, LeaseId, PrefixQuery, Retention, SaveOutcome, Staged
from kvstore.errors import Closed, CorruptRecord, KVStoreError, Unavailable
from kvstore.format.record import Record
from kvstore.model.coverage import longest_resumable
from kvstore.model.keys import RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.store.leases import LeaseTable
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import Prompt
from tests.simulation.oracle import Oracle
from tests.simulation.process import ProcessDied
from tests.simulation.service import Service

T = TypeVar("T")

_LATE_S = 0.1
"""A call may end so long after its deadline: what it does there waits for nothing but its own tasks."""
_HANGS_S = 60.0


class Gone(Exception):
    """The service ended, or is ending, or this client went away."""


class Client:
    """One engine.

    Args:
        name: For traces.
        pick: Chooses a service.
        prompts: What it may be asked for.
        numbers: Decides everything.
        oracle: Told of everything.
    """

    def __init__(
        self,
        name: str,
        pick: Callable[[random.Random], Service | None],
        prompts: list[Prompt],
        numbers: random.Random,
        oracle: Oracle,
    ) -> None:
        self.name = name
        self._pick = pick
        self._prompts = prompts
        self._numbers = numbers
        self._oracle = oracle
        self._leases: list[LeaseId] = []  # of all services; some have ended

    def _say(self, what: str, about: object = "") -> None:
        self._oracle.trace.add(self.name, what, about)

    async def live(self, until_s: float) -> None:
        """Serve one prompt after the other."""
        loop = asyncio.get_running_loop()
        while loop.time() < until_s:
            await asyncio.sleep(self._numbers.expovariate(1 / 0.3))
            service = self._pick(self._numbers)
            if service is None:
                continue
            try:
                await self._serve(service, self._numbers.choice(self._prompts))
            except Gone:
                self._say(f"lost {service.name}")

    async def _serve(self, service: Service, prompt: Prompt) -> None:
        numbers = self._numbers
        await self._call(service, "open", lambda store, by: store.open_namespace(prompt.description, deadline=by), 2.0)
        query = prompt.query(local_tokens=numbers.choice((0, 0, 0, 64)))
        if numbers.random() < 0.7:
            await self._lookup(service, prompt, query)
        started_s = self._now_s()
        timeout_s = numbers.choice((0.3, 1.0, 3.0))
        staged = await self._call(
            service,
            "stage",
            lambda store, by: store.stage(query, deadline=by),
            timeout_s,
            quits=numbers.random() < 0.05,
        )
        resume_tokens = query.local_tokens
        if staged is not None:
            self._check_staged(prompt, query.local_tokens, staged)
            if staged.lease is not None:
                resume_tokens = staged.resume_tokens
                await self._read(service, staged, staged.lease, started_s)
        if numbers.random() < 0.8:
            await self._save_rest(service, prompt, resume_tokens)

    async def _lookup(self, service: Service, prompt: Prompt, query: PrefixQuery) -> None:
        sightings = self._oracle.sightings
        if sightings is not None:
            sightings.looks_up(query, prompt.layout)
        try:
            await self._call(service, "lookup", lambda store, by: store.lookup(query, deadline=by), 0.5)
        finally:
            if sightings is not None:
                sightings.looked_up(query, prompt.layout)

    def _check_staged(self, prompt: Prompt, local_tokens: int, staged: Staged) -> None:
        """What is leased is what the resume point needs."""
        self._say(f"staged {staged.resume_tokens} of {prompt.num_tokens} tokens, {len(staged.keys)} records")
        query, layout = prompt.query(local_tokens=local_tokens), prompt.layout
        if staged.lease is None:
            if staged.resume_tokens != local_tokens or staged.keys:
                self._oracle.violate("something is staged without a lease")
            return
        held = set(staged.keys)
        bits = [
            sum(
                1 << index
                for index, group in enumerate(layout.groups)
                if all(
                    RecordKey(query.namespace, boundary.prefix, index, slice_) in held
                    for slice_ in range(group.num_slices)
                )
            )
            for boundary in query.boundaries
        ]
        reached = longest_resumable(
            layout,
            [boundary.tokens for boundary in query.boundaries],
            bits,
            local_tokens=local_tokens,
            cap_tokens=staged.resume_tokens,
            step_tokens=query.step_tokens,
        )
        if reached != staged.resume_tokens:
            self._oracle.violate(f"{staged.resume_tokens} tokens are promised, what is leased reaches {reached}")

    async def _read(self, service: Service, staged: Staged, lease: LeaseId, started_s: float) -> None:
        """Load records of a lease, some of them late; at the end release it, or leave it to its end."""
        numbers, alive = self._numbers, _LeaseTime(started_s, self._now_s(), staged.lease_s)
        self._leases.append(lease)
        bad: set[RecordKey] = set()
        for key in staged.keys:
            if numbers.random() < 0.05:
                await asyncio.sleep(numbers.random() * 2 * staged.lease_s / 3)
            if numbers.random() < 0.05:
                asked_s = self._now_s()
                renewed = await self._call(service, "renew", lambda store, by: store.renew(lease, deadline=by), 1.0)
                if renewed:
                    alive = _LeaseTime(asked_s, self._now_s(), staged.lease_s)
                elif renewed is False and alive.surely_lives(self._now_s()):
                    self._oracle.violate("a living lease could not be renewed")
            await self._load(service, lease, key, alive, key in bad)
            if numbers.random() < 0.01:
                await self._discard(service, key, bad)
        if numbers.random() < 0.6:
            await self._call(service, "release", lambda store, by: store.release(lease), 1.0)
            if await self._load_one(service, lease, staged.keys[0]) is not None:
                self._oracle.violate("a record was served from a lease that was released", staged.keys[0])
        elif numbers.random() < 0.5:  # this engine dies, and its service notices
            self._say("dies")
            service.process.run(partial(self._release_all, service.store.leases))

    def _release_all(self, table: LeaseTable) -> None:
        for lease in self._leases:
            table.release(lease)

    async def _load(self, service: Service, lease: LeaseId, key: RecordKey, alive: _LeaseTime, is_bad: bool) -> None:
        asked_s = self._now_s()
        record = await self._load_one(service, lease, key)
        if record is not None:
            self._oracle.served(record, key, service.name)
            if alive.has_surely_ended(asked_s):
                self._oracle.violate("a record was served from a lease that had ended", key)
            if is_bad:
                self._oracle.violate("a discarded record was served from its lease", key)
        elif alive.surely_lives(self._now_s()) and not is_bad and not self._oracle.is_suspect(key):
            self._oracle.violate("a leased record could not be loaded", key)

    async def _load_one(self, service: Service, lease: LeaseId, key: RecordKey) -> Record | None:
        return await self._call(service, "load", lambda store, by: store.load(lease, key, deadline=by), 1.0)

    async def _discard(self, service: Service, key: RecordKey, bad: set[RecordKey]) -> None:
        self._say("discards", key)
        self._oracle.suspect(key)
        await self._call(service, "discard", lambda store, by: store.discard(key, "a test says so", deadline=by), 2.0)
        bad.add(key)

    async def _save_rest(self, service: Service, prompt: Prompt, from_tokens: int) -> None:
        """Save what was computed: pages in order, all slices, then perhaps the tail."""
        numbers = self._numbers
        ack = numbers.choices(list(Ack), (3, 4, 2))[0]
        is_short = numbers.random() < 0.1 and ack is not Ack.HOT  # see the README: not modelled
        retention = Retention.SHORT if is_short else Retention.NORMAL
        seed = numbers.choice((0, 0, 0, 1))
        timeout_s = numbers.choice((0.5, 2.0, 5.0))
        page_tokens = prompt.layout.page_tokens
        ends = [end for end in range(page_tokens, prompt.num_tokens + 1, page_tokens) if end > from_tokens]
        if prompt.num_tokens % page_tokens:
            ends.append(prompt.num_tokens)
        for tokens in ends:
            if numbers.random() < 0.05:
                return
            saves = [
                self._save(service, prompt, prompt.record(tokens, group, slice_, seed=seed), ack, retention, timeout_s)
                for group, layout in enumerate(prompt.layout.groups)
                for slice_ in range(layout.num_slices)
            ]
            await asyncio.gather(*saves)

    async def _save(
        self, service: Service, prompt: Prompt, record: Record, ack: Ack, retention: Retention, timeout_s: float
    ) -> None:
        numbers = self._numbers
        if self._oracle.sightings is not None:
            tokens = record.header.span.stop
            self._oracle.sightings.saves(prompt, record.key, tokens, waits=ack is not Ack.MEMORY)
        if numbers.random() < 0.01:
            await self._save_damaged(service, record, ack)
            return
        self._oracle.offered(record)
        started_s = self._now_s()
        outcome = await self._call(
            service,
            f"save {ack.value}",
            lambda store, by: store.save(record, ack=ack, retention=retention, deadline=by),
            timeout_s,
            quits=numbers.random() < 0.02,
        )
        ended = outcome.value if outcome is not None else "failed"
        self._say(f"{service.name} saved at {ack.value} ({retention.value}): {ended}", record.key)
        if outcome in {SaveOutcome.STORED, SaveOutcome.EXISTS}:
            self._oracle.acknowledged(record.key, ack, started_s)

    async def _save_damaged(self, service: Service, record: Record, ack: Ack) -> None:
        data = bytearray(record.data)
        data[self._numbers.randrange(192, len(data))] ^= 1
        damaged = Record(record.header, memoryview(bytes(data)))
        outcome = await self._call(
            service, "save damaged", lambda store, by: store.save(damaged, ack=ack, deadline=by), 2.0, refused=True
        )
        # one that is there already is not looked at
        if outcome not in {None, SaveOutcome.EXISTS, SaveOutcome.BUSY}:
            self._oracle.violate("damaged bytes were taken", record.key)

    async def _call(
        self,
        service: Service,
        what: str,
        make: Callable[[TieredStore, Deadline], Coroutine[Any, Any, T]],
        timeout_s: float,
        *,
        quits: bool = False,
        refused: bool = False,
    ) -> T | None:
        """Have a service do something, as one of its tasks.

        Args:
            service: Which.
            what: For the trace.
            make: The call.
            timeout_s: Its deadline.
            quits: Cancel it somewhere in the middle.
            refused: It is expected to say that the record is corrupt.

        Returns:
            Its answer; `None` when it said that it is unavailable, or was cancelled.

        Raises:
            Gone: The service ended.
        """
        if not service.is_open:
            raise Gone
        loop = asyncio.get_running_loop()
        deadline = Deadline.after(timeout_s, service.clock)
        task = service.process.spawn(make(service.store, deadline))
        if quits:
            await asyncio.wait({task}, timeout=self._numbers.random() * 0.1)
            task.cancel()
        await asyncio.wait({task}, timeout=_HANGS_S)
        if not task.done():
            self._oracle.violate(f"{what} hangs")
            raise Gone
        late_s = loop.time() - deadline.at_s
        is_alive = service.process.is_alive
        if is_alive and late_s > _LATE_S:
            self._oracle.violate(f"{what} ended {late_s:.3f} s after its deadline")
        if not is_alive:  # its connection broke: whatever it answered did not arrive
            if not task.cancelled():
                task.exception()
            raise Gone
        return self._outcome(task, what, quits, refused)

    def _outcome(self, task: asyncio.Task[T], what: str, quits: bool, refused: bool) -> T | None:
        if task.cancelled():
            if not quits:
                self._oracle.violate(f"{what} was cancelled by the store itself")
            return None
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, Unavailable):
            self._say(f"{what}: {error.message}")
            return None
        if isinstance(error, Closed | ProcessDied):
            raise Gone
        if not (refused and isinstance(error, CorruptRecord)):
            kind = "an error of its own" if isinstance(error, KVStoreError) else "a foreign error"
            self._oracle.violate(f"{what} raised {kind}: {error!r}")
        return None

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


class _LeaseTime:
    """When a lease ends, as far as its holder knows: its time began somewhere between question and answer."""

    def __init__(self, asked_s: float, answered_s: float, lease_s: float) -> None:
        self._first_end_s = asked_s + lease_s
        self._last_end_s = answered_s + lease_s

    def surely_lives(self, now_s: float) -> bool:
        return now_s < self._first_end_s

    def has_surely_ended(self, now_s: float) -> bool:
        return now_s > self._last_end_s
