"""What the filesystem tier promises beyond the contract: budget, recovery, one owner, limits, clear errors."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.format.names import format_name, pack_key
from kvstore.model.keys import RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.testing.records import make_key, make_record
from kvstore.testing.waiting import soon, until
from kvstore.tiers.base import PutOutcome
from kvstore.tiers.filesystem import FilesystemTier
from kvstore.tiers.filesystem.files import RecordFiles
from kvstore.tiers.filesystem.index import cost_bytes

PAYLOAD_BYTES = 10_000
COST = cost_bytes(make_record(0, PAYLOAD_BYTES).num_bytes)


async def open_tier(root: Path, num_records: int = 100, **options: object) -> FilesystemTier:
    return await FilesystemTier.open(root, budget_bytes=num_records * COST, **options)


async def filled(root: Path, count: int, num_records: int = 100) -> FilesystemTier:
    tier = await open_tier(root, num_records)
    for number in range(count):
        assert await tier.put(make_record(number, PAYLOAD_BYTES), deadline=soon()) is PutOutcome.STORED
    return tier


async def numbers_in(tier: FilesystemTier, count: int) -> list[int]:
    sizes = await tier.head([make_key(number) for number in range(count)], deadline=soon())
    return [number for number, size in enumerate(sizes) if size is not None]


async def test_least_recently_used_file_gives_way(tmp_path: Path) -> None:
    """At the budget the record that was used longest ago is removed from the disk."""
    tier = await open_tier(tmp_path, num_records=3)
    for number in range(3):
        await tier.put(make_record(number, PAYLOAD_BYTES), deadline=soon())
    await tier.get(make_key(0), deadline=soon())
    await tier.put(make_record(3, PAYLOAD_BYTES), deadline=soon())
    assert await numbers_in(tier, 4) == [0, 2, 3]
    assert not (tmp_path / format_name(make_key(1))).exists()
    usage = await tier.usage(deadline=soon())
    assert (usage.num_records, usage.used_bytes) == (3, 3 * COST)
    await tier.aclose()


async def test_a_start_that_is_given_up_leaves_the_directory_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its thread takes the lock only after the caller was cancelled."""
    has_begun, may_go_on, has_lock = threading.Event(), threading.Event(), threading.Event()
    open_files = RecordFiles.open

    def open_late(files: RecordFiles) -> None:
        has_begun.set()
        may_go_on.wait(10)
        open_files(files)
        has_lock.set()

    with monkeypatch.context() as late:
        late.setattr(RecordFiles, "open", open_late)
        opening = asyncio.create_task(open_tier(tmp_path))
        await asyncio.to_thread(has_begun.wait)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
    may_go_on.set()
    await asyncio.to_thread(has_lock.wait)
    tier = await until(lambda: open_tier(tmp_path), 10, despite=Unavailable)
    await tier.aclose()


async def test_what_leaves_the_index_leaves_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more removals than may wait on a slow disk some are refused, before the index forgets their records: no file
    is left over that nothing counts.
    """
    tier = await filled(tmp_path, 300, num_records=300)
    hold, remove = threading.Event(), RecordFiles.remove
    monkeypatch.setattr(RecordFiles, "remove", lambda *args: hold.wait(20) and remove(*args))
    removals = [asyncio.ensure_future(tier.delete(make_key(number), deadline=soon())) for number in range(300)]
    await asyncio.sleep(0.05)
    hold.set()
    outcomes = await asyncio.gather(*removals, return_exceptions=True)
    assert outcomes[:256] == [True] * 256
    assert all(isinstance(outcome, Unavailable) for outcome in outcomes[256:])
    assert await numbers_in(tier, 300) == list(range(256, 300))
    assert [number for number in range(300) if (tmp_path / format_name(make_key(number))).exists()] == [
        *range(256, 300)
    ]
    await tier.aclose()


async def test_many_writers_stay_within_the_budget(tmp_path: Path) -> None:
    """Concurrent puts reserve their room: the files never cost more than the budget."""
    tier = await open_tier(tmp_path, num_records=5)
    outcomes = await asyncio.gather(
        *(tier.put(make_record(number, PAYLOAD_BYTES), deadline=soon()) for number in range(30))
    )
    assert set(outcomes) <= {PutOutcome.STORED, PutOutcome.FULL}
    files = [path for path in (tmp_path / "v1").rglob("*") if path.is_file()]
    assert 1 <= len(files) <= 5
    assert len(await numbers_in(tier, 30)) == len(files)
    await tier.aclose()


async def test_larger_than_the_budget(tmp_path: Path) -> None:
    """A record that can never fit is FULL and costs the others nothing."""
    tier = await filled(tmp_path, 2)
    assert await tier.put(make_record(9, 200 * COST), deadline=soon()) is PutOutcome.FULL
    assert await numbers_in(tier, 2) == [0, 1]
    await tier.aclose()


async def test_recovery_without_an_index(tmp_path: Path) -> None:
    """A new owner finds whole records, clears temporary files, quarantines wrong sizes, and leaves foreign files."""
    await (await filled(tmp_path, 6)).aclose()
    (tmp_path / "index").unlink()
    path = {number: tmp_path / format_name(make_key(number)) for number in range(6)}
    os.truncate(path[0], 5000)
    path[1].write_bytes(path[1].read_bytes() + b"x")
    path[2].write_bytes(b"")
    path[3].rename(path[4])  # now misnamed
    (tmp_path / "tmp" / "7.tmp").write_bytes(b"half a record")
    foreign = [tmp_path / "v1" / "notes.txt", tmp_path / "holiday.jpg", path[5].parent / "thumbs.db"]
    for file in foreign:
        file.write_bytes(b"not ours")
    tier = await open_tier(tmp_path)
    assert await numbers_in(tier, 6) == [5]
    assert tier.num_quarantined == 4
    assert list((tmp_path / "tmp").iterdir()) == []
    assert all(file.read_bytes() == b"not ours" for file in foreign)
    assert await tier.put(make_record(0, PAYLOAD_BYTES), deadline=soon()) is PutOutcome.STORED
    await tier.aclose()


async def test_recovery_over_the_budget(tmp_path: Path) -> None:
    """With a smaller budget than before, the oldest files go."""
    await (await filled(tmp_path, 5)).aclose()
    (tmp_path / "index").unlink()
    for number in range(5):
        os.utime(tmp_path / format_name(make_key(number)), ns=(0, 1_000_000_000 * (10 - number)))
    tier = await open_tier(tmp_path, num_records=2)
    assert await numbers_in(tier, 5) == [0, 1]
    assert len([path for path in (tmp_path / "v1").rglob("*") if path.is_file()]) == 2
    await tier.aclose()


async def test_one_owner(tmp_path: Path) -> None:
    """A second owner is refused with the directory's name, and reads when an embedded service goes away by itself;
    after the first has closed it is let in."""
    first = await open_tier(tmp_path)
    with pytest.raises(Unavailable, match=f"another process has this directory open.*embedded:.*{tmp_path}"):
        await open_tier(tmp_path)
    await first.aclose()
    await (await open_tier(tmp_path)).aclose()


async def test_root_cannot_be_made(tmp_path: Path) -> None:
    """A file where the directory should be: the error names the path, the errno and what to do."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(Unavailable, match=r"cannot open the directory: .* errno=ENOTDIR path=.*file/records"):
        await open_tier(tmp_path / "file" / "records")


async def test_file_that_vanished(tmp_path: Path) -> None:
    """Another program removed a file: a miss, removed from the index, and the record can be put again."""
    tier = await filled(tmp_path, 1)
    (tmp_path / format_name(make_key(0))).unlink()
    assert await tier.get(make_key(0), deadline=soon()) is None
    assert await numbers_in(tier, 1) == []
    assert (await tier.usage(deadline=soon())).used_bytes == 0
    assert await tier.put(make_record(0, PAYLOAD_BYTES), deadline=soon()) is PutOutcome.STORED
    await tier.aclose()


async def test_symlink_is_not_followed(tmp_path: Path) -> None:
    """A link or a pipe under a record's name is neither followed nor waited for: it is quarantined."""
    tier = await filled(tmp_path / "records", 1)
    path = tmp_path / "records" / format_name(make_key(0))
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert await tier.get(make_key(0), deadline=soon()) is None
    assert await tier.put(make_record(0, PAYLOAD_BYTES), deadline=soon()) is PutOutcome.STORED
    path.unlink()
    os.mkfifo(path)
    assert await tier.get(make_key(0), deadline=soon()) is None
    assert tier.num_quarantined == 2
    await tier.aclose()


async def test_quarantine_is_bounded(tmp_path: Path) -> None:
    """Damaged records are kept, the newest 64 of them, where the budget is large enough."""
    tier = await filled(tmp_path, 70, num_records=2000)
    for number in range(70):
        await tier.quarantine(make_key(number), "a test", deadline=soon())
    assert tier.num_quarantined == 70
    assert len(list((tmp_path / "quarantine").iterdir())) == 64
    await tier.aclose()


async def test_slow_disk_costs_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that hangs costs a call its deadline, a flood of calls is refused, and the late put still counts."""
    tier = await open_tier(tmp_path, num_records=1000)
    hold = threading.Event()
    write = RecordFiles.write
    monkeypatch.setattr(RecordFiles, "write", lambda *args: hold.wait(20) and write(*args))
    records = [make_record(number, 10) for number in range(257)]
    waiting = [asyncio.ensure_future(tier.put(record, deadline=Deadline.after(1))) for record in records[:256]]
    await asyncio.sleep(0.2)
    started_s = time.monotonic()
    with pytest.raises(Unavailable, match="too many calls"):
        await tier.put(records[256], deadline=soon())
    assert time.monotonic() - started_s < 1
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert time.monotonic() - started_s < 4
    assert all("before the deadline" in str(outcome) for outcome in outcomes)
    hold.set()
    await until(lambda: numbers_in(tier, 257), 20, holds=lambda numbers: len(numbers) == 256)
    await tier.aclose()


REMOVALS: dict[str, tuple[str, Callable[[FilesystemTier], Awaitable[object]]]] = {
    "delete": ("remove", lambda tier: tier.delete(make_key(0), deadline=soon())),
    "delete_all": ("remove_all", lambda tier: tier.delete_all([make_key(0)], deadline=soon())),
    "quarantine": ("quarantine", lambda tier: tier.quarantine(make_key(0), "a test", deadline=soon())),
    "for another one": ("remove", lambda tier: tier.put(make_record(9, PAYLOAD_BYTES), deadline=soon())),
}


@pytest.mark.parametrize("how", REMOVALS)
async def test_a_record_that_comes_again_while_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The disk is slow to remove a file, and the same record is put at that time: it is stored again, and not mistaken
    for the old one."""
    tier = await filled(tmp_path, 2, num_records=2)
    record = make_record(0, PAYLOAD_BYTES)
    method, remove = REMOVALS[how]
    began, hold, slow = threading.Event(), threading.Event(), getattr(RecordFiles, method)

    def slowly(*args: object) -> object:
        began.set()
        hold.wait(20)
        return slow(*args)

    monkeypatch.setattr(RecordFiles, method, slowly)
    removal = asyncio.ensure_future(remove(tier))
    assert await asyncio.to_thread(began.wait, 20)
    monkeypatch.undo()
    put = asyncio.ensure_future(tier.put(record, deadline=soon()))
    await asyncio.wait({put}, timeout=0.1)
    hold.set()
    await removal
    assert await put is PutOutcome.STORED
    stored = await tier.get(record.key, deadline=soon())
    assert stored is not None and stored.data == record.data
    await tier.aclose()


async def test_a_record_that_goes_and_comes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record is deleted and put again while a slow disk looks for the deleted one: the new one is counted."""
    tier = await filled(tmp_path, 1)
    hold, read, record = threading.Event(), RecordFiles.read, make_record(0, PAYLOAD_BYTES)
    (tmp_path / format_name(record.key)).rename(tmp_path / "aside")
    looked = threading.Event()

    def slowly(*args: object) -> object:
        found = read(*args)
        looked.set()
        hold.wait(20)
        return found

    monkeypatch.setattr(RecordFiles, "read", slowly)
    getting = asyncio.ensure_future(tier.get(record.key, deadline=soon()))
    assert await asyncio.to_thread(looked.wait, 20)
    monkeypatch.undo()
    await tier.delete(record.key, deadline=soon())
    assert await tier.put(record, deadline=soon()) is PutOutcome.STORED
    hold.set()
    assert await getting is None
    assert await numbers_in(tier, 1) == [0]
    assert (await tier.usage(deadline=soon())).used_bytes == COST
    await tier.aclose()


async def test_a_corrupt_record_whose_reader_gave_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is quarantined after its reader's deadline: a put of its name stores it, and is not told that it exists."""
    tier = await filled(tmp_path, 1)
    os.truncate(tmp_path / format_name(make_key(0)), 5000)
    hold, read = threading.Event(), RecordFiles.read
    monkeypatch.setattr(RecordFiles, "read", lambda *args: hold.wait(20) and read(*args))
    with pytest.raises(Unavailable, match="could not read a record"):
        await tier.get(make_key(0), deadline=Deadline.after(0.05))
    hold.set()
    give_up = Deadline.after(20)
    while await numbers_in(tier, 1) and not give_up.expired:
        await asyncio.sleep(0.01)
    assert tier.num_quarantined == 1
    assert await tier.put(make_record(0, PAYLOAD_BYTES), deadline=soon()) is PutOutcome.STORED
    await tier.aclose()


@pytest.mark.parametrize("how", REMOVALS)
async def test_a_removal_that_the_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The record is still there, is read and counted, and can be removed later."""
    tier = await filled(tmp_path, 2, num_records=2)
    unlink, rename = Path.unlink, Path.rename

    def refusing(call: Callable[..., object]) -> Callable[..., object]:
        def refuse(path: Path, *args: object, **options: object) -> object:
            if path.name == Path(format_name(make_key(0))).name:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return call(path, *args, **options)

        return refuse

    monkeypatch.setattr(Path, "unlink", refusing(unlink))
    monkeypatch.setattr(Path, "rename", refusing(rename))
    with pytest.raises(Unavailable, match="check the disk and the kernel log"):
        await REMOVALS[how][1](tier)
    monkeypatch.undo()
    assert await numbers_in(tier, 2) == [0, 1]
    assert (await tier.usage(deadline=soon())).used_bytes == 2 * COST
    assert await tier.get(make_key(0), deadline=soon()) is not None
    assert await tier.delete(make_key(0), deadline=soon())
    assert not (tmp_path / format_name(make_key(0))).exists()
    await tier.aclose()


async def test_a_scan_of_many_lets_others_work(tmp_path: Path) -> None:
    """Also if who scans does not wait in between. What is removed meanwhile is not listed."""
    tier = await open_tier(tmp_path)
    vars(tier)["_index"].load({pack_key(make_key(number)): PAYLOAD_BYTES for number in range(5000)})
    turns = 0

    async def work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    working = asyncio.ensure_future(work())
    listed = set[RecordKey]()
    async for entry in tier.scan():
        if not listed:
            await tier.delete(make_key(4999), deadline=soon())
            turns = 0
        listed.add(entry.key)
    working.cancel()
    assert listed == set(map(make_key, range(4999)))
    assert turns >= 4
    await tier.aclose()


async def test_fsync_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`data` flushes each record before it gets its name, `none` flushes nothing, anything else is refused."""
    synced: list[int] = []
    monkeypatch.setattr("os.fdatasync", synced.append)
    for policy, expected in (("none", 0), ("data", 1)):
        tier = await open_tier(tmp_path / policy, fsync=policy)
        await tier.put(make_record(1), deadline=soon())
        assert len(synced) == expected
        await tier.aclose()
    with pytest.raises(InvalidRequest, match="fsync"):
        await open_tier(tmp_path / "x", fsync="always")


async def test_directories_are_private(tmp_path: Path) -> None:
    """Pages reveal prompts: only the owner may read them."""
    tier = await filled(tmp_path / "records", 1)
    assert (tmp_path / "records").stat().st_mode & 0o077 == 0
    assert (tmp_path / "records" / format_name(make_key(0))).stat().st_mode & 0o077 == 0
    await tier.aclose()


async def test_disk_that_becomes_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel makes a failing disk read-only under us: writes name it and the next step, reads go on."""
    tier = await filled(tmp_path, 2)

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("os.write", "os.link", "pathlib.Path.unlink", "pathlib.Path.rename"):
        monkeypatch.setattr(name, refuse)
    for refused in (
        tier.put(make_record(5, PAYLOAD_BYTES), deadline=soon()),
        tier.delete(make_key(0), deadline=soon()),
        tier.quarantine(make_key(1), "a test", deadline=soon()),
    ):
        with pytest.raises(Unavailable, match=r"mount the filesystem writable.*EROFS"):
            await refused
    monkeypatch.undo()
    await tier.aclose()
    tier = await open_tier(tmp_path)
    assert await numbers_in(tier, 6) == [0, 1]
    for number in range(2):
        assert await tier.get(make_key(number), deadline=soon()) is not None
    await tier.aclose()
