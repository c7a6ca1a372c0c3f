"""A bridge on a real loop thread, a real store that can be held up, and small engines in words."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from connector.facts import CellFacts, EngineFacts, GroupFacts, StateFacts
from connector.identity import CacheShape, describe_namespace, read_shape
from connector.prefix_hash import PrefixChain
from kvstore.api import (
    PageStore,
)
from kvstore.errors import Closed
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.record import Record, seal
from kvstore.model.keys import RecordKey
from kvstore.model.kinds import FullAttention, GroupKind, Recurrent, SlidingWindow
from kvstore.model.layout import Layout
from kvstore.testing.steered_store import SteeredStore

Value = TypeVar("Value")
MIB = 1 << 20
BLOCK = 16
PAGE = 64
WEIGHTS = "weights of the tests"


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
