"""A store service over a directory that tests look into and change."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from kvstore.testing.serve import Service

__all__ = ["DirectoryService"]

_PATIENCE_S = 60.0


class DirectoryService(Service):
    """Keeps its records in memory and a directory, which is read anew at each start: tests change files meanwhile.

    Args:
        folder: For its socket, log and records.
        flags: Further settings.
        verifies: Whether records are checked.

    Attributes:
        records: Folder of the records.
    """

    def __init__(self, folder: Path, flags: Mapping[str, str] | None = None, *, verifies: bool = True) -> None:
        self.records = folder / "records"
        flags = {"memory_bytes": "512MiB", "cold": f"file://{self.records}", **(flags or {})}
        module = "kvstore.cli" if verifies else "tests.connector.support.unverified"
        super().__init__(folder, flags, module=module)

    def leases_end(self) -> bool:
        """Whether every lease is given back in time, none by running out, and nothing is held in memory for one."""
        ends_s = time.monotonic() + _PATIENCE_S
        while (leases := self.status()["leases"])["active"] and time.monotonic() < ends_s:
            time.sleep(0.05)
        return (leases["active"], leases["expired"], leases["pinned_bytes"]) == (0, 0, 0)

    def stop(self) -> None:
        super().stop()
        (self.records / "index").unlink(missing_ok=True)
