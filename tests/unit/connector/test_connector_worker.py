"""Ranks that save and load through a real store: bit-exact, over any split of the heads; every save reported."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from connector.device.cpu import CpuDevice
from connector.jobs import StepJobs
from connector.settings import ConnectorSettings
from connector.weights import adapter_identities
from connector.worker.side import WorkerSide
from kvstore.api import SaveOutcome
from kvstore.client import trace_parent
from kvstore.codec import encode
from kvstore.errors import InternalError, InvalidRequest, Unavailable
from kvstore.format.record import Record
from kvstore.model.kinds import RecordKind
from kvstore.testing.steered_store import SteeredStore
from kvstore.testing.waiting import eventually
from tests.unit.connector.device_contract import LAYOUTS, Cache
from tests.unit.connector.rank_harness import HEADS, NUM_BLOCKS, SOURCE, TARGET, Make, Rank
from tests.unit.connector.support import BLOCK, LoopBridge, make_facts, make_shape

PAGE_BYTES = 4 * make_facts(total_heads=HEADS, rank_heads=HEADS).groups[0].rank_block_bytes


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


def test_the_trace_of_a_request_goes_with_its_records(rank: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves and loads of a traced request are asked in its trace; those of another one in none."""
    seen: set[tuple[str, str]] = set()
    for name in ("save", "load"):
        original = getattr(SteeredStore, name)

        async def watched(self: Any, *given: Any, of: Any = original, what: str = name, **more: Any) -> Any:
            seen.add((what, trace_parent.get()))
            return await of(self, *given, **more)

        monkeypatch.setattr(SteeredStore, name, watched)
    for number, trace in enumerate(("00-a-b-01", "")):
        seen.clear()
        at = rank(seed=number)
        saves = tuple(replace(job, trace=trace) for job in at.jobs().saves)
        at.side.save(StepJobs(saves=saves))
        assert at.side.saver is not None and at.side.saver.drain(10)
        loads = tuple(replace(job, trace=trace) for job in at.load_job(at.stage()).loads)
        at.side.start_loads(StepJobs(loads=loads))
        assert at.result() == ({"r"}, set())
        assert seen == {("save", trace), ("load", trace)}


def test_records_are_what_the_store_expects(rank: Make, bridge: LoopBridge) -> None:
    """Two pages and a tail, each in four slices, sealed under their keys; a second save of them stores nothing."""
    source = rank()
    source.save()
    records = [slot.record for slot in bridge.store.inner.memory._slots.values()]
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


def test_stages_of_a_pipeline(rank: Make) -> None:
    """Each stage loads what the same stage saved, its ranks however many."""
    sources = [rank(stage=stage, stages=3, seed=stage) for stage in range(3)]
    for source in sources:
        source.save()
    for stage, source in enumerate(sources):
        for index in range(2):
            target = rank(stage=stage, stages=3, rank=index, ranks=2, seed=50 + index, layout="padded")
            target.side.start_loads(target.load_job(target.stage()))
            assert target.result() == ({"r"}, set())
            share = slice(index * target.heads, (index + 1) * target.heads)
            assert torch.equal(target.blocks(TARGET), source.blocks(SOURCE)[:, :, share])


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


def test_a_step_that_computes_nothing_waits_for_saves(rank: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives the interpreter to the threads that save; a step that computes waits for nothing."""
    source, waits = rank(), list[float]()
    assert source.side.saver is not None
    monkeypatch.setattr(source.side.saver, "drain", waits.append)
    assert source.side.take_results() == (set(), set())
    assert waits == []
    assert source.side.take_results(may_wait=True) == (set(), set())
    assert waits == [0.005]


def test_the_pages_of_a_step_are_handed_over_together(rank: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's thread begins with the first at once, and would keep the interpreter while others are handed over."""
    source, handed = rank(), list[object]()
    submit = LoopBridge.submit
    monkeypatch.setattr(LoopBridge, "submit", lambda bridge, work: handed.append(work) or submit(bridge, work))
    source.side.save(source.jobs())
    assert len(handed) == 1
    assert source.side.saver is not None and source.side.saver.drain(10)
    report = source.side.take_report()
    assert report is not None and report.saves_done == {0: 1, 1: 1, 2: 1} and not report.saves_failed


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


def test_saves_that_the_service_refuses(rank: Make, bridge: LoopBridge) -> None:
    """The service is over its limits: the reason is not that of an engine without a processor."""
    source, told = rank(), []
    bridge.store.report = told.append  # type: ignore[method-assign]
    bridge.store.outcome = SaveOutcome.BUSY
    source.side.save(source.jobs((64,)))
    assert source.side.saver is not None and source.side.saver.drain(10)
    assert source.meters.get("connector_saves", outcome="busy") == HEADS
    assert source.meters.get("connector_saves_lost", reason="save_refused") == HEADS
    eventually(lambda: [(loss.reason, loss.num_lost) for loss in told] == [("save_refused", HEADS)])


def test_files_of_an_adapter_that_change_before_its_pages_are_saved(rank: Make, tmp_path: Path) -> None:
    """vLLM may have computed the pages with the new files: they are lost, and those of other requests are saved."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("old")
    source, adapter = rank(), (str(tmp_path), adapter_identities(str(tmp_path)))
    source_saver = source.side.saver
    assert source_saver is not None

    def failed(*ends: int) -> set[int]:
        """Of two jobs with the adapter and one without."""
        jobs = [replace(job, adapter=adapter if job.job_id < 2 else None) for job in source.jobs(ends).saves]
        source.side.save(StepJobs(saves=tuple(jobs)))
        assert source_saver.drain(10)
        report = source.side.take_report()
        assert report is not None and report.saves_done == {0: 1, 1: 1, 2: 1}
        return report.saves_failed

    assert failed(16, 32, 48) == set()
    new = tmp_path / "new"
    new.write_text("old")  # changed back it is another file
    new.replace(tmp_path / "adapter_model.safetensors")
    assert failed(64, 128, 160) == {0, 1}
    assert source.meters.get("connector_saves", outcome="adapter_changed") == 2 * HEADS


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


def test_no_page_of_memory_no_waiting(rank: Make) -> None:
    """With host memory for one page and threads that do not get on, a second page fails at once: nobody waits."""
    source = rank(pinned_bytes=2 * PAGE_BYTES)
    go_on = threading.Event()
    threads, saver = source.side._save_threads, source.side.saver
    assert threads is not None and saver is not None
    saver._pages._limit_bytes = PAGE_BYTES
    for _ in range(2):  # at most as many as the rank has cores
        for pool in (threads._low, threads._normal):
            pool._executor.submit(go_on.wait, 10)
    start = time.monotonic()
    source.side.save(source.jobs((64, 128)))
    assert time.monotonic() - start < 5
    report = source.side.take_report()
    assert report is not None
    assert (report.saves_done, report.saves_failed) == ({1: 1}, {1})
    assert source.meters.get("connector_saves", outcome="no_buffer") == HEADS
    go_on.set()
    assert saver.drain(10)
    report = source.side.take_report()
    assert report is not None
    assert (report.saves_done, report.saves_failed) == ({0: 1}, set())


def stuck(source: Rank) -> Callable[[], None]:
    """Block a rank's threads of low priority; call the result to unblock them."""
    gate, threads = threading.Event(), source.side._save_threads
    assert threads is not None
    for _ in range(2):  # at most as many as the rank has cores
        threads._low._executor.submit(gate.wait, 60)
    return gate.set


def test_pages_without_a_processor_are_saved_soon(rank: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the lowest priority gets no processor, pages are saved after their patience all the same."""
    monkeypatch.setattr("connector.worker.side._PATIENCE_S", 0.1)
    source = rank()
    go_on = stuck(source)
    source.side.save(source.jobs())
    assert source.side.saver is not None and source.side.saver.drain(10)
    report = source.side.take_report()
    assert report is not None and report.saves_failed == set()
    go_on()


def test_an_engine_that_stops_saves_what_it_has(rank: Make, bridge: LoopBridge) -> None:
    """Its pages wait for idle processors no longer: they are in the store when it is gone."""
    source = rank()
    go_on = stuck(source)
    source.side.save(source.jobs())
    assert source.side.saver is not None
    assert not source.side.saver.drain(0.1)
    start = time.monotonic()
    source.side.saver.finish(10)
    assert time.monotonic() - start < 5
    assert len(bridge.store.inner.memory) == 12
    go_on()


def test_what_an_engine_loses_when_it_stops_is_named(
    rank: Make, bridge: LoopBridge, caplog: pytest.LogCaptureFixture
) -> None:
    """Pages that the store does not take in time are counted, logged with their requests, and told, once."""
    source, told = rank(), []
    assert source.side.saver is not None
    source.side.saver._losses.report = lambda **loss: told.append(loss)  # type: ignore[method-assign]
    bridge.store.held.add("save")
    jobs = source.jobs()
    source.side.save(StepJobs(saves=tuple(replace(job, request_id=f"r{job.job_id % 2}") for job in jobs.saves)))
    source.side.saver.finish(0.1)
    source.side.saver.finish(0.1)
    assert source.meters.get("connector_saves", outcome="stopped") == 3 * HEADS
    assert "the engine stopped before 3 pages of 2 requests were saved: r0, r1" in caplog.text
    assert [(loss["request_id"], loss["boundary"].tokens, loss["reason"]) for loss in told] == [
        (f"r{job.job_id % 2}", job.stop_tokens, "save_stopped") for job in jobs.saves
    ]
    bridge.store.held.clear()


def test_each_lost_record_is_counted_once(rank: Make, bridge: LoopBridge) -> None:
    """A page is told of when its last slice has ended, once for each reason, also if a report goes to the scheduler
    side in between or the engine stops first: what is told adds up to what `connector_saves` counts.
    """
    source, told = rank(), []
    saver = source.side.saver
    assert saver is not None
    report = saver._losses.report

    def note(**loss: Any) -> None:
        told.append((loss["boundary"].tokens, loss["reason"], loss["records"]))
        report(**loss)

    saver._losses.report = note  # type: ignore[method-assign]
    bridge.store.held.add("save")
    source.side.save(source.jobs((64, 128, 160)))
    for job_id, outcomes in (
        (0, ["failed"]),
        (1, ["failed"] * HEADS),
        (0, ["stored", "no_processor", "failed"]),
        (2, ["no_processor"]),
    ):
        for outcome in outcomes:
            saver._done(job_id, outcome)
        source.side.take_report()
    assert told == [(128, "save_failed", HEADS), (64, "save_failed", 2), (64, "save_busy", 1)]
    saver.finish(0.1)
    assert told[3:] == [(160, "save_busy", 1), (160, "save_stopped", HEADS - 1)]
    for outcome, reason, num in (
        ("failed", "save_failed", HEADS + 2),
        ("no_processor", "save_busy", 2),
        ("stopped", "save_stopped", HEADS - 1),
    ):
        assert source.meters.get("connector_saves", outcome=outcome) == num
        assert source.meters.get("connector_saves_lost", reason=reason) == num
    bridge.store.held.clear()


def test_an_engine_that_stops_tells_all_that_it_loses(
    rank: Make, bridge: LoopBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what is more than is told one by one in a second."""
    monkeypatch.setattr("connector.worker.side._DRAIN_S", 0.2)
    source, told = rank(), []
    bridge.store.report = told.append  # type: ignore[method-assign]
    bridge.store.held.add("save")
    source.side.save(source.jobs((64,) * 150))
    source.side.shutdown()
    eventually(lambda: sum(outcome.num_lost for outcome in told) == 150 * HEADS, 0.5)
    bridge.store.held.clear()


def test_pages_for_which_there_is_no_processor_at_all(rank: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are given up at their deadline, counted and told as such."""
    monkeypatch.setattr("connector.worker.saver._SAVE_DEADLINE_S", 0.2)
    source, told = rank(), []
    threads, saver = source.side._save_threads, source.side.saver
    assert saver is not None and threads is not None
    saver._losses.report = lambda **loss: told.append(loss["reason"])  # type: ignore[method-assign]
    budgets = [pool._budget for pool in (threads._low, threads._normal)]
    grants = [budget.try_take(budget.limit_bytes) for budget in budgets]  # others hold all of it
    source.side.save(source.jobs((64,)))
    assert saver.drain(10)
    assert source.meters.get("connector_saves", outcome="no_processor") == HEADS
    eventually(lambda: told == ["save_busy"])  # on the loop's thread, after the count
    for budget, grant in zip(budgets, grants, strict=True):
        assert grant is not None
        budget.give_back(grant)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux alone")
@pytest.mark.parametrize(
    ("settings", "at_lowest", "at_normal"),
    [({}, True, False), ({"mode": "save"}, False, True), ({"pinned_bytes": 2 * PAGE_BYTES}, None, True)],
    ids=["with room", "saves for others", "without room"],
)
def test_saves_leave_the_processors_to_the_engine(
    rank: Make, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], at_lowest: bool | None, at_normal: bool
) -> None:
    """Pages are encoded at the lowest priority; not where others wait for them, nor while less than half of the host
    memory is free. The last page of a save may find more of it free than the first: either priority is right for it."""
    seen: set[int] = set()

    def watched(*given: Any, **more: Any) -> Any:
        seen.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return encode(*given, **more)

    monkeypatch.setattr("connector.worker.saver.encode", watched)
    source = rank(**settings)
    source.side.save(source.jobs((64,)))
    assert source.side.saver is not None
    assert source.side.saver.drain(60)
    report = source.side.take_report()
    assert report is not None
    assert report.saves_failed == set()
    assert (os.getpriority(os.PRIO_PROCESS, 0) in seen) is at_normal
    assert at_lowest is None or (19 in seen) is at_lowest


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
    assert len(bridge.store.inner.memory) == 12


def test_an_error_while_copying(rank: Make) -> None:
    """When a copy out of the cache fails, the error goes to the guard, and every job of it is reported as failed."""
    source = rank()
    jobs = source.jobs()
    broken = replace(jobs.saves[1], block_ids=((1, 2, 3, NUM_BLOCKS),))
    with pytest.raises((InternalError, IndexError, RuntimeError)):
        source.side.save(StepJobs(saves=(jobs.saves[0], broken, jobs.saves[2])))
    assert source.side.saver is not None
    assert source.side.saver.drain(10)
    report = source.side.take_report()
    assert report is not None
    assert report.saves_done == {0: 1, 1: 1, 2: 1}
    assert report.saves_failed == {0, 1, 2}  # they would have been one copy


def test_memory_that_cannot_be_had(rank: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose host memory cannot be pinned says so, and caches nothing."""

    def refuse(_: CpuDevice, num_bytes: int) -> torch.Tensor:
        raise InvalidRequest("no memory could be pinned", num_bytes=num_bytes)

    source = rank()
    monkeypatch.setattr(CpuDevice, "host_memory", refuse)
    side = WorkerSide(ConnectorSettings(), source.facts, source.shape, source.bridge, num_cores=2)
    side.register(lambda _: source.layers)
    assert side.refusal is not None and "no memory could be pinned" in side.refusal
    assert side.saver is None
    side.shutdown()


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


def refusal_of(bridge: LoopBridge, layers: list[torch.Tensor], **facts: Any) -> str:
    """What a rank says to these tensors."""
    values = {"total_heads": HEADS, "rank_heads": HEADS, "num_blocks": NUM_BLOCKS, **facts}
    engine = make_facts(**values)
    # as an engine without ranks sees the model: what is wrong with the ranks is the proof's to find
    shape = make_shape(replace(engine, tp_size=1))
    side = WorkerSide(ConnectorSettings(), engine, shape, bridge, num_cores=1)
    assert side.refusal is not None, "nothing is proven before tensors are seen"
    side.register(lambda _: layers)
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
            [layers[0], layers[1].flatten(2)],
            [layer.transpose(2, 3).contiguous().transpose(2, 3) for layer in layers],
        ],
        "does not hold what its spec says": [
            [layer[:, :2] for layer in layers],
            [layer.to(torch.bfloat16) for layer in layers],
            [layers[0], layers[1][..., :5]],
        ],
        "do not stand together": [[torch.zeros(NUM_BLOCKS, HEADS, BLOCK, 7)[..., :6] for _ in layers]],
        "unknown number of blocks": [[layer[:-1] for layer in layers]],
    }
    for reason, variants in changed.items():
        for variant in variants:
            assert reason in refusal_of(bridge, variant)


def test_layers_may_differ_in_memory(bridge: LoopBridge) -> None:
    """Layers whose heads lie further apart, or in an allocation of their own, are proven each for itself."""
    layers = Cache("layer_outer", 2, NUM_BLOCKS, HEADS, BLOCK, 6, 4, 1, "cpu").tensors()
    padded = Cache("padded", 2, NUM_BLOCKS, HEADS, BLOCK, 6, 4, 1, "cpu").tensors()
    assert refusal_of(bridge, [layers[0], padded[1]]) == ""


def test_heads_that_overlap_are_refused(bridge: LoopBridge) -> None:
    """Two heads that share their bytes (an expanded tensor) do not tile anything."""
    layers = [torch.zeros(NUM_BLOCKS, 1, BLOCK, 6).expand(-1, HEADS, -1, -1) for _ in range(2)]
    assert "cover the same byte" in refusal_of(bridge, layers)


def test_a_split_that_cuts_slices_is_refused(bridge: LoopBridge) -> None:
    """Three ranks cannot share four slices."""
    layers = Cache("layer_outer", 2, NUM_BLOCKS, HEADS, BLOCK, 6, 4, 1, "cpu").tensors()
    assert "tensor-parallel size" in refusal_of(bridge, layers, tp_size=3)
