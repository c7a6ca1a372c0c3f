"""`KVStoreConnector`: vLLM's connector interface, translated to and from the two sides. No decision is made here.

Each hook is guarded: an error of ours is counted and logged, and the engine continues without the cache.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

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
from vllm.v1.request import RequestStatus

from connector.facts import EngineFacts
from connector.identity import read_shape
from connector.jobs import RankReport, StepJobs
from connector.logs import LOG, join_vllm_logs
from connector.plugin import register
from connector.prefix_hash import PromptContent, UncacheableContent
from connector.request_parameters import RequestFlags, read_flags, read_handoff, wants_receipt, write_receipt
from connector.scheduler.hook_facts import PromptFacts
from connector.scheduler.requests import RequestState
from connector.scheduler.side import SchedulerSide
from connector.settings import ConnectorSettings, cache_folder
from connector.vllm.advice import (
    ADAPTERS_SPREAD,
    ADAPTERS_UNKNOWN,
    UNTRUSTED_MEDIA,
    advise_at_start,
    advise_on_block_size,
    warn_of_untested_release,
)
from connector.vllm.engine_facts import (
    cache_layers,
    find_models,
    read_facts,
    read_instance,
    read_name,
    untested_version,
)
from connector.vllm.guard import guarded
from connector.vllm.model_facts import weights_source
from connector.vllm.model_files import would_read_the_same
from connector.vllm.observability import ObservabilityHooks
from connector.vllm.requests import ANY_ADAPTER, PoolPins, RequestReader, RestoredMedia, read_step, read_trace
from connector.worker.side import WorkerSide

if TYPE_CHECKING:
    from connector.blend.blender import Blender
    from connector.blend.jobs import BlendJob, BlendReports
    from connector.blend.requests import BlendRequests


_ENDED_WELL = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


@dataclass
class _StepMetadata(KVConnectorMetadata):
    jobs: StepJobs = field(default_factory=StepJobs)
    blends: tuple[BlendJob, ...] = ()
    blends_ended: tuple[str, ...] = ()


@dataclass
class _WorkerMetadata(KVConnectorWorkerMetadata):
    report: RankReport
    blended: BlendReports | None = None  # all ranks have the same ones

    def aggregate(self, other: KVConnectorWorkerMetadata) -> _WorkerMetadata:
        assert isinstance(other, _WorkerMetadata)
        return _WorkerMetadata(self.report.merge(other.report), self.blended or other.blended)


@dataclass
class _RankProof(KVConnectorHandshakeMetadata):
    """A rank's facts. vLLM passes fewer of them to the scheduler's process (some specs are replaced there)."""

    facts: EngineFacts
    refusal: str | None
    blend_refusal: str | None = None


class KVStoreConnector(ObservabilityHooks, KVConnectorBase_V1, SupportsHMA):
    """Saves finished prefixes to a kvstore service and resumes from them.

    A model or setting that is not supported leaves the connector inert: no hits, no saves, no errors, one warning.
    Wrong settings raise `InvalidRequest` at start, since the engine would otherwise run for weeks without a cache.
    """

    # vLLM may compute a prompt without adapter with that of another request
    _adapters_spread = False
    # vLLM's second model runner needs none: it gets a request again each time it gets blocks
    _restored_media: RestoredMedia | None = None
    # a pipeline's other stages have no drafts
    _is_last_stage = True
    # where a rank's weights are from; vLLM names another source once it has loaded others, or will
    _loaded_from: tuple[str, ...] | None = None
    # it slept too deep to keep its weights
    _has_lost_weights = False
    # such a sleep takes a draft model's weights too, and vLLM reads only the model's again (0.32)
    _loses_drafts = False
    # both sides of blending, where it is on
    _blends: BlendRequests | None = None
    _blender: Blender | None = None
    _blend_refusal: str | None = "a rank has not registered its cache"

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        join_vllm_logs()
        self._pins: PoolPins | None = None
        transfer = vllm_config.kv_transfer_config
        self._settings = ConnectorSettings.parse(transfer.kv_connector_extra_config or {}).for_role(transfer.kv_role)
        self._token = self._settings.read_token()
        self._facts: EngineFacts | None = None
        self._refusal: str | None = None
        self._requests = RequestReader()
        if not getattr(vllm_config, "use_v2_model_runner", False):
            self._restored_media = RestoredMedia()
        self._is_advised = False
        self._saved: _StepMetadata | None = None  # the last step whose saves were begun
        is_scheduler = role is KVConnectorRole.SCHEDULER
        if self._settings.mode == "off":
            return
        if (untested := untested_version()) is not None:
            allowed = self._settings.allow_untested_vllm
            if is_scheduler:  # one of an engine's processes
                warn_of_untested_release(untested, allowed=allowed)
            if not allowed:
                return
        if is_scheduler:
            return  # the scheduler side is made once the ranks have reported what they hold
        try:
            may_change = self._settings.weights_may_change
            self._facts = read_facts(vllm_config, kv_cache_config, weights_may_change=may_change)
        except (ImportError, AttributeError, TypeError):  # a change of vLLM that the contract's table does not cover
            LOG.exception("kvstore: this engine is not cached: vLLM's configuration has changed")
            return
        shape = self._facts.unsupported or read_shape(self._facts)
        if isinstance(shape, str):
            self._refusal = shape
            return
        self._is_last_stage = self._facts.is_last_stage
        self._bridge = self._settings.connect(read_name(vllm_config), self._token, saves=True)
        if not may_change:
            self._loaded_from = weights_source(vllm_config)
        num_cores = len(os.sched_getaffinity(0))
        self.worker_side = WorkerSide(self._settings, self._facts, shape, self._bridge, num_cores=num_cores)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache is best effort: a dropped save is a later miss, and never delays a request."""
        return False

    # ---- scheduler side

    @guarded()
    def on_new_request(self, request: Any) -> None:
        if self.scheduler_side is not None:
            flags, complaints = read_flags(request.kv_transfer_params)
            for complaint in complaints:
                _warn_once(f"{complaint}; it is ignored")
            if self._adapters_spread and request.lora_request is None:
                flags = replace(flags, save=False)
            if request.skip_reading_prefix_cache:  # as one does that asks for log probabilities of its prompt
                flags = replace(flags, load=False)
            content, uncacheable = self._read_content(request)
            if self._settings.blend or flags.blend is not None:
                uncacheable = self._read_blend(request, flags, content, uncacheable)
            self.scheduler_side.on_new_request(
                PromptFacts(
                    request_id=request.request_id,
                    tokens=request.all_token_ids,
                    cache_salt=request.cache_salt,
                    uncacheable=uncacheable,
                    content=content,
                    flags=flags,
                    handoff=read_handoff(request.kv_transfer_params, most_s=self._settings.max_wait_ms / 1000),
                    trace=read_trace(request),
                )
            )
            self._note_request_hashes(request)

    def _read_blend(self, request: Any, flags: RequestFlags, content: object, uncacheable: str | None) -> str | None:
        """Note a request that is to be blended. Returns why its prefix is not cached: some blocks may be blended."""
        if self._blends is None:
            _warn_once("kv_transfer_params.kvstore.blend: this engine's settings have no blend = true; it is ignored")
            return uncacheable
        from connector.blend.consent import may_hold_blended

        wish = flags.blend
        reason: str | None = None
        if wish is not None and (content is not None or uncacheable is not None):
            reason = "blending needs a prompt of tokens alone, without adapters, media and embeddings"
        elif wish is not None and not (flags.load and flags.save):
            reason = "blending loads and saves documents, and the request has load or save off"
        elif wish is not None:
            tokens = request.prompt_token_ids
            reason = self._blends.on_new_request(request.request_id, wish, tokens, request.cache_salt)
        if reason is not None:
            _warn_once(f"kv_transfer_params.kvstore.blend: {reason}; the request is computed")
        return "blended" if may_hold_blended(request.cache_salt) else uncacheable

    def _read_content(self, request: Any) -> tuple[PromptContent | None, str | None]:
        """A request's content beside tokens, or why it is not cached; warns once of causes common to all requests."""
        if not self._is_advised and self._facts is not None:
            self._is_advised = True  # not at construction: vLLM may change the block size after it
            advice = advise_on_block_size(self._facts, self._vllm_config.cache_config.block_size)
            if advice is not None:
                LOG.warning("kvstore: %s", advice)
        try:
            return self._requests.content(request), None
        except UncacheableContent as reason:
            if reason.reason == "multimodal":
                _warn_once(UNTRUSTED_MEDIA)
            if request.lora_request is not None:
                self._stop_if_replaced(request.lora_request.lora_int_id)
            return None, reason.reason

    def _stop_if_replaced(self, number: int) -> None:
        if self._requests.is_replaced(number) and self.scheduler_side is not None:
            self.scheduler_side.stop_adapter(number)

    @guarded()
    def on_engine_call(self, method: str, arguments: Sequence[Any]) -> None:
        """An operator lets vLLM load an adapter before a request names it, maybe in place of one that requests use. A
        function that workers call, without a name, may have loaded any. So may it have changed weights, as may a
        method that an operator added to the worker.
        """
        from connector.vllm.engine_calls import CHANGE_WEIGHTS, KEEP_WEIGHTS

        if self._settings.weights_may_change:
            if method in CHANGE_WEIGHTS and self.scheduler_side is not None:
                self.scheduler_side.detach()
        elif method not in KEEP_WEIGHTS:
            self._refuse(
                f"its workers were called with {method or 'a function'} (collective_rpc), which may have changed its"
                " weights: set weights_may_change"
            )
        if method == "add_lora":
            self._requests.note_adapter(arguments[0])
            self._stop_if_replaced(arguments[0].lora_int_id)
        elif not method and self._vllm_config.lora_config is not None:
            _warn_once(ADAPTERS_UNKNOWN)
            self._requests.replaced_adapters.add(ANY_ADAPTER)
            for number in self._requests.adapters:
                self._stop_if_replaced(number)

    def _refuse(self, reason: str) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.refuse(reason)
        if self._blends is not None:
            self._blends.refuse(reason)

    @guarded(fallback=lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.scheduler_side is None:
            return 0, False
        if self._blends is not None and self._blends.knows(request.request_id):
            blended = self._blends.matched_tokens(request.request_id, num_computed_tokens)
            return blended, bool(blended)
        tokens = self.scheduler_side.matched_tokens(request.request_id, num_computed_tokens)
        return tokens, bool(tokens)

    @guarded()
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self.scheduler_side is not None:
            tables: Sequence[Sequence[int]] = blocks.get_block_ids() if num_external_tokens else ()
            if num_external_tokens and self._blends is not None and self._blends.knows(request.request_id):
                self._blends.on_allocated(request.request_id, tables[0], num_external_tokens)
                return
            self.scheduler_side.on_allocated(request.request_id, tables, num_external_tokens)
            if num_external_tokens:
                if self._restored_media is not None:
                    self._restored_media.note(request)
                self._publish_hit(request)

    @guarded(fallback=_StepMetadata)
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self.scheduler_side is None:
            return _StepMetadata()
        step = read_step(scheduler_output)
        if self._restored_media is not None:
            self._restored_media.complete(scheduler_output)
        if self._blends is not None and self._blends.is_busy:
            step = replace(step, is_shared=True)
        jobs = self.scheduler_side.plan_step(step)
        # last: an error before it leaves them for the next step, and vLLM waits for each of these requests
        metadata = _StepMetadata(jobs)
        if self._blends is not None:
            metadata.blends, metadata.blends_ended = self._blends.take_jobs(), self._blends.take_ended()
        if metadata.jobs.may_wait:
            self.scheduler_side.wait_for_answers()
        return metadata

    @guarded()
    def update_connector_output(self, connector_output: Any) -> None:
        if self.scheduler_side is None:
            return
        finished = set(connector_output.finished_recving or ())
        self.scheduler_side.on_loads_finished(finished, set(connector_output.failed_recving or ()))
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, _WorkerMetadata):
            self.scheduler_side.on_rank_report(meta.report)
            if meta.report.refusal and self._blends is not None:
                self._blends.refuse(meta.report.refusal)
            if self._blends is not None and meta.blended is not None:
                self._blends.on_reports(meta.blended)

    @guarded(fallback=lambda: (False, None))
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if self.scheduler_side is None:
            return False, None
        state = self.scheduler_side.requests.get(request.request_id)
        # the last sampled token was never computed
        final_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        ended_well = request.status in _ENDED_WELL
        try:
            self.scheduler_side.on_finished(request.request_id, final_tokens if ended_well else 0, block_ids)
        finally:
            if self._restored_media is not None:
                self._restored_media.forget(request.request_id)
            if self._cache_events is not None:
                self._cache_events.on_request_closed(request.request_id)
            if self._blends is not None:
                self._blends.on_finished(request.request_id)
        return False, self._receipt(request, state) if ended_well and state is not None else None

    def _receipt(self, request: Any, state: RequestState) -> dict[str, Any] | None:
        """The tokens that a decode engine may wait for, if this engine prefills for another one."""
        assert self.scheduler_side is not None
        if not (self._settings.saves and state.flags.save) or state.chain is None or state.save_stopped:
            return None
        if self._kv_transfer_config.kv_role != "kv_producer" and not wants_receipt(request.kv_transfer_params):
            return None
        tokens = self.scheduler_side.saves.promised_tokens(state)
        return write_receipt(tokens) if tokens else None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pins = PoolPins(gpu_block_pool)
        self._pins.around_reset(self._give_blocks_back, self._forget_published)

    @guarded()
    def _give_blocks_back(self) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.give_blocks_back()

    def has_pending_push_work(self) -> bool:
        """Whether an idle engine must keep stepping: for saves, audits, or cache events that are not published yet."""
        if self._cache_events is not None and self._cache_events.has_pending:
            return True
        if self._blends is not None and self._blends.has_open_audits:
            return True
        return self.scheduler_side is not None and self.scheduler_side.has_pending_saves

    @guarded()
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Make the scheduler side from the ranks' facts.

        vLLM (since 0.33) calls this again when the engine wakes up. Then its blocks are empty.
        """
        if self.scheduler_side is not None:
            self.scheduler_side.on_blocks_emptied()
            return
        ranks = [proof for _, proof in sorted(metadata.items())]  # by stage and rank in it, as vLLM counts them
        proofs = {rank: proof for rank, proof in enumerate(ranks) if isinstance(proof, _RankProof)}
        if self._settings.mode == "off":
            return
        if not any(rank is not None for rank in ranks):
            return  # the ranks have logged why
        if not proofs:
            LOG.warning(
                "kvstore: this engine is not cached: vLLM passed another connector's handshake;"
                " list KVStoreConnector first in MultiConnector's connectors"
            )
            return
        facts = next(iter(proofs.values())).facts
        # all ranks take the host memory of the rank with the smallest machine
        known = [proof.facts.machine_bytes for proof in proofs.values() if proof.facts.machine_bytes]
        facts = replace(facts, machine_bytes=min(known, default=0))
        shape = facts.unsupported or read_shape(facts)
        if isinstance(shape, str):
            LOG.warning("kvstore: this engine is not cached: %s", shape)
            return
        for advice in advise_at_start(facts, self._settings):
            LOG.warning("kvstore: %s", advice)
        self._facts = facts
        self._requests = RequestReader.of(
            trusts_media=self._settings.trust_mm_uuids,
            media_rules=facts.media_rules,
            adapter_rules=facts.adapter_rules,
        )
        from connector.vllm.engine_calls import watch_engine_calls  # it imports vLLM's engine

        watch_engine_calls(self)
        if self._vllm_config.lora_config is not None and facts.device == "cpu":
            # a row without adapter has the index -1, which is that of the last adapter (0.32, `lora/ops/torch_ops`)
            self._adapters_spread = True
            LOG.warning("kvstore: %s", ADAPTERS_SPREAD)
        instance = read_instance(self._vllm_config, self._settings, shape)
        self._bridge = self._settings.connect(read_name(self._vllm_config), self._token, instance=instance)
        self.scheduler_side = SchedulerSide(
            self._settings,
            facts,
            shape,
            self._bridge,
            cache_folder=cache_folder(),
            rank_refusals={rank: proof.refusal for rank, proof in proofs.items()},
        )
        if self._settings.blend:
            from connector.vllm.blending import open_requests

            refusals = [proof.blend_refusal for proof in proofs.values()]
            if len(proofs) < facts.num_ranks:  # one that takes no part would let the others wait
                refusals.append(f"{facts.num_ranks - len(proofs)} ranks did not say whether they can")
            meters = self.scheduler_side.meters
            self._blends = open_requests(self._settings, facts, self._bridge, meters, refusals=refusals)
        self._publish_events(shape)
        if self._pins is not None:
            self.scheduler_side.bind_pins(self._pins)

    @guarded(fallback=False)
    def reset_cache(self) -> bool:
        """vLLM dropped its own cache; shared data stays, since its names identify its content."""
        if self.scheduler_side is not None:
            self.scheduler_side.reset_cache(is_empty=self._pins is not None and self._pins.is_empty)
        return True

    # ---- worker side

    @guarded()
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self.worker_side is not None and (facts := self._facts) is not None:
            if not self._settings.weights_may_change:
                from connector.vllm.weight_changes import watch_weights  # it imports vLLM's worker

                models = find_models()
                kept = getattr(self._vllm_config.model_config, "sleep_preserve_parameter_names", None) or ()
                self._loses_drafts = len(models) > 1 and "draft.*" not in kept
                watch_weights(self, models)
            self.worker_side.register(lambda names: cache_layers(kv_caches, names, facts.num_blocks))
            if self._settings.blend and self._bridge is not None:
                self._blend_refusal = "an error at its start, which is in the log"
                from connector.vllm.blending import open_blender

                opened = open_blender(self._settings, facts, self._bridge)
                self._blender, self._blend_refusal = (None, opened) if isinstance(opened, str) else (opened, None)

    @guarded()
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        if self._facts is None:
            return None
        refusal = self.worker_side.refusal if self.worker_side is not None else self._refusal
        return _RankProof(self._facts, refusal, self._blend_refusal)

    @guarded()
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self.worker_side is not None:
            if self._loaded_from and weights_source(self._vllm_config) != self._loaded_from:
                self._loaded_from = None  # once is enough
                self._stop("other weights were loaded into it (reload_weights, update_config): set weights_may_change")
            if self._has_lost_weights and self._jobs().computes:
                self._stop("it computes behind a sleep of level 2, and its weights were not read again")
            self.worker_side.begin_step(self._jobs())

    @guarded()
    def on_weights_loaded(self, *, from_files: bool) -> None:
        """Go on only if the weights are those that the engine started with, as behind a sleep of level 2."""
        if self._has_lost_weights and self._loses_drafts:
            self._stop("a sleep of level 2 took its draft's weights: let sleep_preserve_parameter_names keep draft.*")
        self._has_lost_weights = False
        if not from_files or self._facts is None or not would_read_the_same(self._vllm_config, self._facts):
            self._stop("weights were loaded while it ran, and may be others: set weights_may_change")

    def on_weights_lost(self) -> None:
        self._has_lost_weights = True

    def _stop(self, reason: str) -> None:
        if self.worker_side is not None:
            self.worker_side.stop(reason)
        if self._blender is not None:
            self._blender.stop(reason)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._start_loads()
        self._work_on_blends()

    @guarded()
    def _start_loads(self) -> None:
        if self.worker_side is not None:
            self.worker_side.start_loads(self._jobs())

    @guarded()
    def _work_on_blends(self) -> None:
        if self._blender is not None:
            metadata = self._metadata()
            self._blender.work(metadata.blends, ended=metadata.blends_ended, may_wait=metadata.jobs.may_wait)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: a request is loaded as a whole, before the step that uses it is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: pages are saved after the forward, by `wait_for_save`."""

    @guarded()
    def wait_for_save(self) -> None:
        if self.worker_side is None or (metadata := self._metadata()) is self._saved:
            return
        self._saved = metadata  # before: a save that fails has answered its jobs, and must not be tried again
        self.worker_side.save(metadata.jobs)

    @guarded(fallback=KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self.worker_side is None:
            return KVConnectorTransferResults()
        if not (self._jobs().computes and self._is_last_stage):
            # vLLM 0.30 does not call it in a step without a forward. In a step with drafts it calls it after this, when
            # the drafts' layers and recurrent states are final; before 0.32 on its first runner in the last stage of a
            # pipeline alone. It is guarded: an error loses no load's result.
            self.wait_for_save()
        finished, failed = self.worker_side.take_results(may_wait=self._jobs().may_wait)
        if self._blender is not None:
            blended, not_blended = self._blender.take_results()
            finished, failed = finished | blended, failed | not_blended
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    @guarded()
    def unregister_kv_caches(self) -> None:
        """End all copies to and from blocks: vLLM (since 0.33) frees their memory, to sleep."""
        if self.worker_side is not None:
            self.worker_side.drain()

    def restore_kv_caches(self) -> None:
        """Nothing to do: the blocks are back at their addresses. The scheduler side has dropped its planned saves."""

    @guarded()
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self.worker_side.take_report() if self.worker_side is not None else None
        blended = self._blender.take_reports() if self._blender is not None else None
        return None if report is None and blended is None else _WorkerMetadata(report or RankReport(), blended)

    @guarded()
    def shutdown(self) -> None:
        """Finish pending saves within a time limit, end leases and close the connection. Idempotent."""
        if self.scheduler_side is not None:
            self.scheduler_side.shutdown()
        if self.worker_side is not None:
            self.worker_side.shutdown()
        if self._blender is not None:
            self._blender.close()
        if self._bridge is not None:
            self._bridge.close()

    def _metadata(self) -> _StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _StepMetadata)
        return metadata

    def _jobs(self) -> StepJobs:
        return self._metadata().jobs


@functools.lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    LOG.warning("kvstore: %s", text)


# MultiConnector finds the class of statistics by name, even if a user configured the connector by module path
register()
