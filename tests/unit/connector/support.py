"""A bridge on a real loop thread, a real store that can be held up, and small engines in words."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from connector.facts import CellFacts, EngineFacts, GroupFacts, StateFacts
from connector.identity import CacheShape, describe_namespace, read_shape
from connector.prefix_hash import PrefixChain
from kvstore.api import (
    Ack,
    Deadline,
    LeaseId,
    Lookup,
    Outcome,
    PageStore,
    PrefixQuery,
    Progress,
    Retention,
    SaveOutcome,
    Staged,
)
from kvstore.errors import Closed
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.record import Record, seal
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.model.kinds import FullAttention, GroupKind, Recurrent, SlidingWindow
from kvstore.model.layout import Layout
from kvstore.model.namespace import NamespaceDescription
from kvstore.store.limits import StoreLimits
from kvstore.store.tiered import TieredStore
from kvstore.tiers.memory import MemoryTier

Value = TypeVar("Value")
MIB = 1 << 20
BLOCK = 16
PAGE = 64
WEIGHTS = "weights of the tests"


class SteeredStore(PageStore):
    """A store whose calls can be held up, made to fail, or hooked; by default a `TieredStore` over memory.

    Attributes:
        calls: Number of calls by name.
        held: Names of calls that wait until they are taken out of this set, or until their deadline.
        held_keys: Records whose load waits until they are taken out of this set, or until its deadline.
        errors: By name what a call raises instead.
        outcome: What every save answers instead of keeping the record.
        after_stage: Called on the loop's thread when a stage is about to return.
        on_load: Changes the record that a load returns.
        on_stage: Changes what a stage answers.
        cancelled: Names of calls that were cancelled.
    """

    def __init__(self, inner: PageStore | None = None) -> None:
        self.inner: Any = inner or TieredStore(MemoryTier(64 * MIB), limits=StoreLimits(stage_bytes=32 * MIB))
        self.calls: Counter[str] = Counter()
        self.held: set[str] = set()
        self.held_keys: set[RecordKey] = set()
        self.errors: dict[str, Exception] = {}
        self.outcome: SaveOutcome | None = None
        self.after_stage: Callable[[], None] = lambda: None
        self.on_load: Callable[[Record], Record] = lambda record: record
        self.on_stage: Callable[[Staged], Staged] = lambda staged: staged
        self.cancelled: list[str] = []

    @property
    def num_leases(self) -> int:
        return len(self.inner.leases)

    async def _pass(self, name: str, deadline: Deadline, key: RecordKey | None = None) -> None:
        self.calls[name] += 1
        try:
            async with deadline.scope(name):
                while name in self.held or (name == "load" and key in self.held_keys):
                    await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        if name in self.errors:
            raise self.errors[name]

    async def open_namespace(self, description: NamespaceDescription, *, deadline: Deadline) -> NamespaceId:
        await self._pass("open_namespace", deadline)
        return await self.inner.open_namespace(description, deadline=deadline)

    async def lookup(self, query: PrefixQuery, *, deadline: Deadline) -> Lookup:
        await self._pass("lookup", deadline)
        return await self.inner.lookup(query, deadline=deadline)

    async def stage(self, query: PrefixQuery, *, deadline: Deadline, progress: Progress | None = None) -> Staged:
        await self._pass("stage", deadline)
        staged = await self.inner.stage(query, deadline=deadline, progress=progress)
        self.after_stage()
        return self.on_stage(staged)

    async def renew(self, lease: LeaseId, *, deadline: Deadline) -> bool:
        await self._pass("renew", deadline)
        return await self.inner.renew(lease, deadline=deadline)

    async def load(
        self,
        lease: LeaseId,
        key: RecordKey,
        *,
        deadline: Deadline,
        allocate: Callable[[int], memoryview] | None = None,
    ) -> Record:
        await self._pass("load", deadline, key)
        return self.on_load(await self.inner.load(lease, key, deadline=deadline, allocate=allocate))

    async def save(
        self,
        record: Record,
        *,
        ack: Ack = Ack.MEMORY,
        retention: Retention = Retention.NORMAL,
        deadline: Deadline,
    ) -> SaveOutcome:
        await self._pass("save", deadline)
        return self.outcome or await self.inner.save(record, ack=ack, retention=retention, deadline=deadline)

    async def release(self, lease: LeaseId) -> None:
        self.calls["release"] += 1
        await self.inner.release(lease)

    async def discard(self, key: RecordKey, reason: str, *, deadline: Deadline) -> None:
        await self._pass("discard", deadline)
        await self.inner.discard(key, reason, deadline=deadline)

    def report(self, outcome: Outcome) -> None:
        self.calls["tell"] += 1
        self.inner.report(outcome)

    async def explain(self, request: str, *, deadline: Deadline, tenant: str | None = "") -> Mapping[str, object]:
        return await self.inner.explain(request, deadline=deadline, tenant=tenant)

    async def status(self, *, deadline: Deadline) -> Mapping[str, object]:
        return await self.inner.status(deadline=deadline)

    async def aclose(self) -> None:
        await self.inner.aclose()


class LoopBridge:
    """One loop thread with one store on it, as `BlockingStore` has, without a service behind it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bridge")
        self._thread.start()
        self._closed = False
        self.store: SteeredStore = self._call(self._make)

    def submit(self, work: Callable[[PageStore], Coroutine[Any, Any, Value]]) -> Future[Value]:
        if self._closed:
            raise Closed("the bridge is closed")
        return asyncio.run_coroutine_threadsafe(self._answer(work), self._loop)

    async def _answer(self, work: Callable[[PageStore], Coroutine[Any, Any, Value]]) -> Value:
        return await work(self.store)

    async def _make(self) -> SteeredStore:
        return SteeredStore()

    def _call(self, work: Callable[[], Coroutine[Any, Any, Value]]) -> Value:
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(10)

    def run(self, work: Callable[[SteeredStore], Coroutine[Any, Any, Value]]) -> Value:
        """Do something with the store and wait for it."""
        return self._call(lambda: work(self.store))

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """The thread does nothing inside the block."""
        go_on = threading.Event()
        self._loop.call_soon_threadsafe(go_on.wait)
        try:
            yield
        finally:
            go_on.set()

    def refuse_further_work(self) -> None:
        """From now on `submit` raises, as a closed client does."""
        self._closed = True

    def close(self) -> None:
        self.store.held.clear()
        self.store.held_keys.clear()
        self._call(self._end)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=10)
        await self.store.aclose()
        await asyncio.get_running_loop().shutdown_default_executor()


@contextmanager
def bridge_to_memory() -> Iterator[LoopBridge]:
    bridge = LoopBridge()
    try:
        yield bridge
    finally:
        bridge.close()


def make_facts(**changes: Any) -> EngineFacts:
    """An engine with two layers a stage, two heads and blocks of 16 tokens."""
    cells: dict[str, Any] = {
        "rank_heads": 2,
        "total_heads": 2,
        "head_size": 3,
        "head_size_v": 3,
        "element_bytes": 4,
        "dtype": "float32",
    }
    cells.update({name: changes.pop(name) for name in list(changes) if name in cells})
    stages = tuple((f"layer.{2 * stage}", f"layer.{2 * stage + 1}") for stage in range(changes.get("pp_size", 1)))
    attention = GroupFacts(
        kind=FullAttention(),
        stages=stages,
        feeds=(0, 0),
        feed_groups=(0,),
        block_tokens=BLOCK,
        content=CellFacts(**cells),
        packing={"backend": "test"},
        stage=changes.pop("stage", 0),
    )
    values: dict[str, Any] = {
        "model_path": "/nowhere/model",
        "architecture": "Llama",
        "model_config": {"hidden_size": 64},
        "compute_dtype": "float32",
        "quantization": "none",
        "cache_dtype": "auto",
        "device": "cpu",
        "scheduler_block_tokens": BLOCK,
        "num_blocks": 64,
        "tp_rank": 0,
        "tp_size": 1,
        "groups": (attention,),
        "unsupported": None,
        "load_failure_policy": "recompute",
    }
    return EngineFacts(**{**values, **changes})


def make_shape(facts: EngineFacts) -> CacheShape:
    """The engine's, but with pages of 64 tokens where they would be longer, so that small prompts have several."""
    shape = read_shape(facts)
    assert isinstance(shape, CacheShape)
    return replace(shape, layout=Layout(min(PAGE, shape.layout.page_tokens), shape.layout.groups))


def tokens_of(name: str, count: int) -> tuple[int, ...]:
    """Tokens that depend on `name` and position alone, so that prompts of one name share their prefix."""
    seed = sum(name.encode())
    return tuple((seed * 1009 + position * 31) % 50_000 for position in range(count))


def records_of(
    tokens: tuple[int, ...], facts: EngineFacts, shape: CacheShape, *, ends: Iterable[int] | None = None
) -> list[Record]:
    """Sealed records of every page of a prompt and of its tail (or those that end at `ends`), all slices."""
    namespace = describe_namespace(facts, shape, WEIGHTS).id
    chain = PrefixChain(BLOCK)
    chain.extend(tokens)
    last = len(tokens) // BLOCK * BLOCK
    wanted = set(ends) if ends is not None else {*range(PAGE, last + 1, PAGE), last}
    records = []
    group = shape.layout.groups[0]
    for boundary in chain.boundaries:
        if boundary.tokens not in wanted:
            continue
        kind, span = group.record_at(boundary.tokens, shape.layout.page_tokens)
        for slice_ in range(group.num_slices):
            key = RecordKey(namespace, boundary.prefix, 0, slice_)
            payload = bytes([slice_]) * span.num_tokens
            header = HeaderV1.unsealed(
                key, kind, span, codec_chain=0, decoded_bytes=len(payload), created_ms=1_700_000_000_000
            )
            records.append(seal(header, bytearray(HEADER_BYTES) + payload))
    return records


CELLS = CellFacts(1, 1, 4, 4, 2, "bfloat16")
STATE = StateFacts(((3, 4), (5, 5)), ("bfloat16", "float32"), (24, 100), True)


def group(kind: GroupKind, feeds: tuple[int, ...]) -> GroupFacts:
    """A group of three kinds of layers, in words."""
    content = STATE if isinstance(kind, Recurrent) else CELLS
    layers = tuple(f"layers.{feed}" for feed in feeds)
    return GroupFacts(kind, (layers,), tuple(range(len(feeds))), feeds, BLOCK, content)


FULL, WINDOW, STATES = (
    group(FullAttention(), (1,)),
    group(SlidingWindow(window_tokens=2 * BLOCK), (0, 2)),
    group(Recurrent(), (0, 2)),
)
