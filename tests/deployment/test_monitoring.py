"""Prometheus and Grafana: they ask for metrics that exist, of services that exist."""

from __future__ import annotations

import re

import pytest
import yaml

from connector import metrics as connector
from kvstore.service import metrics as service
from tests.deployment.files import GRAFANA, METRIC, PROMETHEUS, compose, compose_service, dashboard, expressions


def existing() -> set[str]:
    """Every series of ours, by the tables of both sides."""
    engines = {f"{metric.name}_total" for metric in connector.COUNTERS} | {metric.name for metric in connector.GAUGES}
    engines |= {f"{metric.name}_{part}" for metric in connector.TIMES for part in ("bucket", "count", "sum")}
    services = {f"kvstore_{name}_total" for name in service.COUNTERS}
    services |= {f"kvstore_{name}" for name in (*service.GAUGES, *service.OWN_GAUGES)}
    return engines | services


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_every_metric_exists(where: str, expression: str) -> None:
    """An alert or a panel on a name that nothing counts under would be silent for ever."""
    names = set(METRIC.findall(expression)) - {'up{job="kvstore"}'}
    assert names <= existing(), (where, names - existing())
    assert names or expression.startswith("up{")


def test_every_alert_says_what_to_do() -> None:
    """Its severity is one of two, and it has a summary and a description; what is pending is told of before it reaches
    the services' own limit, whatever that is.
    """
    rules = [
        rule for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"] for rule in group["rules"]
    ]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description"}
    (pending,) = [rule["expr"] for rule in rules if rule["alert"] == "KVStoreWritesPending"]
    assert re.search(r"> 0\.\d+ \* min without \(instance\) \(kvstore_pending_limit_bytes\)$", pending)


def test_prometheus_asks_every_service() -> None:
    """Its targets are the compose file's services at their administration ports, with the token of its own secrets."""
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    services, engines = config["scrape_configs"]
    names = [name for name in compose()["services"] if name.startswith("kvstore-")]
    ports = {compose_service(name)["environment"]["KVSTORE_ADMIN_LISTEN"].rpartition(":")[2] for name in names}
    assert len(ports) == 1
    assert services["static_configs"] == [{"targets": [f"{name}:{port}" for port in ports for name in names]}]
    token = services["authorization"]["credentials_file"]
    assert token.removeprefix("/run/secrets/") in compose_service("prometheus")["secrets"]
    shared = set(compose_service("prometheus")["networks"])
    assert all(shared & set(compose_service(name)["networks"]) for name in names)
    assert config["rule_files"] == ["/etc/prometheus/alerts.yml"]
    assert engines["file_sd_configs"] == [{"files": ["/etc/prometheus/engines/*.yml"]}]
    assert yaml.safe_load((PROMETHEUS / "engines" / "engines.yml").read_text()) == []


def test_grafana_finds_its_source_and_its_dashboard() -> None:
    """Provisioned are the stack's Prometheus and the folder that is mounted."""
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in compose()["services"]
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/kvstore.yml").read_text())["providers"]
    targets = [volume.split(":")[1] for volume in compose_service("grafana")["volumes"]]
    assert provider["options"]["path"] in targets


def test_the_dashboard_shows_what_an_operator_asks_first() -> None:
    """Panels do not overlap, each has a description, and the questions of the first minute have one."""
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert isinstance(place, dict) and place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert taken.isdisjoint(cells), panel["title"]
        taken |= cells
    assert all(panel["description"] for panel in panels)
    titles = {str(panel["title"]) for panel in panels}
    assert {"Hit ratio", "Misses by reason", "To stage a hit", "To load a hit", "Breakers", "Evicted bytes"} <= titles
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])
