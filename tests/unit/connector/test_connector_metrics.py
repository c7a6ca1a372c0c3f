"""What `/metrics` says of us: the names, and that no number is lost or told twice on its way there."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from connector.metrics import COUNTERS, GAUGES, TIMES, Drain, Payload, merge, metric_of, summary
from kvstore.runtime.meters import Meters

CONNECTOR = Path(__file__).parents[3] / "connector"


def test_names_are_as_prometheus_wants_them() -> None:
    """Names carry vLLM's prefix and ours, are unique, and do not end in what Prometheus adds itself."""
    names = [metric.name for metric in (*COUNTERS, *TIMES, *GAUGES)]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"vllm:kvstore_[a-z_]+", name) and not name.endswith("_total") for name in names)
    assert all(metric.name.endswith("_seconds") for metric in TIMES)


def test_every_metric_is_documented() -> None:
    """The tables of docs/observing.md have exactly these names, with their labels, and those of vLLM's own offloading,
    which start with `tier`."""
    text = (CONNECTOR.parent / "docs" / "observing.md").read_text()
    rows = re.findall(r"^\| `(vllm:kvstore_(?!tier_)\w+)` \| (\w+) \| (?:`(\w+)`)? ?\|", text, re.MULTILINE)
    kinds = {"counter": COUNTERS, "histogram": TIMES, "gauge": GAUGES}
    assert sorted(rows) == sorted(
        (metric.name, kind, metric.label or "") for kind, metrics in kinds.items() for metric in metrics
    )


def test_labels_are_read_from_meter_keys() -> None:
    """A key gives its metric and label; an unknown meter, and one with labels that the table does not know, nothing."""
    found = metric_of('connector_misses{reason="nothing_stored"}')
    assert found is not None
    assert (found[0].name, found[1]) == ("vllm:kvstore_misses", "nothing_stored")
    assert metric_of("connector_hits") is not None
    assert metric_of("connector_misses") is None
    assert metric_of('connector_hits{tier="redis"}') is None
    assert metric_of("somebody_elses") is None


def test_a_drain_tells_each_number_once() -> None:
    """Counters come as differences, times as values, gauges when they change; a quiet interval tells nothing."""
    meters = Meters()
    meters.set("connector_ready", 0.0)
    drain = Drain(meters)
    meters.add("connector_hits", 2)
    meters.add("somebody_elses", 5)
    meters.observe("connector_lookup_seconds", 0.25)
    assert drain.take() == {
        "counters": {"connector_hits": 2},
        "times": {"connector_lookup_seconds": [0.25]},
        "gauges": {"connector_ready": 0.0},
    }
    assert drain.take() is None
    meters.set("connector_audit_max_difference", 0.5)
    assert drain.take() == {"gauges": {"connector_audit_max_difference": 0.5}}
    assert drain.take() is None
    meters.add("connector_hits")
    meters.add("connector_misses", reason="stage_timeout")
    meters.set("connector_ready", 1.0)
    assert drain.take() == {
        "counters": {"connector_hits": 1, 'connector_misses{reason="stage_timeout"}': 1},
        "gauges": {"connector_ready": 1.0},
    }


def test_observations_that_nobody_takes_are_bounded() -> None:
    """Of a distribution that is not read, the sum and count are kept and the last thousand values."""
    meters = Meters()
    for value in range(1500):
        meters.observe("connector_load_seconds", value)
    assert meters.get("connector_load_seconds_count") == 1500
    assert meters.get("connector_load_seconds_sum") == sum(range(1500))
    assert meters.take_observations() == {"connector_load_seconds": list(range(500, 1500))}
    assert meters.take_observations() == {}


def test_payloads_of_ranks_add_up() -> None:
    """Two ranks and the scheduler: counters add up, times follow, a later gauge replaces; parts stay as they are."""
    first: Payload = {"counters": {"connector_load_errors": 1}, "times": {"connector_load_seconds": [0.1]}}
    second: Payload = {
        "counters": {"connector_load_errors": 2, "connector_hits": 1},
        "times": {"connector_load_seconds": [0.2]},
        "gauges": {"connector_ready": 1.0},
    }
    merged: Payload = {}
    for payload in (first, second, {"gauges": {"connector_ready": 0.0}}):
        merge(merged, payload)
    assert merged == {
        "counters": {"connector_load_errors": 3, "connector_hits": 1},
        "times": {"connector_load_seconds": [0.1, 0.2]},
        "gauges": {"connector_ready": 0.0},
    }
    assert first["counters"] == {"connector_load_errors": 1}
    assert second["gauges"] == {"connector_ready": 1.0}


def test_the_largest_difference_is_of_all_ranks_and_times(
    prometheus: tuple[CollectorRegistry, dict[type, Any]],
) -> None:
    """A rank that has seen less does not hide what another one has seen, in one payload or in a later one."""
    from types import SimpleNamespace

    from connector.vllm.observability import KVStorePromMetrics

    def seen(value: float) -> Payload:
        return {"gauges": {"connector_audit_max_difference": value}}

    merged: Payload = {}
    for value in (0.2, 0.5, 0.1):
        merge(merged, seen(value))
    assert merged == seen(0.5)
    registry, kinds = prometheus
    shown = KVStorePromMetrics(SimpleNamespace(kv_transfer_config=None), kinds, ["engine"], {0: ["0"]})
    for value, expected in ((0.5, 0.5), (0.1, 0.5), (0.7, 0.7)):
        shown.observe(seen(value))
        assert registry.get_sample_value("vllm:kvstore_audit_max_difference", {"engine": "0"}) == expected


def test_the_log_line_is_short() -> None:
    """A line of the log names what happened, bytes in MiB and times in ms, and leaves out what it does not know."""
    line = summary(
        {
            "counters": {
                "connector_hits": 2,
                'connector_saves{outcome="stored"}': 3,
                "connector_loaded_bytes": 3 << 20,
                "newer_release": 1,
            },
            "times": {"connector_stage_seconds": [0.010, 0.030]},
        }
    )
    assert line == {"hits": 2, "saves:stored": 3, "loaded_MiB": 3.0, "stage_ms_mean": 20.0, "stage_ms_max": 30.0}


@pytest.fixture
def prometheus() -> tuple[CollectorRegistry, dict[type, Any]]:
    """vLLM's three classes of metrics, on a registry of their own."""
    registry = CollectorRegistry()
    return registry, {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}


def test_prometheus_gets_what_was_counted(prometheus: tuple[CollectorRegistry, dict[type, Any]]) -> None:
    """Metrics without labels are there from the start; payloads of two engines are kept apart."""
    from types import SimpleNamespace

    from connector.vllm.observability import KVStorePromMetrics

    registry, kinds = prometheus
    shown = KVStorePromMetrics(
        SimpleNamespace(kv_transfer_config=None), kinds, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}
    )
    engines = [{"model_name": "m", "engine": str(index)} for index in (0, 1)]
    assert registry.get_sample_value("vllm:kvstore_hits_total", engines[0]) == 0.0
    shown.observe(
        {
            "counters": {"connector_hits": 2, 'connector_misses{reason="lookup_timeout"}': 1, "newer_release": 7},
            "times": {"connector_lookup_seconds": [0.003, 0.03]},
            "gauges": {"connector_ready": 1.0},
        },
        engine_idx=1,
    )
    assert registry.get_sample_value("vllm:kvstore_hits_total", engines[0]) == 0.0
    assert registry.get_sample_value("vllm:kvstore_hits_total", engines[1]) == 2.0
    assert registry.get_sample_value("vllm:kvstore_ready", engines[1]) == 1.0
    missed = {**engines[1], "reason": "lookup_timeout"}
    assert registry.get_sample_value("vllm:kvstore_misses_total", missed) == 1.0
    assert registry.get_sample_value("vllm:kvstore_lookup_seconds_count", engines[1]) == 2.0
    assert registry.get_sample_value("vllm:kvstore_lookup_seconds_bucket", {**engines[1], "le": "0.005"}) == 1.0


def test_statistics_survive_the_way_between_processes() -> None:
    """vLLM sends `to_dict()` as msgpack and builds the statistics again; they aggregate, and an empty one is empty."""
    import msgspec

    from connector.vllm.connector import KVStoreConnector
    from connector.vllm.observability import KVStoreStats

    sent = KVStoreStats({"counters": {"connector_hits": 1}, "times": {"connector_load_seconds": [0.5]}})
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent.to_dict()))
    built = KVStoreConnector.build_kv_connector_stats(received)
    assert built == sent
    assert built.aggregate(KVStoreStats({"counters": {"connector_hits": 2}})).data["counters"] == {"connector_hits": 3}
    assert built.reduce()["hits"] == 3
    assert not built.is_empty()
    built.reset()
    assert built.is_empty()
    assert KVStoreConnector.build_kv_connector_stats().is_empty()
