"""What attacks are tested with: a short folder, since sockets have short paths, and whether this is the long run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    """For a service: its socket, log, directory."""
    with tempfile.TemporaryDirectory(prefix="kvstore-attack-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture
def full() -> bool:
    """Whether everything is repeated as often as promised, with the bounds of a machine of its own."""
    return os.environ.get("KVSTORE_TEST_FULL") == "1"
