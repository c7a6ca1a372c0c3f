"""Finishes abandoned write-backs: their service died, or had more to write than it could hold."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from itertools import islice

from kvstore.catalog.entry import Level
from kvstore.catalog.pending import PendingEntry, PendingLog
from kvstore.errors import Closed, KVStoreError, Unavailable
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.runtime.background import gather_all
from kvstore.runtime.budget import ByteBudget
from kvstore.runtime.deadline import Deadline
from kvstore.store.context import StoreContext, StorePart
from kvstore.store.namespaces import read_description
from kvstore.store.recorder import Recorder
from kvstore.store.write_back.pending_writes import BELIEVED_S, PendingWrites
from kvstore.tiers.base import PutOutcome, Tier

_log = logging.getLogger(__name__)

_CLAIMED_TOGETHER = 16
"""Few, so that the last of them is finished well within its lease, and other services get their share."""
_PAUSE_S_MAX = 2.0
_REQUESTS_MAX = 32_768
"""Entries that may wait to be written to the log, some 12 MB."""
_REQUESTS_TOGETHER = 256
_LOGGED_S = 60.0
"""A busy service leaves some writes to others all the time."""


class Finisher(StorePart):
    """Claims entries whose leases have expired, a few at a time, and copies their records to the cold tier.

    Args:
        log: The pending entries, under an owner id of the finisher's own: a record that is saved again during that,
            even by this service, gets a second entry beside the one that is being finished.
        cold: Where the records belong.
        recorder: The way to the catalog: a service that died may not have reported what it wrote. `None`: no catalog.
        pending_writes: Gets the totals over all services.

    Attributes:
        is_paused: Nothing is claimed for now.
    """

    def __init__(
        self,
        log: PendingLog,
        cold: Tier,
        context: StoreContext,
        *,
        recorder: Recorder | None,
        pending_writes: PendingWrites,
    ) -> None:
        super().__init__(context)
        self.is_paused = False
        self._log = log
        self._target = cold
        self._recorder = recorder
        self._pending_writes = pending_writes
        self._undescribed: dict[NamespaceId, Deadline] = {}  # no manifest found: how long to wait for it
        self._in_flight = ByteBudget(self._limits.finish_bytes_in_flight)
        self._requests: dict[RecordKey, PendingEntry] = {}
        self._unlogged: Counter[str] = Counter()  # what was finished since the last line in the log, by outcome
        self._logged_s = float("-inf")

    def start(self) -> None:
        """Work in the background, until its owner is closed."""
        self._background.keep_running(self._run, "finishing write-backs")

    def request(self, entry: PendingEntry) -> bool:
        """Have a record that the hot tier has, and may evict, copied to the cold tier by any service that has time.
        False: too much is pending. Never waits; requests not yet in the log are lost with the process.
        """
        if len(self._requests) >= _REQUESTS_MAX or self._pending_writes.is_over_limit:
            return False
        self._requests[entry.key] = entry
        return True

    async def _write_requests(self) -> None:
        """Write the requested entries to the log and release them at once, so that any service may claim them."""
        while self._requests:
            entries = list(islice(self._requests.values(), _REQUESTS_TOGETHER))
            keys = [entry.key for entry in entries]
            deadline = self._deadline()
            if await self._log.add(entries, deadline=deadline):
                await self._log.release(keys, deadline=deadline)
            else:
                self._meters.add("pending_failures", step="full")
            for key in keys:
                self._requests.pop(key, None)

    async def _run(self) -> None:
        while True:
            num_claimed = num_done = 0
            try:
                if not self.is_paused:
                    num_claimed, num_done = await self.round()
            except Closed:
                raise
            except KVStoreError:
                self._meters.add("pending_failures", step="claim")
            if not num_claimed:
                self._log_finished()
            if num_claimed < _CLAIMED_TOGETHER or not num_done:
                await asyncio.sleep(min(_PAUSE_S_MAX, self._log.lease_s / 3))

    def _log_finished(self) -> None:
        """Say in the log what was finished for services that left it, at most once in a while."""
        now_s = self._clock.monotonic_s()
        if self._unlogged and now_s - self._logged_s >= _LOGGED_S:
            numbers = ", ".join(f"{outcome} {num:,}" for outcome, num in sorted(self._unlogged.items()))
            _log.info("writes to %s that a service had left undone were finished: %s", self._target.name, numbers)
            self._unlogged.clear()
            self._logged_s = now_s

    async def round(self) -> tuple[int, int]:
        """Claim some entries and finish them; returns how many were claimed, and how many of them are done.

        Raises:
            Unavailable: The log does not answer.

        If cancelled, what was claimed can be claimed again once its lease has expired.
        """
        await self._write_requests()
        deadline = self._deadline()
        totals = await self._log.totals(deadline=deadline)
        self._pending_writes.set_totals(totals)
        self._meters.set("pending_records", totals.num_records)
        self._meters.set("pending_bytes", totals.num_bytes)
        self._meters.set("pending_limit_bytes", self._limits.pending_bytes)
        if not totals.num_records:
            self._undescribed.clear()
            return 0, 0
        entries = await self._log.claim(_CLAIMED_TOGETHER, deadline=deadline)
        done = await gather_all([self._finish_within_budget(entry) for entry in entries])
        return len(entries), sum(done)

    async def _finish_within_budget(self, entry: PendingEntry) -> bool:
        grant = await self._in_flight.take(min(entry.num_bytes, self._in_flight.limit_bytes))
        try:
            return await self._finish(entry)
        finally:
            self._in_flight.give_back(grant)

    async def _finish(self, entry: PendingEntry) -> bool:
        """Copy one record to the cold tier and end its entry. False: not now, it is retried once its lease expires."""
        deadline = self._deadline()
        key = entry.key
        try:
            await self._register(key.namespace, deadline)
            started_s = self._clock.monotonic_s()
            outcome = await self._copy(entry, deadline)
            if outcome == "lost" and self._hot is not None and await self._hot.head([key], deadline=deadline) != [None]:
                return False  # it was written again since: the entry now belongs to that write
            if outcome == "full":
                self._meters.add("pending_failures", step="full")
                return False
            if outcome == "refused":
                _log.error("the cold tier refused a record for good, it stays in the hot tier key=%s", key)
            elif self._hot is not None and outcome != "lost":
                took_s = self._clock.monotonic_s() - started_s
                if took_s <= BELIEVED_S or await self._log.renew([key], deadline=deadline) == [1]:
                    await self._hot.allow_eviction([key], deadline=deadline)
                # else a service that has written the record since relies on it, and ends its own entry
                await self._report(self._hot, Level.HOT, entry, deadline)
            await self._log.finish([key], deadline=deadline)
        except Closed:
            raise
        except KVStoreError as error:  # of this record: the others of the round continue
            if not isinstance(error, Unavailable):
                _log.warning("a pending write-back cannot be finished now, it is tried again: %s", error)
            self._meters.add("pending_failures", step="finish")
            return False
        self._meters.add("pending_finished", outcome=outcome)
        self._unlogged[outcome] += 1
        return True

    async def _copy(self, entry: PendingEntry, deadline: Deadline) -> str:
        """How it ended: `present` already, `stored` now, `full`, `refused` for good, or `lost`: in no tier.

        Entries are written before their records, so a record that is in no tier may never have been acknowledged.
        """
        key = entry.key
        (num_bytes,) = await self._target.head([key], deadline=deadline)
        if num_bytes is not None:
            await self._report(self._target, Level.COLD, entry, deadline)
            return "present"
        record = await self._hot.get(key, deadline=deadline) if self._hot is not None else None
        if record is None:
            return "lost"
        try:
            outcome = await self._target.put(record, deadline=deadline)
        except (Unavailable, Closed):
            raise
        except KVStoreError:
            return "refused"
        return "full" if outcome is PutOutcome.FULL else "stored"

    async def _register(self, namespace: NamespaceId, deadline: Deadline) -> None:
        """Register a namespace that no engine has opened on this node with the catalog, from its manifest in a tier.

        Raises:
            Unavailable: No tier has a manifest yet. After a while the record is finished all the same: the catalog then
                lacks it, and is marked incomplete.
        """
        if self._recorder is None or self._recorder.knows(namespace):
            return
        description = await read_description(namespace, (self._target, self._hot), deadline=deadline)
        if description is not None:
            self._recorder.register(namespace, description.layout(), description.tenant)
            return
        if self._undescribed.setdefault(namespace, deadline).expired:
            return
        raise Unavailable("a namespace has no manifest yet", namespace=namespace.hex())

    async def _report(self, tier: Tier, level: Level, entry: PendingEntry, deadline: Deadline) -> None:
        """Report a record that another process wrote to the catalog, if the tier has it."""
        if self._recorder is None:
            return
        (num_bytes,) = await tier.head([entry.key], deadline=deadline)
        if num_bytes is None:
            return
        num_bytes = num_bytes or entry.num_bytes
        if not await self._recorder.sized(entry.key, level, num_bytes, entry.stop_tokens, deadline=deadline):
            raise Unavailable("the record's boundary is being deleted: it is tried again", key=entry.key)

    def _deadline(self) -> Deadline:
        return Deadline.after(self._limits.write_back_timeout_s, self._clock)
