"""The filesystem tier when there is no more room: puts answer FULL, reads go on, nothing is left behind."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.runtime.deadline import Deadline
from kvstore.testing.records import make_record
from kvstore.tiers.base import PutOutcome
from kvstore.tiers.filesystem import FilesystemTier
from tests.integration.small_disk import run_on_disk

_ON_A_TINY_DISK = """
import asyncio, sys
from pathlib import Path
from kvstore.runtime.deadline import Deadline
from kvstore.testing.records import make_record
from kvstore.tiers.base import PutOutcome
from kvstore.tiers.filesystem import FilesystemTier

async def main(root):
    tier = await FilesystemTier.open(root, budget_bytes=1 << 30)
    records = [make_record(number, 500_000) for number in range(12)]
    outcomes = [await tier.put(record, deadline=Deadline.after(9)) for record in records]
    assert outcomes[0] is PutOutcome.STORED and outcomes[-1] is PutOutcome.FULL, outcomes
    assert "make room there" in (await tier.usage(deadline=Deadline.after(9))).refuses_writes
    assert list((root / "tmp").iterdir()) == []
    for record, outcome in zip(records, outcomes):
        stored = await tier.get(record.key, deadline=Deadline.after(9))
        assert (stored is not None) == (outcome is PutOutcome.STORED)
        assert stored is None or stored.data == record.data
    for record in records[:3]:
        assert await tier.delete(record.key, deadline=Deadline.after(9))
    assert (await tier.usage(deadline=Deadline.after(9))).refuses_writes == ""
    assert await tier.put(records[-1], deadline=Deadline.after(9)) is PutOutcome.STORED
    await tier.aclose()
    print(outcomes.count(PutOutcome.STORED))

asyncio.run(main(Path(sys.argv[1]) / "records"))
"""


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """The kernel refuses larger files of this process (EFBIG), as a quota would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_write_that_stops_half_way(tmp_path: Path) -> None:
    """The kernel refuses a file's second half: FULL, the temporary file is gone, smaller records and reads go on."""
    tier = await FilesystemTier.open(tmp_path, budget_bytes=1 << 30)
    small, large = make_record(1, 1000), make_record(2, 3_000_000)
    with file_size_limit(1_000_000):
        assert await tier.put(large, deadline=Deadline.after(9)) is PutOutcome.FULL
        assert "raise the limit" in (await tier.usage(deadline=Deadline.after(9))).refuses_writes
        assert await tier.put(small, deadline=Deadline.after(9)) is PutOutcome.STORED
    assert list((tmp_path / "tmp").iterdir()) == []
    assert await tier.get(large.key, deadline=Deadline.after(9)) is None
    assert await tier.get(small.key, deadline=Deadline.after(9)) is not None
    assert await tier.put(large, deadline=Deadline.after(9)) is PutOutcome.STORED
    await tier.aclose()


def test_full_disk(tmp_path: Path) -> None:
    """A real disk of 3 MB runs full: the same, and its usage says so; after a delete there is room again."""
    assert 1 <= int(run_on_disk(tmp_path / "disk", "3m", _ON_A_TINY_DISK)) <= 6
