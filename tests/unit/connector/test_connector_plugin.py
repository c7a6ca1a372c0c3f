"""vLLM finds the connector by its name alone."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

REGISTERED = """
import sys
from connector.plugin import register

register()
register()
ours = [name for name in sys.modules if name.split(".")[0] in ("connector", "kvstore")]
assert sorted(ours) == ["connector", "connector.plugin"], ours

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

found = KVConnectorFactory.get_connector_class_by_name("KVStoreConnector")
from connector import KVStoreConnector

assert found is KVStoreConnector
print("found")
"""


def test_the_package_names_its_plugin() -> None:
    """Where the package is installed, vLLM finds the entry point in its own group."""
    (ours,) = [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "kvstore"]
    assert ours.value == "connector.plugin:register"


def test_registering_loads_nothing_of_ours() -> None:
    """Any number of calls makes the name known; the connector is imported when somebody asks for it, by any path."""
    pytest.importorskip("vllm")
    done = subprocess.run(
        [sys.executable, "-c", REGISTERED], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "found"
