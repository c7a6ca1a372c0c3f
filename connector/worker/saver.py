"""Saving: during the step blocks are copied to buffers; in the background buffers become records and are sent."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import groupby
from operator import attrgetter

import torch

from connector.bridge import Bridge, post, traced
from connector.device.base import PageGather, Ticket
from connector.device.host_memory import HostPages
from connector.jobs import RankReport, SaveJob
from connector.logs import LOG
from connector.losses import LossReason, LossReporter
from connector.weights import adapter_identities
from connector.worker.groups import RankGroup
from connector.worker.low_priority import LowPriorityPool
from connector.worker.memory import RecordMemory, view
from kvstore.api import Deadline, PageStore, Retention, SaveOutcome
from kvstore.codec import RAW, TILES, Encoded, encode, max_payload_bytes
from kvstore.codec.tiles import read_head
from kvstore.errors import Closed, KVStoreError, Unavailable
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.record import Record, seal
from kvstore.model.keys import Boundary, RecordKey
from kvstore.model.layout import Span
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.meters import Meters

_SAVE_DEADLINE_S = 10.0
SHARED_WAIT_S = 1.0
"""A record that finds no room in memory that the service reads for this long is sent."""
_RETRY_S, _RETRIES = 0.001, 10
"""A save may end while the thread that made its record still refers to it."""
_NO_PROCESSOR = "no_processor"
_LOST = {
    _NO_PROCESSOR: LossReason.BUSY,
    SaveOutcome.BUSY.value: LossReason.REFUSED,
    "stopped": LossReason.STOPPED,
    "no_buffer": LossReason.NO_ROOM,
    "no_room": LossReason.NO_ROOM,
}
"""Why a record is lost, by the outcome of its save. After any other outcome the store did not take it."""

_AdapterFiles = tuple[str, tuple[str, ...]]

_group_of = attrgetter("group")


class Saver:
    """Saves one rank's slices.

    The engine's thread only orders copies of blocks to host buffers. Other threads encode, seal and send. A page that
    cannot be saved is counted and dropped: it is a miss later.

    Args:
        groups: The canonical groups on this rank, by their index.
        threads: For encoding.
        patience_s: How long a page may wait for idle processors while there is room for others.
        pages: Host memory for pages in flight.
        memory: Where records are made that cannot be made in memory that the service reads.
    """

    def __init__(
        self,
        bridge: Bridge,
        groups: Sequence[RankGroup],
        *,
        page_tokens: int,
        threads: LowPriorityPool,
        patience_s: float,
        pages: HostPages,
        memory: RecordMemory,
        meters: Meters,
    ) -> None:
        self._bridge = bridge
        self._groups = tuple(groups)
        self._page_tokens = page_tokens
        self._threads = threads
        self._patience_s = patience_s
        self._pages = pages
        self._memory = memory
        self._meters = meters
        self._losses = LossReporter(bridge, meters)
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._open: dict[int, _Open] = {}  # by job id
        self._report = RankReport()
        # pages arrive in the order in which they were gathered: one thread waits for the next, and no codec thread does
        self._arrivals = ThreadPoolExecutor(1, thread_name_prefix="arrivals")
        self._next_shared = asyncio.Lock()
        self._shared_ended = asyncio.Event()
        self._num_shared = 0  # records in memory that the service reads

    def save(self, jobs: Sequence[SaveJob]) -> None:
        """Copy the jobs' blocks out; when it returns the blocks may be reused.

        Every job is reported once, even if this raises: the scheduler side holds room for it until then.
        """
        left = deque(
            (group, [(job, slice_index) for job in its_jobs for slice_index in self._written(job)])
            for group, its_jobs in groupby(sorted(jobs, key=_group_of), key=_group_of)
        )
        with self._lock:
            for job in jobs:
                if slices := len(self._written(job)):
                    self._open[job.job_id] = _Open(job, slices)
                else:  # another replica's turn
                    self._report.saves_done[job.job_id] = 1
        try:
            while left:
                group, batch = left.popleft()
                self._save_batch(self._groups[group], batch)
        finally:
            for _, batch in left:
                for job, _ in batch:
                    self._done(job.job_id, "failed")

    def _written(self, job: SaveJob) -> range:
        return self._groups[job.group].written(job.prefix)

    def _save_batch(self, group: RankGroup, batch: Sequence[tuple[SaveJob, int]]) -> None:
        """Gather slices of one group together and send each one off. Each is reported once, also after an error."""
        left, held, outcome = deque(batch), list[tuple[SaveJob, int, torch.Tensor]](), "failed"
        try:
            while left:
                job, slice_index = left[0]
                page = self._pages.take(group.plan.decoded_bytes(job.num_blocks))
                left.popleft()
                if page is None:
                    self._done(job.job_id, "no_buffer")
                else:
                    held.append((job, slice_index, page))
            tickets = group.copier.gather_all(
                [
                    PageGather(group.plan.runs(slice_index, job.num_blocks), job.block_ids, page)
                    for job, slice_index, page in held
                ],
                as_tiles=group.chain == TILES,
            )
            gathered = []
            for (job, slice_index, page), ticket in zip(held, tickets, strict=True):
                if ticket is not None:
                    header = self._header(group, job, slice_index, page.numel())
                    width = group.copier.plane_width
                    one = _Gathered(header, page, width, ticket, job.retention, job.trace, job.adapter)
                    gathered.append((job.job_id, one))
            # together: the store's thread begins with the first at once, and the interpreter is not free for the others
            self._bridge.submit(partial(self._send_all, gathered))
            held, outcome = [each for each, ticket in zip(held, tickets, strict=True) if ticket is None], "no_room"
        except Closed:
            pass  # the engine is shutting down, and its saves end
        finally:
            for job, _, page in held:
                self._pages.put(page)
                self._done(job.job_id, outcome)
            for job, _ in left:
                self._done(job.job_id, "failed")

    def _header(self, group: RankGroup, job: SaveJob, slice_index: int, page_bytes: int) -> HeaderV1:
        kind, span = group.layout.record_at(job.stop_tokens, self._page_tokens)
        assert span == Span(job.start_tokens, job.stop_tokens)
        return HeaderV1.unsealed(
            RecordKey(job.namespace, job.prefix, job.group, slice_index),
            kind,
            span,
            codec_chain=group.chain,
            decoded_bytes=page_bytes,
            created_ms=SYSTEM_CLOCK.wall_ms(),
        )

    async def _send_all(self, gathered: Sequence[tuple[int, _Gathered]], store: PageStore) -> None:
        adapters = {each.adapter for _, each in gathered if each.adapter is not None}
        changed = await asyncio.to_thread(_changed, adapters) if adapters else ()
        async with asyncio.TaskGroup() as group:
            for job_id, each in gathered:
                if each.adapter in changed:
                    self._pages.put(each.page)
                    self._done(job_id, "adapter_changed")
                else:
                    group.create_task(traced(each.trace, partial(self._send, job_id, each))(store))

    async def _send(self, job_id: int, gathered: _Gathered, store: PageStore) -> None:
        outcome = "failed"
        try:
            outcome = await self._encode_and_save(store, gathered)
        except KVStoreError as error:
            LOG.debug("kvstore: a page was not saved: %s", error)
        except Exception:  # noqa: BLE001 - a background task's top: no caller awaits its future
            LOG.exception("kvstore: a page was not saved")
        finally:
            self._done(job_id, outcome)

    async def _encode_and_save(self, store: PageStore, gathered: _Gathered) -> str:
        deadline = Deadline.after(_SAVE_DEADLINE_S)
        room = _room(gathered)
        try:
            if not gathered.ticket.is_done():
                await asyncio.get_running_loop().run_in_executor(self._arrivals, gathered.ticket.wait)
            waits_since_s = SYSTEM_CLOCK.monotonic_s()
            targets = await self._shared_targets(store, room)
        except BaseException:
            # also before its copy has ended: a device orders all its copies to the host on one stream, and so the next
            # one to this memory after it
            self._pages.put(gathered.page)
            raise
        is_shared = bool(targets)
        try:
            patience_s = self._patience_s - (SYSTEM_CLOCK.monotonic_s() - waits_since_s)
            return await self._make_and_save(store, gathered, targets, max(0.0, patience_s), deadline)
        finally:
            if is_shared:
                self._num_shared -= 1
                self._shared_ended.set()

    async def _make_and_save(
        self, store: PageStore, gathered: _Gathered, targets: list[memoryview], patience_s: float, deadline: Deadline
    ) -> str:
        """Make the record in the target, if there is one, or where there is memory, and save it."""
        room = _room(gathered)
        try:
            record = await self._threads.run(
                room,
                lambda: partial(_seal, gathered, targets.pop() if targets else self._target(store, room)),
                patience_s=0.0 if self._pages.is_half_used else patience_s,
                deadline=deadline,
                release=lambda: self._pages.put(gathered.page),
            )
        except Unavailable:
            return _NO_PROCESSOR
        self._meters.add("connector_saved_raw_bytes", gathered.header.decoded_bytes)
        outcome = await store.save(record, retention=gathered.retention, deadline=deadline)
        if outcome is SaveOutcome.STORED:
            self._meters.add("connector_saved_bytes", record.num_bytes)
        return outcome.value

    def _target(self, store: PageStore, num_bytes: int) -> memoryview:
        shared = store.shared_buffer(num_bytes)
        return self._memory.take(num_bytes) if shared is None else shared

    async def _shared_targets(self, store: PageStore, num_bytes: int) -> list[memoryview]:
        """A buffer that the service reads, if it shares memory for records of this size. Waits a while for those that
        are in it now: to receive a record takes the service's event loop as long as a thread to copy it, and there is
        one loop.
        """
        if not store.shares(num_bytes):
            return []
        with suppress(TimeoutError):
            async with asyncio.timeout(SHARED_WAIT_S), self._next_shared:
                tries = 0
                while (buffer := store.shared_buffer(num_bytes)) is None:
                    if self._num_shared:
                        self._shared_ended.clear()
                        await self._shared_ended.wait()
                        tries = _RETRIES
                    elif tries:
                        tries -= 1
                        await asyncio.sleep(_RETRY_S)
                    else:
                        return []
                self._num_shared += 1
                return [buffer]
        return []

    def _done(self, job_id: int, outcome: str) -> None:
        """A slice of a job has ended. Called on any thread."""
        with self._lock:
            open_job = self._open.get(job_id)
            if open_job is None:  # given up when the engine stopped
                return
            if outcome not in ("stored", "exists"):
                open_job.lost[outcome] += 1
                self._report.saves_failed.add(job_id)
            open_job.slices -= 1
            is_last = not open_job.slices
            if is_last:
                del self._open[job_id]
                self._report.saves_done[job_id] = 1
            if not self._open:
                self._idle.notify_all()
        self._meters.add("connector_saves", outcome=outcome)
        if is_last:
            self._report_losses(open_job)

    def _report_losses(self, ended: _Open) -> None:
        """Report a job's lost records to the store: one loss for each outcome, with the number of records."""
        job = ended.job
        for outcome, num_records in ended.lost.items():
            self._losses.report(
                request_id=job.request_id,
                namespace=job.namespace,
                boundary=Boundary(job.stop_tokens, job.prefix),
                group=job.group,
                reason=_LOST.get(outcome, LossReason.FAILED),
                detail={} if outcome in _LOST else {"outcome": outcome},
                records=num_records,
            )

    def take_report(self) -> RankReport | None:
        """What was finished since the last call, or `None`."""
        with self._lock:
            if not self._report.saves_done:
                return None
            report, self._report = self._report, RankReport()
            return report

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is sent. False: it took too long."""
        with self._lock:
            return self._idle.wait_for(lambda: not self._open, timeout_s)

    def finish(self, timeout_s: float) -> None:
        """Send open pages as fast as possible; count, log and report those that were not sent in time. Idempotent."""

        async def hurry(store: PageStore) -> None:
            self._threads.hurry()

        if not self.drain(0):
            post(self._bridge, hurry)
            self.drain(timeout_s)
        with self._lock:
            lost, self._open = list(self._open.values()), {}
        for open_job in lost:
            self._meters.add("connector_saves", open_job.slices, outcome="stopped")
            open_job.lost["stopped"] += open_job.slices
            self._report_losses(open_job)
        self._losses.close()
        if lost:
            requests = {open_job.job.request_id for open_job in lost}
            LOG.warning(
                "kvstore: the engine stopped before %d pages of %d requests were saved: %s",
                len(lost),
                len(requests),
                ", ".join(sorted(requests)[:5]),
            )
        self._arrivals.shutdown(wait=False)


@dataclass(slots=True)
class _Open:
    """A job of which slices are open.

    Attributes:
        slices: Number of open slices.
        lost: By outcome, number of slices that were not saved; reported when none is open.
    """

    job: SaveJob
    slices: int
    lost: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Gathered:
    """A page on its way to the store.

    Attributes:
        page: Its bytes, once `ticket` is done, in the form of `BlockCopier.plane_width`, or as the ticket says.
        trace: Passed to the store; empty: none.
        adapter: As of `SaveJob`.
    """

    header: HeaderV1
    page: torch.Tensor
    plane_width: int
    ticket: Ticket
    retention: Retention
    trace: str
    adapter: _AdapterFiles | None


def _changed(adapters: Collection[_AdapterFiles]) -> set[_AdapterFiles]:
    """The adapters whose files are no longer those that requests named: vLLM, which has computed the pages by now, may
    have read either.
    """
    changed = {adapter for adapter in adapters if adapter_identities(adapter[0]) != adapter[1]}
    for path, _ in changed:
        _warn_of_adapter(path)
    return changed


@lru_cache(maxsize=64)
def _warn_of_adapter(path: str) -> None:
    LOG.warning(
        "kvstore: the files of the adapter in %s changed while the engine runs: what it computes with them is not"
        " saved; load a new version from a new folder",
        path,
    )


def _room(gathered: _Gathered) -> int:
    return HEADER_BYTES + max_payload_bytes(gathered.page.numel())


def _seal(gathered: _Gathered, target: memoryview) -> Record:
    header, page = gathered.header, view(gathered.page)
    if (tiles_bytes := gathered.ticket.tiles_bytes) is None:
        encoded = encode(header.codec_chain, page, target[HEADER_BYTES:], plane_width=gathered.plane_width)
    else:
        payload = page[: tiles_bytes or len(page)]
        if tiles_bytes:
            read_head(payload, len(page))  # raises if the size that the GPU reports is not this payload's
        copied = encode(RAW, payload, target[HEADER_BYTES:])
        encoded = Encoded(TILES if tiles_bytes else RAW, copied.payload_bytes)
    return seal(replace(header, codec_chain=encoded.chain), target[: HEADER_BYTES + encoded.payload_bytes])
