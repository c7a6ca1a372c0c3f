"""The index of a directory on disk: a restart reads it, a kill spoils nothing, and what cannot be trusted is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.format.names import format_name, pack_key, unpack_key
from kvstore.testing.records import make_key, make_record
from kvstore.testing.waiting import soon
from kvstore.tiers.base import PutOutcome, TierUsage
from kvstore.tiers.filesystem import FilesystemTier, index
from kvstore.tiers.filesystem.files import RecordFiles
from kvstore.tiers.filesystem.index import ENTRY_BYTES, IndexLog, cost_bytes, replay

PAYLOAD_BYTES = 5000
COST = cost_bytes(make_record(0, PAYLOAD_BYTES).num_bytes)
BOOT, OTHER_BOOT = b"b" * 16, b"o" * 16


async def open_tier(root: Path, num_records: int = 100) -> FilesystemTier:
    return await FilesystemTier.open(root, budget_bytes=num_records * COST)


async def put(tier: FilesystemTier, *numbers: int) -> None:
    for number in numbers:
        assert await tier.put(make_record(number, PAYLOAD_BYTES), deadline=soon()) is PutOutcome.STORED


async def numbers_in(tier: FilesystemTier, count: int) -> list[int]:
    sizes = await tier.head([make_key(number) for number in range(count)], deadline=soon())
    return [number for number, size in enumerate(sizes) if size is not None]


def forbid_reading_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: RecordFiles) -> None:
        raise AssertionError("the directory was read")

    monkeypatch.setattr(RecordFiles, "recover", refuse)


async def test_a_restart_reads_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new owner knows every record, its size and the order of use, without looking at a single file."""
    tier = await open_tier(tmp_path)
    await put(tier, *range(6))
    await tier.delete(make_key(4), deadline=soon())
    await tier.get(make_key(0), deadline=soon())
    used = await tier.usage(deadline=soon())
    await tier.aclose()
    forbid_reading_the_directory(monkeypatch)
    tier = await open_tier(tmp_path, num_records=5)
    assert await numbers_in(tier, 6) == [0, 1, 2, 3, 5]
    assert await tier.usage(deadline=soon()) == TierUsage(5, used.used_bytes, 5 * COST, 0, "disk_bytes")
    await put(tier, 7)  # the record that was used longest ago gives way, not the oldest one
    assert await numbers_in(tier, 8) == [0, 2, 3, 5, 7]
    await tier.aclose()
    tier = await open_tier(tmp_path, num_records=2)  # and so it is with a smaller budget
    assert await numbers_in(tier, 8) == [0, 7]
    assert len([path for path in (tmp_path / "v1").rglob("*") if path.is_file()]) == 2
    await tier.aclose()


async def test_damage_behind_an_index_is_found_when_it_is_read(tmp_path: Path) -> None:
    """Files that were cut, emptied or removed while the directory had no owner are misses, or quarantined."""
    tier = await open_tier(tmp_path)
    await put(tier, *range(4))
    await tier.aclose()
    paths = [tmp_path / format_name(make_key(number)) for number in range(4)]
    os.truncate(paths[0], 3000)
    paths[1].write_bytes(b"")
    paths[2].unlink()
    tier = await open_tier(tmp_path)
    for number in range(3):
        assert await tier.get(make_key(number), deadline=soon()) is None
    assert await tier.get(make_key(3), deadline=soon()) is not None
    assert tier.num_quarantined == 2
    assert await numbers_in(tier, 4) == [3]
    await put(tier, 0, 1, 2)
    await tier.aclose()


_WRITER = """
import asyncio, sys
from pathlib import Path
from kvstore.runtime.deadline import Deadline
from kvstore.testing.records import make_record
from kvstore.tiers.filesystem import FilesystemTier

async def main():
    tier = await FilesystemTier.open(Path(sys.argv[1]), budget_bytes=int(sys.argv[2]))
    async def write(first):
        for number in range(first, 100_000, 4):
            await tier.put(make_record(number, 5000), deadline=Deadline.after(30))
            print(number, flush=True)
    await asyncio.gather(*map(write, range(4)))

asyncio.run(main())
"""


@pytest.mark.parametrize("num_before_kill", [1, 40, 170])
async def test_a_killed_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_before_kill: int) -> None:
    """SIGKILL while four writers put and evict: the next owner reads the index, and it is what the directory holds."""
    command = [sys.executable, "-c", _WRITER, str(tmp_path), str(60 * COST)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    acknowledged = [int(writer.stdout.readline()) for _ in range(num_before_kill)]
    writer.kill()
    acknowledged += map(int, writer.stdout.read().split())
    writer.wait()
    writer.stdout.close()
    forbid_reading_the_directory(monkeypatch)
    tier = await open_tier(tmp_path, num_records=60)
    held = {entry.key async for entry in tier.scan()}
    there = {path.name for path in (tmp_path / "v1").rglob("*") if path.is_file()}
    assert there <= {format_name(key).rpartition("/")[2] for key in held}  # no file is forgotten
    assert len(held) - len(there) <= 4  # at most what was about to be written, which is a miss
    for number in acknowledged[-40:]:  # of the last 60, what was acknowledged is not evicted yet, but for races
        record = await tier.get(make_key(number), deadline=soon())
        assert record is not None and record.data == make_record(number, 5000).data
    for key in held:
        await tier.get(key, deadline=soon())
    assert tier.num_quarantined == 0
    assert (await tier.usage(deadline=soon())).num_records == len(there)
    await tier.aclose()


async def test_a_second_writer_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A put that finds a file which the index does not know leaves both as they are, and it is known from then on."""
    tier = await open_tier(tmp_path)
    path = tmp_path / format_name(make_key(1))
    path.parent.mkdir(parents=True)
    path.write_bytes(make_record(1, 300).data)
    assert await tier.put(make_record(1, PAYLOAD_BYTES), deadline=soon()) is PutOutcome.EXISTS
    await tier.aclose()
    forbid_reading_the_directory(monkeypatch)
    tier = await open_tier(tmp_path)
    assert await tier.head([make_key(1)], deadline=soon()) == [492]
    await tier.aclose()


def test_after_a_power_failure_the_log_is_not_believed(tmp_path: Path) -> None:
    """A log that was not ended is right for as long as the machine runs; one that was ended always is."""
    log = IndexLog(tmp_path / "index", BOOT)
    log.begin([])
    log.added(make_key(1), 100)
    assert IndexLog(tmp_path / "index", OTHER_BOOT).resume() is None
    assert IndexLog(tmp_path / "index", BOOT).resume() == {pack_key(make_key(1)): 100}
    log.end([])
    later = IndexLog(tmp_path / "index", OTHER_BOOT)
    assert later.resume() == {pack_key(make_key(1)): 100}
    later.added(make_key(2), 200)
    assert IndexLog(tmp_path / "index", BOOT).resume() is None
    later.drop()
    later.added(make_key(3), 200)  # without a log nothing is noted
    assert later.resume() is None


KEYS = [make_key(number) for number in range(8)]


@given(
    st.lists(st.tuples(st.sampled_from(["added", "removed", "restart", "end"]), st.sampled_from(KEYS)), max_size=60),
    st.integers(0, ENTRY_BYTES - 1),
)
def test_the_log_against_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, object]], torn: int
) -> None:
    """Additions and removals, restarts, folds and a torn last entry: the log has the same records as a dictionary."""
    path = tmp_path_factory.mktemp("log") / "index"
    kept, index._TAIL_ENTRIES_MIN = index._TAIL_ENTRIES_MIN, 3  # so that it folds all the time
    try:
        held: dict[bytes, int] = {}
        log = IndexLog(path, BOOT)
        log.begin([])
        for number, (step, key) in enumerate(steps):
            match step:
                case "added":
                    log.added(key, number)
                    held[pack_key(key)] = number
                case "removed":
                    log.removed(key)
                    held.pop(pack_key(key), None)
                case _:
                    if step == "end":
                        log.end(list(held)[::-1])
                    with path.open("ab") as file:
                        file.write(b"x" * torn)
                    log = IndexLog(path, BOOT)
                    assert log.resume() == held
        assert replay(path.read_bytes(), BOOT) == held
    finally:
        index._TAIL_ENTRIES_MIN = kept
    assert all(pack_key(unpack_key(packed)) == packed for packed in held)


def test_damage_anywhere_is_found(tmp_path: Path) -> None:
    """No flipped byte is believed, in the head, the snapshot or the tail; a cut in the tail only shortens it."""
    log = IndexLog(tmp_path / "index", BOOT)
    log.begin([(pack_key(make_key(number)), number) for number in range(3)])
    for number in range(3, 6):
        log.added(make_key(number), number)
    data = (tmp_path / "index").read_bytes()
    assert len(data) == 7 * ENTRY_BYTES
    unused = range(48, ENTRY_BYTES)  # of the head
    for at in set(range(len(data))) - set(unused):
        changed = bytearray(data)
        changed[at] ^= 0x10
        held = replay(bytes(changed), OTHER_BOOT if at in (6, 7) else BOOT)
        assert held is None or (at in (6, 7) and len(held) == 6), at
    for length in range(len(data)):
        held = replay(data[:length], BOOT)
        assert (held is None) == (length < 4 * ENTRY_BYTES)
        assert held is None or len(held) == length // ENTRY_BYTES - 1
