"""Our part of an engine's `/metrics`: a table of stable names, and the arithmetic of the payloads that carry values.

The two sides count in `Meters`. Their counts since vLLM's last query travel as a *payload* of plain values: `counters`
and `gauges` by meter key, `times` as lists of seconds by meter name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.runtime.meters import Meters

Payload = dict[str, dict[str, Any]]

_MIB = 1 << 20
_KEY = re.compile(r'(?P<name>\w+)(?:\{(?P<label>\w+)="(?P<value>.*)"\})?', re.ASCII)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of `/metrics`.

    Attributes:
        short_name: Its name without prefix. Never renamed.
        documentation: Help text.
        label: Its one label beside vLLM's own, or `None`.
        keeps_largest: A gauge that shows the largest value of any rank and time, not the last one.
    """

    short_name: str
    documentation: str
    label: str | None = None
    keeps_largest: bool = False

    @property
    def name(self) -> str:
        """Its name in Prometheus, which adds `_total` to counters."""
        return f"vllm:kvstore_{self.short_name}"

    @property
    def meter(self) -> str:
        """Its name in `Meters`."""
        return f"connector_{self.short_name}"


COUNTERS = (
    Metric("hits", "Requests resumed from the store."),
    Metric("misses", "Requests for which nothing was loaded, by reason.", "reason"),
    Metric("hits_cut", "Hits of which less was loaded than was stored, by reason.", "reason"),
    Metric("requests_followed", "Requests that waited for another one to load the same prefix."),
    Metric("requests_opted_out", "Requests that asked not to be loaded or saved.", "of"),
    Metric("handoffs", "Prompts of prefill engines that were waited for, by whether they arrived in time.", "outcome"),
    Metric("external_tokens", "Prompt tokens restored, not computed."),
    Metric("staged_records", "Records staged for hits, by the tier that they were read from.", "tier"),
    Metric("uncacheable_requests", "Requests that are neither loaded nor saved, by reason.", "reason"),
    Metric("loaded_bytes", "Bytes written to KV blocks, on all ranks."),
    Metric("loaded_in_place_bytes", "Those that a GPU copied from where they are in the service's memory."),
    Metric("failed_loads", "Hits that could not be loaded and are recomputed."),
    Metric("load_errors", "Loads that failed on a rank."),
    Metric("corrupt_records", "Records whose checksum failed at the engine."),
    Metric("saves", "Slices of pages and states handed to the store, by what became of them.", "outcome"),
    Metric("saves_lost", "Records that were computed and not saved, by reason.", "reason"),
    Metric("saves_delayed", "Times that a request's saves had to wait for room in host memory."),
    Metric("saved_raw_bytes", "Bytes copied from KV blocks to be saved."),
    Metric("saved_bytes", "Encoded bytes that the store took."),
    Metric("audits", "Hits chosen to be computed again and compared."),
    Metric("audited_pages", "Restored pages that were compared."),
    Metric("audit_mismatches", "Restored pages that differ from their recomputation beyond rounding."),
    Metric("audit_skipped", "Audits that could not be made."),
    Metric(
        "audit_read_back_pages", "Pages read back from blocks right after their load and compared with what was stored."
    ),
    Metric("blended_requests", "Requests whose documents were blended."),
    Metric("blended_tokens", "Tokens of blended requests that vLLM did not compute."),
    Metric("blend_recomputed_tokens", "Those of them that were computed again, and tokens outside of documents."),
    Metric("blend_refused", "Requests that asked to be blended and could not be."),
    Metric("blend_failed", "Requests that were to be blended, and were computed after an error."),
    Metric("blend_audits", "Blended requests that were also computed in full, by what became of that.", "outcome"),
    Metric("blend_turned_off", "1 once audits have turned blending off."),
    Metric("guarded_errors", "Errors of the connector kept from the engine."),
)

TIMES = (
    Metric("lookup_seconds", "Seconds to learn what is stored for a prompt."),
    Metric("stage_seconds", "Seconds to fetch a hit into this node's memory."),
    Metric("load_seconds", "Seconds to load a hit to a rank's KV blocks."),
)

TIME_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)

GAUGES = (
    Metric("ready", "1 when the engine saves and resumes, 0 while or where it cannot."),
    Metric("audit_max_difference", "Largest difference that an audit has seen on any rank.", keeps_largest=True),
    Metric("blend_kl", "Mean difference of the next token's distribution in the latest audits of blending, in nats."),
    Metric("saves_in_flight", "Save jobs that ranks still hold memory for."),
)

_BY_METER: Mapping[str, Metric] = {metric.meter: metric for metric in (*COUNTERS, *TIMES, *GAUGES)}
_LARGEST = frozenset(metric.meter for metric in GAUGES if metric.keeps_largest)
_GAUGE_METERS = frozenset(metric.meter for metric in GAUGES)


def metric_of(key: str) -> tuple[Metric, str | None] | None:
    """The metric of a meter key and the value of its label; `None` for a meter that is not shown."""
    match = _KEY.fullmatch(key)
    metric = _BY_METER.get(match["name"]) if match is not None else None
    if match is None or metric is None or metric.label != match["label"]:
        return None
    return metric, match["value"]


class Drain:
    """What one side's meters have counted since the last `take`.

    Args:
        meters: The side's meters. Of gauges, only changes are reported.
    """

    def __init__(self, meters: Meters) -> None:
        self._meters = meters
        self._last_counters: dict[str, float] = {}
        self._last_gauges: dict[str, float] = {}

    def take(self) -> Payload | None:
        """The payload; `None` when nothing happened."""
        payload: Payload = {}
        seen = self._meters.snapshot()
        gauges = {key: value for key, value in seen.items() if key in _GAUGE_METERS}
        counters = {
            key: value - self._last_counters.get(key, 0)
            for key, value in seen.items()
            if value != self._last_counters.get(key) and key not in gauges and metric_of(key) is not None
        }
        if counters:
            payload["counters"] = counters
            self._last_counters = seen
        times = {name: values for name, values in self._meters.take_observations().items() if name in _BY_METER}
        if times:
            payload["times"] = times
        changed = {name: value for name, value in gauges.items() if self._last_gauges.get(name) != value}
        if changed:
            payload["gauges"] = changed
            self._last_gauges |= changed
        return payload or None


def merge(into: Payload, other: Mapping[str, Mapping[str, Any]]) -> None:
    """Add another payload: counters are summed, times appended; of a gauge the later value stays, or the largest."""
    for key, value in other.get("counters", {}).items():
        counters = into.setdefault("counters", {})
        counters[key] = counters.get(key, 0) + value
    for name, values in other.get("times", {}).items():
        times = into.setdefault("times", {})
        times[name] = [*times.get(name, ()), *values]
    if other.get("gauges"):
        keep_gauges(into.setdefault("gauges", {}), other["gauges"])


def keep_gauges(into: dict[str, float], other: Mapping[str, float]) -> None:
    """Replace gauges by later values; of some, only by larger ones."""
    for name, value in other.items():
        into[name] = max(into.get(name, value), value) if name in _LARGEST else value


def summary(payload: Mapping[str, Mapping[str, Any]]) -> dict[str, int | float]:
    """A payload in a line of vLLM's log: what happened, by a short name."""
    line: dict[str, int | float] = {}
    for key, value in payload.get("counters", {}).items():
        if (found := metric_of(key)) is None:
            continue
        metric, label = found
        name = metric.short_name + (f":{label}" if label else "")
        if name.endswith("bytes"):
            line[name.removesuffix("bytes") + "MiB"] = round(value / _MIB, 1)
        else:
            line[name] = int(value)
    for name, values in payload.get("times", {}).items():
        short = _BY_METER[name].short_name.removesuffix("_seconds")
        line[f"{short}_ms_mean"] = round(1000 * sum(values) / len(values), 1)
        line[f"{short}_ms_max"] = round(1000 * max(values), 1)
    return line
