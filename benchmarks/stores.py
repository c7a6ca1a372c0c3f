"""The clients that are measured, in one shape: the service's, our tiers', redis-py."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.ceilings import Mover
from benchmarks.measure import Amounts, Row, Work, measure_in_turn, windowed
from benchmarks.node import Node
from benchmarks.pages import Batch, RecordPages
from kvstore.api import Ack, LeasedRecord, PageStore, Retention, SaveOutcome
from kvstore.format.names import format_name
from kvstore.format.record import MAX_RECORD_BYTES, Record, open_record
from kvstore.model.keys import RecordKey
from kvstore.testing.waiting import soon
from kvstore.tiers.base import PutOutcome, Tier

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from kvstore.testing.servers import CephRgw
    from kvstore.tiers.s3 import S3Tier

from kvstore.testing.program import Say

__all__ = [
    "SAVE_MEMORY_BYTES",
    "RedisPy",
    "Service",
    "ServiceOverTier",
    "Store",
    "TierStore",
    "fill",
    "open_s3_tier",
    "store_rows",
]

SAVE_MEMORY_BYTES = 64 << 20
"""As an engine's ranks have."""
_BUCKET = "kvstore-benchmark"


class Store(ABC):
    """Moves one batch of records at a time.

    Attributes:
        name: What its rows are called.
        verbs: What it is measured at.
    """

    name: str
    verbs: tuple[str, ...] = ("put", "get")

    async def aclose(self) -> None:  # noqa: B027 - not every store has something to close
        """Release what it holds."""

    @abstractmethod
    async def put(self, record: Record) -> None:
        """Store one record.

        Raises:
            RuntimeError: It was not stored.
        """

    async def put_all(self, batch: Batch, in_flight: int) -> None:
        """Put every record of a batch; errors as `put`."""
        await windowed((partial(self.put, record) for record in batch.records), in_flight)

    async def prepare(self, record: Record) -> None:
        """Put one record that will be got, where a get reads the place that is measured."""
        await self.put(record)

    async def prepared(self, batch: Batch) -> None:  # noqa: B027 - most need nothing
        """Return when all records of a batch can be got."""

    async def occupy(self, record: Record) -> None:
        """Put one record that is never got."""
        await self.put(record)

    def num_connections(self, size_bytes: int, in_flight: int) -> int:
        """Connections that carry records of a size at the same time. The ceiling gets the same number."""
        return 1

    def cpu_s(self) -> float:
        """Processor time so far of the processes whose cost counts."""
        return time.process_time()

    @abstractmethod
    async def get_all(self, batch: Batch, targets: Sequence[memoryview], in_flight: int) -> list[memoryview]:
        """Every record of a batch that was put; our own clients write them to `targets`."""

    @abstractmethod
    async def forget(self, batch: Batch) -> None:
        """Make room again where a store does not by itself."""


class Service(Store):
    """A running service with a memory tier, which makes room by itself."""

    name = "service"

    def __init__(self, store: PageStore) -> None:
        self._store = store

    async def put(self, record: Record) -> None:
        outcome = await self._store.save(_made_there(self._store, record), deadline=soon())
        if outcome is not SaveOutcome.STORED:
            raise RuntimeError(f"the service did not store a record: {outcome.value}")

    async def get_all(self, batch: Batch, targets: Sequence[memoryview], in_flight: int) -> list[memoryview]:
        staged = await self._store.stage(batch.query, deadline=soon())
        lease = staged.lease
        if lease is None or len(staged.keys) != len(batch.records):
            seen = f"{len(staged.keys)} records of {len(batch.records)}"
            raise RuntimeError(f"the service staged {seen}: {staged.cut or 'no reason given'}")
        keys = [record.key for record in batch.records]
        records = await self._store.load_many(lease, keys, deadline=soon())
        received: dict[bytes, memoryview] = {}

        def load(key: RecordKey, leased: LeasedRecord, target: memoryview) -> Callable[[], Awaitable[None]]:
            async def call() -> None:
                loaded = await leased.load(deadline=soon(), allocate=_into(target))
                with loaded.reading() as record:
                    received[key.prefix] = _copied(record.data, target)

            return call

        await windowed(map(load, keys, records, targets), in_flight)
        await self._store.release(lease)
        return [received[key.prefix] for key in keys]

    async def forget(self, batch: Batch) -> None:
        pass


class ServiceOverTier(Service):
    """A service with a slower tier behind it, which is measured: another service puts records there.

    Args:
        store: The service's client.
        node: The service, whose processor time counts too.
        writer: The other service's client.
        tier: The same tier, of this process, to make room again.
    """

    def __init__(self, store: PageStore, node: Node, writer: PageStore, tier: TierStore) -> None:
        super().__init__(store)
        self.name = f"service {tier.name}"
        self._node = node
        self._writer = writer
        self._tier = tier

    async def put(self, record: Record) -> None:
        await _save_hot(self._store, record)

    async def prepare(self, record: Record) -> None:
        await _save_hot(self._writer, record)

    async def prepared(self, batch: Batch) -> None:
        give_up = soon()
        while (await self._store.lookup(batch.query, deadline=soon())).resume_tokens < batch.query.cap_tokens:
            if give_up.expired:
                raise RuntimeError("the service does not find records that another one saved")
            await asyncio.sleep(0.01)

    async def occupy(self, record: Record) -> None:
        await self._store.save(record, retention=Retention.SHORT, deadline=soon())

    def num_connections(self, size_bytes: int, in_flight: int) -> int:
        return self._tier.num_connections(size_bytes, in_flight)

    def cpu_s(self) -> float:
        return super().cpu_s() + self._node.cpu_s()

    async def forget(self, batch: Batch) -> None:
        await self._tier.forget(batch)


def _made_there(store: PageStore, record: Record) -> Record:
    """A copy of a record in memory that the service reads, where an engine would have made the record; the record
    itself if there is no such memory."""
    buffer = store.shared_buffer(record.num_bytes)
    if buffer is None:
        return record
    return Record(record.header, _copied(record.data, buffer).toreadonly())


async def _save_hot(store: PageStore, record: Record) -> None:
    outcome = await store.save(_made_there(store, record), ack=Ack.HOT, deadline=soon())
    if outcome is not SaveOutcome.STORED:
        raise RuntimeError(f"the service did not store a record: {outcome.value}")


class TierStore(Store):
    """One of our tiers, without the guard and the store around it.

    Args:
        tier: The tier.
        num_connections_max: Connections that it carries records on.
        part_bytes: Bytes of a record that travel on one connection at a time.
        name: What its rows are called; by default the tier's name.
    """

    def __init__(
        self, tier: Tier, num_connections_max: int = 1, part_bytes: int = MAX_RECORD_BYTES, name: str | None = None
    ) -> None:
        self.name = tier.name if name is None else name
        self._tier = tier
        self._num_connections_max = num_connections_max
        self._part_bytes = part_bytes

    async def aclose(self) -> None:
        """Close the tier."""
        await self._tier.aclose()

    def num_connections(self, size_bytes: int, in_flight: int) -> int:
        return min(self._num_connections_max, in_flight * -(-size_bytes // self._part_bytes))

    async def put(self, record: Record) -> None:
        outcome = await self._tier.put(record, deadline=soon())
        if outcome is not PutOutcome.STORED:
            raise RuntimeError(f"{self.name} did not store a record: {outcome.value}")

    async def get_all(self, batch: Batch, targets: Sequence[memoryview], in_flight: int) -> list[memoryview]:
        received: dict[bytes, memoryview] = {}

        def get(record: Record, target: memoryview) -> Callable[[], Awaitable[None]]:
            async def call() -> None:
                stored = await self._tier.get(record.key, deadline=soon(), allocate=_into(target))
                if stored is None:
                    raise RuntimeError(f"{self.name} lost a record")
                received[record.key.prefix] = stored.data

            return call

        await windowed(map(get, batch.records, targets), in_flight)
        return [received[record.key.prefix] for record in batch.records]

    async def forget(self, batch: Batch) -> None:
        for record in batch.records:
            await self._tier.delete(record.key, deadline=soon())


class RedisPy(Store):
    """The general Redis client, with hiredis where that is installed: the same records under the same names."""

    name = "redis-py"

    def __init__(self, client: Redis) -> None:
        self._client = client

    async def put(self, record: Record) -> None:
        if not await self._client.set(format_name(record.key), record.data, nx=True):
            raise RuntimeError("redis-py did not store a record")

    async def get_all(self, batch: Batch, targets: Sequence[memoryview], in_flight: int) -> list[memoryview]:
        received: dict[bytes, memoryview] = {}

        def get(record: Record) -> Callable[[], Awaitable[None]]:
            async def call() -> None:
                value = await self._client.get(format_name(record.key))
                if not isinstance(value, bytes):
                    raise RuntimeError("redis-py lost a record")
                received[record.key.prefix] = memoryview(value)

            return call

        await windowed(map(get, batch.records), in_flight)
        return [received[record.key.prefix] for record in batch.records]

    async def forget(self, batch: Batch) -> None:
        await self._client.delete(*(format_name(record.key) for record in batch.records))


async def open_s3_tier(server: CephRgw) -> S3Tier:
    """Our tier in a bucket of its own, which is made."""
    from kvstore.tiers.s3 import S3Tier

    server.create_bucket(_BUCKET)
    return await S3Tier.open(server.location(_BUCKET, "benchmark"), credentials=server.credentials)


async def fill(store: Store, size_bytes: int, num_bytes: int) -> None:
    """Put at least `num_bytes` that are never got."""
    pages = RecordPages(size_bytes, 1)
    for _ in range(-(-num_bytes // pages.num_bytes)):
        await store.occupy(pages.batch().records[0])


async def store_rows(store: Store, peer: Mover, amounts: Amounts, say: Say, beside: Sequence[Store] = ()) -> list[Row]:
    """A row for put and one for get, for each size and number of calls in flight.

    The stores in `beside` are measured in turn with the store, at their own verbs. Each has its rows.
    """
    rows = []
    for size_bytes in amounts.sizes:
        most = RecordPages(size_bytes, max(amounts.num_pages(size_bytes), *amounts.in_flights))
        for in_flight in amounts.in_flights:
            pages = most.first(max(amounts.num_pages(size_bytes), in_flight))
            links = store.num_connections(pages.record_bytes, in_flight)
            ceilings = {"put": peer.puts(pages.sources, links), "get": peer.gets(pages.targets, links)}
            for verb in ("put", "get"):
                if verb not in amounts.verbs:
                    continue
                kind = _Put if verb == "put" else _Get
                works: list[tuple[str, Work]] = [
                    (f"{one.name} {verb}", kind(one, pages, in_flight)) for one in (store, *beside) if verb in one.verbs
                ]
                say(f"{store.name}: {verb} of {pages.record_bytes:,} bytes, {in_flight} in flight")
                rows += await measure_in_turn(
                    works,
                    ceilings[verb],
                    size_bytes=pages.record_bytes,
                    num_bytes=pages.num_bytes,
                    in_flight=in_flight,
                    repetitions=amounts.repetitions,
                )
    return rows


class _Put(Work):
    def __init__(self, store: Store, pages: RecordPages, in_flight: int) -> None:
        self.store = store
        self.pages = pages
        self.in_flight = in_flight
        self.batch = pages.batch()

    async def before(self) -> None:
        self.batch = self.pages.batch()

    def cpu_s(self) -> float:
        return self.store.cpu_s()

    async def run(self) -> None:
        await self.store.put_all(self.batch, self.in_flight)

    async def after(self) -> None:
        await self.store.forget(self.batch)


class _Get(Work):
    """Each turn gets a batch that the same turn put, so that no cache of the turn before helps."""

    def __init__(self, store: Store, pages: RecordPages, in_flight: int) -> None:
        self.store = store
        self.pages = pages
        self.in_flight = in_flight
        self.batch = pages.batch()
        self.received: list[memoryview] = []

    async def before(self) -> None:
        self.batch = self.pages.batch()
        for record in self.batch.records:
            await self.store.prepare(record)
        await self.store.prepared(self.batch)

    def cpu_s(self) -> float:
        return self.store.cpu_s()

    async def run(self) -> None:
        self.received = await self.store.get_all(self.batch, self.pages.targets, self.in_flight)

    async def after(self) -> None:
        for record, data in zip(self.batch.records, self.received, strict=True):
            open_record(data, record.key)
        self.received = []
        await self.store.forget(self.batch)


def _copied(source: memoryview, target: memoryview) -> memoryview:
    """The part of `target` that holds `source`, which is copied there unless it was received there."""
    place = target[: len(source)]
    from_bytes, to_bytes = np.frombuffer(source, np.uint8), np.frombuffer(place, np.uint8)
    if not np.may_share_memory(from_bytes, to_bytes):
        np.copyto(to_bytes, from_bytes)
    return place


def _into(target: memoryview) -> Callable[[int], memoryview]:
    return lambda num_bytes: target[:num_bytes]
