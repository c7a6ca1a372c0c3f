"""`KVStoreConnector`: vLLM's connector interface, translated to and from the two sides. No decision is made here.

Each hook is guarded: an error of ours is counted and logged, and the engine goes on as if nothing were cached.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from connector.identity import read_shape
from connector.jobs import RankReport, StepJobs
from connector.scheduler.side import PromptFacts, SchedulerSide, StepFacts
from connector.settings import ConnectorSettings, cache_folder
from connector.vllm_facts import cache_layers, read_facts
from connector.worker.side import WorkerSide, rank_page_bytes
from kvstore.client import BlockingStore, ClientOptions, EmbeddedOptions

__all__ = ["KVStoreConnector"]

_log = logging.getLogger("vllm.kvstore")  # below vLLM's logger, so that its handlers and levels apply

Hook = TypeVar("Hook", bound=Callable[..., Any])


def _guarded(fallback: Any = None) -> Callable[[Hook], Hook]:
    """Never let an error of ours reach the engine: log it with its traceback and answer `fallback()` or `fallback`."""

    def decorate(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def guarded(self: KVStoreConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except Exception:  # noqa: BLE001 - the guard
                self.guarded_errors += 1
                if self.guarded_errors <= _LOGGED_ERRORS:
                    _log.exception("kvstore: an error in %s was kept from the engine", hook.__name__)
                return fallback() if callable(fallback) else fallback

        return guarded  # type: ignore[return-value]

    return decorate


_LOGGED_ERRORS = 20


@dataclass
class _StepMetadata(KVConnectorMetadata):
    jobs: StepJobs = field(default_factory=StepJobs)


@dataclass
class _WorkerMetadata(KVConnectorWorkerMetadata):
    report: RankReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> _WorkerMetadata:
        assert isinstance(other, _WorkerMetadata)
        return _WorkerMetadata(self.report.merge(other.report))


@dataclass
class _RankProof(KVConnectorHandshakeMetadata):
    refusal: str | None


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """Saves finished prefixes to a kvstore service and resumes from them.

    A model or setting that is not supported leaves the connector inert: no hits, no saves, no errors, one warning.
    Wrong settings raise `InvalidRequest` at start, since the engine would otherwise run for weeks without a cache.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.guarded_errors = 0
        self.scheduler_side: SchedulerSide | None = None
        self.worker_side: WorkerSide | None = None
        self._bridge: BlockingStore | None = None
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        settings = ConnectorSettings.parse(extra)
        token = settings.read_token()
        if settings.mode == "off":
            return
        self._facts = read_facts(vllm_config, kv_cache_config)
        shape = self._shape_or_reason(settings)
        if isinstance(shape, str):
            if role is KVConnectorRole.SCHEDULER:
                _log.warning("kvstore: this engine is not cached: %s", shape)
            return
        assert self._facts.attention is not None
        self._bridge = BlockingStore(
            settings.url,
            token=token,
            options=ClientOptions(stall_timeout_s=settings.stall_timeout_ms / 1000),
            embedded=EmbeddedOptions(memory_bytes=settings.memory_bytes, disk_bytes=settings.disk_bytes),
        )
        if role is KVConnectorRole.SCHEDULER:
            if self._facts.load_failure_policy == "fail":
                _log.warning(
                    "kvstore: kv_load_failure_policy is 'fail', so that a page that cannot be loaded ends its request"
                    ' with an error; set "kv_load_failure_policy": "recompute" in --kv-transfer-config'
                )
            self.scheduler_side = SchedulerSide(
                settings,
                self._facts,
                shape,
                self._bridge,
                rank_page_bytes=rank_page_bytes(self._facts.attention, shape),
                cache_folder=cache_folder(),
            )
        else:
            num_cores = len(os.sched_getaffinity(0))
            self.worker_side = WorkerSide(settings, self._facts, shape, self._bridge, num_cores=num_cores)

    def _shape_or_reason(self, settings: ConnectorSettings) -> Any:
        if self._facts.unsupported is not None:
            return self._facts.unsupported
        if settings.weights_may_change:
            return "weights_may_change is not supported yet"
        assert self._facts.attention is not None
        return read_shape(self._facts.attention)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache is best effort: a dropped save is a later miss, never a reason to hold a request back."""
        return False

    # ---- scheduler side

    @_guarded()
    def on_new_request(self, request: Any) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.on_new_request(
                PromptFacts(
                    request_id=request.request_id,
                    tokens=tuple(request.prompt_token_ids or ()),
                    cache_salt=request.cache_salt,
                    uncacheable=_why_uncacheable(request),
                )
            )

    @_guarded(fallback=lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.scheduler_side is None or request.skip_reading_prefix_cache:
            return 0, False
        tokens = self.scheduler_side.matched_tokens(request.request_id, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self.scheduler_side is not None:
            tables = blocks.get_block_ids() if num_external_tokens else ()
            self.scheduler_side.on_allocated(request.request_id, tables, num_external_tokens)

    @_guarded(fallback=_StepMetadata)
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self.scheduler_side is None:
            return _StepMetadata()
        metadata = _StepMetadata(self.scheduler_side.plan_step(_step_facts(scheduler_output)))
        if not metadata.jobs.computes:
            self.scheduler_side.wait_in_empty_step()
        return metadata

    @_guarded()
    def update_connector_output(self, connector_output: Any) -> None:
        if self.scheduler_side is None:
            return
        finished = set(connector_output.finished_recving or ())
        self.scheduler_side.on_loads_finished(finished, set(connector_output.failed_recving or ()))
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, _WorkerMetadata):
            self.scheduler_side.on_rank_report(meta.report)

    @_guarded(fallback=lambda: (False, None))
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if self.scheduler_side is not None:
            self.scheduler_side.on_finished(request.request_id)
        return False, None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @_guarded()
    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        if self.scheduler_side is not None:
            refusals = {rank: proof.refusal for rank, proof in metadata.items() if isinstance(proof, _RankProof)}
            self.scheduler_side.set_rank_proofs(refusals, expected_ranks=self._facts.tp_size)

    @_guarded(fallback=True)
    def reset_cache(self) -> bool:
        """vLLM dropped its own cache; what is shared stays, since its names say what it is."""
        return True

    # ---- worker side

    @_guarded()
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self.worker_side is not None and self._facts.attention is not None:
            names = self._facts.attention.layer_names
            self.worker_side.register(cache_layers(kv_caches, names, self._facts.num_blocks))

    @_guarded()
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return None if self.worker_side is None else _RankProof(self.worker_side.refusal)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.worker_side is not None:
            self.worker_side.start_loads(self._jobs())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are whole requests, finished before their forward is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Saves are whole pages, after the forward: `wait_for_save`."""

    @_guarded()
    def wait_for_save(self) -> None:
        if self.worker_side is not None:
            self.worker_side.save(self._jobs())

    @_guarded(fallback=KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self.worker_side is None:
            return KVConnectorTransferResults()
        finished, failed = self.worker_side.take_results(computes=self._jobs().computes)
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    @_guarded()
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self.worker_side.take_report() if self.worker_side is not None else None
        return None if report is None else _WorkerMetadata(report)

    @_guarded()
    def shutdown(self) -> None:
        """Send what is on its way within a bound, end leases, close the connection. Idempotent."""
        if self.scheduler_side is not None:
            self.scheduler_side.shutdown()
        if self.worker_side is not None:
            self.worker_side.shutdown()
        if self._bridge is not None:
            self._bridge.close()

    def take_events(self) -> Iterable[Any]:
        return ()

    def _jobs(self) -> StepJobs:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _StepMetadata)
        return metadata.jobs


def _why_uncacheable(request: Any) -> str | None:
    """What makes a request's pages depend on more than its tokens and salt, in a word for a counter."""
    if request.lora_request is not None:
        return "lora"
    if request.mm_features:
        return "multimodal"
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "prompt_embeds"
    if getattr(request, "resumable", False):
        return "streaming_session"
    return None


def _step_facts(output: Any) -> StepFacts:
    computed = {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    final, tables = {}, {}
    for request_id, scheduled in output.num_scheduled_tokens.items():
        drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        final[request_id] = computed[request_id] + scheduled - drafts
        tables[request_id] = output.kv_connector_block_state.get_block_ids(request_id)
    return StepFacts(final, tables, tuple(output.preempted_req_ids or ()))
