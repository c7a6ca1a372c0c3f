"""The audit on a rank: reads loads back, and compares stored pages with what the engine computed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import xxhash

from connector.bridge import Bridge
from connector.device.base import PageGather, Ticket
from connector.device.host_memory import HostPages
from connector.jobs import AuditJob, LoadPiece, RankReport
from connector.logs import LOG
from connector.worker.differences import bound_for, canonical_bytes, largest_difference, parts_of, some_blocks
from connector.worker.groups import RankGroup
from connector.worker.memory import view
from kvstore.api import Deadline, LeaseId, LoadedRecord, PageStore
from kvstore.codec import CodecPool, decode_into
from kvstore.errors import CorruptRecord, KVStoreError
from kvstore.format.record import verify_payload
from kvstore.runtime.meters import Meters

_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class Scattered:
    """A piece that was written to blocks, and the digest of its bytes."""

    piece: LoadPiece
    digest: bytes


@dataclass(frozen=True, slots=True)
class _Copy:
    """The blocks of a piece in host memory, complete once the ticket is done."""

    page: torch.Tensor
    ticket: Ticket


Check = Callable[[PageStore, int, _Copy], Awaitable[bool]]
"""Says whether the copy of the piece with this index is right. Raises a `KVStoreError` if it cannot be compared."""


class Auditor:
    """Copies blocks to host memory and compares them with records.

    Read back: do the blocks of a load hold what the records held, before the request may use them? This is exact.
    Recomputation: is a stored page what this engine computes for the same tokens? Another split of the prompt rounds
    differently, so this has a bound.

    A page without a buffer or a record is skipped and counted. The engine's thread never waits.

    Args:
        groups: The canonical groups on this rank, by their index.
        pages: Host memory for copies of blocks.
        compute_dtype: Type of the engine's activations.
        pool: Threads for comparing.
    """

    def __init__(
        self,
        bridge: Bridge,
        groups: Sequence[RankGroup],
        pages: HostPages,
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
        self._report = RankReport()
        self._largest = 0.0

    # ---- read back

    def scattered(self, piece: LoadPiece, page: torch.Tensor) -> Scattered:
        """What to expect in the blocks of a piece of `page`, a whole page in host memory. Called on a codec thread."""
        group = self._groups[piece.key.group]
        array: Any = page.numpy()
        cells = some_blocks(
            canonical_bytes(array, group.copier.plane_width),
            _cell_bytes(group, piece),
            piece.span_blocks,
            piece.first_block,
            piece.num_blocks,
        )
        return Scattered(piece, xxhash.xxh3_128_digest(cells.tobytes()))

    def read_back(self, scattered: Sequence[Scattered], then: Callable[[bool], None]) -> None:
        """Compare a load's blocks with what was scattered. Called on the engine's thread, while the request holds them.

        Args:
            then: Called once, from another thread, unless this raises. Receives whether all pieces were equal; those
                that were not compared count as equal.

        Raises:
            KVStoreError: The blocks cannot be copied.
        """

        async def check(_: PageStore, index: int, copy: _Copy) -> bool:
            return bool(await self._on_a_codec_thread(copy, partial(self._is_equal, scattered[index], copy)))

        self._start([one.piece for one in scattered], check, lambda verdicts: then(False not in verdicts))

    def _is_equal(self, one: Scattered, copy: _Copy) -> bool:
        array: Any = copy.page.numpy()
        page = canonical_bytes(array, self._groups[one.piece.key.group].copier.plane_width)
        self._meters.add("connector_audit_read_back_pages")
        if xxhash.xxh3_128_digest(page.tobytes()) == one.digest:
            return True
        self._meters.add("connector_audit_mismatches")
        LOG.error(
            "kvstore: audit: blocks do not hold what was loaded to them: key=%s blocks=%s",
            one.piece.key,
            one.piece.block_ids,
        )
        return False

    # ---- recomputation

    def compare(self, jobs: Sequence[AuditJob]) -> None:
        """Compare stored records with blocks that this step's forward completes. Called on the engine's thread.

        `take_report` returns every job once, also if this raises.
        """
        left = deque(jobs)
        try:
            while left:
                job = left[0]
                pieces = [piece for piece in job.pieces if piece.key.slice in self._groups[piece.key.group].held]
                try:
                    self._start(pieces, partial(self._compare_record, job, pieces), partial(self._compared, job))
                except KVStoreError as error:
                    self._skip(str(error))
                    self._compared(job, [None])
                left.popleft()
        finally:
            for job in left:
                self._compared(job, [None])

    async def _compare_record(
        self, job: AuditJob, pieces: Sequence[LoadPiece], store: PageStore, index: int, copy: _Copy
    ) -> bool:
        """Whether a record is what was computed. One that is not, or is corrupt, is discarded.

        Raises:
            CorruptRecord: It could not be compared.
        """
        key = pieces[index].key
        (leased,) = await store.load_many(LeaseId(job.lease), [key], deadline=Deadline.after(_DEADLINE_S))
        loaded = await leased.load(deadline=Deadline.after(_DEADLINE_S))
        corrupt: CorruptRecord | None = None
        try:
            reason = await self._on_a_codec_thread(copy, partial(self._difference, loaded, pieces[index], copy))
        except CorruptRecord as error:
            reason, corrupt = str(error), error
        if reason is None:
            return True
        with suppress(KVStoreError):  # then the next reader finds it
            await store.discard(key, reason, deadline=Deadline.after(_DEADLINE_S))
        if corrupt is not None:
            raise corrupt
        return False

    def _difference(self, loaded: LoadedRecord, piece: LoadPiece, copy: _Copy) -> str | None:
        """Why a record is not what was computed, or `None`. Called on a codec thread.

        Raises:
            CorruptRecord: Its bytes are not those that were sealed, or it has another size.
        """
        group = self._groups[piece.key.group]
        size = group.plan.decoded_bytes(piece.span_blocks)
        page = torch.empty(size, dtype=torch.uint8)
        try:
            with loaded.reading() as record:
                verify_payload(record)
                if record.header.decoded_bytes != size:
                    raise CorruptRecord("page has the wrong size", expected=size, seen=record.header.decoded_bytes)
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
        LOG.error("kvstore: audit: a stored page is wrong and is discarded: %s key=%s", reason, piece.key)
        return reason

    def _compared(self, job: AuditJob, verdicts: Sequence[bool | None]) -> None:
        with self._lock:
            self._report.audits_done[job.audit_id] = 1
            if None in verdicts:
                self._report.audits_partial.add(job.audit_id)
            if False in verdicts:
                self._report.audits_differ.add(job.audit_id)

    def take_report(self) -> RankReport | None:
        """The jobs that this rank has finished since the last call, or `None`."""
        with self._lock:
            if not self._report.audits_done:
                return None
            report, self._report = self._report, RankReport()
            return report

    # ---- both

    def _start(self, pieces: Sequence[LoadPiece], check: Check, then: Callable[[Sequence[bool | None]], None]) -> None:
        """Order copies of the pieces' blocks, and check each one once it has arrived.

        Args:
            then: Called once, from another thread, unless this raises: for each piece what `check` returned, or `None`
                if it was not compared.

        Raises:
            KVStoreError: The blocks cannot be copied, or the connector is closed.
        """
        copies: list[_Copy | None] = []
        try:
            for piece in pieces:
                copies.append(self._gather(piece))
            self._bridge.submit(partial(self._check_all, copies, check, then))
        except BaseException:
            self._put_back(copies)
            raise

    async def _check_all(
        self,
        copies: Sequence[_Copy | None],
        check: Check,
        then: Callable[[Sequence[bool | None]], None],
        store: PageStore,
    ) -> None:
        verdicts: list[bool | None] = [None] * len(copies)
        try:
            for index, copy in enumerate(copies):
                if copy is not None:
                    verdicts[index] = await self._verdict(check, store, index, copy)
        except Exception as error:  # noqa: BLE001 - a background task's top: no caller awaits its future
            self._skip(str(error))
            LOG.exception("kvstore: audit: pages could not be compared")
        finally:
            self._put_back(copies)
            then(verdicts)

    async def _verdict(self, check: Check, store: PageStore, index: int, copy: _Copy) -> bool | None:
        try:
            return await check(store, index, copy)
        except CorruptRecord:  # which is no fault of how it was made, or is computed
            return None
        except KVStoreError as error:
            self._skip(str(error))
            return None

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

    def _put_back(self, copies: Iterable[_Copy | None]) -> None:
        for copy in copies:
            if copy is not None:
                self._pages.put(copy.page)

    async def _on_a_codec_thread(self, copy: _Copy, compare: Callable[[], Any]) -> Any:
        def wait_and_compare() -> Any:
            copy.ticket.wait()
            return compare()

        return await self._pool.run(copy.page.numel(), wait_and_compare, deadline=Deadline.after(_DEADLINE_S))

    def _skip(self, why: str) -> None:
        self._meters.add("connector_audit_skipped")
        LOG.debug("kvstore: audit: a page was not compared: %s", why)


def _cell_bytes(group: RankGroup, piece: LoadPiece) -> int:
    """Bytes of one block in one row of a page."""
    return group.plan.runs(piece.key.slice, 1)[0].page_block_stride
