"""The S3 tier: one object per record, written once by a conditional put."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager

from kvstore.errors import CorruptRecord, Unavailable
from kvstore.format.names import ROOT, format_name, manifest_name, namespace_root, record_key
from kvstore.format.record import MAX_RECORD_BYTES, Record
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.runtime.background import gather_all
from kvstore.runtime.buffers import fresh_buffer
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.io_loops import IoLoop
from kvstore.runtime.meters import Meters
from kvstore.tiers.base import Entry, PutOutcome, Tier, TierUsage
from kvstore.tiers.locations import S3Location
from kvstore.tiers.s3.client import Credentials, S3Client
from kvstore.tiers.s3.failures import Conflict, Taken
from kvstore.tiers.s3.objects import allocate_once
from kvstore.tiers.verify import QuarantineBudget, allocate_exactly, is_same, open_off_loop

_log = logging.getLogger(__name__)

_CONFLICT_ATTEMPTS = 4
_CONFLICT_WAIT_S = 0.05
_SCAN_STEP_S = 20.0
"""For a thousand names, which take a second. A bucket that freezes during a walk costs this time once."""
_REQUESTS_MAX = 32


class S3Tier(Tier):
    """Stores records under a prefix of a bucket; make one with `open`.

    Args:
        client: Owned by the tier.
        prefix: Prefix of all names, without slashes at its ends; may be empty.
    """

    name = "s3"

    def __init__(self, client: S3Client, prefix: str) -> None:
        self._client = client
        self._root = f"{prefix}/" if prefix else ""
        self._quarantine_budget = QuarantineBudget()

    @classmethod
    async def open(
        cls,
        location: S3Location,
        *,
        credentials: Credentials | None = None,
        meters: Meters | None = None,
        io_loops: Sequence[IoLoop] = (),
    ) -> S3Tier:
        """Make a tier on a bucket that exists; no request is sent yet.

        At most 32 requests run at a time, fewer while the endpoint answers `SlowDown`. Further ones wait within their
        deadline.

        Args:
            credentials: `None`: those of the AWS environment (variables, profile, instance role).
            meters: Counts `s3_requests{verb} s3_retries s3_throttled s3_received_bytes s3_sent_bytes`.
            io_loops: Where the bytes of records move, and `allocate` is called; none: on the caller's loop. They stay
                the caller's.

        Raises:
            InvalidRequest: The AWS settings are wrong.
        """
        client = await S3Client.open(
            location, credentials=credentials, num_connections=_REQUESTS_MAX, meters=meters, io_loops=io_loops
        )
        return cls(client, location.prefix)

    async def head(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> list[int | None]:
        """One request for each key, a limited number at a time."""
        self._check(deadline)
        async with self._until(deadline, "looking for records"):
            found = await gather_all(self._client.head(self._name(key)) for key in keys)
        return [None if one is None else one[0] for one in found]

    async def get(
        self, key: RecordKey, *, deadline: Deadline, allocate: Callable[[int], memoryview] | None = None
    ) -> Record | None:
        self._check(deadline)

        def receive_into(num_bytes: int) -> memoryview:
            if num_bytes > MAX_RECORD_BYTES:
                raise CorruptRecord("the object is too large for a record", limit=MAX_RECORD_BYTES, seen=num_bytes)
            return allocate_exactly(num_bytes, allocate)

        place, before = allocate_once(receive_into), None
        for _ in range(2):  # bytes that were damaged on their way differ when they are read again
            try:
                async with self._until(deadline, "reading a record"):
                    found = await self._client.get_record(self._name(key), place)
            except CorruptRecord as error:
                await self._quarantine_too_large(key, str(error), deadline)
                return None
            if found is None:
                return None
            # outside the deadline: a busy processor must not count as a failure of S3
            opened = await open_off_loop(found.data, key)
            if isinstance(opened, Record):
                return opened
            if before is not None and is_same(found.data, before):
                await self._quarantine(key, opened, found.tag, deadline)
                return None
            before = memoryview(bytes(found.data))
        _log.warning("a record of S3 was damaged on its way twice: check the network's devices key=%s %s", key, opened)
        return None

    async def put(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        self._check(deadline)
        async with self._until(deadline, "writing a record"):
            for _ in range(_CONFLICT_ATTEMPTS):
                try:
                    await self._client.put_record(self._name(record.key), record.data)
                except Taken:
                    return PutOutcome.EXISTS
                except Conflict:  # another put of the same name is in progress: retry when it has ended
                    await asyncio.sleep(_CONFLICT_WAIT_S)
                    continue
                return PutOutcome.STORED
        raise Unavailable("S3 could not decide between two puts of one name", bucket=self._client.bucket)

    async def delete(self, key: RecordKey, *, deadline: Deadline) -> bool:
        self._check(deadline)
        name = self._name(key)
        async with self._until(deadline, "removing a record"):
            if await self._client.head(name) is None:
                return False
            await self._client.delete(name)
            return True

    async def delete_all(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        """As `Tier.delete_all`: one request per thousand, if the endpoint can."""
        self._check(deadline)
        async with self._until(deadline, "removing records"):
            await self._client.delete_all([self._name(key) for key in keys])

    async def quarantine(self, key: RecordKey, reason: str, *, seen: Record | None = None, deadline: Deadline) -> bool:
        """Copy the object under `quarantine/` beside the records, then remove it. A later one replaces the copy. Once
        this process has 256 MiB there, the object is only removed.
        """
        self._check(deadline)
        if seen is None:
            return await self._quarantine(key, reason, None, deadline)
        async with self._until(deadline, "reading a corrupt record again"):
            found = await self._client.get_record(self._name(key), fresh_buffer)
        if found is None or not is_same(found.data, seen.data):
            return False
        return await self._quarantine(key, reason, found.tag, deadline)

    async def _quarantine_too_large(self, key: RecordKey, reason: str, deadline: Deadline) -> None:
        """Quarantine an object that was not read, unless one of a possible size has replaced it."""
        async with self._until(deadline, "looking at a corrupt record"):
            found = await self._client.head(self._name(key))
        if found is not None and found[0] > MAX_RECORD_BYTES:
            await self._quarantine(key, reason, found[1], deadline, is_record=False)

    async def _quarantine(
        self, key: RecordKey, reason: str, tag: str | None, deadline: Deadline, *, is_record: bool = True
    ) -> bool:
        """Quarantine the object that had this ETag (`None`: any). False: it is gone, or another one by now.

        An object that cannot be a record of ours is always kept.
        """
        target = f"{self._root}quarantine/{format_name(key)}"
        keeps = self._quarantine_budget.keeps if is_record else lambda _: True
        async with self._until(deadline, "quarantining a record"):
            was_there = await self._client.move(self._name(key), target, tag, keeps=keeps)
        return self._quarantined(key, reason, target if was_there else None)

    async def scan(self, namespace: NamespaceId | None = None) -> AsyncIterator[Entry]:
        self._check_open()
        prefix = self._root + (namespace_root(namespace) if namespace is not None else f"{ROOT}/")
        listing = self._client.list(prefix)
        while True:
            self._check_open()
            async with self._until(Deadline.after(_SCAN_STEP_S), "listing records"):
                answer = await anext(listing, None)
            if answer is None:
                return
            for name, num_bytes, age_s in answer:
                if (key := record_key(name.removeprefix(self._root))) is not None:
                    yield Entry(key, num_bytes, age_s)

    async def put_manifest(self, namespace: NamespaceId, manifest: bytes, *, deadline: Deadline) -> None:
        self._check(deadline)
        async with self._until(deadline, "writing a manifest"):
            await self._client.put(self._root + manifest_name(namespace), bytes(manifest), if_absent=False)

    async def get_manifest(self, namespace: NamespaceId, *, deadline: Deadline) -> bytes | None:
        self._check(deadline)
        async with self._until(deadline, "reading a manifest"):
            found = await self._client.get(self._root + manifest_name(namespace), fresh_buffer)
        return None if found is None else bytes(found.data)

    async def usage(self, *, deadline: Deadline) -> TierUsage:
        """Only the number of quarantined records: counting records would mean a scan."""
        self._check(deadline)
        return TierUsage(None, None, None, self._num_quarantined)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            await self._client.aclose()

    def _until(self, deadline: Deadline, what: str) -> AbstractAsyncContextManager[None]:
        client = self._client
        where = f"bucket={client.bucket} endpoint={client.endpoint}"
        return deadline.scope(f"{what} in S3 ({where}; check its load and the network)")

    def _name(self, key: RecordKey) -> str:
        return self._root + format_name(key)
