"""The audit on a rank: reads back what was scattered, and compares what was stored with what the engine computed."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import xxhash

from connector.bridge import Bridge
from connector.device.base import PageGather, Ticket
from connector.device.host_pages import PageShare
from connector.jobs import AuditJob, AuditJobs, LoadPiece, RankReport
from connector.worker.differences import (
    bound_for,
    canonical_bytes,
    largest_difference,
    parts_of,
    some_blocks,
)
from connector.worker.groups import RankGroup
from connector.worker.staging import view
from kvstore.api import Deadline, LeaseId, PageStore
from kvstore.codec import CodecPool, decode_into
from kvstore.errors import Closed, CorruptRecord, KVStoreError
from kvstore.format.record import Record, verify_payload
from kvstore.runtime.meters import Meters

__all__ = ["Auditor"]

_log = logging.getLogger("vllm.kvstore")  # below vLLM's logger, so that its handlers and levels apply

_DEADLINE_S = 30.0


class Auditor:
    """Checks pages that were loaded or are about to be.

    Read back: do the blocks of a load hold what the records held, after the scatter and still after the first forward?
    They do not change while their request holds them, so this is exact. Recomputation: is a stored page what this
    engine computes for the same tokens? Another split of the prompt rounds differently, so this has a bound.

    A page without a buffer or a record is skipped and counted; the engine's thread never waits.

    Args:
        bridge: To the store.
        groups: The canonical groups on this rank, by their index.
        pages: Host memory for copies of blocks.
        compute_dtype: Type of the engine's activations.
        pool: Threads for comparing.
        meters: Counters.
    """

    def __init__(
        self,
        bridge: Bridge,
        groups: Sequence[RankGroup],
        pages: PageShare,
        *,
        compute_dtype: str,
        pool: CodecPool,
        meters: Meters,
    ) -> None:
        self._bridge = bridge
        self._groups = tuple(groups)
        self._bounds = [bound_for(compute_dtype, group.shape.facts.content) for group in groups]
        self._pool = pool
        self._pages = pages
        self._meters = meters
        self._lock = threading.Lock()
        self._placed: dict[str, list[_Placed]] = {}  # by request, until its first forward
        self._report = RankReport()
        self._largest = 0.0

    def look(self, jobs: AuditJobs) -> None:
        """Start a step's audits. Called on the engine's thread, after the step's forward was ordered."""
        self.forget(jobs.gone)
        try:
            for request_id in jobs.read_backs:
                self.read_back(request_id, after="the first forward", then=partial(self._read_back_done, request_id))
        finally:
            self._audit(jobs.records)

    # ---- read back

    def placed(self, request_id: str, piece: LoadPiece, page: torch.Tensor) -> None:
        """Remember what the blocks must hold of a page that is being scattered. Called on a codec thread.

        Args:
            request_id: Whose load.
            piece: Which blocks of the page, and where they go.
            page: The whole page, in its form in host memory.
        """
        group = self._groups[piece.key.group]
        array: Any = page.numpy()
        cells = some_blocks(
            canonical_bytes(array, group.copier.plane_width),
            _cell_bytes(group, piece),
            piece.span_blocks,
            piece.first_block,
            piece.num_blocks,
        )
        digest = xxhash.xxh3_128_digest(cells.tobytes())
        with self._lock:
            self._placed.setdefault(request_id, []).append(_Placed(piece, digest))

    def forget(self, request_ids: Iterable[str]) -> None:
        """Do not read these loads back: they failed, or their blocks were taken away."""
        with self._lock:
            for request_id in request_ids:
                self._placed.pop(request_id, None)

    def read_back(self, request_id: str, *, after: str, then: Callable[[bool], None]) -> None:
        """Compare a load's blocks with what was scattered. Called on the engine's thread, while the request holds them.

        Args:
            request_id: Whose load.
            after: What has just happened, for the log.
            then: Called, from another thread or from here, with whether all were equal; skipped ones count as equal.
        """
        with self._lock:
            placed = list(self._placed.get(request_id, ()))
        left = deque(zip(placed, self._gather_all([one.piece for one in placed]), strict=True))

        async def compare(store: PageStore) -> None:
            equal = True
            try:
                while left:
                    one, copy = left[0]
                    if copy is not None:
                        equal &= await self._compared(copy, partial(self._is_equal, one, copy, after))
                    left.popleft()
                    self._put_back([copy])
            except KVStoreError as error:
                self._skip(str(error))
            except Exception as error:  # noqa: BLE001 - a background task's top: nobody looks at its future
                self._skip(str(error))
                _log.exception("kvstore: audit: blocks could not be compared")
            finally:
                self._put_back(copy for _, copy in left)
                then(equal)

        try:
            self._bridge.submit(compare)
        except Closed:
            self._put_back(copy for _, copy in left)
            then(True)

    def _read_back_done(self, request_id: str, is_equal: bool) -> None:
        self.forget([request_id])

    def _is_equal(self, one: _Placed, copy: _Copy, after: str) -> bool:
        group = self._groups[one.piece.key.group]
        array: Any = copy.page.numpy()
        seen = xxhash.xxh3_128_digest(canonical_bytes(array, group.copier.plane_width).tobytes())
        self._meters.add("connector_audit_read_back_pages")
        if seen == one.digest:
            return True
        self._meters.add("connector_audit_mismatches")
        _log.error(
            "kvstore: audit: blocks do not hold what was loaded to them, after %s: key=%s blocks=%s",
            after,
            one.piece.key,
            one.piece.block_ids,
        )
        return False

    # ---- recomputation

    def _audit(self, jobs: Sequence[AuditJob]) -> None:
        """Compare stored records with the blocks that this step's forward completes. Called on the engine's thread.

        Every job is reported once, by `take_report`.
        """
        left = deque(jobs)
        try:
            while left:
                self._order_comparison(left[0])
                left.popleft()
        finally:
            for job in left:
                self._done(job, is_partial=True)

    def _order_comparison(self, job: AuditJob) -> None:
        pieces = [piece for piece in job.pieces if piece.key.slice in self._groups[piece.key.group].held]
        copies: list[_Copy | None] = []
        try:
            copies = self._gather_all(pieces)
            self._bridge.submit(partial(self._compare_records, job, deque(zip(pieces, copies, strict=True))))
        except BaseException as error:
            self._put_back(copies)
            if not isinstance(error, KVStoreError):
                raise
            if not isinstance(error, Closed):
                _log.exception("kvstore: audit: pages could not be compared")
            self._done(job, is_partial=True)

    async def _compare_records(
        self, job: AuditJob, left: deque[tuple[LoadPiece, _Copy | None]], store: PageStore
    ) -> None:
        is_partial, differs = any(copy is None for _, copy in left), False
        try:
            while left:
                piece, copy = left[0]
                if copy is not None:
                    try:
                        differs |= not await self._compare_record(store, LeaseId(job.lease), piece, copy)
                    except CorruptRecord:  # which is no fault of how it was made, or is computed
                        is_partial = True
                    except KVStoreError as error:
                        is_partial = True
                        self._skip(str(error))
                left.popleft()
                self._put_back([copy])
        except Exception:  # noqa: BLE001 - a background task's top: nobody looks at its future
            _log.exception("kvstore: audit: pages could not be compared")
        finally:
            self._put_back(copy for _, copy in left)
            self._done(job, is_partial=is_partial or bool(left), differs=differs)

    async def _compare_record(self, store: PageStore, lease: LeaseId, piece: LoadPiece, copy: _Copy) -> bool:
        """Whether a record is what was computed. One that is not, or is corrupt, is discarded.

        Raises:
            CorruptRecord: It could not be compared.
        """
        record = await store.load(lease, piece.key, deadline=Deadline.after(_DEADLINE_S))
        corrupt: CorruptRecord | None = None
        try:
            reason = await self._compared(copy, partial(self._differs, record, piece, copy))
        except CorruptRecord as error:
            reason, corrupt = str(error), error
        if reason is None:
            return True
        with suppress(KVStoreError):  # then whoever reads it next finds it
            await store.discard(piece.key, reason, deadline=Deadline.after(_DEADLINE_S))
        if corrupt is not None:
            raise corrupt
        return False

    def _differs(self, record: Record, piece: LoadPiece, copy: _Copy) -> str | None:
        """Why a record is not what was computed, or `None`. Called on a codec thread.

        Raises:
            CorruptRecord: It does not hold what it says.
        """
        group = self._groups[piece.key.group]
        size = group.plan.decoded_bytes(piece.span_blocks)
        try:
            verify_payload(record)
            if record.header.decoded_bytes != size:
                raise CorruptRecord("page has the wrong size", expected=size, seen=record.header.decoded_bytes)
            page = torch.empty(size, dtype=torch.uint8)
            decode_into(record.header.codec_chain, record.payload, view(page))
        except CorruptRecord:
            self._meters.add("connector_corrupt_records")
            raise
        cell_bytes = _cell_bytes(group, piece)
        stored: Any = page.numpy()
        computed: Any = copy.page.numpy()
        difference = largest_difference(
            some_blocks(
                canonical_bytes(computed, group.copier.plane_width), cell_bytes, piece.num_blocks, 0, piece.num_blocks
            ),
            some_blocks(stored, cell_bytes, piece.span_blocks, piece.first_block, piece.num_blocks),
            parts_of(group.shape.facts.content, cell_bytes),
        )
        bound = self._bounds[piece.key.group]
        with self._lock:
            self._largest = max(self._largest, difference)
            self._meters.set("connector_audit_max_difference", self._largest)
        self._meters.add("connector_audited_pages")
        if difference <= bound:
            return None
        self._meters.add("connector_audit_mismatches")
        reason = f"it differs from its recomputation: difference={difference:.3g} bound={bound:.3g}"
        _log.error("kvstore: audit: a stored page is wrong and is discarded: %s key=%s", reason, piece.key)
        return reason

    def take_report(self) -> RankReport | None:
        """The jobs that this rank has finished since the last call, or `None`."""
        with self._lock:
            if not self._report.audits_done:
                return None
            report, self._report = self._report, RankReport()
            return report

    def _done(self, job: AuditJob, *, is_partial: bool, differs: bool = False) -> None:
        with self._lock:
            self._report.audits_done[job.audit_id] = 1
            if is_partial:
                self._report.audits_partial.add(job.audit_id)
            if differs:
                self._report.audits_differ.add(job.audit_id)

    # ---- both

    def _gather_all(self, pieces: Iterable[LoadPiece]) -> list[_Copy | None]:
        copies: list[_Copy | None] = []
        try:
            for piece in pieces:
                copies.append(self._gather(piece))
        except BaseException:
            self._put_back(copies)
            raise
        return copies

    def _put_back(self, copies: Iterable[_Copy | None]) -> None:
        for copy in copies:
            if copy is not None:
                self._pages.put(copy.page)

    def _gather(self, piece: LoadPiece) -> _Copy | None:
        """Start to copy the piece's blocks to host memory; `None`: there is no room."""
        group = self._groups[piece.key.group]
        page = self._pages.take(group.plan.decoded_bytes(piece.num_blocks))
        if page is None:
            self._skip("no buffer")
            return None
        try:
            runs = group.plan.runs(piece.key.slice, piece.num_blocks)
            (ticket,) = group.copier.gather_all([PageGather(runs, piece.block_ids, page)])
        except BaseException:
            self._pages.put(page)
            raise
        if ticket is None:
            self._pages.put(page)
            self._skip("no room on the device")
            return None
        return _Copy(page, ticket)

    async def _compared(self, copy: _Copy, compare: Callable[[], Any]) -> Any:
        def wait_and_compare() -> Any:
            copy.ticket.wait()
            return compare()

        return await self._pool.run(copy.page.numel(), wait_and_compare, deadline=Deadline.after(_DEADLINE_S))

    def _skip(self, why: str) -> None:
        self._meters.add("connector_audit_skipped")
        _log.debug("kvstore: audit: a page was not compared: %s", why)


@dataclass(frozen=True, slots=True)
class _Placed:
    """The digest of what the blocks of a piece must hold."""

    piece: LoadPiece
    digest: bytes


@dataclass(frozen=True, slots=True)
class _Copy:
    """A piece's blocks in host memory, complete once the ticket is done."""

    page: torch.Tensor
    ticket: Ticket


def _cell_bytes(group: RankGroup, piece: LoadPiece) -> int:
    """Bytes of one block in one row of a page."""
    return group.plan.runs(piece.key.slice, 1)[0].page_block_stride
