"""The filesystem tier: an index in memory, files behind it, blocking work in a few threads."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from kvstore.errors import Closed, InvalidRequest, Unavailable
from kvstore.format.record import Record
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.runtime.background import Background, Work, outcome_of
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.base import Entry, PutOutcome, Tier, TierUsage
from kvstore.tiers.filesystem.files import Fsync, RecordFiles
from kvstore.tiers.filesystem.index import Index, cost_bytes
from kvstore.tiers.verify import allocate_exactly

T = TypeVar("T")

_THREADS = 4
_JOBS_MAX = 256
_SCANNED_AT_ONCE = 1024
_CLOSE_S = 5.0
_OVER_BUDGET = "the records that are being written exceed the budget: set a larger disk_bytes"
_QUARANTINE_BYTES_MAX, _QUARANTINE_SHARE = 256 << 20, 1 / 16
"""Limits of the quarantine: in bytes, and as a share of the budget, which includes it."""


class FilesystemTier(Tier):
    """Stores each record as a file, at most `budget_bytes` of them; make one with `open`.

    Over its budget it evicts the least recently used records one by one. That is the last resort: retention, which
    evicts whole prefixes, should act before.

    A full disk answers `FULL` and does not affect reads. A call that ends at its deadline leaves its thread running. If
    too many threads are busy (a frozen network filesystem), calls are refused at once.
    """

    name = "filesystem"

    def __init__(self, files: RecordFiles, index: Index, *, is_beside: bool = False) -> None:
        self._files = files
        files.on_quarantine = self._quarantined
        self._index = index
        self._is_beside = is_beside
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvstore-filesystem")
        self._background = Background("filesystem tier")
        self._removals: dict[RecordKey, asyncio.Event] = {}  # of files that are being removed; set at their end
        self._num_jobs = 0
        self._jobs_lock = threading.Lock()

    @classmethod
    async def open(cls, root: Path, *, budget_bytes: int, fsync: Fsync = "none") -> FilesystemTier:
        """Own `root`: lock it, clean up after an earlier owner, load the index.

        Takes about 2 s for a million records. After a power failure, or without the index, every file is examined,
        which takes a minute. Records over the budget are removed, the least recently used first.

        Raises:
            Unavailable: Another process owns the directory, or it cannot be used; the message names the next step.
        """
        if budget_bytes <= 0:
            raise InvalidRequest("the filesystem tier's budget must be positive", budget_bytes=budget_bytes)
        quarantine_bytes = min(_QUARANTINE_BYTES_MAX, int(budget_bytes * _QUARANTINE_SHARE))
        files = RecordFiles(Path(root), fsync, quarantine_bytes_max=quarantine_bytes)
        index = Index(budget_bytes)

        def recover() -> None:
            files.open()
            index.load(files.held())
            index.quarantined_bytes = files.quarantined_bytes
            for victim in index.shrink():
                files.remove(victim)

        return await cls(files, index)._begun(recover)

    @classmethod
    async def open_beside(cls, root: Path) -> FilesystemTier:
        """Open a directory that another process may own, to read its records and to quarantine corrupt ones.

        To the owner, a quarantined record is missing, as after an eviction. Do not put records.

        Raises:
            Unavailable: There is no such directory, or it cannot be read.
        """
        files = RecordFiles(Path(root))
        index = Index(sys.maxsize)

        def look() -> None:
            for key, num_bytes in files.names():
                index.add(key, num_bytes)

        return await cls(files, index, is_beside=True)._begun(look)

    async def _begun(self, fill: Callable[[], None]) -> FilesystemTier:
        """The tier, once a thread has filled its index."""
        filling = self._pool.submit(fill)
        try:
            await asyncio.wrap_future(filling)
        except BaseException:
            self._pool.shutdown(wait=False, cancel_futures=True)
            # not before the thread has ended: if the caller was cancelled, it may have yet to take the lock
            filling.add_done_callback(lambda _: self._files.close())
            raise
        return self

    async def head(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> list[int | None]:
        self._check(deadline)
        if self._is_beside:  # the owner may have put and removed records since the directory was listed
            self._check_load()
            looking = asyncio.wrap_future(self._submit(self._files.sizes, list(keys)))
            return await outcome_of(looking, f"look for records in {self._files.root}", deadline)
        return [self._index.size_of(key) for key in keys]

    async def get(
        self, key: RecordKey, *, deadline: Deadline, allocate: Callable[[int], memoryview] | None = None
    ) -> Record | None:
        self._check(deadline)
        num_bytes = self._index.size_of(key)
        if num_bytes is None:
            return None
        self._index.touch(key)
        self._check_load()
        reading = self._submit(self._files.read, key, allocate_exactly(num_bytes, allocate))

        async def read() -> Record | None:
            record = await asyncio.wrap_future(reading)
            self._index.quarantined_bytes = self._files.quarantined_bytes
            if record is None and key in self._index:
                await self._job(self._files.is_gone, key, removed=[key])()
            return record

        try:
            return await self._run_to_end(read, "read a record", deadline)
        finally:
            reading.cancel()  # removes it from the queue if no thread has started it

    async def put(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        self._check(deadline)
        await self._until_removed([record.key], deadline)
        if record.key in self._index:
            self._index.touch(record.key)
            return PutOutcome.EXISTS
        self._check_load()
        victims = self._index.reserve(record.num_bytes)
        if victims is None:
            self.no_room = _OVER_BUDGET
            return PutOutcome.FULL
        if victims and self.on_drop is not None:
            self.on_drop(victims)
        write = self._job(self._files.write, record, victims, removed=victims)

        async def store() -> PutOutcome:
            try:
                outcome, num_bytes = await write()
            finally:
                self._index.unreserve(record.num_bytes)
            self.no_room = self._files.no_room
            if num_bytes:
                self._index.add(record.key, num_bytes)
            return outcome

        return await self._run_to_end(store, "write a record", deadline)

    def cost_bytes(self, num_bytes: int) -> int:
        return cost_bytes(num_bytes)

    async def delete(self, key: RecordKey, *, deadline: Deadline) -> bool:
        self._check(deadline)
        await self._until_removed([key], deadline)
        if key not in self._index:
            return False
        return await self._run_to_end(self._job(self._files.remove, key, removed=[key]), "remove a record", deadline)

    async def delete_all(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        """As `Tier.delete_all`, in one job."""
        self._check(deadline)
        await self._until_removed(keys, deadline)
        if held := [key for key in keys if key in self._index]:
            await self._run_to_end(self._job(self._files.remove_all, held, removed=held), "remove records", deadline)

    async def quarantine(self, key: RecordKey, reason: str, *, seen: Record | None = None, deadline: Deadline) -> bool:
        self._check(deadline)
        if key not in self._index:
            return False
        quarantine = self._job(self._files.quarantine, key, reason, seen, removed=[key])

        async def update() -> bool:
            is_quarantined = await quarantine()
            self._index.quarantined_bytes = self._files.quarantined_bytes
            return is_quarantined

        return await self._run_to_end(update, "quarantine a record", deadline)

    async def scan(self, namespace: NamespaceId | None = None) -> AsyncIterator[Entry]:
        self._check_open()
        packed = self._index.packed()
        for start in range(0, len(packed), _SCANNED_AT_ONCE):
            for key, num_bytes in self._index.held(packed[start : start + _SCANNED_AT_ONCE]):
                if namespace is None or key.namespace == namespace:
                    yield Entry(key, num_bytes)
            await asyncio.sleep(0)
            self._check_open()

    async def put_manifest(self, namespace: NamespaceId, manifest: bytes, *, deadline: Deadline) -> None:
        self._check(deadline)
        writing = self._job(self._files.write_manifest, namespace, bytes(manifest))
        await self._run_to_end(writing, "write a manifest", deadline)

    async def get_manifest(self, namespace: NamespaceId, *, deadline: Deadline) -> bytes | None:
        self._check(deadline)
        reading = self._job(self._files.read_manifest, namespace)
        return await self._run_to_end(reading, "read a manifest", deadline)

    async def usage(self, *, deadline: Deadline) -> TierUsage:
        self._check(deadline)
        index, files = self._index, self._files
        if files.no_room:
            await self._run_to_end(self._job(files.look_for_room), "read the size of the disk", deadline)
        used_bytes = index.used_bytes + files.quarantined_bytes
        return TierUsage(len(index), used_bytes, index.limit_bytes, self.num_quarantined, "disk_bytes", files.no_room)

    async def aclose(self) -> None:
        """Wait up to five seconds for running writes, then release the directory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            ending = threading.Thread(target=self._end, daemon=True)  # a frozen disk must not delay us
            ending.start()
            give_up = Deadline.after(_CLOSE_S)
            while ending.is_alive() and not give_up.expired:
                await asyncio.sleep(0.002)
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._files.close()
            await self._background.aclose()

    def _end(self) -> None:
        self._pool.shutdown()
        self._files.end_log(self._index.in_order())

    def _job(self, function: Callable[..., T], *args: Any, removed: Sequence[RecordKey] = ()) -> Work[T]:
        """A call in a thread, queued now, and refused while too many wait.

        Args:
            removed: Records whose files it removes; the index loses them now. They come back if the call fails or
                returns False, and their names have files: the disk refused, or has other records. Puts of them wait.
        """
        self._check_load()
        future = self._submit(function, *args)
        ended = asyncio.Event()
        self._removals.update(dict.fromkeys(removed, ended))
        for key in removed:
            self._index.remove(key)

        async def run() -> T:
            is_done = False
            try:
                result = await asyncio.wrap_future(future)
                is_done = result is not False
                return result
            finally:
                if not is_done:
                    await self._put_back(removed)
                for key in removed:
                    if self._removals.get(key) is ended:
                        del self._removals[key]
                ended.set()

        return run

    async def _put_back(self, keys: Sequence[RecordKey]) -> None:
        """Have the index know the files that have these names, as far as the disk tells."""
        with suppress(Unavailable, Closed):
            sizes = await asyncio.wrap_future(self._submit(self._files.sizes, keys))
            for key, num_bytes in zip(keys, sizes, strict=True):
                if num_bytes is not None:
                    self._index.add(key, num_bytes)

    async def _until_removed(self, keys: Sequence[RecordKey], deadline: Deadline) -> None:
        """Wait until none of these records is being removed: until then its file may exist, and may stay."""
        for key in keys:
            while (removal := self._removals.get(key)) is not None:
                async with deadline.scope(f"waiting for the removal of an earlier record in {self._files.root}"):
                    await removal.wait()
        self._check_open()

    async def _run_to_end(self, work: Work[T], what: str, deadline: Deadline) -> T:
        """Run `work` to its end even if the caller is cancelled or out of time, so that index and files agree."""
        return await self._background.run_to_end(work, f"{what} in {self._files.root}", deadline)

    def _submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        try:
            future = self._pool.submit(function, *args)
        except RuntimeError as error:  # the pool was shut down
            raise Closed("the tier is closed", tier=self.name) from error
        with self._jobs_lock:
            self._num_jobs += 1
        future.add_done_callback(self._job_ended)
        return future

    def _job_ended(self, _: Future[Any]) -> None:
        with self._jobs_lock:
            self._num_jobs -= 1

    def _check_load(self) -> None:
        if self._num_jobs >= _JOBS_MAX:
            raise Unavailable(
                "too many calls wait for the disk: check its load and health", path=self._files.root, limit=_JOBS_MAX
            )
