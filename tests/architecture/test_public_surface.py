"""What users of the packages may rely on. A change here is a change for them: it belongs in the changelog."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT, files

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
        *("Address", "BlockingStore", "ClientOptions", "ClientTls", "EmbeddedOptions", "PageDoor", "PageKey", "Plan"),
        *("PlanClient", "RemoteStore", "TcpAddress", "UnixAddress", "connect", "describe_pages", "parse_address"),
        "trace_parent",
    ],
    "kvstore.codec": [
        *("CHAINS", "CodecPool", "Encoded", "PLANES2", "PLANES4", "RAW", "TILES", "ZSTD"),
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


def test_other_modules_have_no_list() -> None:
    """`__all__` says what users may rely on. In other modules a leading underscore says what is private."""
    listing = [str(path) for path in files("kvstore", "connector", "migrations") if "__all__ = " in _text(path)]
    public = {f"{name.replace('.', '/')}.py" for name in SURFACE}
    assert [path for path in listing if path not in public and not path.endswith("__init__.py")] == []


def _text(path: Path) -> str:
    return (ROOT / path).read_text()
