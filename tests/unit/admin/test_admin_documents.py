"""The documents on the interface are current."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from connector.metrics import COUNTERS as ENGINE_COUNTERS
from connector.metrics import GAUGES as ENGINE_GAUGES
from connector.metrics import TIMES as ENGINE_TIMES
from kvstore.errors import InvalidRequest
from kvstore.service.admin.app import make_routes
from kvstore.service.authentication import read_credentials
from kvstore.service.metrics import COUNTERS, GAUGES, OWN_GAUGES, render
from tests.architecture.sources import ROOT, files, tree


def test_the_description_is_current() -> None:
    """It is that of this release: `python tools/admin_reference.py --write` writes it."""
    assert json.loads((ROOT / "docs/openapi.json").read_text()) == json.loads(json.dumps(make_routes().openapi()))


def test_every_reference_leads_somewhere() -> None:
    """A reference in the description is one to its own schemas: programs make clients of it."""
    description = make_routes().openapi()
    schemas = description["components"]["schemas"]
    named = set(re.findall(r'"\$ref": "([^"]*)"', json.dumps(description)))
    assert named <= {f"#/components/schemas/{name}" for name in schemas}


def test_no_example_of_credentials_admits_anybody(tmp_path: Path) -> None:
    """Copied as they are, they are refused: a digest in them admitted whoever knows its token."""
    for page in ("admin", "vllm"):
        for example in re.findall(r"```toml\n(\[\[credential\]\].*?)```", (ROOT / f"docs/{page}.md").read_text(), re.S):
            (tmp_path / "credentials.toml").write_text(example)
            with pytest.raises(InvalidRequest, match="token_sha256"):
                read_credentials(tmp_path / "credentials.toml")


def test_every_answer_and_body_has_an_example() -> None:
    """A reader of the description sees values, not types alone."""
    schemas = make_routes().openapi()["components"]["schemas"]
    simple = {"Alive", "Order"}

    def has_example(schema: dict[str, object]) -> bool:
        return any(key in schema for key in ("example", "examples", "const", "enum", "$ref")) or any(
            has_example(part) for part in _parts(schema)
        )

    assert [name for name, schema in schemas.items() if name not in simple and not has_example(schema)] == []


def _parts(schema: dict[str, object]) -> list[dict[str, object]]:
    found: list[object] = [schema.get("items"), schema.get("additionalProperties")]
    for key in ("properties",):
        part = schema.get(key)
        found += part.values() if isinstance(part, dict) else []
    for key in ("anyOf", "allOf"):
        part = schema.get(key)
        found += part if isinstance(part, list) else []
    return [one for one in found if isinstance(one, dict)]


def meters_in_code() -> dict[str, set[str]]:
    """The names that the product counts (`add`), sets and observes in `Meters`. Each call spells its name out."""
    found: dict[str, set[str]] = {"add": set(), "set": set(), "observe": set()}
    for path in files("kvstore", "connector", "migrations"):
        if "testing" in path.parts:
            continue
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if (call := node.func.attr) in found and ast.unparse(node.func.value).endswith("meters"):
                name = node.args[0]
                assert isinstance(name, ast.Constant), f"{path}:{node.lineno}: write the meter's whole name here"
                found[call].add(name.value)
    return found


def test_every_meter_is_described() -> None:
    """Every meter in the code has a kind and a help text in `kvstore/service/metrics.py` or `connector/metrics.py`,
    none of these is left over, and those of the service have a row in docs/observing.md.
    """
    engine = {"add": ENGINE_COUNTERS, "set": ENGINE_GAUGES, "observe": ENGINE_TIMES}
    described = {call: {metric.meter for metric in metrics} for call, metrics in engine.items()}
    in_code = meters_in_code()
    # the connector counts its errors outside of `Meters`, which may be what fails
    in_code["set"].remove("connector_guarded_errors")
    in_code["add"].add("connector_guarded_errors")
    assert in_code["add"] == set(COUNTERS) | described["add"]
    assert in_code["set"] == set(GAUGES) | described["set"]
    assert in_code["observe"] == described["observe"]
    text = (ROOT / "docs/observing.md").read_text()
    names = [f"kvstore_{name}_total" for name in COUNTERS] + [f"kvstore_{name}" for name in (*GAUGES, *OWN_GAUGES)]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_every_meter_is_read() -> None:
    """A meter that the code counts is named by an alert, a chart, a verb, the dashboard, a page (its row in the
    reference does not count) or a test of what it counts. One that no place names is removed.
    """
    patterns = ("deploy/**/*.*", "kvstore/cli/*.py", "kvstore/doctor/*.py", "kvstore/service/admin/dashboard/*")
    places = [path for pattern in (*patterns, "docs/*.md", "tests/**/*.py") for path in ROOT.glob(pattern)]
    places = [path for path in places if path.is_file() and path.suffix != ".pyc"]
    own = (ROOT / "tests/unit/admin/test_admin_documents.py", ROOT / "tests/unit/connector/test_connector_metrics.py")
    text = "\n".join(path.read_text() for path in places if path not in own)
    text = re.sub(r"^\| `(vllm:)?kvstore_\w+` \| (counter|gauge|histogram) .*$", "", text, flags=re.MULTILINE)
    named = set(re.findall(r"(?<!\w)(?:kvstore_|connector_)?([a-z0-9_]+?)(?:_total|_count|_sum|_bucket)?(?!\w)", text))
    counted = {name.removeprefix("connector_") for names in meters_in_code().values() for name in names}
    assert (counted | set(OWN_GAUGES)) - named == set()


def test_metrics_are_text_that_prometheus_reads() -> None:
    """Counters end in `_total`, each family is declared once, and labels are kept. A meter without a description is
    shown; an invalid name is left out.
    """
    meters = {
        "saves": 3.0,
        'served_records{tier="redis"}': 2.0,
        'served_records{tier="s3"}': 1.5,
        'tier_open{tier="redis"}': 1.0,
        "brand_new": 7.0,
        'corrupt_records{reason="a "quoted" one"}': 1.0,
    }
    service = {"release": "1", "uptime_s": 1.25, "sessions": 2, "requests_running": 0}
    service |= {"receive_bytes_used": 0, "receive_bytes_limit": 5, "known_pieces_bytes": 7}
    text = render(meters, [], service)
    assert "# TYPE kvstore_served_records_total counter" in text
    assert 'kvstore_served_records_total{tier="redis"} 2\nkvstore_served_records_total{tier="s3"} 1.5\n' in text
    assert 'kvstore_tier_open{tier="redis"} 1' in text and "kvstore_saves_total 3\n" in text
    assert "# TYPE kvstore_brand_new untyped" in text and "quoted" not in text
    assert 'kvstore_info{release="1"} 1' in text and "kvstore_uptime_seconds 1.25" in text
    from prometheus_client.parser import text_string_to_metric_families

    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families) > 8
