"""Loading: leased records to blocks, verified before a byte of them is used."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from connector.canonical.runs import PagePlan
from connector.device.base import BlockCopier
from connector.jobs import LoadJob, LoadPiece
from connector.scheduler.bridge import Bridge
from connector.worker.staging import BufferPool, view
from kvstore.api import Deadline, LeaseId, PageStore
from kvstore.codec import CodecPool, decode_into
from kvstore.errors import CorruptRecord, InternalError, KVStoreError, Unavailable
from kvstore.format.record import Record, verify_payload
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.meters import Meters

__all__ = ["Loader"]

_log = logging.getLogger("vllm.kvstore")  # below vLLM's logger, so that its handlers and levels apply

_IN_FLIGHT = 12
_WATCH_S = 0.05
_CEILING_S = 60.0
_ROUND_BYTES = 1 << 18


class Loader:
    """Loads one rank's slices for admitted requests.

    Each request is reported exactly once, and only when nothing can write to its blocks any more.

    Args:
        bridge: To the store.
        copier: The device.
        plan: The group's page plan on this rank.
        slices: The slices that this rank reads.
        pool: Threads for verifying and decoding.
        buffers: Host memory to receive records into.
        stall_s: A load fails when the service owes records and none came for this long.
        meters: Counters.
    """

    def __init__(
        self,
        bridge: Bridge,
        copier: BlockCopier,
        plan: PagePlan,
        *,
        slices: Sequence[int],
        pool: CodecPool,
        buffers: BufferPool,
        stall_s: float,
        meters: Meters,
    ) -> None:
        self._bridge = bridge
        self._copier = copier
        self._plan = plan
        self._slices = frozenset(slices)
        self._pool = pool
        self._buffers = buffers
        self._stall_s = stall_s
        self._meters = meters
        self._lock = threading.Lock()
        self._reported = threading.Condition(self._lock)
        self._num_open = 0
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._scratch = threading.local()
        self.verify = True
        """Tests switch it off to show that verification is what stands between a flipped bit and wrong output."""

    def load(self, jobs: Sequence[LoadJob]) -> None:
        """Start loading; returns at once."""
        for job in jobs:
            with self._lock:
                self._num_open += 1
            try:
                self._bridge.submit(partial(self._run, job))
            except KVStoreError:
                self._report(job.request_id, failed=True)

    def take_results(self, *, wait_s: float = 0.0) -> tuple[set[str], set[str]]:
        """Requests that finished since the last call, and those among them that failed.

        Args:
            wait_s: How long to wait for the first one while any is being loaded.
        """
        with self._lock:
            if wait_s and self._num_open and not self._finished:
                self._reported.wait(wait_s)
            finished, failed = self._finished, self._failed
            self._finished, self._failed = set(), set()
            return finished, failed

    async def _run(self, job: LoadJob, store: PageStore) -> None:
        failed = True
        started_s = SYSTEM_CLOCK.monotonic_s()
        try:
            await self._load_pieces(store, job)
            failed = False
        except* Exception as errors:  # noqa: BLE001 - a task's top: whatever happened, the request must be reported
            self._meters.add("connector_load_errors")
            error = errors.exceptions[0]
            _log.warning(
                "kvstore: a hit could not be loaded and is recomputed: %s request=%s",
                error,
                job.request_id,
                exc_info=None if isinstance(error, KVStoreError) else error,
            )
        finally:
            self._report(job.request_id, failed=failed)
            duration_ms = (SYSTEM_CLOCK.monotonic_s() - started_s) * 1000
            _log.debug("kvstore: load ended in %d ms failed=%s request=%s", duration_ms, failed, job.request_id)

    def _report(self, request_id: str, *, failed: bool) -> None:
        with self._lock:
            self._finished.add(request_id)
            if failed:
                self._failed.add(request_id)
            self._num_open -= 1
            self._reported.notify_all()

    async def _load_pieces(self, store: PageStore, job: LoadJob) -> None:
        """Load all pieces, or raise; either way no thread writes to the blocks any more when it ends."""
        if job.pieces is None:
            raise InternalError("the load could not be planned", request=job.request_id)
        pieces = [piece for piece in job.pieces if piece.key.slice in self._slices]
        room = asyncio.Semaphore(_IN_FLIGHT)
        progress = _Progress()
        open_pieces = len(pieces)
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(progress.watch(self._stall_s))

            async def load(piece: LoadPiece) -> None:
                nonlocal open_pieces
                async with room:
                    await self._load_piece(store, LeaseId(job.lease), piece, progress)
                open_pieces -= 1
                if open_pieces == 0:
                    watch.cancel()

            for piece in pieces:
                group.create_task(load(piece))
            if not pieces:
                watch.cancel()

    async def _load_piece(self, store: PageStore, lease: LeaseId, piece: LoadPiece, progress: _Progress) -> None:
        taken: list[torch.Tensor] = []
        try:
            await self._load_record(store, lease, piece, progress, taken)
        except BaseException:
            for buffer in taken:
                self._buffers.drop(buffer)  # a connection may still write to it
            raise
        for buffer in taken:
            self._buffers.put(buffer)

    async def _load_record(
        self, store: PageStore, lease: LeaseId, piece: LoadPiece, progress: _Progress, taken: list[torch.Tensor]
    ) -> None:
        deadline = Deadline.after(_CEILING_S)

        def allocate(num_bytes: int) -> memoryview:
            # records differ by a few bytes in size; rounded, one's buffer serves the next
            buffer = self._buffers.take(-(-num_bytes // _ROUND_BYTES) * _ROUND_BYTES)
            if buffer is None:
                return view(torch.empty(num_bytes, dtype=torch.uint8))
            taken.append(buffer)
            return view(buffer)[:num_bytes]

        with progress.asking():
            record = await store.load(lease, piece.key, deadline=deadline, allocate=allocate)
        try:
            # a cancelled run returns only when its thread has ended, so that the blocks are left alone afterwards
            await self._pool.run(record.num_bytes, lambda: self._place(record, piece), deadline=deadline)
        except CorruptRecord as error:
            self._meters.add("connector_corrupt_records")
            with progress.asking():
                await store.discard(piece.key, str(error), deadline=deadline)
            raise

    def _place(self, record: Record, piece: LoadPiece) -> None:
        if self.verify:
            verify_payload(record)
        expected = self._plan.decoded_bytes(piece.span_blocks)
        if record.header.decoded_bytes != expected:
            raise CorruptRecord("page has the wrong size", expected=expected, seen=record.header.decoded_bytes)
        page = self._scratch_page(expected)
        decode_into(record.header.codec_chain, record.payload, view(page))
        runs = self._plan.runs(piece.key.slice, piece.span_blocks)
        self._copier.scatter(runs, piece.block_ids, page, piece.first_block)
        self._meters.add("connector_raw_bytes_loaded", expected)

    def _scratch_page(self, num_bytes: int) -> torch.Tensor:
        # one page per codec thread: it stays in the processor's cache between decode and scatter
        page: torch.Tensor | None = getattr(self._scratch, "page", None)
        if page is None or page.numel() < num_bytes:
            page = self._scratch.page = torch.empty(num_bytes, dtype=torch.uint8)
        return page[:num_bytes]


class _Progress:
    """Ends a load that the service does not answer. Records that came may take their time in the codec's threads."""

    def __init__(self) -> None:
        self._asked = 0
        self._answers = 0

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Around a call to the service."""
        self._asked += 1
        try:
            yield
        finally:
            self._asked -= 1
            self._answers += 1

    async def watch(self, stall_s: float) -> None:
        """Raise when calls are open and none was answered for `stall_s`.

        Counts its own waking up and not the clock, so that a loop that got no processor does not look like a service
        that gave no answer.
        """
        waited_s, answers = 0.0, 0
        while waited_s < stall_s:
            await asyncio.sleep(_WATCH_S)
            is_open = self._asked > 0 and self._answers == answers
            waited_s, answers = (waited_s + _WATCH_S if is_open else 0.0), self._answers
        raise Unavailable("no record came from the service for too long", stall_s=stall_s)
