"""What users of the packages may rely on. A change here is a change for them: it belongs in the changelog."""

from __future__ import annotations

import importlib

import pytest

SURFACE = {
    "connector": ["KVStoreConnector"],
    "kvstore": ["__version__"],
    "kvstore.api": [
        *(
            "Ack",
            "Deadline",
            "LeaseId",
            "LeasedRecord",
            "LoadedRecord",
            "Lookup",
            "Offer",
            "Outcome",
            "PageStore",
            "PrefixQuery",
            "Retention",
            "SaveOutcome",
        ),
        "Staged",
    ],
    "kvstore.client": [
        *("Address", "BlockingStore", "ClientOptions", "ClientTls", "EmbeddedOptions", "RemoteStore"),
        *("TcpAddress", "UnixAddress", "connect", "parse_address", "trace_parent"),
    ],
    "kvstore.codec": [
        *("CHAINS", "CodecPool", "Encoded", "PLANES2", "PLANES4", "PoolUsage", "RAW", "ZSTD"),
        *("chain_for_element_bytes", "decode_into", "encode", "max_payload_bytes"),
    ],
    "kvstore.errors": [
        *("Closed", "CorruptRecord", "InternalError", "InvalidRequest", "KVStoreError", "Unavailable"),
        "UnsupportedFormat",
    ],
}


@pytest.mark.parametrize("package", SURFACE)
def test_surface_is_what_is_written_here(package: str) -> None:
    """`__all__` names what is public, no more and no less, and each name is there."""
    module = importlib.import_module(package)
    assert sorted(module.__all__) == sorted(SURFACE[package])
    if package != "connector":  # its one name starts importing vLLM
        assert [name for name in module.__all__ if not hasattr(module, name)] == []
