"""The contract of tiers, run on memory, on a directory, and on a guarded tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.format.names import format_name
from kvstore.format.record import Record
from kvstore.model.keys import RecordKey
from kvstore.runtime.meters import Meters
from kvstore.testing.tier_contract import LastingTierContract, Medium, TierContract
from kvstore.tiers.base import Tier
from kvstore.tiers.filesystem import FilesystemTier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.wrap import GuardedTier

BUDGET_BYTES = 1 << 30


class MemoryMedium(Medium):
    """Reaches into the tier's own slots, as a stray write to memory would."""

    receives = False

    def __init__(self) -> None:
        self.tier = MemoryTier(BUDGET_BYTES)

    async def open_tier(self) -> Tier:
        return self.tier

    async def read(self, key: RecordKey) -> bytes | None:
        slot = self.tier._slots.get(key)
        return None if slot is None else bytes(slot.record.data)

    async def write(self, key: RecordKey, data: bytes) -> None:
        slot = self.tier._slots[key]
        slot.record = Record(slot.record.header, memoryview(data))


class FilesystemMedium(Medium):
    """Reaches into the files."""

    def __init__(self, root: Path) -> None:
        self.root = root

    async def open_tier(self) -> Tier:
        return await FilesystemTier.open(self.root, budget_bytes=BUDGET_BYTES)

    async def read(self, key: RecordKey) -> bytes | None:
        path = self.root / format_name(key)
        return path.read_bytes() if path.exists() else None

    async def write(self, key: RecordKey, data: bytes) -> None:
        path = self.root / format_name(key)
        assert path.exists()
        path.write_bytes(data)


class GuardedMedium(FilesystemMedium):
    async def open_tier(self) -> Tier:
        return GuardedTier(await super().open_tier(), meters=Meters())


class TestMemoryTier(TierContract):
    @pytest.fixture
    async def medium(self) -> Medium:
        return MemoryMedium()


class TestFilesystemTier(LastingTierContract):
    @pytest.fixture
    async def medium(self, tmp_path: Path) -> Medium:
        return FilesystemMedium(tmp_path / "records")


class TestGuardedTier(LastingTierContract):
    @pytest.fixture
    async def medium(self, tmp_path: Path) -> Medium:
        return GuardedMedium(tmp_path / "records")
