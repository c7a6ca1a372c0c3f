"""Our counters as vLLM's connector statistics: from the ranks and the scheduler to the log and to `/metrics`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from connector.metrics import COUNTERS, GAUGES, TIME_BUCKETS_S, TIMES, keep_gauges, merge, metric_of, summary

__all__ = ["KVStorePromMetrics", "KVStoreStats"]


@dataclass
class KVStoreStats(KVConnectorStats):
    """A payload of `connector.metrics` on its way through vLLM; `data` holds plain values only."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVStoreStats:
        """Add what another rank, the scheduler's side or a later step counted."""
        merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """A summary of the interval for a line of the log."""
        return summary(self.data)

    def is_empty(self) -> bool:
        return not self.data


class KVStorePromMetrics(KVConnectorPromMetrics):
    """Registers the metrics of `connector.metrics` and feeds them, for each engine behind one front end.

    Args:
        vllm_config: vLLM's.
        metric_types: vLLM's classes for Prometheus' three types.
        labelnames: Labels that all of vLLM's metrics have.
        per_engine_labelvalues: Their values, by engine index.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        self._gauges: dict[int, dict[str, float]] = {}  # what is shown, by engine
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
