"""Loading: leased records to blocks, verified before a byte of them is used."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from connector.bridge import Bridge
from connector.device.base import Fence
from connector.jobs import LoadJob, LoadPiece
from connector.worker.audit import Auditor, Scattered
from connector.worker.groups import RankGroup
from connector.worker.memory import RecordMemory, ScratchPages, view
from kvstore.api import Deadline, LeasedRecord, LeaseId, LoadedRecord, PageStore
from kvstore.client import trace_parent
from kvstore.codec import CodecPool, decode_into
from kvstore.errors import CorruptRecord, InternalError, KVStoreError, Unavailable
from kvstore.format.record import verify_payload
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.meters import Meters

_log = logging.getLogger("vllm.kvstore")  # below vLLM's logger, so that its handlers and levels apply

_IN_FLIGHT = 12
_WATCH_S = 0.05
_CEILING_S = 60.0


class Loader:
    """Loads one rank's slices for admitted requests.

    Each request is reported exactly once, and only once no thread can write to its blocks any more.

    Args:
        bridge: To the store.
        groups: The canonical groups on this rank, by their index.
        pool: Threads for verifying and decoding.
        memory: Where records are received that cannot be read in the service's memory.
        scratch: Pages of host memory to decode into.
        stall_s: A load fails if the service owes records and none arrives for this long.
        meters: Counters.
        auditor: Reads loads back before they are reported, if their jobs say so.
    """

    def __init__(
        self,
        bridge: Bridge,
        groups: Sequence[RankGroup],
        *,
        pool: CodecPool,
        memory: RecordMemory,
        scratch: ScratchPages,
        stall_s: float,
        meters: Meters,
        auditor: Auditor | None = None,
    ) -> None:
        self._bridge = bridge
        self._groups = tuple(groups)
        self._pool = pool
        self._memory = memory
        self._scratch = scratch
        self._stall_s = stall_s
        self._meters = meters
        self._auditor = auditor
        self._lock = threading.Lock()
        self._reported = threading.Condition(self._lock)
        self._num_open = 0
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._to_read_back = deque[tuple[str, list[Scattered]]]()  # for the engine's thread, which orders what follows
        self._in_flight = asyncio.Semaphore(_IN_FLIGHT)  # of all loads together: records in flight are in memory
        self.verify = True
        """Tests switch it off to show that verification is what stands between a flipped bit and wrong output."""

    def load(self, jobs: Sequence[LoadJob], after: Fence) -> None:
        """Start loading; returns at once. Called on the engine's thread.

        Args:
            jobs: What to load.
            after: The engine's last work that may use the blocks.
        """
        for job in jobs:
            with self._lock:
                self._num_open += 1
            try:
                self._bridge.submit(partial(self._run, job, after))
            except KVStoreError:
                self._report(job.request_id, failed=True)

    @property
    def is_loading(self) -> bool:
        """Whether a load is in flight, or has ended and was not reported yet."""
        with self._lock:
            return bool(self._num_open or self._finished or self._to_read_back)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no load writes to blocks any more. False: it took too long."""
        with self._lock:
            return self._reported.wait_for(lambda: self._num_open <= len(self._to_read_back), timeout_s)

    def take_results(self, *, wait_s: float = 0.0) -> tuple[set[str], set[str]]:
        """Requests that finished since the last call, and those of them that failed.

        Args:
            wait_s: How long to wait for the first one if any is being loaded.
        """
        with self._lock:
            if wait_s and self._num_open and not self._finished and not self._to_read_back:
                self._reported.wait(wait_s)
        while self._to_read_back:  # this thread alone takes from it
            self._read_back(*self._to_read_back.popleft())
        with self._lock:
            finished, failed = self._finished, self._failed
            self._finished, self._failed = set(), set()
            return finished, failed

    def _read_back(self, request_id: str, scattered: Sequence[Scattered]) -> None:
        assert self._auditor is not None
        try:
            self._auditor.read_back(scattered, lambda is_equal: self._report(request_id, failed=not is_equal))
        except BaseException as error:
            self._report(request_id, failed=True)
            if not isinstance(error, KVStoreError):
                raise
            _log.exception("kvstore: audit: a load cannot be read back and is recomputed")

    async def _run(self, job: LoadJob, after: Fence, store: PageStore) -> None:
        failed = True
        scattered: list[Scattered] | None = [] if job.read_back and self._auditor is not None else None
        started_s = SYSTEM_CLOCK.monotonic_s()
        if job.trace:
            trace_parent.set(job.trace)  # of this task alone
        try:
            await self._load_pieces(store, job, after, scattered)
            failed = False
        except* Exception as errors:  # noqa: BLE001 - a task's top: the request must be reported after any error
            self._meters.add("connector_load_errors")
            error = errors.exceptions[0]
            _log.warning(
                "kvstore: a hit could not be loaded and is recomputed: %s request=%s",
                error,
                job.request_id,
                exc_info=None if isinstance(error, KVStoreError) else error,
            )
        finally:
            if scattered is not None and not failed:
                with self._lock:
                    self._to_read_back.append((job.request_id, scattered))
                    self._reported.notify_all()
            else:
                self._report(job.request_id, failed=failed)
            duration_s = SYSTEM_CLOCK.monotonic_s() - started_s
            self._meters.observe("connector_load_seconds", duration_s)
            _log.debug("kvstore: load ended in %d ms failed=%s request=%s", duration_s * 1000, failed, job.request_id)

    def _report(self, request_id: str, *, failed: bool) -> None:
        with self._lock:
            self._finished.add(request_id)
            if failed:
                self._failed.add(request_id)
            self._num_open -= 1
            self._reported.notify_all()

    async def _load_pieces(
        self, store: PageStore, job: LoadJob, after: Fence, scattered: list[Scattered] | None
    ) -> None:
        """Load all pieces, or raise; either way no thread writes to the blocks after it ends."""
        if job.pieces is None:
            raise InternalError("the load could not be planned", request=job.request_id)
        pieces = [piece for piece in job.pieces if piece.key.slice in self._groups[piece.key.group].held]
        load = _Load(LeaseId(job.lease), after, _Progress(), scattered)
        open_pieces = len(pieces)
        turn = asyncio.Semaphore(_IN_FLIGHT)  # of this load: a long one does not queue before all others
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(load.progress.watch(self._stall_s))

            async def load_piece(piece: LoadPiece, record: LeasedRecord) -> None:
                nonlocal open_pieces
                async with turn, self._in_flight:
                    await self._load_record(store, load, piece, record)
                open_pieces -= 1
                if open_pieces == 0:
                    watch.cancel()

            with load.progress.call():
                keys = [piece.key for piece in pieces]
                records = await store.load_many(load.lease, keys, deadline=Deadline.after(_CEILING_S))
            for piece, record in zip(pieces, records, strict=True):
                group.create_task(load_piece(piece, record))
            if not pieces:
                watch.cancel()

    async def _load_record(self, store: PageStore, load: _Load, piece: LoadPiece, record: LeasedRecord) -> None:
        deadline = Deadline.after(_CEILING_S)
        with load.progress.call():
            loaded = await record.load(deadline=deadline, allocate=self._memory.take)
        try:
            # a cancelled run returns only once its thread is done, so that nothing touches the blocks afterwards
            await self._pool.run(loaded.num_bytes, lambda: self._scatter(loaded, piece, load), deadline=deadline)
        except CorruptRecord as error:
            self._meters.add("connector_corrupt_records")
            with load.progress.call():
                await store.discard(piece.key, str(error), deadline=deadline)
            raise

    def _scatter(self, loaded: LoadedRecord, piece: LoadPiece, load: _Load) -> None:
        group = self._groups[piece.key.group]
        expected = group.plan.decoded_bytes(piece.span_blocks)
        with self._scratch.page(expected) as page:
            with loaded.reading() as record:
                if self.verify:
                    verify_payload(record)
                if record.header.decoded_bytes != expected:
                    raise CorruptRecord("page has the wrong size", expected=expected, seen=record.header.decoded_bytes)
                decode_into(record.header.codec_chain, record.payload, view(page), plane_width=group.copier.plane_width)
            runs = group.plan.runs(piece.key.slice, piece.span_blocks)
            group.copier.scatter(runs, piece.block_ids, page, piece.first_block, load.after)
            if self._auditor is not None and load.scattered is not None:
                load.scattered.append(self._auditor.scattered(piece, page))
        self._meters.add("connector_loaded_bytes", expected)


@dataclass(frozen=True, slots=True)
class _Load:
    """One request's load.

    Attributes:
        lease: Keeps its records readable.
        after: The fence that its copies follow.
        progress: Whether the service answers.
        scattered: What was written to blocks, if that is read back.
    """

    lease: LeaseId
    after: Fence
    progress: _Progress
    scattered: list[Scattered] | None


class _Progress:
    """Ends a load if the service stops answering. Time in codec threads does not count."""

    def __init__(self) -> None:
        self._open_calls = 0
        self._answers = 0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Wraps a call to the service."""
        self._open_calls += 1
        try:
            yield
        finally:
            self._open_calls -= 1
            self._answers += 1

    async def watch(self, stall_s: float) -> None:
        """Raise if calls are open and none is answered for `stall_s`.

        It counts its own wake-ups instead of reading the clock, so that a loop that was not scheduled does not look
        like a service that did not answer.
        """
        waited_s, answers = 0.0, 0
        while waited_s < stall_s:
            await asyncio.sleep(_WATCH_S)
            is_open = self._open_calls > 0 and self._answers == answers
            waited_s, answers = (waited_s + _WATCH_S if is_open else 0.0), self._answers
        raise Unavailable("the service sent no record for too long", stall_s=stall_s)
