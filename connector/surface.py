"""The engine's hooks that neither save nor load: statistics, hit sources, cache events, set-up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from connector.guard import guarded
from connector.hit_sources import split_tokens
from connector.kv_events import to_events
from connector.metrics import Drain
from connector.scheduler.announcements import Announcements, RequestHashes
from connector.scheduler.bridge import result_or_none
from connector.stats import KVStorePromMetrics, KVStoreStats
from connector.vllm_facts import hash_block_tokens

if TYPE_CHECKING:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    from connector.identity import CacheShape
    from connector.scheduler.side import SchedulerSide
    from connector.worker.side import WorkerSide
    from kvstore.api import Staged

__all__ = ["EngineSurface"]


class EngineSurface:
    """Hooks of `KVStoreConnector` that neither save nor load.

    Attributes:
        model: The worker's model, if the engine passes it on; kept for selective recomputation.
    """

    scheduler_side: SchedulerSide | None = None
    worker_side: WorkerSide | None = None
    guarded_errors: int = 0
    model: Any = None
    _vllm_config: Any
    _kv_cache_config: Any
    _announcements: Announcements | None = None
    _hash_tokens: int = 0
    _drain: Drain | None = None

    # ---- both sides

    @guarded()
    def get_kv_connector_stats(self) -> KVStoreStats | None:
        """What this side counted since the last call; `None` when nothing happened."""
        side = self.scheduler_side or self.worker_side
        if side is None:
            return None
        if self._drain is None:
            self._drain = Drain(side.meters, self._gauges)
        if self.guarded_errors:
            side.meters.set("connector_guarded_errors", self.guarded_errors)
        payload = self._drain.take()
        return None if payload is None else KVStoreStats(payload)

    def _gauges(self) -> dict[str, float]:
        side = self.scheduler_side
        if side is None:
            return {}
        return {"connector_ready": float(side.is_ready), "connector_saves_in_flight": len(side.saves)}

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStoreStats:
        """Statistics that came from another process."""
        return KVStoreStats(data if data is not None else {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVStorePromMetrics:
        """Our part of the front end's `/metrics`."""
        return KVStorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- scheduler side

    @guarded(fallback=dict)
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """The hit's tokens by where they came from; the numbers add up to the hit. vLLM asks since 0.32."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        staged = self._being_loaded(request.request_id)
        sources = staged.sources if staged is not None else {}
        return {CacheHitSource(place): count for place, count in split_tokens(sources, num_external_tokens).items()}

    @guarded(fallback=list)
    def take_events(self) -> list[Any]:
        """Cache events since the last call; a list, since vLLM tests its truth value."""
        if self.scheduler_side is not None:
            self.scheduler_side.on_step_reported()  # vLLM asks once for each step, when it has the step's results
        if self._announcements is None or self._kv_cache_config is None:
            return []
        taken = self._announcements.take()
        return list(to_events(taken, self._announcements.shape, self._kv_cache_config)) if taken else []

    def _publish_events(self, shape: CacheShape, num_ranks: int) -> None:
        """Announce pages from now on, if the engine publishes cache events."""
        events = self._vllm_config.kv_events_config
        if events is None or not events.enable_kv_cache_events or self.scheduler_side is None:
            return
        self._announcements = Announcements(shape, num_ranks=num_ranks)
        self._hash_tokens = hash_block_tokens(self._vllm_config, self._kv_cache_config)
        self.scheduler_side.saves.announcements = self._announcements

    @guarded()
    def _announce_request(self, request: Any) -> None:
        """Note a request whose pages may be announced."""
        if self._announcements is None:
            return
        adapter = request.lora_request
        self._announcements.opened(
            request.request_id,
            RequestHashes(
                block_hashes=request.block_hashes,
                hash_tokens=self._hash_tokens,
                lora_name=adapter.name if adapter is not None else None,
                lora_id=adapter.adapter_id if adapter is not None else None,
            ),
        )

    @guarded()
    def _announce_hit(self, request: Any) -> None:
        """Announce the pages of a hit that is being loaded: they are where they were read from."""
        if self._announcements is None or self.scheduler_side is None:
            return
        state, staged = self.scheduler_side.ledger.find(request.request_id), self._being_loaded(request.request_id)
        if state is not None and staged is not None:
            self._announcements.on_staged(state, staged)

    def _being_loaded(self, request_id: str) -> Staged | None:
        state = self.scheduler_side.ledger.find(request_id) if self.scheduler_side is not None else None
        return result_or_none(state.loading.future) if state is not None and state.loading is not None else None

    def get_finished_count(self) -> int | None:
        """Every rank reports every load once, so vLLM counts all ranks, as it does by default."""
        return None

    # ---- worker side

    @guarded()
    def initialize_worker_connector(self, initialization_data: Any) -> None:
        """Take what an engine passes to its workers' connectors once the model is loaded.

        Proposed to vLLM; no release calls it yet.

        Args:
            initialization_data: Any object; its `model`, if it has one, is kept.
        """
        self.model = getattr(initialization_data, "model", None)
