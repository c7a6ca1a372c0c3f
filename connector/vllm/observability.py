"""The hooks by which an engine is observed: statistics and metrics, the sources of a hit, cache events."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from sys import byteorder
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from connector.bridge import post, result_or_none
from connector.identity import CacheShape
from connector.metrics import COUNTERS, GAUGES, TIME_BUCKETS_S, TIMES, Drain, keep_gauges, merge, metric_of, summary
from connector.scheduler.cache_events import CacheEvents, NamedPage, PageEvent, RequestHashes
from connector.vllm.engine_facts import hash_block_tokens, read_model_name
from connector.vllm.guard import guarded
from kvstore.model.media import parse_media
from kvstore.model.page_blocks import NUMBER_BYTES, BlockGroup, PageBlocks

if TYPE_CHECKING:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    from connector.scheduler.side import SchedulerSide
    from connector.settings import ConnectorSettings
    from connector.worker.side import WorkerSide
    from kvstore.api import PageStore, Staged
    from kvstore.client import BlockingStore

_HIT_SOURCES = {"memory": "host", "filesystem": "disk"}
_OTHER_SOURCE = "external_unspecified"
"""Redis and S3: vLLM has no word for stores that are neither this host nor its disk."""


class ObservabilityHooks:
    """The part of `KVStoreConnector` that neither saves nor loads."""

    scheduler_side: SchedulerSide | None = None
    worker_side: WorkerSide | None = None
    guarded_errors: int = 0
    _settings: ConnectorSettings
    _bridge: BlockingStore | None = None
    _vllm_config: Any
    _kv_cache_config: Any
    _cache_events: CacheEvents | None = None
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
            self._drain = Drain(side.meters)
        if self.guarded_errors:
            side.meters.set("connector_guarded_errors", self.guarded_errors)
        if (scheduler := self.scheduler_side) is not None:
            side.meters.set("connector_ready", float(scheduler.is_ready))
            side.meters.set("connector_saves_in_flight", len(scheduler.save_jobs))
        payload = self._drain.take()
        return None if payload is None else KVStoreStats(payload)

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
        """The hit's tokens by source; the numbers add up to the hit. vLLM calls this since 0.32."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        staged = self._being_loaded(request.request_id)
        sources = staged.sources if staged is not None else {}
        return {CacheHitSource(source): count for source, count in split_tokens(sources, num_external_tokens).items()}

    @guarded(fallback=list)
    def take_events(self) -> list[Any]:
        """Cache events since the last call; a list, since vLLM tests its truth value."""
        if self.scheduler_side is not None:
            self.scheduler_side.on_step_reported()  # vLLM calls this once for each step, when it has the step's results
        if self._cache_events is None or self._kv_cache_config is None:
            return []
        self._name_pages(self._cache_events.take_named())
        taken = self._cache_events.take()
        return list(to_events(taken, self._cache_events.shape, self._kv_cache_config)) if taken else []

    def _publish_events(self, shape: CacheShape) -> None:
        """Publish cache events from now on, or name pages to the service, if the engine is configured to."""
        events, names_pages = self._vllm_config.kv_events_config, self._settings.name_blocks != "off"
        is_publishing = events is not None and events.enable_kv_cache_events
        if not (is_publishing or names_pages) or self.scheduler_side is None:
            return
        media = parse_media(self._settings.event_media)
        self._cache_events = CacheEvents(shape, media=media, names_pages=names_pages)
        self._hash_tokens = hash_block_tokens(self._vllm_config, self._kv_cache_config)
        self.scheduler_side.publish_events(self._cache_events)

    def _name_pages(self, pages: Sequence[NamedPage]) -> None:
        """Tell the service how routers know some pages. Waits for nothing."""
        if not pages or self._bridge is None or self._cache_events is None:
            return
        tells_tokens, shape = self._settings.name_blocks == "tokens", self._cache_events.shape
        model = read_model_name(self._vllm_config)
        named = [page_blocks(page, shape, self._kv_cache_config, model, tells_tokens=tells_tokens) for page in pages]

        async def name(store: PageStore) -> None:
            for blocks in named:
                store.name_blocks(blocks)

        post(self._bridge, name)

    @guarded()
    def _note_request_hashes(self, request: Any) -> None:
        """Note how vLLM's events name a new request's blocks."""
        if self._cache_events is None:
            return
        adapter = request.lora_request
        hashes = RequestHashes(
            block_hashes=request.block_hashes,
            hash_tokens=self._hash_tokens,
            lora_name=adapter.name if adapter is not None else None,
            lora_id=adapter.adapter_id if adapter is not None else None,
            are_of_tokens=not request.cache_salt and not request.mm_features and request.prompt_embeds is None,
        )
        self._cache_events.on_new_request(request.request_id, hashes)

    @guarded()
    def _publish_hit(self, request: Any) -> None:
        """Publish the pages of a hit that is being loaded: they are in the tier from which they were read."""
        if self._cache_events is None or self.scheduler_side is None:
            return
        state, staged = self.scheduler_side.requests.get(request.request_id), self._being_loaded(request.request_id)
        if state is not None and staged is not None:
            self._cache_events.on_staged(state, staged)

    @guarded()
    def _forget_published(self) -> None:
        """vLLM's event about its own cache was published: routers take it for all that the engine published."""
        if self._cache_events is not None:
            self._cache_events.on_cleared()

    def _being_loaded(self, request_id: str) -> Staged | None:
        state = self.scheduler_side.requests.get(request_id) if self.scheduler_side is not None else None
        return result_or_none(state.loading.future) if state is not None and state.loading is not None else None

    def get_finished_count(self) -> int | None:
        """Every rank reports every load once, so vLLM counts all ranks, as it does by default."""
        return None


def split_tokens(records_by_tier: Mapping[str, int], tokens: int) -> dict[str, int]:
    """Divide a hit's tokens by source; the shares add up to `tokens`.

    Records differ in tokens, so a hit from several tiers is shared in proportion to its records.

    Returns:
        Tokens by the value of vLLM's `CacheHitSource`; none of them zero.
    """
    records: dict[str, int] = {}
    for tier, count in records_by_tier.items():
        source = _HIT_SOURCES.get(tier, _OTHER_SOURCE)
        records[source] = records.get(source, 0) + count
    total = sum(records.values())
    if total == 0:
        return {_OTHER_SOURCE: tokens} if tokens else {}
    shares, given, seen = {}, 0, 0
    for source, count in sorted(records.items()):
        seen += count
        upto = tokens * seen // total  # rounding a running sum: no token is lost or counted twice
        shares[source] = upto - given
        given = upto
    return {source: share for source, share in shares.items() if share}


def to_events(events: Iterable[PageEvent], shape: CacheShape, kv_cache_config: Any) -> Iterator[KVCacheEvent]:
    """One of vLLM's events for each of its groups whose blocks are in a page.

    Without `ownership`: Dynamo drops events whose owner it does not know.
    """
    for event in events:
        medium, parent = event.medium, event.parent
        hashes = [maybe_convert_block_hash(BlockHash(block_hash)) for block_hash in event.hashes]
        for index in shape.groups[event.group].facts.feed_groups:
            if event.removed:
                yield BlockRemoved(
                    block_hashes=hashes,
                    medium=medium.name,
                    group_idx=index,
                    locality=medium.locality,
                )
                continue
            spec = kv_cache_config.kv_cache_groups[index].kv_cache_spec
            yield BlockStored(
                block_hashes=hashes,
                parent_block_hash=None if parent is None else maybe_convert_block_hash(BlockHash(parent)),
                token_ids=list(event.tokens),
                block_size=event.block_tokens,
                lora_id=event.lora_id,
                medium=medium.name,
                lora_name=event.lora_name,
                group_idx=index,
                kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
                kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
                locality=medium.locality,
            )


def page_blocks(
    page: NamedPage, shape: CacheShape, kv_cache_config: Any, model: str, *, tells_tokens: bool
) -> PageBlocks:
    """How vLLM's own events name the blocks of a page.

    Args:
        model: The model's name as the engine serves it.
        tells_tokens: Token ids too, if the blocks' hashes depend on nothing else.
    """
    event = page.event
    hashes = _hash_bytes(event.hashes)
    groups = []
    for index in shape.groups[event.group].facts.feed_groups:
        spec = kv_cache_config.kv_cache_groups[index].kv_cache_spec
        kind, window = get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)
        groups.append(BlockGroup(index, kind, window))
    tokens = array("I", event.tokens if tells_tokens else ())
    if byteorder == "big":
        tokens.byteswap()
    return PageBlocks(
        namespace=page.namespace,
        boundary=page.boundary,
        group=event.group,
        model=model,
        hash_bytes=len(hashes[0]),
        hashes=b"".join(hashes),
        parent=b"" if event.parent is None else _hash_bytes([event.parent])[0],
        block_tokens=event.block_tokens,
        groups=tuple(groups),
        tokens=tokens.tobytes(),
        lora_name=event.lora_name or "",
    )


def _hash_bytes(block_hashes: Sequence[bytes]) -> list[bytes]:
    """Hashes of blocks as vLLM would publish them; numbers as eight bytes.

    vLLM reads an environment variable for each hash, on the scheduler's thread. So vLLM converts the first one alone,
    if its number is what the hash ends with.
    """
    first = _told_bytes(block_hashes[0])
    if first == block_hashes[0]:
        return list(block_hashes)
    if first == block_hashes[0][-NUMBER_BYTES:]:
        return [block_hash[-NUMBER_BYTES:] for block_hash in block_hashes]
    return [_told_bytes(block_hash) for block_hash in block_hashes]


def _told_bytes(block_hash: bytes) -> bytes:
    told = maybe_convert_block_hash(BlockHash(block_hash))
    return told.to_bytes(NUMBER_BYTES, "big") if isinstance(told, int) else told


@dataclass
class KVStoreStats(KVConnectorStats):
    """A payload of `connector.metrics` on its way through vLLM; `data` holds plain values only."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVStoreStats:
        """Add what another rank, the scheduler side or a later step counted."""
        merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """A summary of the interval for a line of the log."""
        return summary(self.data)

    def is_empty(self) -> bool:
        return not self.data


class KVStorePromMetrics(KVConnectorPromMetrics):
    """Registers the metrics of `connector.metrics` and feeds them, for each engine behind one front end."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        self._gauges: dict[int, dict[str, float]] = {}  # the values shown, by engine
        for metric in COUNTERS:
            labels = [*labelnames, *([metric.label] if metric.label else [])]
            self._metrics[metric.meter] = self._counter_cls(
                name=metric.name, documentation=metric.documentation, labelnames=labels
            )
        for metric in TIMES:
            self._metrics[metric.meter] = self._histogram_cls(
                name=metric.name, documentation=metric.documentation, labelnames=labelnames, buckets=TIME_BUCKETS_S
            )
        for metric in GAUGES:
            self._metrics[metric.meter] = self._gauge_cls(
                name=metric.name,
                documentation=metric.documentation,
                labelnames=labelnames,
                multiprocess_mode="mostrecent",
            )
        for metric in (*COUNTERS, *TIMES, *GAUGES):
            if metric.label is None:  # so that they exist from the start, at zero
                for engine_index in per_engine_labelvalues:
                    self._child(metric.meter, engine_index)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Feed one payload."""
        for key, value in transfer_stats_data.get("counters", {}).items():
            if (found := metric_of(key)) is not None:
                metric, label = found
                self._child(metric.meter, engine_idx, label).inc(value)
        for name, values in transfer_stats_data.get("times", {}).items():
            histogram = self._child(name, engine_idx)
            for value in values:
                histogram.observe(value)
        shown = self._gauges.setdefault(engine_idx, {})
        keep_gauges(shown, transfer_stats_data.get("gauges", {}))
        for name, value in shown.items():
            self._child(name, engine_idx).set(value)

    def _child(self, meter: str, engine_index: int, label: str | None = None) -> Any:
        values = [*self.per_engine_labelvalues[engine_index], *([label] if label is not None else [])]
        return self._metrics[meter].labels(*values)
