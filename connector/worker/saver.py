"""Saving: blocks to buffers inside the step, buffers to records to the store behind its back."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch

from connector.canonical.runs import PagePlan
from connector.device.base import BlockCopier
from connector.jobs import RankReport, SaveJob
from connector.scheduler.bridge import Bridge
from connector.worker.staging import BufferPool, view
from kvstore.api import Deadline, PageStore, SaveOutcome
from kvstore.codec import CodecPool, encode, max_payload_bytes
from kvstore.errors import Closed, KVStoreError
from kvstore.format.header_v1 import HeaderV1
from kvstore.format.record import HEADER_BYTES, Record, seal
from kvstore.model.keys import RecordKey
from kvstore.model.layout import GroupLayout
from kvstore.model.spans import Span
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.meters import Meters

__all__ = ["Saver"]

_log = logging.getLogger("vllm.kvstore")  # below vLLM's logger, so that its handlers and levels apply

_SAVE_DEADLINE_S = 10.0


class Saver:
    """Saves one rank's slices.

    The engine's thread only copies blocks to host buffers; encoding, sealing and sending run elsewhere. A page that
    cannot be saved is counted and forgotten: it is a later miss.

    Args:
        bridge: To the store.
        copier: The device.
        plan: The group's page plan on this rank.
        group: The group's layout.
        page_tokens: Tokens of a page.
        slices: The slices that this rank writes.
        chain: Codec chain to encode with.
        pool: Threads for encoding.
        buffers: Host memory for pages and records on their way.
        meters: Counters.
    """

    def __init__(
        self,
        bridge: Bridge,
        copier: BlockCopier,
        plan: PagePlan,
        group: GroupLayout,
        *,
        page_tokens: int,
        slices: Sequence[int],
        chain: int,
        pool: CodecPool,
        buffers: BufferPool,
        meters: Meters,
    ) -> None:
        self._bridge = bridge
        self._copier = copier
        self._plan = plan
        self._group = group
        self._page_tokens = page_tokens
        self._slices = tuple(slices)
        self._chain = chain
        self._pool = pool
        self._buffers = buffers
        self._meters = meters
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._open_slices: dict[int, int] = {}
        self._report = RankReport()

    def save(self, jobs: Sequence[SaveJob]) -> None:
        """Copy the jobs' blocks out now; when it returns the blocks may be reused.

        Every job is reported once, also when this raises: the scheduler side holds room for it until then.
        """
        left = deque((job, slice_index) for job in jobs for slice_index in self._slices)
        with self._lock:
            self._open_slices.update((job.job_id, len(self._slices)) for job in jobs)
        try:
            while left:
                self._save_slice(*left[0])
                left.popleft()
        finally:
            for job, _ in left:
                self._done(job.job_id, "failed")

    def _save_slice(self, job: SaveJob, slice_index: int) -> None:
        page = self._buffers.take(self._plan.decoded_bytes(len(job.block_ids)))
        if page is None:
            self._done(job.job_id, "no_buffer")
            return
        try:
            self._copy_and_send(job, slice_index, page)
        except Closed:
            self._buffers.put(page)
            self._done(job.job_id, "failed")
        except BaseException:
            self._buffers.put(page)
            raise

    def _copy_and_send(self, job: SaveJob, slice_index: int, page: torch.Tensor) -> None:
        self._copier.gather(self._plan.runs(slice_index, len(job.block_ids)), job.block_ids, page)
        kind, span = self._group.record_at(job.stop_tokens, self._page_tokens)
        assert span == Span(job.start_tokens, job.stop_tokens)
        header = HeaderV1(
            key=RecordKey(job.namespace, job.prefix, job.group, slice_index),
            kind=kind,
            span=span,
            codec_chain=self._chain,
            decoded_bytes=page.numel(),
            payload_bytes=0,
            payload_checksum=bytes(16),
            created_ms=SYSTEM_CLOCK.wall_ms(),
        )
        self._bridge.submit(lambda store: self._send(store, job.job_id, header, page))

    async def _send(self, store: PageStore, job_id: int, header: HeaderV1, page: torch.Tensor) -> None:
        outcome = "failed"
        try:
            outcome = await self._encode_and_save(store, header, page)
        except KVStoreError as error:
            _log.debug("kvstore: a page was not saved: %s", error)
        except Exception:  # noqa: BLE001 - a background task's top: nobody looks at its future
            _log.exception("kvstore: a page was not saved")
        finally:
            self._done(job_id, outcome)

    async def _encode_and_save(self, store: PageStore, header: HeaderV1, page: torch.Tensor) -> str:
        deadline = Deadline.after(_SAVE_DEADLINE_S)
        room = HEADER_BYTES + max_payload_bytes(page.numel())
        # scratch memory beside the granted pages: bounded by the pool, which lets in a few jobs at a time
        buffer = torch.empty(room, dtype=torch.uint8)
        try:
            record = await self._pool.run(room, lambda: _seal(self._chain, header, page, buffer), deadline=deadline)
        finally:
            self._buffers.put(page)
        self._meters.add("connector_raw_bytes_saved", header.decoded_bytes)
        outcome = await store.save(record, deadline=deadline)
        if outcome is SaveOutcome.STORED:
            self._meters.add("connector_bytes_stored", record.num_bytes)
        return outcome.value

    def _done(self, job_id: int, outcome: str) -> None:
        self._meters.add("connector_saves", outcome=outcome)
        with self._lock:
            if outcome not in ("stored", "exists"):
                self._report.saves_failed.add(job_id)
            self._open_slices[job_id] -= 1
            if self._open_slices[job_id] == 0:
                del self._open_slices[job_id]
                self._report.saves_done[job_id] = 1
            if not self._open_slices:
                self._idle.notify_all()

    def take_report(self) -> RankReport | None:
        """What was finished since the last call, or `None`."""
        with self._lock:
            if not self._report.saves_done:
                return None
            report, self._report = self._report, RankReport()
            return report

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is sent. False: it took too long; the rest is lost, which costs later misses."""
        with self._lock:
            return self._idle.wait_for(lambda: not self._open_slices, timeout_s)


def _seal(chain: int, header: HeaderV1, page: torch.Tensor, buffer: torch.Tensor) -> Record:
    target = view(buffer)
    encoded = encode(chain, view(page), target[HEADER_BYTES:])
    return seal(replace(header, codec_chain=encoded.chain), target[: HEADER_BYTES + encoded.payload_bytes])
