"""The filesystem tier on a read-only disk: an error that names it and the next step, and nothing stored is harmed."""

from __future__ import annotations

from pathlib import Path

from tests.integration.small_disk import run_on_disk

_ON_A_DISK = """
import asyncio, subprocess, sys
from pathlib import Path
from kvstore.errors import Unavailable
from kvstore.runtime.deadline import Deadline
from kvstore.testing.records import make_record
from kvstore.tiers.filesystem import FilesystemTier

disk = Path(sys.argv[1])

def remount(mode):
    subprocess.run(["mount", "-o", f"remount,{mode}", str(disk)], check=True)

async def refused(call, *texts):
    try:
        await call
    except Unavailable as error:
        assert all(text in str(error) for text in ("mount the filesystem writable", "EROFS", *texts)), error
    else:
        raise AssertionError("it was not refused")

async def main():
    records = [make_record(number, 50_000) for number in range(4)]
    tier = await FilesystemTier.open(disk / "records", budget_bytes=1 << 30)
    for record in records[:3]:
        await tier.put(record, deadline=Deadline.after(9))
    await tier.aclose()
    remount("ro")
    await refused(FilesystemTier.open(disk / "records", budget_bytes=1 << 30), "open the directory")
    beside = await FilesystemTier.open_beside(disk / "records")  # what is there can be looked at
    assert await beside.get(records[1].key, deadline=Deadline.after(9)) is not None
    await beside.aclose()
    remount("rw")
    tier = await FilesystemTier.open(disk / "records", budget_bytes=1 << 30)
    for record in records[:3]:
        assert await tier.get(record.key, deadline=Deadline.after(9)) is not None
    await tier.put(records[3], deadline=Deadline.after(9))
    assert tier.num_quarantined == 0
    await tier.aclose()

asyncio.run(main())
"""


def test_a_disk_that_was_mounted_read_only(tmp_path: Path) -> None:
    """A service cannot own it and is told why, an operator can look; writable again, everything is there."""
    run_on_disk(tmp_path / "disk", "9m", _ON_A_DISK)
