"""The contract of tiers, run on memory, on a directory, and on a guarded tier."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvstore.format.names import format_name
from kvstore.format.record import Record
from kvstore.model.keys import RecordKey
from kvstore.runtime.instruments import Instruments
from kvstore.testing.records import flipped, make_record
from kvstore.testing.tier_contract import LastingTierContract, RawMedium, TierContract
from kvstore.testing.waiting import soon
from kvstore.tiers.base import Tier
from kvstore.tiers.filesystem import FilesystemTier
from kvstore.tiers.guarded import GuardedTier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.verify import open_or_reason
from tests.contract.media import BUDGET_BYTES, FilesystemMedium

FILE_VERDICTS = "kvstore.tiers.filesystem.files"


class MemoryMedium(RawMedium):
    """Replaces the bytes of a record, as a stray write to memory would."""

    receives = False

    def __init__(self) -> None:
        self.tier = MemoryTier(BUDGET_BYTES)

    async def open_tier(self) -> Tier:
        return self.tier

    async def read(self, key: RecordKey) -> bytes | None:
        record = self.tier.peek(key)
        return None if record is None else bytes(record.data)

    async def write(self, key: RecordKey, data: bytes) -> None:
        record = self.tier.peek(key)
        assert record is not None
        self.tier.remove(key)
        self.tier.insert(Record(record.header, memoryview(data)))


class GuardedMedium(FilesystemMedium):
    async def open_tier(self) -> Tier:
        return GuardedTier(await super().open_tier(), Instruments())


class TestMemoryTier(TierContract):
    @pytest.fixture
    async def medium(self) -> RawMedium:
        return MemoryMedium()


class TestFilesystemTier(LastingTierContract):
    @pytest.fixture
    async def medium(self, tmp_path: Path) -> RawMedium:
        return FilesystemMedium(tmp_path / "records")


class TestGuardedTier(LastingTierContract):
    @pytest.fixture
    async def medium(self, tmp_path: Path) -> RawMedium:
        return GuardedMedium(tmp_path / "records")


async def test_a_file_that_is_replaced_while_it_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another writer's good record takes the name of a damaged one that is being read: it is served."""
    medium = FilesystemMedium(tmp_path / "records")
    tier = await medium.open_tier()
    record = make_record(1)
    await tier.put(record, deadline=soon())
    await medium.write(record.key, flipped(bytes(record.data), 8 * 500))
    path = medium.root / format_name(record.key)

    def judged(data: memoryview, key: RecordKey) -> Record | str:
        verdict = open_or_reason(data, key)
        if isinstance(verdict, str):
            path.rename(tmp_path / "before")  # kept: its number must not go to the next file
            path.write_bytes(record.data)
        return verdict

    monkeypatch.setattr(sys.modules[FILE_VERDICTS], "open_or_reason", judged)
    stored = await tier.get(record.key, deadline=soon())
    assert await medium.read(record.key) == record.data
    assert stored is not None and stored.data == record.data
    assert tier.num_quarantined == 0
    await tier.aclose()


async def test_a_file_of_another_size_than_the_index_says(tmp_path: Path) -> None:
    """Another writer's record of another size has taken the name since the index was read: a miss, and it stays."""
    medium = FilesystemMedium(tmp_path / "records")
    tier = await medium.open_tier()
    await tier.put(make_record(1, 1000), deadline=soon())
    larger = make_record(1, 2000)
    await medium.write(larger.key, bytes(larger.data))
    assert await tier.get(larger.key, deadline=soon()) is None
    assert await medium.read(larger.key) == larger.data
    assert tier.num_quarantined == 0
    await tier.aclose()


async def test_beside_the_owner(tmp_path: Path) -> None:
    """A reader beside a directory's owner sees what the owner has put and removed since it was listed."""
    owner = await FilesystemTier.open(tmp_path, budget_bytes=BUDGET_BYTES)
    going, coming = make_record(1), make_record(2)
    await owner.put(going, deadline=soon())
    beside = await FilesystemTier.open_beside(tmp_path)
    await owner.delete(going.key, deadline=soon())
    await owner.put(coming, deadline=soon())
    assert await beside.head([going.key, coming.key], deadline=soon()) == [None, coming.num_bytes]
    await beside.aclose()
    await owner.aclose()
