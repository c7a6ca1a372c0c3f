"""The worker side of the connector: one object per rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from connector.bridge import Bridge
from connector.device import open_device
from connector.device.base import Device, Fence
from connector.device.cpu import CpuDevice
from connector.device.host_memory import HostPages, aligned
from connector.facts import EngineFacts
from connector.identity import CacheShape
from connector.jobs import RankReport, StepJobs
from connector.memory_budget import host_memory_budget, page_bytes
from connector.settings import ConnectorSettings
from connector.worker.audit import Auditor
from connector.worker.groups import RankGroup, check_bytes, check_round_trip, prove_group
from connector.worker.loader import Loader
from connector.worker.low_priority import LowPriorityPool
from connector.worker.memory import RecordMemory, ScratchPages, Warmer, memory_ranges
from connector.worker.saver import Saver
from kvstore.codec import CodecPool
from kvstore.errors import InvalidRequest
from kvstore.runtime.meters import Meters

_DRAIN_S = 4.0  # vLLM kills its workers after 5 s
_MAX_CODEC_THREADS = 4
_MAX_CODEC_THREADS_OF_GPU = 8
"""The engine does not compute on the processors there, and threads that have decoded wait for the GPU's copies."""
_SCRATCH_BYTES_OF_GPU = 256 << 20
"""Pinned memory for more threads than `_MAX_CODEC_THREADS`: each takes two pages."""
_EMPTY_STEP_S = 0.005
_PATIENCE_S = 1.0
"""How long a page waits for idle processors before it is encoded at normal priority."""
_WARM_BYTES = 64 << 20
"""Host pages that are made resident for the engine's first steps."""


class WorkerSide:
    """Proves the layout of this rank's cache, then saves and loads what the scheduler side asks for.

    Attributes:
        refusal: Why this rank's cache cannot be cached, or `None`; known after `register`.
    """

    def __init__(
        self, settings: ConnectorSettings, facts: EngineFacts, shape: CacheShape, bridge: Bridge, *, num_cores: int
    ) -> None:
        self._settings = settings
        self._facts = facts
        self._shape = shape
        self._bridge = bridge
        self._num_cores = num_cores
        self._pool: CodecPool | None = None
        self._device: Device | None = None
        self._save_threads: LowPriorityPool | None = None
        self._memory: RecordMemory | None = None
        self.meters = Meters()
        self.refusal: str | None = "cache tensors were not registered"
        self.groups: tuple[RankGroup, ...] = ()
        self.saver: Saver | None = None
        self.loader: Loader | None = None
        self.auditor: Auditor | None = None
        self._warmer: Warmer | None = None
        self._begun: tuple[StepJobs | None, Fence | None] = (None, None)
        self._stopped = ""
        self._unsaved: RankReport | None = None

    def register(self, layers_of: Callable[[tuple[str, ...]], Sequence[torch.Tensor]]) -> None:
        """Take the cache tensors and prove their layout.

        Args:
            layers_of: Returns the tensors of layers by name, dimension 0 = the manager's blocks.

        Raises:
            Exception: What the device or a bug of ours made of it; it is the refusal too.
        """
        try:
            self._register(layers_of)
        except BaseException as error:
            self._device, self.groups = None, ()  # the engine runs without a cache, and has their memory
            if isinstance(error, InvalidRequest):
                self.refusal = str(error)
                return
            # an error of CUDA has paragraphs of advice behind its first line
            reason = next(iter(str(error).splitlines()), "")
            self.refusal = f"its cache could not be registered: {type(error).__name__}: {reason}"
            raise
        self.refusal = None

    def _register(self, layers_of: Callable[[tuple[str, ...]], Sequence[torch.Tensor]]) -> None:
        settings, facts = self._settings, self._facts
        budget, slice_bytes = host_memory_budget(settings, facts, self._shape), self._largest_slice_bytes()
        page_tokens = self._shape.layout.page_tokens
        num_threads = num_codec_threads(facts, slice_bytes, self._num_cores)
        limit_bytes = max(budget.in_flight_bytes, 64 << 20)
        pool = self._pool = CodecPool(num_threads=num_threads, limit_bytes=limit_bytes)
        scratch_bytes = num_threads * slice_bytes
        # an engine that only loads and audits nothing copies no page from blocks, except in the check at start
        gathers = settings.saves or budget.audit_bytes > 0
        checked_bytes = check_bytes(self._shape.groups, page_tokens)
        device = self._device = open_device(
            layers_of(self._shape.groups[0].facts.layer_names)[0].device,
            ring_bytes=max(budget.in_flight_bytes if gathers else 0, checked_bytes),
            page_bytes_max=slice_bytes,
        )
        # All of it at once: memory that is pinned later stalls the engine's thread and the device. Saves get some pages
        # more, since threads may still read pages whose jobs are done.
        saved_bytes = aligned(max(budget.pinned_bytes if gathers else 0, checked_bytes) + scratch_bytes)
        memory = device.host_memory(saved_bytes + aligned(budget.audit_bytes) + scratch_bytes)
        saved, audited, decoded = memory.split([saved_bytes, aligned(budget.audit_bytes), scratch_bytes])
        self.groups = tuple(
            prove_group(
                group, layout, layers_of(group.facts.layer_names), facts, device, compression=settings.compression
            )
            for group, layout in zip(self._shape.groups, self._shape.layout.groups, strict=True)
        )
        for group in self.groups:
            layers = layers_of(group.shape.facts.layer_names)
            check_round_trip(group, layers, device, HostPages(saved), page_tokens=page_tokens)
        # loads, for which requests wait, never queue behind saves
        self._save_threads = LowPriorityPool(num_threads=max(1, num_threads // 2), limit_bytes=limit_bytes)
        self._memory = RecordMemory()
        self.saver = Saver(
            self._bridge,
            self.groups,
            page_tokens=page_tokens,
            threads=self._save_threads,
            # an engine that only saves does so for others, which wait for its pages
            patience_s=_PATIENCE_S if settings.mode == "both" else 0.0,
            # a page that is encoded a second time is still read by the first thread when its job is done
            pages=HostPages(saved, budget.in_flight_bytes + scratch_bytes),
            memory=self._memory,
            meters=self.meters,
        )
        if budget.audit_bytes:
            self.auditor = Auditor(
                self._bridge,
                self.groups,
                HostPages(audited),  # of its own: audits never take memory from saves
                compute_dtype=facts.compute_dtype,
                pool=pool,
                meters=self.meters,
            )
        self.loader = Loader(
            self._bridge,
            self.groups,
            pool=pool,
            memory=self._memory,
            scratch=ScratchPages(device, decoded.split(slice_bytes)),
            stall_s=settings.stall_timeout_ms / 1000,
            meters=self.meters,
            auditor=self.auditor,
        )
        if isinstance(device, CpuDevice):
            layers = [layer for group in self._shape.groups for layer in layers_of(group.facts.layer_names)]
            first = [(decoded.data_ptr(), scratch_bytes), (saved.data_ptr(), min(saved.numel(), _WARM_BYTES))]
            self._warmer = Warmer([*first, *memory_ranges(layers)])

    def _largest_slice_bytes(self) -> int:
        held = [len(group.slices.slices_of(0, self._facts.tp_size)) for group in self._shape.groups]
        sizes = zip(self._shape.groups, held, strict=True)
        return max(page_bytes(self._shape, group) // slices for group, slices in sizes)

    def stop(self, reason: str) -> None:
        """Load and save nothing any more: jobs are answered as failed, and the scheduler side gets the first reason."""
        if self._stopped:
            return  # a report may hold jobs that were answered since
        self._stopped, self._unsaved = reason, RankReport(refusal=reason)

    def begin_step(self, jobs: StepJobs) -> None:
        """Note where a step's forward begins, for loads that start behind it. Called when the step's jobs are bound.

        The blocks of a load were allocated in this step, for a request that does not compute yet. All work that may
        still use them was ordered on the compute stream before this call, on both of vLLM's runners: earlier steps'
        forwards, drafts and gathers, and this step's zeroing, copies on write and copies of recurrent states.
        (`handle_preemptions` would be too early: the first runner zeroes after it.)

        Between this call and `start_load_kv` come the forward and the drafts. They use the tables of requests that
        compute, in which no block of a load is. vLLM relies on the same: with a synchronous load in the step it calls
        `start_load_kv` here, for all of the step's loads.
        """
        if self.loader is not None and self._settings.loads:
            self.loader.follow_memory()
        if self._device is not None and jobs.loads:
            self._begun = (jobs, self._device.fence())

    def start_loads(self, jobs: StepJobs) -> None:
        """Start a step's loads, behind the work that was ordered before `begin_step`, or before this call if that was
        not called for these jobs.

        Each is reported once, even if this raises: vLLM waits for it.
        """
        (begun, after), self._begun = self._begun, (None, None)
        if self.loader is not None and jobs.loads:
            loads = [replace(job, pieces=None) for job in jobs.loads] if self._stopped else jobs.loads
            self.loader.load(loads, after if begun is jobs else None)

    def save(self, jobs: StepJobs) -> None:
        """Order a step's saves and audits, after its forward was ordered."""
        if self._stopped:
            if jobs.saves or jobs.audits:
                saves, audits = [job.job_id for job in jobs.saves], [job.audit_id for job in jobs.audits]
                undone = RankReport(dict.fromkeys(saves, 1), set(saves), dict.fromkeys(audits, 1), set(audits))
                self._unsaved = undone.merge(self._unsaved or RankReport(refusal=self._stopped))
            return
        try:
            if self.auditor is not None:
                self.auditor.compare(jobs.audits)
        finally:  # also after an error of the audit: a save that is not reported keeps its room and its blocks for ever
            if self.saver is not None:
                self.saver.save(jobs.saves)

    def take_results(self, *, may_wait: bool = False) -> tuple[set[str], set[str]]:
        """Finished and failed loads.

        In a step that may wait the rank waits a moment for a load to end, or for its saves. Otherwise it would spin in
        Python for the next step, and keep the interpreter's lock from the threads that load and save.
        """
        if self.loader is None or self.saver is None:
            return set(), set()
        if not may_wait:
            return self.loader.take_results()
        if not self.loader.is_loading:
            self.saver.drain(_EMPTY_STEP_S)
        return self.loader.take_results(wait_s=_EMPTY_STEP_S)

    def take_report(self) -> RankReport | None:
        report = self.saver.take_report() if self.saver is not None else None
        if self.auditor is not None and (audited := self.auditor.take_report()) is not None:
            report = (report or RankReport()).merge(audited)
        if self._unsaved is not None:
            report, self._unsaved = self._unsaved.merge(report or RankReport()), None
        return report

    def drain(self) -> None:
        """Wait, within a time limit, until nothing reads from the blocks or writes to them."""
        if self.loader is not None and self.saver is not None:
            self.loader.drain(_DRAIN_S)
            self.saver.drain(_DRAIN_S)

    def shutdown(self) -> None:
        """Finish pending saves within a time limit, then stop. Idempotent."""
        if self.saver is not None:
            self.saver.finish(_DRAIN_S)
        if self._device is not None:
            self._device.close()
        if self._memory is not None:
            self._memory.close()
        if self._warmer is not None:
            self._warmer.stop()
        if self._save_threads is not None:
            self._save_threads.close()
        if self._pool is not None:
            self._pool.close()


def num_codec_threads(facts: EngineFacts, page_bytes: int, num_cores: int) -> int:
    """Threads that decode what this rank loads; half as many encode what it saves.

    Args:
        page_bytes: Of its largest page of a slice.
        num_cores: Of the machine.
    """
    most = _MAX_CODEC_THREADS
    if facts.device == "cuda":
        cores, room = num_cores // (2 * facts.machine_ranks), _SCRATCH_BYTES_OF_GPU // (2 * page_bytes)
        most = max(most, min(_MAX_CODEC_THREADS_OF_GPU, cores, room))
    return max(1, min(most, num_cores))
