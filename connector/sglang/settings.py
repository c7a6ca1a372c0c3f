"""The operator's settings, from SGLang's `--hicache-storage-backend-extra-config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from connector.settings import ConnectorSettings

OURS = (
    *("url", "token_file", "tls_ca_file", "tls_certificate_file", "tls_key_file", "mode", "weights_id"),
    *("memory_bytes", "disk_bytes", "stall_timeout_ms", "max_wait_ms"),
)
"""Settings of the connector that apply here, with the same meaning."""

SGLANGS = (
    *("backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size", "hicache_storage_pass_prefix_keys"),
    *("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token"),
)
"""What SGLang itself reads of the same text."""


def read_settings(extra_config: Mapping[str, Any] | None) -> ConnectorSettings:
    """Read the settings; those of the environment (`KVSTORE_CONNECTOR_*`) win.

    Raises:
        InvalidRequest: An unknown key (with the nearest valid one), or a value that does not fit.
    """
    given = {key: value for key, value in (extra_config or {}).items() if key not in SGLANGS}
    return ConnectorSettings.parse(given, only=OURS)
