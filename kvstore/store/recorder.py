"""Reports to the catalog what was stored, deleted and read: in order, in batches, with retries."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvstore.catalog.base import Addition, Catalog, LeaveReason, Removal, Use
from kvstore.catalog.entry import Level
from kvstore.errors import Closed, CorruptRecord, InvalidRequest, Unavailable
from kvstore.format.record import Record
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.model.layout import Layout
from kvstore.runtime.background import Background
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.retries import backoff_s
from kvstore.store.catalog_outage import CatalogOutage
from kvstore.store.parents import Parents

_log = logging.getLogger(__name__)

_BATCH = 512
_WAITING_MAX = 65_536
"""Changes that may wait for a catalog that does not answer, some 30 MiB; beyond, the catalog is marked incomplete."""
_CALL_S = 5.0
_PAUSE_S_MIN, _PAUSE_S_MAX = 0.2, 5.0
_CLOSE_S = 1.0
_AGAIN_S = 1.0
"""Time after which a record is reported again that the catalog refused because its boundary was being deleted."""
_AWAY = "takes no changes: they wait, and other services do not find what is stored here until then"
_USE_S = 5.0
"""How often reads are reported: there are many, and no reader needs them sooner."""


@dataclass(eq=False, slots=True)
class _Report:
    """A change on its way to the catalog."""

    change: Addition | Removal
    taken: asyncio.Future[bool]
    """Whether the catalog took the change, once it has answered. True at once when the change has to wait."""
    is_new: bool = False
    """The record was stored just now: it is reported until the catalog takes it."""

    def resolve(self, answer: bool) -> None:
        if not self.taken.done():
            self.taken.set_result(answer)


@dataclass(frozen=True, slots=True)
class Backlog:
    """Changes that this process has yet to report to the catalog. Other services do not know of them."""

    num_changes: int
    since_ms: int | None
    """Since when the catalog has taken none, since the Unix epoch; `None`: it takes them."""
    reason: str = ""
    """Why it took none when it was last asked."""


class Recorder:
    """The way from the store to its catalog. Changes that cannot be reported now are reported later, in the same order.
    When too many wait, or some are left at the end, the catalog is marked incomplete: then lookups do not
    trust a missing entry.

    Args:
        catalog: Stays the caller's.

    Attributes:
        parents: Where it finds the parent that the catalog gets with a boundary.
        num_refused: Additions that the catalog refused because their boundary was being deleted.
        on_changed: Called with the key of each change that the catalog has taken; `None`: with none.
    """

    def __init__(self, catalog: Catalog, instruments: Instruments) -> None:
        self.catalog = catalog
        self.parents = Parents()
        self.num_refused = 0
        self.on_changed: Callable[[RecordKey], None] | None = None
        self._meters = instruments.meters
        self._clock = instruments.clock
        self._background = Background("catalog recorder")
        self._waiting: deque[_Report] = deque()
        self._again: set[_Report] = set()  # refused, to be queued once more
        self._uses: dict[tuple[NamespaceId, PrefixHash], Use] = {}
        self._flusher: asyncio.Task[None] | None = None
        self._use_reporter: asyncio.Task[None] | None = None
        self._has_lost = False
        self._outage = CatalogOutage(_AWAY, "takes changes", instruments.clock)
        self._unregistered: dict[NamespaceId, tuple[Layout, str]] = {}

    def __len__(self) -> int:
        """Changes that wait."""
        return len(self._waiting)

    @property
    def backlog(self) -> Backlog:
        """What waits. Safe from any thread."""
        return Backlog(len(self._waiting), self._outage.since_ms, self._outage.reason)

    def check_reported(self) -> None:
        """Check that the catalog takes changes: without the latest ones it cannot say that a record is not stored.

        Raises:
            Unavailable: It took none of those that were sent last.
        """
        if self._outage.since_ms is not None:
            raise Unavailable(
                f"the catalog took no changes when it was last asked, and {len(self._waiting)} of this service wait: "
                "run `kvstore doctor`"
            )

    def knows(self, namespace: NamespaceId) -> bool:
        """Whether the namespace was registered here: the catalog refuses changes of any other."""
        return namespace in self._unregistered or self.catalog.knows(namespace)

    def register(self, namespace: NamespaceId, layout: Layout, tenant: str) -> None:
        """Register a namespace with the catalog: now, or before its next change, or with the next one. Never waits."""
        self._unregistered[namespace] = (layout, tenant)
        self._background.spawn(self._register_all(), "namespace")

    async def _register_all(self) -> None:
        try:
            await self._register(list(self._unregistered), Deadline.after(_CALL_S, self._clock))
        except (Unavailable, Closed):
            self._meters.add("catalog_failures", call="register")

    async def _register(self, namespaces: Iterable[NamespaceId], deadline: Deadline) -> None:
        """Register those that the catalog has not taken yet."""
        for namespace in namespaces:
            if (found := self._unregistered.get(namespace)) is not None:
                await self.catalog.register(namespace, *found, deadline=deadline)
                self._unregistered.pop(namespace, None)

    async def added(self, record: Record, level: Level, *, deadline: Deadline) -> bool:
        """Report that a level holds `record` now. False: its boundary is being deleted there, put the record again.

        Returns once the catalog has the change. If it cannot be reached, or not before the deadline, it is reported
        later; while it takes no changes, this returns at once. If cancelled, the change is reported all the same.
        """
        key, tokens = record.key, record.header.span.stop
        addition = Addition(key, level, record.num_bytes, tokens, self.parents.of(key.namespace, key.prefix))
        return await self._report(addition, deadline, is_new=True)

    async def sized(self, key: RecordKey, level: Level, num_bytes: int, tokens: int, *, deadline: Deadline) -> bool:
        """As `added`, for a record that another process stored."""
        parent = self.parents.of(key.namespace, key.prefix)
        return await self._report(Addition(key, level, num_bytes, tokens, parent), deadline)

    async def removed(
        self, key: RecordKey, level: Level, reason: LeaveReason, num_bytes: int | None, *, deadline: Deadline
    ) -> None:
        """Report that a level no longer holds a record. Returns when `added` would."""
        await self._report(Removal(key, level, num_bytes, reason), deadline)

    def dropped(self, keys: Sequence[RecordKey], level: Level, tier: str) -> None:
        """Report that a tier evicted records by itself. Never waits."""
        self._meters.add("tier_evicted_records", len(keys), tier=tier)
        for key in keys:
            change = Removal(key, level, None, LeaveReason.EVICTED)
            self._queue(_Report(change, asyncio.get_running_loop().create_future()))

    def used(self, namespace: NamespaceId, boundaries: Iterable[tuple[PrefixHash, int]]) -> None:
        """Report, within seconds, that boundaries (prefix, tokens) were read. Never waits."""
        for prefix, tokens in boundaries:
            before = self._uses.get((namespace, prefix))
            hits = 1 + (before.hits if before is not None else 0)
            if before is not None or len(self._uses) < _WAITING_MAX:
                self._uses[namespace, prefix] = Use(prefix, hits, tokens, self.parents.of(namespace, prefix))
        if self._uses and (self._use_reporter is None or self._use_reporter.done()):
            self._use_reporter = self._background.spawn(self._report_uses_regularly(), "uses")

    async def _report(self, change: Addition | Removal, deadline: Deadline, *, is_new: bool = False) -> bool:
        report = _Report(change, asyncio.get_running_loop().create_future(), is_new)
        is_queued = self._queue(report)
        try:
            if is_queued and self._outage.since_ms is None:  # a write waits for no refusal that is known
                await asyncio.wait({report.taken}, timeout=deadline.remaining_s)
        finally:
            report.resolve(True)
        return report.taken.result()

    def _queue(self, report: _Report) -> bool:
        """Queue a change. False: too many wait, this one is lost."""
        if len(self._waiting) >= _WAITING_MAX:
            self._lose(1)
            return False
        self._waiting.append(report)
        if self._flusher is None or self._flusher.done():
            self._flusher = self._background.spawn(self._flush(), "changes")
        return True

    async def _flush(self) -> None:
        """Send what waits, in order, until the queue is empty."""
        failures = 0
        while self._waiting:
            batch = [self._waiting[index] for index in range(min(_BATCH, len(self._waiting)))]
            first = type(batch[0].change)
            batch = next(list(group) for _, group in groupby(batch, key=lambda report: type(report.change) is first))
            try:
                taken = await self._send_or_lose(batch)
            except (Unavailable, Closed) as error:
                self._meters.add("catalog_failures", call="change")
                self._outage.failed(error)
                for report in self._waiting:
                    report.resolve(True)
                failures += 1
                await asyncio.sleep(backoff_s(failures, shortest_s=_PAUSE_S_MIN, longest_s=_PAUSE_S_MAX))
                continue
            failures = 0
            self._outage.answered()
            self.num_refused += taken.count(False)
            for report, answer in zip(batch, taken, strict=True):
                self._waiting.popleft()
                if self.on_changed is not None:
                    self.on_changed(report.change.key)
                if not answer and report.is_new and report.taken.done():  # its caller has left and cannot put it again
                    self._again.add(report)
                    self._background.spawn(self._report_again(report), "change that was refused")
                report.resolve(answer)
            await self._mark_incomplete_if_lost()

    async def _report_again(self, report: _Report) -> None:
        """Report a record that the catalog refused while its boundary was being deleted: it is still stored."""
        await asyncio.sleep(_AGAIN_S)
        self._again.remove(report)
        self._queue(report)

    async def _send_or_lose(self, batch: list[_Report]) -> list[bool]:
        """As `_send`. What the catalog can never take is lost, and nothing else: of a batch that it refuses each half
        is sent by itself.
        """
        try:
            return await self._send(batch)
        except (Unavailable, Closed):
            raise
        except Exception as error:  # noqa: BLE001 - a task's top: other changes wait behind these
            if len(batch) > 1:
                half = len(batch) // 2
                return [*await self._send_or_lose(batch[:half]), *await self._send_or_lose(batch[half:])]
            if not isinstance(error, InvalidRequest | CorruptRecord) and not self._has_lost:  # once, not for each
                _log.exception("a bug, please report it: changes did not reach the catalog")
            self._meters.add("catalog_failures", call="refused")
            self._has_lost = True
            return [True]

    async def _send(self, batch: list[_Report]) -> list[bool]:
        deadline = Deadline.after(_CALL_S, self._clock)
        await self._register({report.change.key.namespace for report in batch}, deadline)
        additions = [report.change for report in batch if isinstance(report.change, Addition)]
        if additions:
            return await self.catalog.add(additions, deadline=deadline)
        removals = [report.change for report in batch if isinstance(report.change, Removal)]
        await self.catalog.remove(removals, deadline=deadline)
        return [True] * len(batch)

    def _lose(self, num_changes: int) -> None:
        self._has_lost = True
        self._meters.add("catalog_changes_lost", num_changes)

    async def _mark_incomplete_if_lost(self, within_s: float = _CALL_S) -> None:
        """Mark the catalog incomplete if changes were lost: a record without an entry may be stored all the same."""
        if self._has_lost:
            try:
                await self.catalog.mark_incomplete(deadline=Deadline.after(within_s, self._clock))
            except (Unavailable, Closed):
                return
            self._has_lost = False

    async def _report_uses_regularly(self) -> None:
        while self._uses:
            await asyncio.sleep(_USE_S)
            await self._report_uses()

    async def _report_uses(self) -> None:
        """Report the reads since the last report; reads that cannot be reported are dropped, counted."""
        uses, self._uses = self._uses, {}
        by_namespace: dict[NamespaceId, list[Use]] = {}
        for (namespace, _), use in uses.items():
            by_namespace.setdefault(namespace, []).append(use)
        for namespace, listed in by_namespace.items():
            try:
                await self.catalog.use(namespace, listed, deadline=Deadline.after(_CALL_S, self._clock))
            except (Unavailable, Closed, InvalidRequest, CorruptRecord):
                self._meters.add("catalog_failures", call="use")

    async def drain(self, deadline: Deadline) -> int:
        """Wait until everything is reported, or until the deadline; returns how many changes are left."""
        if self._uses and not deadline.expired:
            await self._report_uses()
        if self._flusher is not None and not self._flusher.done():
            await asyncio.wait({self._flusher}, timeout=deadline.remaining_s)
        return len(self._waiting)

    async def aclose(self) -> None:
        """Drain for a second, then stop. What is left is lost, and the catalog is marked incomplete: a Redis that is
        full refuses changes, but not this mark. Idempotent.
        """
        await self.drain(Deadline.after(_CLOSE_S, self._clock))
        await self._background.aclose()
        if left := len(self._waiting) + len(self._again):
            self._lose(left)
        await self._mark_incomplete_if_lost(_CLOSE_S)
        while self._waiting:
            self._waiting.popleft().resolve(True)
        self._again.clear()
