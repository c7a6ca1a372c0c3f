"""The operator's settings, from the tier's entry in `secondary_tiers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from connector.settings import ConnectorSettings

OURS = (
    *("url", "token_file", "tls_ca_file", "tls_certificate_file", "tls_key_file", "mode", "weights_id"),
    *("memory_bytes", "disk_bytes", "stall_timeout_ms", "max_wait_ms", "lookup_timeout_ms"),
    *("weights_may_change", "trust_mm_uuids", "allow_untested_vllm"),
)
"""Settings of the connector that apply here, with the same meaning."""

_DEFAULTS = {"lookup_timeout_ms": 80}
"""vLLM computes nothing of a request before it has its answer, and asks for that between steps: 100 ms at most."""


def read_settings(given: Mapping[str, Any]) -> ConnectorSettings:
    """Read the settings; those of the environment (`KVSTORE_CONNECTOR_*`) win.

    Raises:
        InvalidRequest: An unknown key (with the nearest valid one), or a value that does not fit.
    """
    return ConnectorSettings.parse({**_DEFAULTS, **given}, only=OURS)
