"""Loading: leased records to blocks, verified before a byte of them is used."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

from connector.bridge import Bridge, post, traced
from connector.device.base import Fence, PageScatter, SharedRecord, WrongSource
from connector.jobs import LoadJob, LoadPiece
from connector.logs import LOG
from connector.worker.audit import Auditor, Scattered
from connector.worker.groups import RankGroup
from connector.worker.memory import RecordMemory, ScratchPages, view
from kvstore.api import Deadline, LeasedRecord, LeaseId, LoadedRecord, PageStore
from kvstore.codec import RAW, TILES, CodecPool, decode_into
from kvstore.codec.tiles import read_head
from kvstore.errors import Closed, CorruptRecord, InternalError, KVStoreError, Unavailable
from kvstore.format.header_v1 import HEADER_BYTES
from kvstore.format.record import Record, verify_payload
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.meters import Meters

Result = TypeVar("Result")
_IN_FLIGHT = 12
FIRST_PIECES = 8
_GROWTH = 4
_MOST_PIECES = 128
"""In one request: the interpreter works on the whole answer before threads that order copies have it again."""
_WATCH_S = 0.05
_CEILING_S = 60.0
_FOLLOW_S = 1.0
_FAILURES_MAX = 8


class Loader:
    """Loads one rank's slices for admitted requests.

    Each request is reported exactly once, and only once no thread can write to its blocks any more.

    Args:
        bridge: To the store.
        groups: The canonical groups on this rank, by their index.
        pool: Threads for verifying and decoding.
        memory: Where records are received that cannot be read in the service's memory.
        scratch: Pages of host memory to decode into.
        stall_s: A load fails if the service owes records and none arrives for this long; also if it owes them to loads
            that come first.
        meters: Counters.
        auditor: Reads loads back before they are reported, if their jobs say so.

    Attributes:
        device: What pages are copied to.
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
        auditor: Auditor | None,
    ) -> None:
        self._bridge = bridge
        self._groups = tuple(groups)
        self._pool = pool
        self._memory = memory
        self._scratch = scratch
        self.device = scratch.device
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
        self._answers = _Answers()
        # more threads would only compete for the interpreter's lock
        self._batches_in_flight = asyncio.Semaphore(self.device.batches_at_once)
        self._is_following = False
        self._page_sizes: dict[tuple[int, int], int] = {}
        self._failures_in_place = 0

    def follow_memory(self) -> None:
        """Have the device prepare to read the service's memory, from now on. Called when the engine has begun to serve,
        since it captures graphs before. Idempotent.
        """
        if self.device.batch_bytes and not self._is_following:
            self._is_following = True
            post(self._bridge, self._follow_memory)

    async def _follow_memory(self, store: PageStore) -> None:
        """Also what fills later, and the memory of a service that starts again. Runs until the store's loop ends."""
        is_told = False
        while True:
            try:
                self.device.adopt(store.shared_memory())
            except Exception:  # noqa: BLE001 - a task's top: loads work without
                if not is_told:
                    LOG.exception("kvstore: the GPU cannot read the service's memory")
                is_told = True
            await asyncio.sleep(_FOLLOW_S)

    def load(self, jobs: Sequence[LoadJob], after: Fence | None = None) -> None:
        """Start loading; returns at once. Called on the engine's thread.

        Every job is reported once, even if this raises.

        Args:
            jobs: What to load.
            after: The engine's last work that may use the blocks; `None`: all that was ordered before this call.
        """
        left = deque(jobs)
        with self._lock:
            self._num_open += len(left)
        try:
            fence = self.device.fence() if after is None else after
            while left:
                self._bridge.submit(traced(left[0].trace, partial(self._run, left[0], fence)))
                left.popleft()
        except Closed:
            pass  # the engine is shutting down
        finally:
            for job in left:
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
            LOG.exception("kvstore: audit: a load cannot be read back and is recomputed")

    async def _run(self, job: LoadJob, after: Fence, store: PageStore) -> None:
        failed = True
        scattered: list[Scattered] | None = [] if job.read_back and self._auditor is not None else None
        started_s = SYSTEM_CLOCK.monotonic_s()
        try:
            await self._load_pieces(store, job, after, scattered)
            failed = False
        except* Exception as errors:  # noqa: BLE001 - a task's top: the request must be reported after any error
            self._meters.add("connector_load_errors")
            error = errors.exceptions[0]
            LOG.warning(
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
            LOG.debug("kvstore: load ended in %d ms failed=%s request=%s", duration_s * 1000, failed, job.request_id)

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
        load = _Load(LeaseId(job.lease), after, _Progress(self._answers), scattered)
        open_pieces = len(pieces)
        total_bytes = sum(map(self._page_bytes, pieces))
        # of this load: a long one does not queue before all others
        turn, turn_in_place = asyncio.Semaphore(_IN_FLIGHT), asyncio.Semaphore(self.device.batches_at_once)
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(load.progress.watch(self._stall_s))

            def ended(num_pieces: int) -> None:
                nonlocal open_pieces
                open_pieces -= num_pieces
                if open_pieces == 0:
                    watch.cancel()

            async def load_piece(piece: LoadPiece, record: LeasedRecord) -> None:
                async with turn, load.progress.queued(self._in_flight):
                    await self._load_record(store, load, piece, record)
                ended(1)

            async def load_batch(batch: Sequence[_Leased]) -> None:
                async with turn_in_place, self._batches_in_flight:
                    others = await self._load_in_place(store, load, batch)
                for each in others:
                    group.create_task(load_piece(*each))
                ended(len(batch) - len(others))

            for some in self._requests(pieces):
                with load.progress.call():
                    keys = [piece.key for piece in some]
                    records = await store.load_many(load.lease, keys, deadline=Deadline.after(_CEILING_S))
                leased = [_Leased(*each) for each in zip(some, records, strict=True)]
                # what is read back is compared with pages in host memory
                shared = self._shared(leased) if scattered is None else []
                for batch in self._batches(shared, total_bytes):
                    group.create_task(load_batch(batch))
                for each in leased if not shared else [each for each in leased if each.record.memory is None]:
                    group.create_task(load_piece(*each))
            if not pieces:
                watch.cancel()

    def _requests(self, pieces: Sequence[LoadPiece]) -> Iterator[Sequence[LoadPiece]]:
        """The pieces of each request to the store: all, or for a GPU first a few and then more. Its link is idle until
        the first ones are known; they are copied while the service finds the next ones. Answers that take long would
        keep the interpreter from the threads that order copies.
        """
        num_pieces = FIRST_PIECES if self.device.batch_bytes else len(pieces)
        start = 0
        while start < len(pieces):
            yield pieces[start : start + num_pieces]
            start += num_pieces
            num_pieces = min(_GROWTH * num_pieces, _MOST_PIECES)

    def _shared(self, leased: Sequence[_Leased]) -> Sequence[_Leased]:
        """Those in memory that the device may be able to read."""
        if not self.device.batch_bytes or self._failures_in_place >= _FAILURES_MAX:
            return ()
        return [each for each in leased if each.record.memory is not None]

    def _batches(self, leased: Sequence[_Leased], total_bytes: int) -> Iterator[Sequence[_Leased]]:
        """Adjacent pieces of one shape, as many as the device takes at a time, but of a short load fewer.

        Args:
            total_bytes: Of the load.
        """
        most_bytes = min(self.device.batch_bytes, total_bytes // (2 * self.device.batches_at_once))
        batch: list[_Leased] = []
        batch_bytes = 0
        for each in leased:
            piece, num_bytes = each.piece, self._page_bytes(each.piece)
            if each.record.num_bytes < num_bytes:  # an encoded record is beside its page
                num_bytes += each.record.num_bytes
            if batch and (
                (piece.key.group, piece.span_blocks) != (batch[0].piece.key.group, batch[0].piece.span_blocks)
                or batch_bytes + num_bytes > most_bytes
            ):
                yield batch
                batch, batch_bytes = [], 0
            batch.append(each)
            batch_bytes += num_bytes
        if batch:
            yield batch

    def _page_bytes(self, piece: LoadPiece) -> int:
        shape = piece.key.group, piece.span_blocks
        known = self._page_sizes.get(shape)
        if known is None:  # a load asks some thousand times
            known = self._page_sizes[shape] = self._groups[shape[0]].plan.decoded_bytes(shape[1])
        return known

    async def _load_in_place(self, store: PageStore, load: _Load, batch: Sequence[_Leased]) -> Sequence[_Leased]:
        """Load the records that the device reads where they are; returns the others, which must be decoded."""
        deadline = Deadline.after(_CEILING_S)
        found = [_Found(piece, await record.load(deadline=deadline), record) for piece, record in batch]
        # they take no memory of this process
        others = await self._in_thread(store, load, found, 0, self._scatter_in_place)
        return [batch[index] for index in others]

    async def _load_record(self, store: PageStore, load: _Load, piece: LoadPiece, record: LeasedRecord) -> None:
        with load.progress.call():
            loaded = await record.load(deadline=Deadline.after(_CEILING_S), allocate=self._memory.take)
        await self._in_thread(store, load, [_Found(piece, loaded, record)], loaded.num_bytes, self._scatter_decoded)

    async def _in_thread(
        self,
        store: PageStore,
        load: _Load,
        found: Sequence[_Found],
        num_bytes: int,
        work: Callable[[Sequence[_Found], _Load], Result],
    ) -> Result:
        """Run `work` on a codec thread, and report a damaged record to the store.

        Args:
            num_bytes: What it takes of the pool's budget.
        """
        deadline = Deadline.after(_CEILING_S)
        try:
            # a cancelled run returns only once its thread is done, so that nothing touches the blocks afterwards
            return await self._pool.run(num_bytes, lambda: _without_frames(work, found, load), deadline=deadline)
        except _DamagedPiece as damaged:
            self._meters.add("connector_corrupt_records")
            with load.progress.call():
                await store.discard(damaged.piece.key, str(damaged), deadline=deadline)
            raise

    def _scatter_in_place(self, found: Sequence[_Found], load: _Load) -> list[int]:
        """Have the device read records of one shape where they are, and write their pages to blocks; returns which it
        cannot."""
        first = found[0].piece
        group, expected = self._groups[first.key.group], self._page_bytes(first)
        pages, others = [], []
        for index, each in enumerate(found):
            try:
                source = self._source_in_place(each, expected)
            except KVStoreError as error:
                each.loaded.check()  # or it is not the record's fault
                if isinstance(error, CorruptRecord):
                    raise _DamagedPiece(each.piece, error) from error
                raise
            if source is None:
                others.append(index)
            else:
                piece = each.piece
                runs = group.plan.runs(piece.key.slice, piece.span_blocks)
                pages.append(PageScatter(runs, piece.block_ids, source, piece.first_block, each.loaded.check))
        if pages:
            try:
                group.copier.scatter_all(pages, load.after)
            except (Unavailable, Closed):
                raise
            except Exception as error:  # noqa: BLE001 - what fails here may still work from host memory
                self._failed_in_place(error)
                return list(range(len(found)))
            self._failures_in_place = 0
        done_bytes = len(pages) * expected
        self._meters.add("connector_loaded_bytes", done_bytes)
        self._meters.add("connector_loaded_in_place_bytes", done_bytes)
        return others

    def _failed_in_place(self, error: Exception) -> None:
        with self._lock:
            self._failures_in_place += 1
            is_last = self._failures_in_place == _FAILURES_MAX
        LOG.warning(
            "kvstore: the GPU %s, the processor verifies and copies these records: %s",
            "found a damaged record" if isinstance(error, WrongSource) else "cannot read records where they are",
            error,
            exc_info=None if isinstance(error, KVStoreError) else error,
        )
        if is_last:
            LOG.warning("kvstore: that has failed %d times in a row: it is not tried again", _FAILURES_MAX)

    def _source_in_place(self, found: _Found, expected: int) -> SharedRecord | None:
        """A record that the device can read where it is; `None`: it must be decoded first.

        Args:
            expected: Size of its page.
        """
        record, memory = found.loaded.peek(), found.record.memory
        header = record.header
        num_bytes = header.payload_bytes
        is_raw = header.codec_chain == RAW and num_bytes == expected
        if memory is None or not (is_raw or (header.codec_chain == TILES and self.device.decodes_tiles(expected))):
            return None
        parts = self.device.shared(memory, found.record.offset + HEADER_BYTES, num_bytes)
        if parts is None:
            return None
        is_verified = not is_raw or self.device.verifies(num_bytes)  # tiles have sums of their own
        self._check(record, expected, verify=not is_verified)
        if not is_raw:
            return SharedRecord(parts, expected, tiles=read_head(record.payload, expected))
        return SharedRecord(parts, expected, digest=header.payload_checksum if is_verified else None)

    def _scatter_decoded(self, found: Sequence[_Found], load: _Load) -> None:
        """Decode a record, and write its page to blocks."""
        [(piece, loaded, _)] = found
        group, expected = self._groups[piece.key.group], self._page_bytes(piece)
        with self._scratch.page(expected) as page:
            with _blaming(piece), loaded.reading() as record:
                self._check(record, expected)
                decode_into(record.header.codec_chain, record.payload, view(page), plane_width=group.copier.plane_width)
            runs = group.plan.runs(piece.key.slice, piece.span_blocks)
            group.copier.scatter_all([PageScatter(runs, piece.block_ids, page, piece.first_block)], load.after)
            if self._auditor is not None and load.scattered is not None:
                load.scattered.append(self._auditor.scattered(piece, page))
        self._meters.add("connector_loaded_bytes", expected)

    def _check(self, record: Record, expected: int, *, verify: bool = True) -> None:
        if verify:
            verify_payload(record)
        if record.header.decoded_bytes != expected:
            raise CorruptRecord("page has the wrong size", expected=expected, seen=record.header.decoded_bytes)


class _Leased(NamedTuple):
    piece: LoadPiece
    record: LeasedRecord


class _Found(NamedTuple):
    piece: LoadPiece
    loaded: LoadedRecord
    record: LeasedRecord


class _DamagedPiece(CorruptRecord):
    """A `CorruptRecord` that names the piece whose record it is."""

    def __init__(self, piece: LoadPiece, error: CorruptRecord) -> None:
        super().__init__(str(error))
        self.piece = piece


def _without_frames(work: Callable[[Sequence[_Found], _Load], Result], found: Sequence[_Found], load: _Load) -> Result:
    """Run work; its error refers to no frames that would keep the service's memory registered."""
    try:
        return work(found, load)
    except BaseException as error:
        each: BaseException | None = error
        while each is not None:
            traceback.clear_frames(each.__traceback__)
            each = each.__context__
        raise


@contextmanager
def _blaming(piece: LoadPiece) -> Iterator[None]:
    try:
        yield
    except CorruptRecord as error:
        raise _DamagedPiece(piece, error) from error


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


class _Answers:
    """Calls to the service: those that are open, and how many were answered."""

    def __init__(self) -> None:
        self.num_open = 0
        self.num_answered = 0

    @contextmanager
    def call(self) -> Iterator[None]:
        self.num_open += 1
        was_answered = True
        try:
            yield
        except asyncio.CancelledError:
            was_answered = False
            raise
        finally:
            self.num_open -= 1
            self.num_answered += was_answered


class _Progress:
    """Ends a load if the service stops answering. Time in codec threads does not count.

    Args:
        of_all: The calls of all loads. A load whose pieces are queued behind those of others waits for their answers.
    """

    def __init__(self, of_all: _Answers) -> None:
        self._of_all = of_all
        self._own = _Answers()
        self._num_queued = 0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Wraps a call to the service."""
        with self._of_all.call(), self._own.call():
            yield

    @asynccontextmanager
    async def queued(self, turns: asyncio.Semaphore) -> AsyncIterator[None]:
        """Wraps the turn of a piece among those of all loads."""
        self._num_queued += 1
        try:
            await turns.acquire()
        finally:
            self._num_queued -= 1
        try:
            yield
        finally:
            turns.release()

    def _awaited(self) -> _Answers | None:
        """The calls whose answers this load waits for; `None`: it waits for none."""
        if self._own.num_open:
            return self._own
        return self._of_all if self._num_queued and self._of_all.num_open else None

    async def watch(self, stall_s: float) -> None:
        """Raise if the load waits for calls and none is answered for `stall_s`.

        It counts its own wake-ups instead of reading the clock, so that a loop that was not scheduled does not look
        like a service that did not answer.
        """
        waited_s, own, of_all = 0.0, 0, 0
        while waited_s < stall_s:
            await asyncio.sleep(_WATCH_S)
            awaited = self._awaited()
            before = own if awaited is self._own else of_all
            is_stalled = awaited is not None and awaited.num_answered == before
            waited_s = waited_s + _WATCH_S if is_stalled else 0.0
            own, of_all = self._own.num_answered, self._of_all.num_answered
        raise Unavailable("the service sent no record for too long", stall_s=stall_s)
