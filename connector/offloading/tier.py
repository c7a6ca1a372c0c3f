"""`KVStoreTier`: a secondary tier of vLLM's offloading over a kvstore service.

vLLM calls it in its scheduler's process, between two steps of the engine. So no call waits for the store, except
`drain_jobs` and `shutdown`, and none but the constructor raises: what fails is a miss, or a job that failed.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, cast

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingMetricMetadata,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from connector.logs import LOG, join_vllm_logs
from connector.offloading.engine import Engine, describe_groups, read_engine
from connector.offloading.lookups import Doors, Lookups, Request
from connector.offloading.transfers import Done, Job, Transfers
from connector.request_parameters import RequestFlags, read_flags
from connector.settings import STORE_SETTINGS, ConnectorSettings, cache_folder
from connector.vllm.engine_calls import CHANGE_WEIGHTS, KEEP_WEIGHTS, watch_engine_calls
from connector.vllm.guard import guarded
from connector.vllm.model_files import would_read_the_same
from kvstore.client import PageDoor
from kvstore.codec import CodecPool
from kvstore.errors import Closed, InvalidRequest, KVStoreError
from kvstore.model.keys import NamespaceId

_SETTINGS = (*STORE_SETTINGS, "lookup_timeout_ms", "weights_may_change", "trust_mm_uuids", "allow_untested_vllm")
_DEFAULTS = {"lookup_timeout_ms": 80}
"""vLLM computes nothing of a request before it has its answer, and asks for that between steps: 100 ms at most."""
_CODEC_THREADS, _CODEC_BYTES = 4, 256 << 20
_OPEN_RETRY_S = 0.5
_TO_STORE_SHARE = 0.25
"""The part of the primary tier that may wait to be stored. What waits cannot be evicted, and with a full primary tier
vLLM offloads nothing: a store that is slower than the engine costs chunks in the store alone."""
_MISSES, _CHUNKS = "vllm:kvstore_tier_misses", "vllm:kvstore_tier_chunks"
_ERRORS = "vllm:kvstore_tier_guarded_errors"


class KVStoreTier(SecondaryTierManager):
    """A secondary tier.

    Args:
        offloading_spec: What vLLM offloads.
        primary_kv_view: The primary tier's memory: [slots, bytes of a slot].
        tier_type: The name of this class.
        backpressure_detector: vLLM's, if the operator configured one.
        enable_kv_events: Report stored chunks in vLLM's cache events, if these are on.
        locality: `LOCAL` or `REMOTE`, for these events and for requests that choose tiers.
        settings: Ours (docs/engines.md).

    Raises:
        InvalidRequest: A setting is wrong, or a file that it names.

    Attributes:
        identified: Set when the namespaces are open, or cannot be.
        refusal: Why this engine is not cached; empty while it is, and while that is not known.
        guarded_errors: Errors of ours that were kept from the engine.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(  # noqa: PLR0917 - vLLM's factory passes them by name
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        enable_kv_events: bool = False,
        locality: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        join_vllm_logs()
        self._settings = read = ConnectorSettings.parse({**_DEFAULTS, **settings}, only=_SETTINGS)
        self.locality = Locality(locality) if locality is not None else None
        self._has_events = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[OffloadingEvent] = []
        self.identified, self.refusal, self.guarded_errors = threading.Event(), "", 0
        self._closing = threading.Event()
        self._doors: Doors = {}
        self._flags: dict[str, RequestFlags] = {}
        self._misses: Counter[str] = Counter()
        self._chunks: Counter[tuple[str, str]] = Counter()
        self._errors_counted = 0
        self._store = read.connect(f"vllm offloading, pid {os.getpid()}", read.read_token(), saves=True)
        self._threads = CodecPool(num_threads=_CODEC_THREADS, limit_bytes=_CODEC_BYTES)
        self._lookups = Lookups(read.lookup_timeout_ms / 1000, lambda why, num: self._misses.update({why: num}))
        self._transfers = Transfers(primary_kv_view, read.max_wait_ms / 1000)
        self._engine: Engine | None = None
        try:
            if read.mode != "off":
                self._engine = read_engine(offloading_spec, self.block_size_bytes, read)
                watch_engine_calls(self)
        except Exception as error:  # noqa: BLE001 - of a vLLM that has changed: its engine runs without the store
            self._refuse(error)
        threading.Thread(target=self._identify, args=(self._engine,), name="kvstore-weights", daemon=True).start()

    # which chunks are stored

    @guarded(fallback=RequestOffloadingContext)
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        flags, complaints = read_flags(req_context.kv_transfer_params)
        for complaint in complaints:
            LOG.debug("kvstore: request %s: %s", req_context.req_id, complaint)
        self._flags[req_context.req_id] = flags
        return RequestOffloadingContext()

    @guarded(fallback=LookupResult.MISS)
    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        request = self._lookups.request(req_context.req_id)
        if key not in request.verdicts:
            request.note(key, req_context.get_offload_key_position(cast(Any, key)))
            if refused := self._why_not_loaded(req_context.req_id):
                self._lookups.refuse(request, [key], refused)
        found = self._lookups.lookup(request, key)
        return LookupResult.RETRY if found is None else LookupResult.HIT if found else LookupResult.MISS

    def _why_not_loaded(self, request_id: str) -> str:
        if not self._doors:
            return "engine_not_cached" if self.refusal else "not_ready"
        if not self._settings.loads:
            return "mode"
        return "" if self._flags.get(request_id, RequestFlags()).load else "opted_out"

    @guarded()
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.send(self._doors)

    @guarded()
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.forget(req_context.req_id)
        self._flags.pop(req_context.req_id, None)

    # jobs

    def submit_store(self, job_metadata: TransferJob) -> None:
        flags = self._flags.get(job_metadata.req_context.req_id, RequestFlags())
        waiting = self._transfers.slots_to_store + len(job_metadata.keys)
        refused = "engine_not_cached" if not self._doors else ""
        if not self._settings.saves or not flags.save:
            refused = "mode" if flags.save else "opted_out"
        elif waiting > max(1, _TO_STORE_SHARE * self._transfers.num_slots):
            refused = "busy"
        self._submit(job_metadata, refused)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, "engine_not_cached" if not self._doors else "")

    def _submit(self, given: TransferJob, refused: str) -> None:
        """Start a job, or report that it failed: vLLM keeps its slots until it is reported."""
        request_id, keys = given.req_context.req_id, list(given.keys)
        # vLLM may begin a load for a request that has ended since its lookups: nothing would forget it
        request = self._lookups.request(request_id) if request_id in self._flags else Request(request_id)
        job = Job(given.job_id, request, keys, given.chunk_ids.tolist(), given.is_promotion)
        if refused or not self._start(job, given.req_context):
            self._transfers.refuse(job, refused or "failed")

    @guarded(fallback=False)
    def _start(self, job: Job, context: ReqContext) -> bool:
        job.request.note_new(job.keys, lambda key: context.get_offload_key_position(cast(Any, key)))
        self._transfers.submit(job, self._doors)
        return True

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [self._result(done) for done in self._transfers.finished()]

    def _result(self, done: Done) -> JobResult:
        job, succeeded = done.job, set(done.succeeded)
        failed = [key for key in job.keys if key not in succeeded]
        kind = "load" if job.loads else "store"
        self._chunks[kind, "done"] += len(succeeded)
        self._chunks[kind, done.refused or "failed"] += len(failed)
        keys = cast(Any, list(done.succeeded))
        if job.loads:
            self._lookups.refuse(job.request, failed, "load_failed")
        elif keys and self._has_events:
            self._events.append(OffloadingEvent(keys, self.medium, removed=False, locality=self.locality))
        return JobResult(
            job_id=job.id,
            success=not failed,
            successful_keys=keys if job.loads and failed else None,
            transfer_time=done.seconds,
            transfer_bytes=len(succeeded) * self.block_size_bytes,
        )

    @guarded()
    def drain_jobs(self) -> None:
        """Return when no job touches the primary tier: about `max_wait_ms` after the call at most.

        vLLM calls this before it empties its caches, as when its weights change.
        """
        self._transfers.drain()
        if self._settings.weights_may_change and not self.refusal:
            self._refuse("vLLM's caches were emptied, and its weights may have changed: restart it to use the store")

    @guarded()
    def on_engine_call(self, method: str, arguments: Sequence[Any]) -> None:
        """Go on behind a call that may change weights only if it read the files that the engine started with."""
        assert self._engine is not None
        reads = method in ("reload_weights", "update_config")
        declared = self._settings.weights_may_change  # then vLLM should have emptied its caches before
        keeps = method not in CHANGE_WEIGHTS if declared else method in KEEP_WEIGHTS
        if self.refusal or (keeps and not reads):
            return
        if not reads or arguments or not would_read_the_same(self._engine.config, self._engine.model):
            self._refuse(f"its weights may be others ({method or 'a function'}): restart it to use the store")

    # reports

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Three counters beside those that vLLM has for each tier."""
        return {
            _MISSES: OffloadingCounterMetadata("Chunks that were looked up and not found, by reason.", ("reason",)),
            _CHUNKS: OffloadingCounterMetadata("Chunks of jobs, by what became of them.", ("job", "outcome")),
            _ERRORS: OffloadingCounterMetadata("Errors of the tier kept from the engine."),
        }

    @guarded()
    def get_stats(self) -> OffloadingConnectorStats | None:
        stats = OffloadingConnectorStats()
        for reason, count in self._misses.items():
            if count:
                stats.increase_counter(_MISSES, count, (reason,))
        for labels, count in self._chunks.items():
            if count:
                stats.increase_counter(_CHUNKS, count, labels)
        if errors := self.guarded_errors - self._errors_counted:
            stats.increase_counter(_ERRORS, errors)
        self._errors_counted = self.guarded_errors
        self._misses.clear()
        self._chunks.clear()
        return stats

    # life

    @guarded()
    def shutdown(self) -> None:
        """End jobs, threads and connections. Idempotent."""
        self._closing.set()
        self.refusal, self._doors = "it was shut down", {}
        self._lookups.close()
        self._transfers.close()
        self._store.close()
        self._threads.close()

    def namespaces(self) -> dict[int, NamespaceId]:
        """The namespace of each group, once they are open."""
        return {group: door.namespace for group, door in self._doors.items() if door.namespace is not None}

    def _identify(self, engine: Engine | None) -> None:
        """Find out which weights the engine has, in minutes at the first start: until then each lookup misses."""
        try:
            if engine is not None:
                wait_s = self._settings.max_wait_ms / 1000
                self._open(
                    {
                        group: PageDoor(self._store, described, timeout_s=wait_s, pool=self._threads)
                        for group, described in describe_groups(engine, self._settings, cache_folder()).items()
                    }
                )
        except Closed:
            pass  # the engine ends
        except Exception as error:  # noqa: BLE001 - a thread's top: an engine without a store must say why
            self._refuse(error)
        finally:
            self.identified.set()

    def _open(self, doors: dict[int, PageDoor]) -> None:
        while not self._closing.is_set():
            try:
                namespaces = [door.open().hex() for door in doors.values()]
            except (Closed, InvalidRequest):
                raise
            except KVStoreError:  # the client logs what is wrong, once, and keeps reconnecting
                self._closing.wait(_OPEN_RETRY_S)
            else:
                self._doors = doors
                if self.refusal:  # by the engine's thread, while this one opened them
                    self._doors = {}
                    return
                LOG.info("kvstore: caching offloaded chunks at %s, namespaces %s", self._store.url, namespaces)
                return

    def _refuse(self, reason: object) -> None:
        self.refusal, self._doors = str(reason), {}
        LOG.warning("kvstore: this engine is not cached: %s", reason)
