"""Ranks that save and load through a real store: bit-exact, over any split of the heads, and never half a promise."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from connector.identity import describe_namespace
from connector.jobs import LoadJob, SaveJob, StepJobs
from connector.prefix_hash import PrefixChain
from connector.scheduler.load_plan import plan_load
from connector.settings import ConnectorSettings
from connector.worker.side import WorkerSide
from kvstore.api import PrefixQuery, SaveOutcome, Staged
from kvstore.errors import Unavailable
from kvstore.format.record import HEADER_BYTES, Record
from kvstore.model.kinds import RecordKind
from kvstore.model.spans import span_ending_at
from tests.unit.connector.device_contract import LAYOUTS, Cache, storage
from tests.unit.connector.support import (
    BLOCK,
    MIB,
    PAGE,
    WEIGHTS,
    LoopBridge,
    SteeredStore,
    bridge_to_memory,
    eventually,
    make_facts,
    make_shape,
    soon,
    tokens_of,
)

HEADS = 4
NUM_BLOCKS = 32
TOKENS = tokens_of("prompt", 170)
SOURCE = (7, 3, 4, 5, 30, 29, 28, 1, 12, 9)
"""Blocks that hold the prompt where it is saved, and"""
TARGET = (20, 21, 22, 2, 31, 6, 5, 4, 8, 10)
"""where it is loaded to."""


class Rank:
    """One worker side with a cache of its own."""

    def __init__(
        self,
        bridge: LoopBridge,
        *,
        rank: int = 0,
        ranks: int = 1,
        layout: str = "layer_outer",
        element_bytes: int = 4,
        seed: int = 1,
        **settings: Any,
    ) -> None:
        dtype = {2: "bfloat16", 4: "float32"}[element_bytes]
        self.heads = HEADS // ranks
        self.facts = make_facts(
            total_heads=HEADS,
            rank_heads=self.heads,
            tp_rank=rank,
            tp_size=ranks,
            num_blocks=NUM_BLOCKS,
            element_bytes=element_bytes,
            dtype=dtype,
        )
        self.shape = make_shape(HEADS, HEADS)
        self.cache = Cache(layout, 2, NUM_BLOCKS, self.heads, BLOCK, 6, element_bytes, seed, "cpu")
        self.layers = self.cache.tensors()
        self.bridge = bridge
        values = {"pinned_bytes": 8 * MIB, "stall_timeout_ms": 5000, **settings}
        self.side = WorkerSide(ConnectorSettings(**values), self.facts, self.shape, bridge, num_cores=2)
        self.side.register(self.layers)
        assert self.side.refusal is None
        self.description = describe_namespace(self.facts, self.shape, WEIGHTS)
        bridge.run(lambda store: store.inner.open_namespace(self.description, deadline=soon()))

    @property
    def meters(self) -> Any:
        return self.side.meters

    def jobs(self, ends: tuple[int, ...] = (64, 128, 160), first_id: int = 0) -> StepJobs:
        """Save jobs for the pages and the tail of the prompt that stands in `SOURCE`."""
        chain = PrefixChain(BLOCK)
        chain.extend(TOKENS)
        jobs = []
        for number, end in enumerate(ends, first_id):
            span = span_ending_at(end, PAGE)
            jobs.append(
                SaveJob(
                    number,
                    self.description.id,
                    chain.boundaries[end // BLOCK - 1].prefix,
                    0,
                    span.start,
                    end,
                    SOURCE[span.start // BLOCK : end // BLOCK],
                )
            )
        return StepJobs(saves=tuple(jobs))

    def save(self, ends: tuple[int, ...] = (64, 128, 160)) -> None:
        """Save, overwrite the blocks at once as the engine may, and wait for the report."""
        kept = [layer.clone() for layer in self.layers]
        self.side.save(self.jobs(ends))
        for layer in self.layers:
            layer[list(SOURCE)] = 0
        assert self.side.saver is not None
        assert self.side.saver.drain(10)
        for layer, content in zip(self.layers, kept, strict=True):
            layer.copy_(content)
        report = self.side.take_report()
        assert report is not None
        assert (report.saves_done, report.saves_failed) == (dict.fromkeys(range(len(ends)), 1), set())
        assert self.side.take_report() is None

    def stage(self, local_tokens: int = 0) -> Staged:
        chain = PrefixChain(BLOCK)
        chain.extend(TOKENS)
        query = PrefixQuery(self.description.id, tuple(chain.boundaries), local_tokens, 160, BLOCK)
        staged = self.bridge.run(lambda store: store.inner.stage(query, deadline=soon()))
        assert staged.lease is not None
        return staged

    def load_job(self, staged: Staged, request_id: str = "r", local_tokens: int = 0) -> StepJobs:
        pieces = plan_load(
            staged, [TARGET], local_tokens=local_tokens, resume_tokens=staged.resume_tokens, block_tokens=BLOCK
        )
        assert staged.lease is not None
        return StepJobs(loads=(LoadJob(request_id, staged.lease, pieces),))

    def result(self) -> tuple[set[str], set[str]]:
        """Wait for loads to be reported."""
        found: list[tuple[set[str], set[str]]] = []

        def reported() -> bool:
            results = self.side.take_results()
            if results[0]:
                found.append(results)
            return bool(found)

        eventually(reported)
        return found[0]

    def blocks(self, ids: tuple[int, ...]) -> torch.Tensor:
        """uint8 [layers, blocks, heads, bytes]"""
        whole = torch.stack([layer[list(ids)] for layer in self.layers]).contiguous()
        return whole.view(torch.uint8).reshape(2, len(ids), self.heads, -1)

    def copier_that(self, before: Callable[[], None]) -> None:
        """Call `before` in front of every scatter."""
        loader = self.side.loader
        assert loader is not None
        inner = loader._copier

        class Slow:
            gather = staticmethod(inner.gather)

            @staticmethod
            def scatter(*args: Any) -> None:
                before()
                inner.scatter(*args)

        loader._copier = Slow()


@pytest.fixture
def bridge() -> Iterator[LoopBridge]:
    with bridge_to_memory() as made:
        yield made


@pytest.fixture
def rank(bridge: LoopBridge) -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def make(**changes: Any) -> Rank:
        made.append(Rank(bridge, **changes))
        return made[-1]

    yield make
    for one in made:
        one.side.shutdown()
        assert one.side.saver is not None
        assert one.side.saver._buffers.used_bytes == 0, "buffers leaked"
        assert one.side._pool.usage.used_bytes == 0


Make = Callable[..., Rank]


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip(rank: Make, layout: str, element_bytes: int) -> None:
    """Saved from one cache and loaded into other blocks of another one, bit by bit; no other byte is written."""
    source = rank(layout=layout, element_bytes=element_bytes)
    source.save()
    target = rank(layout=layout, element_bytes=element_bytes, seed=2)
    expected = target.blocks(tuple(range(NUM_BLOCKS)))
    expected[:, list(TARGET)] = source.blocks(SOURCE)
    target.side.start_loads(target.load_job(target.stage()))
    assert target.result() == ({"r"}, set())
    assert torch.equal(target.blocks(tuple(range(NUM_BLOCKS))), expected)


def test_records_are_what_the_store_expects(rank: Make, bridge: LoopBridge) -> None:
    """Two pages and a tail, each in four slices, sealed under their keys; a second save of them stores nothing."""
    source = rank()
    source.save()
    records = [slot.record for slot in bridge.store.inner._memory._slots.values()]
    kinds = sorted((record.header.span.start, record.header.span.stop, record.header.kind) for record in records)
    assert kinds == sorted([(0, 64, RecordKind.PAGE), (64, 128, RecordKind.PAGE), (128, 160, RecordKind.TAIL)] * HEADS)
    assert source.meters.get("connector_saves", outcome="stored") == 12
    source.save()
    assert source.meters.get("connector_saves", outcome="exists") == 12


@pytest.mark.parametrize(("savers", "loaders"), [(2, 1), (1, 2), (4, 2), (2, 4), (1, 4)])
def test_other_tensor_parallel_size(rank: Make, savers: int, loaders: int) -> None:
    """What ranks of one split saved, ranks of another split load: every head comes to where it belongs."""
    sources = [rank(rank=index, ranks=savers, seed=index) for index in range(savers)]
    for source in sources:
        source.save()
    whole = torch.cat([source.blocks(SOURCE) for source in sources], dim=2)
    targets = [rank(rank=index, ranks=loaders, seed=50 + index, layout="padded") for index in range(loaders)]
    for index, target in enumerate(targets):
        target.side.start_loads(target.load_job(target.stage()))
        assert target.result() == ({"r"}, set())
        share = slice(index * target.heads, (index + 1) * target.heads)
        assert torch.equal(target.blocks(TARGET), whole[:, :, share])


def test_load_beyond_a_local_hit(rank: Make) -> None:
    """With 96 tokens held by the engine their blocks stay as they are, though a record reaches below."""
    source = rank()
    source.save()
    target = rank(seed=2)
    before = target.blocks(TARGET)
    target.side.start_loads(target.load_job(target.stage(96), local_tokens=96))
    assert target.result() == ({"r"}, set())
    after = target.blocks(TARGET)
    assert torch.equal(after[:, :6], before[:, :6])
    assert torch.equal(after[:, 6:], source.blocks(SOURCE)[:, 6:])


def test_loads_of_several_requests(rank: Make) -> None:
    """Requests that load at a time are reported once each."""
    source = rank()
    source.save()
    target = rank(seed=2)
    names = {f"r{number}" for number in range(6)}
    for name in names:
        target.side.start_loads(target.load_job(target.stage(), name))
    seen: list[str] = []
    eventually(lambda: seen.extend(target.side.take_results()[0]) or len(seen) >= len(names))
    time.sleep(0.01)
    assert sorted(seen) == sorted(names)
    assert target.side.take_results() == (set(), set())


def flipped(record: Record) -> Record:
    data = bytearray(record.data)
    data[HEADER_BYTES] ^= 1
    return Record(record.header, memoryview(bytes(data)))


def test_a_flipped_bit(rank: Make, bridge: LoopBridge) -> None:
    """A damaged record fails the load and is put aside, so that the next request does not meet it."""
    source = rank()
    source.save()
    staged = source.stage()
    bad = staged.keys[-1]
    bridge.store.on_load = lambda record: flipped(record) if record.key == bad else record
    source.side.start_loads(source.load_job(staged))
    assert source.result() == ({"r"}, {"r"})
    assert source.meters.get("connector_corrupt_records") == 1
    assert bridge.store.calls["discard"] == 1
    assert bad not in bridge.store.inner._memory
    assert source.stage().resume_tokens < 160


def test_verification_is_what_catches_it(rank: Make, bridge: LoopBridge) -> None:
    """The same without verification would restore wrong bytes: the test above tests something."""
    source = rank()
    source.save()
    target = rank(seed=2)
    assert target.side.loader is not None
    target.side.loader.verify = False
    bridge.store.on_load = flipped
    target.side.start_loads(target.load_job(target.stage()))
    target.result()
    assert not torch.equal(target.blocks(TARGET), source.blocks(SOURCE))


@pytest.mark.parametrize("change", [{"decoded_bytes": 64}, {"codec_chain": 99}])
def test_a_record_of_another_shape(rank: Make, bridge: LoopBridge, change: dict[str, int]) -> None:
    """A record whose size or codec is not what the plan expects writes nothing."""
    source = rank()
    source.save()
    bridge.store.on_load = lambda record: Record(replace(record.header, **change), record.data)
    before = storage(source.layers[0])
    source.side.start_loads(source.load_job(source.stage()))
    assert source.result() == ({"r"}, {"r"})
    assert torch.equal(storage(source.layers[0]), before)


def test_a_lease_that_ended(rank: Make, bridge: LoopBridge) -> None:
    """A load under a lease that is gone is reported as failed, once."""
    source = rank()
    source.save()
    staged = source.stage()
    bridge.run(lambda store: store.release(staged.lease))  # type: ignore[arg-type]
    before = storage(source.layers[0])
    source.side.start_loads(source.load_job(staged))
    assert source.result() == ({"r"}, {"r"})
    assert torch.equal(storage(source.layers[0]), before)


def test_a_load_that_was_not_planned(rank: Make) -> None:
    """The scheduler side could not plan it, but vLLM waits for a report."""
    source = rank()
    source.side.start_loads(StepJobs(loads=(LoadJob("r", b"lease", None),)))
    assert source.result() == ({"r"}, {"r"})


def test_a_load_with_nothing_for_this_rank(rank: Make) -> None:
    """A rank that none of the pieces are for reports at once: all ranks must."""
    source = rank()
    source.side.start_loads(StepJobs(loads=(LoadJob("r", b"lease", ()),)))
    assert source.result() == ({"r"}, set())


def test_nothing_is_written_after_the_report(rank: Make, bridge: LoopBridge) -> None:
    """One record is damaged while another is still on its way: what comes late is not written any more."""
    source = rank()
    source.save()
    target = rank(seed=2)
    staged = target.stage()
    late, bad = set(staged.keys[:4]), staged.keys[-1]
    bridge.store.held_keys |= late
    bridge.store.on_load = lambda record: flipped(record) if record.key == bad else record
    target.side.start_loads(target.load_job(staged))
    assert target.result() == ({"r"}, {"r"})
    reported = storage(target.layers[0])
    bridge.store.held_keys.clear()
    time.sleep(0.05)
    assert torch.equal(storage(target.layers[0]), reported)
    assert target.side.take_results() == (set(), set())


def test_a_write_that_has_begun_ends_before_the_report(rank: Make, bridge: LoopBridge) -> None:
    """A thread that is writing when the load fails is waited for: vLLM gives the blocks away after the report."""
    source = rank()
    source.save()
    target = rank(seed=2)
    staged = target.stage()
    bad = staged.keys[-1]
    writing, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        writing.set()
        assert go_on.wait(10)

    target.copier_that(wait)
    bridge.store.held_keys.add(bad)
    bridge.store.on_load = lambda record: flipped(record) if record.key == bad else record
    target.side.start_loads(target.load_job(staged))
    assert writing.wait(10)
    bridge.store.errors["load"] = Unavailable("told to")
    bridge.store.held_keys.clear()
    time.sleep(0.1)
    assert target.side.take_results() == (set(), set())
    go_on.set()
    assert target.result() == ({"r"}, {"r"})
    reported = storage(target.layers[0])
    time.sleep(0.05)
    assert torch.equal(storage(target.layers[0]), reported)


def test_a_stalled_load(rank: Make, bridge: LoopBridge) -> None:
    """When no record comes for the stall time the load fails, long before its ceiling."""
    source = rank(stall_timeout_ms=100)
    source.save()
    bridge.store.held.add("load")
    start = time.monotonic()
    source.side.start_loads(source.load_job(source.stage()))
    assert source.result() == ({"r"}, {"r"})
    assert time.monotonic() - start < 5
    assert set(bridge.store.cancelled) == {"load"}


def test_a_stalled_load_after_some_records(rank: Make, bridge: LoopBridge) -> None:
    """All but one record came: the missing one fails the load."""
    source = rank(stall_timeout_ms=100)
    source.save()
    staged = source.stage()
    bridge.store.held_keys.add(staged.keys[5])
    source.side.start_loads(source.load_job(staged))
    assert source.result() == ({"r"}, {"r"})


def test_slow_threads_are_no_stall(rank: Make) -> None:
    """Records that came are decoded however long that takes: a busy processor is not a silent service."""
    source = rank()
    source.save()
    target = rank(seed=2, stall_timeout_ms=50)
    target.copier_that(lambda: time.sleep(0.2))
    target.side.start_loads(target.load_job(target.stage()))
    assert target.result() == ({"r"}, set())
    assert torch.equal(target.blocks(TARGET), source.blocks(SOURCE))


@pytest.mark.parametrize("outcome", [SaveOutcome.FULL, SaveOutcome.BUSY, Unavailable("told to"), ZeroDivisionError()])
def test_saves_that_fail(rank: Make, bridge: LoopBridge, outcome: Any) -> None:
    """A page that the store does not take is reported as done and failed, and its buffers are free again."""
    source = rank()
    if isinstance(outcome, Exception):
        bridge.store.errors["save"] = outcome
    else:
        bridge.store.outcome = outcome
    source.side.save(source.jobs())
    assert source.side.saver is not None
    assert source.side.saver.drain(10)
    report = source.side.take_report()
    assert report is not None
    assert (report.saves_done, report.saves_failed) == ({0: 1, 1: 1, 2: 1}, {0, 1, 2})


def test_one_slice_that_fails(rank: Make, bridge: LoopBridge) -> None:
    """A job is reported when all its slices are done, and failed when one of them is."""
    source = rank()
    source.side.save(source.jobs((64,)))
    assert source.side.saver is not None
    assert source.side.saver.drain(10)
    report = source.side.take_report()
    assert report is not None
    assert report.saves_failed == set()
    inner, seen = bridge.store.inner.save, []

    async def third_fails(record: Record, **kwargs: Any) -> SaveOutcome:
        seen.append(record)
        return SaveOutcome.FULL if len(seen) == 3 else await inner(record, **kwargs)

    bridge.store.inner.save = third_fails  # type: ignore[method-assign]
    source.side.save(source.jobs((128,), first_id=5))
    assert source.side.saver.drain(10)
    report = source.side.take_report()
    assert report is not None
    assert (report.saves_done, report.saves_failed) == ({5: 1}, {5})


def test_no_buffer_no_waiting(rank: Make) -> None:
    """With host memory for one page and threads that do not get on, a second page fails at once: nobody waits."""
    source = rank(pinned_bytes=1)
    go_on = threading.Event()
    blocked = [source.side._pool.try_submit(0, go_on.wait, 10) for _ in range(2)]
    assert all(blocked)
    start = time.monotonic()
    source.side.save(source.jobs((64, 128)))
    assert time.monotonic() - start < 5
    report = source.side.take_report()
    assert report is not None
    assert (report.saves_done, report.saves_failed) == ({1: 1}, {1})
    assert source.meters.get("connector_saves", outcome="no_buffer") == HEADS
    go_on.set()
    assert source.side.saver is not None
    assert source.side.saver.drain(10)
    report = source.side.take_report()
    assert report is not None
    assert (report.saves_done, report.saves_failed) == ({0: 1}, set())


def test_drain(rank: Make, bridge: LoopBridge) -> None:
    """Draining waits for what is on its way, within its bound."""
    source = rank()
    assert source.side.saver is not None
    assert source.side.saver.drain(0)
    bridge.store.held.add("save")
    source.side.save(source.jobs())
    assert not source.side.saver.drain(0.05)
    bridge.store.held.clear()
    assert source.side.saver.drain(10)
    assert len(bridge.store.inner._memory) == 12


def test_an_error_while_copying(rank: Make) -> None:
    """When a copy out of the cache fails, the error goes to the guard, and every job is reported all the same."""
    source = rank()
    jobs = source.jobs()
    broken = replace(jobs.saves[1], block_ids=(1, 2, 3, NUM_BLOCKS))
    with pytest.raises((IndexError, RuntimeError)):
        source.side.save(StepJobs(saves=(jobs.saves[0], broken, jobs.saves[2])))
    assert source.side.saver is not None
    assert source.side.saver.drain(10)
    report = source.side.take_report()
    assert report is not None
    assert report.saves_done == {0: 1, 1: 1, 2: 1}
    assert report.saves_failed == {1, 2}


def test_a_closed_client(rank: Make, bridge: LoopBridge) -> None:
    """After the client was closed loads are reported as failed, saves too, and nothing leaks."""
    source = rank()
    source.save()
    staged = source.stage()
    bridge.refuse_further_work()
    source.side.start_loads(source.load_job(staged))
    assert source.side.take_results() == ({"r"}, {"r"})
    try:
        source.side.save(source.jobs())
    finally:
        bridge._closed = False
    report = source.side.take_report()
    assert report is not None
    assert (report.saves_done, report.saves_failed) == ({0: 1, 1: 1, 2: 1}, {0, 1, 2})


def test_shutdown_while_loading(bridge: LoopBridge) -> None:
    """A client that is closed under a load still reports it."""
    source = Rank(bridge)
    source.save()
    bridge.store.held.add("load")
    source.side.start_loads(source.load_job(source.stage()))
    eventually(lambda: bridge.store.calls["load"] > 0)
    source.side.shutdown()
    source.side.shutdown()

    async def cancel_all(store: SteeredStore) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    bridge.run(cancel_all)
    assert source.result() == ({"r"}, {"r"})


def refusal_of(bridge: LoopBridge, layers: list[torch.Tensor], **facts: Any) -> str:
    """What a rank says to these tensors."""
    values = {"total_heads": HEADS, "rank_heads": HEADS, "num_blocks": NUM_BLOCKS, **facts}
    side = WorkerSide(ConnectorSettings(), make_facts(**values), make_shape(HEADS, HEADS), bridge, num_cores=1)
    assert side.refusal is not None, "nothing is proven before tensors are seen"
    side.register(layers)
    side.save(StepJobs())
    assert (side.saver is None) == (side.refusal is not None)
    side.shutdown()
    return side.refusal or ""


def test_layouts_that_are_not_known_are_refused(bridge: LoopBridge) -> None:
    """Tensors of another shape, type, order or size leave the rank uncached, with the reason."""
    good = Cache("layer_outer", 2, NUM_BLOCKS, HEADS, BLOCK, 6, 4, 1, "cpu")
    layers = good.tensors()
    assert refusal_of(bridge, layers) == ""
    changed = {
        "unknown cache layout": [
            [layer[:, :2] for layer in layers],
            [layer.to(torch.bfloat16) for layer in layers],
            [layers[0], layers[1].flatten(2)],
        ],
        "do not stand together": [
            [layer.transpose(2, 3).contiguous().transpose(2, 3) for layer in layers],
            [torch.zeros(NUM_BLOCKS, HEADS, BLOCK, 7)[..., :6] for _ in layers],
            [layer[:-1] for layer in layers],
        ],
        "differ in layout": [
            [layers[0], Cache("padded", 2, NUM_BLOCKS, HEADS, BLOCK, 6, 4, 1, "cpu").tensors()[1]],
        ],
    }
    for reason, variants in changed.items():
        for variant in variants:
            assert reason in refusal_of(bridge, variant)


def test_heads_that_overlap_are_refused(bridge: LoopBridge) -> None:
    """Two heads that share their bytes (an expanded tensor) do not tile anything."""
    layers = [torch.zeros(NUM_BLOCKS, 1, BLOCK, 6).expand(-1, HEADS, -1, -1) for _ in range(2)]
    assert "cover the same byte" in refusal_of(bridge, layers)


def test_a_split_that_cuts_slices_is_refused(bridge: LoopBridge) -> None:
    """Three ranks cannot share four slices."""
    layers = Cache("layer_outer", 2, NUM_BLOCKS, HEADS, BLOCK, 6, 4, 1, "cpu").tensors()
    assert "tensor-parallel size" in refusal_of(bridge, layers, tp_size=3)
