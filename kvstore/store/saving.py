"""Saves: verify, keep in memory, queue for the slower tiers, and wait for the one that the caller names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvstore.api import Ack, Retention, SaveOutcome
from kvstore.catalog.pending import PendingEntry, PendingLog
from kvstore.errors import Closed, CorruptRecord, InvalidRequest
from kvstore.format.record import Record
from kvstore.model.keys import Boundary, NamespaceId, RecordKey
from kvstore.model.layout import Layout
from kvstore.runtime.budget import ByteBudget
from kvstore.runtime.deadline import Deadline
from kvstore.store.context import StoreContext, StorePart
from kvstore.store.lookup import AbsentKeys
from kvstore.store.namespaces import check_header
from kvstore.store.presence import UNKNOWN_BYTES, Presence, slices_of
from kvstore.store.recorder import Recorder
from kvstore.store.retention.cold_admission import ColdAdmission
from kvstore.store.write_back.finisher import Finisher
from kvstore.store.write_back.pending_writes import PendingWrites
from kvstore.store.write_back.queue import WriteBack
from kvstore.tiers.base import PutOutcome, Tier
from kvstore.tiers.verify import open_off_loop

_RELEASE_S = 2.0
_COPIED_TOGETHER = 256
"""Records that are queued before the event loop gets a turn."""
_OUTCOMES = {outcome: SaveOutcome[outcome.name] for outcome in PutOutcome}


class Saver(StorePart):
    """Takes records in and passes them on to the tiers.

    Args:
        pending: Records what is under way, so that other services can finish it after a crash; used with a cold tier
            only. `None`: a crash loses it.
        recorder: The way to the catalog; `None`: there is no catalog.
        check_open: Raises `Closed` when the store is closed.
        admission: Which saves that wait for memory alone the cold tier gets; `None`: all.
        absent: Records that are saved are removed from it.
        follows: Whether the hints of a namespace's tenant are followed now.

    Attributes:
        queues: The queue of each slower tier, by the tier's name.
    """

    def __init__(
        self,
        context: StoreContext,
        *,
        pending: PendingLog | None,
        recorder: Recorder | None,
        check_open: Callable[[], None],
        admission: ColdAdmission | None,
        absent: AbsentKeys,
        follows: Callable[[NamespaceId], bool],
    ) -> None:
        super().__init__(context)
        self._follows = follows
        self._check_open = check_open
        self._admission = admission
        self._absent = absent
        self._in_flight = ByteBudget(context.limits.save_bytes_in_flight)
        log = pending if context.cold is not None else None
        self._pending_writes = PendingWrites(log, context, self._pending_ended)
        self.queues = {tier.name: WriteBack(tier, self._pending_writes, context) for tier in context.slower}
        self._copies: set[asyncio.Task[None]] = set()
        self._finisher: Finisher | None = None
        if log is not None and context.cold is not None:
            self._finisher = Finisher(
                log.other_owner(), context.cold, context, recorder=recorder, pending_writes=self._pending_writes
            )
            self._finisher.start()

    async def save(
        self, record: Record, layout: Layout, *, ack: Ack, retention: Retention, deadline: Deadline
    ) -> SaveOutcome:
        """As `PageStore.save`. Counts the outcome."""
        outcome = await self._save(record, layout, ack, retention, deadline)
        self._meters.add("saves", outcome=outcome.value)
        return outcome

    async def _save(
        self, record: Record, layout: Layout, ack: Ack, retention: Retention, deadline: Deadline
    ) -> SaveOutcome:
        awaited = self._tier_of(ack)
        check_header(record.header, layout)
        if awaited is None and record.key in self._memory:
            return SaveOutcome.EXISTS
        if record.num_bytes > self._in_flight.limit_bytes:
            return SaveOutcome.FULL
        if awaited is not None and awaited is self._hot and self._pending_writes.is_over_limit:
            return SaveOutcome.BUSY
        grant = self._in_flight.try_take(record.num_bytes)
        if grant is None:
            return SaveOutcome.BUSY
        if retention in (Retention.RELEASED, Retention.RETAINED) and not self._follows(record.key.namespace):
            retention = Retention.NORMAL
        try:
            if not record.is_verified:
                async with deadline.scope("verifying a record"):
                    await verify_record(record)
            self._check_open()
            outcome = self._keep(record, awaited, retention)
            is_wanted = awaited is not None or retention is Retention.RETAINED
            if is_wanted and self._admission is not None:
                self._copy_beginning(record, layout, self._admission)
            if awaited is not None and outcome is not SaveOutcome.FULL:
                outcome = await self._write_through(record, awaited, retention, deadline)
        finally:
            self._in_flight.give_back(grant)
        return outcome

    def _keep(self, record: Record, awaited: Tier | None, retention: Retention) -> SaveOutcome:
        """Put a verified record into memory and queue it for the tiers that no caller waits for. Never suspends.

        Raises:
            Closed: The store is closed.
        """
        outcome = self._memory.insert(record)
        if outcome is PutOutcome.STORED:
            self._absent.remove(record.key)
            if retention is not Retention.SHORT:
                self._queue_for_others(record, awaited, retention)
        return _OUTCOMES[outcome]

    def _queue_for_others(self, record: Record, awaited: Tier | None, retention: Retention) -> None:
        """Queue a record for the tiers that no caller waits for; if the cold one does not get it, the hot may evict
        it. A released record is declined like one that the rule declines: a lookup that finds it again has it copied.
        """
        admission = self._admission if awaited is None and retention is not Retention.RETAINED else None
        if admission is None:
            is_declined = False
        elif retention is Retention.RELEASED:
            admission.decline(record)
            is_declined = True
        else:
            is_declined = not admission.takes(record)
        for tier in (self._hot, None if is_declined else self._cold):
            if tier is not None and tier is not awaited:
                self.queues[tier.name].offer_saved(record, is_evictable=is_declined)

    def copy_to_cold(self, presence: Presence, indexes: Sequence[int]) -> None:
        """Have the cold tier get what it lacks of some boundaries of a prompt, shortest prefix first: from memory, or
        from the hot tier by any service that has time. Never waits; what does not fit into a queue is copied when it is
        looked up again.
        """
        task = self._background.spawn(self._copy_all(presence, indexes), "copying what was looked up again")
        self._copies.add(task)
        task.add_done_callback(self._copies.discard)

    async def _copy_all(self, presence: Presence, indexes: Sequence[int]) -> None:
        query, layout = presence.query, presence.layout
        num_copied = 0
        for index in indexes:
            wanted = []
            for group in range(len(layout.groups)):
                probe = (index, group)
                in_hot, held = presence.hot.get(probe, 0), presence.memory.get(probe, 0)
                num_bytes = presence.mean_bytes(group, UNKNOWN_BYTES)
                wanted += [
                    (presence.key(probe, slice_), num_bytes, bool(in_hot >> slice_ & 1))
                    for slice_ in slices_of((in_hot | held) & ~presence.cold.get(probe, 0))
                ]
            self._copy(query.namespace, query.boundaries[index], wanted)
            num_copied += len(layout.groups) + len(wanted)
            if num_copied >= _COPIED_TOGETHER:
                num_copied = 0
                await asyncio.sleep(0)

    def _copy_beginning(self, record: Record, layout: Layout, admission: ColdAdmission) -> None:
        """Queue for the cold tier the declined boundaries that a record needs or belongs to: a caller waits for the
        record, or wants it retained.
        """
        in_hot, namespace = self._hot is not None, record.key.namespace
        for boundary in admission.needs(record):
            keys = layout.keys_of(namespace, boundary.prefix)
            self._copy(namespace, boundary, [(key, record.num_bytes, in_hot) for key in keys])

    def _copy(self, namespace: NamespaceId, boundary: Boundary, wanted: Sequence[tuple[RecordKey, int, bool]]) -> None:
        """Queue records (key, estimated bytes, whether the hot tier may have it) of one boundary."""
        assert self._cold is not None
        queue, queued = self.queues[self._cold.name], []
        for key, num_bytes, in_hot in wanted:
            if (record := self._memory.peek(key)) is not None:
                queued.append(queue.offer(record))
            elif in_hot and self._finisher is not None and key not in self._pending_writes:
                queued.append(self._finisher.request(PendingEntry(key, num_bytes, boundary.tokens)))
        self._meters.add("admitted_later_records", sum(queued))
        if all(queued) and self._admission is not None:
            self._admission.copied(namespace, boundary.prefix)

    async def _write_through(self, record: Record, tier: Tier, retention: Retention, deadline: Deadline) -> SaveOutcome:
        """Write the record to the tier whose answer the caller waits for. If it is not written now, it waits for that
        tier like any other."""
        is_short, is_promise = retention is Retention.SHORT, tier is self._hot
        write = self._pending_writes.begin(record, tier, is_short=is_short, is_promise=is_promise)
        outcome = None
        try:
            outcome = await self._pending_writes.put(write, deadline)
        finally:
            if outcome is None and not is_short and record.key in self._memory:
                # later saves find it in memory, and would not write it
                with suppress(Closed):
                    self.queues[tier.name].offer_saved(record)
            self._pending_writes.end(write)
        if outcome is not None and outcome is not PutOutcome.FULL:
            self.queues[tier.name].leave(record.key)  # where it waits if an earlier try failed
        return SaveOutcome.BUSY if outcome is None else _OUTCOMES[outcome]

    def _tier_of(self, ack: Ack) -> Tier | None:
        """The slower tier that a save waits for; `None`: it waits for memory alone."""
        if ack is Ack.MEMORY:
            return None
        tier = self._hot if ack is Ack.HOT else self._cold
        if tier is None:
            raise InvalidRequest(f"ack {ack.value} needs a {ack.value} tier, and this store has none", ack=ack.value)
        return tier

    def copy_to_hot(self, record: Record) -> None:
        """Copy a record that was read from the cold tier to the hot one, in the background."""
        if self._hot is not None:
            self.queues[self._hot.name].offer(record, in_cold=True)

    def left_memory(self, key: RecordKey) -> None:
        """Note that the memory tier has no record of this key any more."""
        for queue in self.queues.values():
            queue.left_memory(key)

    def _pending_ended(self, key: RecordKey, is_kept: bool) -> None:
        if self._cold is not None:
            self.queues[self._cold.name].pending_ended(key, is_kept=is_kept)

    def forget(self, key: RecordKey) -> None:
        """Stop writing `key`: it is bad."""
        for queue in reversed(self.queues.values()):  # what the hot tier's drops the cold one's does not count
            queue.forget(key)

    def pause(self, tier_name: str, *, is_paused: bool) -> None:
        """Pause or resume all writes to a tier in the background, including other services' write-backs. Saves that
        wait for the tier are written all the same.
        """
        queue = self.queues.get(tier_name)
        if queue is None:
            return
        if is_paused:
            queue.pause()
        else:
            queue.resume()
        if self._finisher is not None and self._cold is not None and self._cold.name == tier_name:
            self._finisher.is_paused = is_paused

    async def drain(self, deadline: Deadline) -> int:
        """Wait until nothing is under way to the slower tiers, or until the deadline.

        Returns:
            Records that are still queued for them. They are written later, also if this call is cancelled.
        """
        left = 0
        if self._copies:
            await asyncio.wait(self._copies, timeout=deadline.remaining_s)
        for queue in self.queues.values():
            left += await queue.drain(deadline)
        await self._pending_writes.drain(deadline)
        return left

    async def aclose(self) -> None:
        """Release unfinished pending entries. The background tasks have ended."""
        with suppress(Closed):
            await self._pending_writes.aclose(Deadline.after(_RELEASE_S, self._clock))


async def verify_record(record: Record) -> None:
    """Check all of a record's bytes against its seal, and that its header is the one in the bytes.

    Raises:
        CorruptRecord: They do not match.
    """
    opened = await open_off_loop(record.data, record.key)
    if isinstance(opened, str):
        raise CorruptRecord("a saved record does not match its seal", key=record.key, reason=opened)
    if opened.header != record.header:
        raise CorruptRecord("the header differs from the bytes it stands for", key=record.key)
