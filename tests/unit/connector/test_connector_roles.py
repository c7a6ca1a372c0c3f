"""vLLM's role beside our `mode`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from connector.settings import ConnectorSettings
from kvstore.errors import InvalidRequest


@pytest.mark.parametrize(
    ("role", "mode", "loads", "saves"),
    [
        ("kv_both", "both", True, True),
        ("kv_both", "load", True, False),
        ("kv_producer", "both", False, True),
        ("kv_producer", "save", False, True),
        ("kv_consumer", "both", True, False),
        ("kv_consumer", "load", True, False),
        ("kv_producer", "off", False, False),
        ("kv_consumer", "off", False, False),
    ],
)
def test_a_role_narrows_the_mode(role: str, mode: str, loads: bool, saves: bool) -> None:
    """A producer only saves; a consumer only loads, and takes every hit: another engine computes prompts for it."""
    settings = ConnectorSettings(mode=mode).for_role(role)
    assert settings.load_always == (role == "kv_consumer" and loads)
    assert (settings.loads, settings.saves) == (loads, saves)


@pytest.mark.parametrize(("role", "mode"), [("kv_producer", "load"), ("kv_consumer", "save")])
def test_a_contradiction_is_refused_by_name(role: str, mode: str) -> None:
    """An engine that could then neither load nor save is refused, with both fields named."""
    with pytest.raises(InvalidRequest, match=f"{role} only .* field=mode seen={mode}"):
        ConnectorSettings(mode=mode).for_role(role)


def test_an_engine_with_a_contradiction_does_not_start() -> None:
    """The connector itself is where vLLM's role and the operator's mode meet."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

    from connector import KVStoreConnector

    transfer = SimpleNamespace(kv_connector_extra_config={"mode": "load"}, kv_role="kv_producer")
    with pytest.raises(InvalidRequest, match="kv_role kv_producer only saves"):
        KVStoreConnector(SimpleNamespace(kv_transfer_config=transfer), KVConnectorRole.WORKER, None)
