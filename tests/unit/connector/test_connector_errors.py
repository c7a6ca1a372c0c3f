"""Errors that should never be: each costs the page, load or request it is about, and holds up nothing else for ever."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request
from vllm.v1.worker.gpu_worker import Worker

from connector.jobs import AuditJob, LoadPiece, RankReport, StepJobs
from connector.scheduler.hook_facts import PromptFacts, StepFacts
from connector.vllm.connector import KVStoreConnector
from connector.vllm.engine_calls import CHANGE_WEIGHTS, watch_engine_calls
from connector.vllm.engine_facts import find_models
from connector.vllm.weight_changes import watch_weights
from connector.worker.memory import RecordMemory
from kvstore.testing.waiting import eventually
from tests.unit.connector.rank_harness import SOURCE, Make, Rank
from tests.unit.connector.scheduler_harness import SchedulerHarness, harness


def raising(*_: object, **__: object) -> None:
    raise ZeroDivisionError


def stops(jobs: StepJobs) -> list[int]:
    return [job.stop_tokens for job in jobs.saves]


def test_a_request_that_cannot_be_planned_holds_up_nobody(at: SchedulerHarness) -> None:
    """However long it runs: its own saves end with its error, loads and saves of others reach the ranks."""
    at.keep("h", 70)
    at.new("h", 70)
    at.side.on_allocated("h", [[1, 2, 3, 4, 5]], at.ask("h"))
    at.new("bad", 640)
    at.new("good", 64)
    at.hashed("bad", "good")
    table = {"good": [range(1, 5)]}
    with pytest.raises(KeyError):
        at.side.plan_step(StepFacts({"bad": 64}, table))
    jobs = at.side.plan_step(StepFacts({"bad": 128, "good": 64}, table))
    assert [job.request_id for job in jobs.loads] == ["h"]
    assert stops(jobs) == [64]
    assert at.side.plan_step(StepFacts({"bad": 192}, table)).saves == ()
    at.finished("h")


def test_an_error_of_the_audit_ends_the_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else: a page of a request that ended, whose blocks are pinned, goes out with the next step."""
    pinned: list[int] = []
    with harness(tmp_path, audit_rate=1.0) as at:
        at.side.bind_pins(SimpleNamespace(pin=pinned.extend, unpin=lambda _: pinned.clear()))
        at.new("a", 64)
        at.hashed("a")
        at.side.on_finished("a", 64, [range(1, 5)])
        assert pinned == [1, 2, 3, 4]
        at.keep("r", 170)
        at.new("r", 170)
        assert at.ask("r") == 0
        monkeypatch.setattr(at.side._audits, "_pieces", raising)
        with pytest.raises(ZeroDivisionError):
            at.step({"r": 70})
        (job,) = [job for job in at.step({"r": 70}).saves if job.request_id == "a"]
        at.ranks_done(job.job_id)
        assert not pinned and not at.side.has_pending_saves


def test_an_error_of_the_audit_ends_no_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of an untested release whose pages were not compared yet: nothing is loaded from then on."""
    with harness(tmp_path, facts={"untested_release": "0.34.0"}) as at:
        at.keep("a", 70)
        at.new("a", 70)
        assert at.ask("a") == 0
        monkeypatch.setattr(at.side._audits, "_pieces", raising)
        with pytest.raises(ZeroDivisionError):
            at.step({"a": 70})
        at.new("b", 70, "a")
        assert at.ask("b") == 0


@pytest.mark.parametrize("where", ["hits.outcomes.report_hit", "_stopwatch.on_load_ordered", "hits.admit"])
def test_an_error_in_an_admission(at: SchedulerHarness, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """vLLM waits for the load from here on: the ranks report it as failed, and it is not fetched again."""
    connector = KVStoreConnector.__new__(KVStoreConnector)
    connector.guarded_errors = 0
    connector.scheduler_side = at.side
    at.keep("a", 170)
    at.new("a", 170)
    hit = at.ask("a")
    *path, name = where.split(".")
    monkeypatch.setattr(reduce(getattr, path, at.side), name, raising)
    blocks = SimpleNamespace(get_block_ids=lambda: [list(range(1, 13))])
    connector.update_state_after_alloc(SimpleNamespace(request_id="a"), blocks, hit)
    assert connector.guarded_errors == 1
    (job,) = at.step().loads
    assert (job.request_id, job.pieces) == ("a", None)
    at.finished("a", failed=True)
    assert at.ask("a") == 0
    at.side.on_finished("a")
    at.no_leases()


def test_an_error_at_the_end_of_a_request(at: SchedulerHarness) -> None:
    """Blocks that cannot be found: no room is lost, no block stays pinned, and its fetch ends with it."""
    at.side.bind_pins(SimpleNamespace(pin=raising, unpin=raising))
    at.keep("a", 128)
    at.new("a", 170)
    at.hashed("a")
    at.keep("a", 170)
    at.state("a").lookup = None
    assert at.ask("a") == 160
    at.state("a").stored_groups.clear()
    with pytest.raises(ZeroDivisionError):
        at.side.on_finished("a", 170, [range(1, 12)])
    assert not at.side.has_pending_saves
    at.no_leases()


def test_a_reset_that_fails_says_so() -> None:
    """The engine may still be bound to its old weights, and the operator who updates them has to know."""
    connector = KVStoreConnector.__new__(KVStoreConnector)
    connector.guarded_errors = 0
    connector._pins = None
    connector.scheduler_side = SimpleNamespace(reset_cache=raising)  # type: ignore[assignment]
    assert connector.reset_cache() is False
    assert connector.guarded_errors == 1


@pytest.mark.parametrize("changes", [{"load_inplace": True}, {"lora_path": "/adapters/b"}])
@pytest.mark.parametrize("resumable", [False, True])
def test_open_requests_of_a_replaced_adapter_are_stopped(changes: dict[str, Any], *, resumable: bool) -> None:
    """Also if the request that replaces it is refused for another reason."""
    transfer = SimpleNamespace(kv_connector_extra_config={"mode": "off"}, kv_role="kv_both")
    connector = KVStoreConnector(SimpleNamespace(kv_transfer_config=transfer), KVConnectorRole.SCHEDULER, None)
    seen, stopped = list[PromptFacts](), list[int]()
    connector.scheduler_side = SimpleNamespace(  # type: ignore[assignment]
        on_new_request=seen.append, stop_adapter=stopped.append
    )

    def ask(resumable: bool = False, **changes: Any) -> str | None:
        adapter = LoRARequest("a", 7, **{"lora_path": "/adapters/a", **changes})
        asked = Request("r", [1] * 64, SamplingParams(max_tokens=1), None, lora_request=adapter, resumable=resumable)
        connector.on_new_request(asked)
        return seen.pop().uncacheable

    assert ask() is None and not stopped
    assert ask(resumable, **changes) == ("streaming_session" if resumable else "adapter_replaced")
    assert stopped == [7]


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("adapter", [None, LoRARequest("a", 7, "/adapters/a")], ids=["plain", "adapter"])
def test_prompts_beside_adapters(adapter: LoRARequest | None, *, spread: bool) -> None:
    """Where vLLM computes a prompt without adapter by another request's, it is loaded and not saved."""
    transfer = SimpleNamespace(kv_connector_extra_config={"mode": "off"}, kv_role="kv_both")
    connector = KVStoreConnector(SimpleNamespace(kv_transfer_config=transfer), KVConnectorRole.SCHEDULER, None)
    seen = list[PromptFacts]()
    connector.scheduler_side = SimpleNamespace(on_new_request=seen.append)  # type: ignore[assignment]
    vars(connector)["_adapters_spread"] = spread
    connector.on_new_request(Request("r", [1] * 64, SamplingParams(max_tokens=1), None, lora_request=adapter))
    (flags,) = [one.flags for one in seen]
    assert (flags.load, flags.save) == (True, adapter is not None or not spread)


@pytest.mark.parametrize("by_name", [False, True], ids=["add_lora", "collective_rpc"])
def test_adapters_that_no_request_names_yet(*, by_name: bool) -> None:
    """`/v1/load_lora_adapter` swaps weights of requests that run, as does a call of workers by name: they are stopped
    before the next step."""
    transfer = SimpleNamespace(kv_connector_extra_config={"mode": "off"}, kv_role="kv_both")
    config = SimpleNamespace(kv_transfer_config=transfer, lora_config=SimpleNamespace())
    connector = KVStoreConnector(config, KVConnectorRole.SCHEDULER, None)
    told = list[object]()
    connector.scheduler_side = SimpleNamespace(  # type: ignore[assignment]
        stop_adapter=told.append, refuse=lambda reason: None
    )
    watch_engine_calls(connector)
    loads = SimpleNamespace(
        add_lora=lambda adapter: told.append("loads") or True,
        collective_rpc=lambda method, timeout, args, kwargs: told.append("loads") or [True],
    )
    core: Any = SimpleNamespace(model_executor=loads)

    def add(adapter: Any) -> None:
        if by_name:
            assert EngineCore.collective_rpc(core, "add_lora", args=(adapter,)) == [True]
        else:
            assert EngineCore.add_lora(core, adapter)

    def load(number: int, **changes: Any) -> None:
        add(LoRARequest("a", number, **{"lora_path": "/adapters/a", **changes}))

    load(7)
    load(7)
    assert told == ["loads", "loads"]
    load(7, load_inplace=True)
    assert told[2:] == [7, "loads", 7]
    load(8)
    load(8, lora_path="/adapters/b")
    assert told[5:] == ["loads", 8, "loads", 8]
    add(SimpleNamespace(lora_int_id=9))  # errors of ours are counted, and the adapter is loaded
    assert (connector.guarded_errors, told[9:]) == (2, ["loads"])
    EngineCore.collective_rpc(core, "list_loras")
    assert (connector.guarded_errors, told[10:]) == (2, ["loads"])
    EngineCore.collective_rpc(core, lambda worker: None)  # type: ignore[arg-type, return-value]
    assert (connector.guarded_errors, told[11:]) == (2, [7, 8, "loads", 7, 8])  # it may have loaded any adapter
    load(10)
    assert told[16:] == [10, "loads", 10]


# ---- on the ranks


class Told:
    """Notes what it is told of weights: whether they came from files, or `None` where they were lost."""

    def __init__(self, told: list[bool | None]) -> None:
        self._told = told

    def on_weights_loaded(self, *, from_files: bool) -> None:
        self._told.append(from_files)

    def on_weights_lost(self) -> None:
        self._told.append(None)


class Loadable(torch.nn.Module):
    """A model, or a part of one, that a trainer gives weights."""

    is_loaded = False

    def load_weights(self) -> set[str]:
        self.is_loaded = True
        return {"loaded"}


def test_weights_that_are_read_again() -> None:
    """Of each reload the connector learns whether all of it came from files."""
    told = list[bool | None]()

    def read(weights_iterator: object = None) -> None:
        model.load_weights()
        if weights_iterator == "torn":
            raise OSError

    model = Loadable()
    watch_weights(watcher := Told(told), [model])
    worker: Any = SimpleNamespace(vllm_config=VllmConfig(), model_runner=SimpleNamespace(reload_weights=read))
    Worker.reload_weights(worker)
    Worker.reload_weights(worker, weights_iterator=[])
    Worker.reload_weights(worker, [])
    with pytest.raises(OSError):
        Worker.reload_weights(worker, "torn")
    assert told == [True, False, False, False]
    del watcher


def test_weights_that_code_beside_vllm_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer calls `load_weights` of the model or of a part of it, or lets the engine sleep without its weights."""
    told = list[bool | None]()
    whole = Loadable()
    whole.part = torch.nn.ModuleList([Loadable(), torch.nn.Linear(1, 1)])
    watch_weights(watcher := Told(told), [whole, whole.part])
    assert [whole.load_weights(), whole.part[0].load_weights()] == [{"loaded"}] * 2  # type: ignore[operator]
    assert told == [False, False]
    backend = SimpleNamespace(suspend=lambda level: told.append(True))
    monkeypatch.setattr(Worker, "sleep_mode_backend", backend)
    for level in (1, 2):
        with suppress(Exception):  # where there is no GPU it ends somewhere behind the beginning
            Worker.sleep(SimpleNamespace(), level)  # type: ignore[arg-type]
    assert told[2:].count(None) == 1
    del watcher


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_loads_its_own_weights(copied: Callable[[Loadable], Loadable]) -> None:
    """A trainer in the engine's process may copy the model: the engine's own stays as it is."""
    model = Loadable()
    watch_weights(watcher := Told([]), [model])
    other = copied(model)
    other.load_weights()
    assert (model.is_loaded, other.is_loaded) == (False, True)
    del watcher


class Runner:
    """A model runner of vLLM's for a GPU, whose model is within what replays CUDA graphs."""

    def __init__(self) -> None:
        self.module, self.draft = Loadable(), Loadable()
        self.model: Any = CUDAGraphWrapper.__new__(CUDAGraphWrapper)
        self.model.runnable = self.module

    def get_model(self) -> torch.nn.Module:
        module: torch.nn.Module = self.model.unwrap()
        return module

    def get_draft_model(self) -> torch.nn.Module:
        return self.draft

    def register(self) -> list[torch.nn.Module]:
        return find_models()


def test_models_of_a_runner() -> None:
    """The model is found within what replays CUDA graphs, which is no module, and so are its drafts' weights."""
    runner = Runner()
    assert runner.register() == [runner.module, runner.draft]
    runner.draft = None  # type: ignore[assignment]
    assert runner.register() == [runner.module]
    assert find_models() == []


@pytest.mark.parametrize(
    ("method", "may_change", "is_refused"),
    [
        ("compute_weight_checksums", False, False),
        ("release_late_interaction_query_cache", False, False),  # vLLM's server, when a client has left
        ("reload_weights", False, False),  # each rank judges it
        ("reset_weights", False, True),
        ("apply_model", False, True),
        ("update_of_a_trainer", False, True),
        ("update_of_a_trainer", True, False),
        (print, False, True),
        (print, True, False),
        ("reset_weights", True, False),
        ("start_draft_weight_update", True, False),
    ],
)
def test_calls_of_workers_that_may_change_weights(method: Any, *, may_change: bool, is_refused: bool) -> None:
    """Functions, and methods that are not known to leave weights alone, end caching unless the operator takes care."""
    extra = {"mode": "off", "weights_may_change": may_change}
    transfer = SimpleNamespace(kv_connector_extra_config=extra, kv_role="kv_both")
    config = SimpleNamespace(kv_transfer_config=transfer, lora_config=None)
    connector = KVStoreConnector(config, KVConnectorRole.SCHEDULER, None)
    reasons = list[str]()
    detached = list[bool]()
    connector.scheduler_side = SimpleNamespace(  # type: ignore[assignment]
        refuse=reasons.append, detach=lambda: detached.append(True)
    )
    watch_engine_calls(connector)
    core: Any = SimpleNamespace(model_executor=SimpleNamespace(collective_rpc=lambda *_: [None]))
    EngineCore.collective_rpc(core, method)
    assert (bool(reasons), connector.guarded_errors) == (is_refused, 0)
    assert bool(detached) == (may_change and method in CHANGE_WEIGHTS)  # its operator should have reset the caches
    assert all("set weights_may_change" in reason for reason in reasons)
    assert not vars(connector)["_requests"].replaced_adapters  # nor is anything said of adapters: there are none


def loaded(rank: Make) -> Rank:
    """A rank whose load has ended and is to be read back."""
    source = rank()
    source.save()
    engine = rank(seed=2, audit_rate=1.0)
    jobs = engine.load_job(engine.stage())
    engine.side.start_loads(replace(jobs, loads=tuple(replace(job, read_back=True) for job in jobs.loads)))
    loader = engine.side.loader
    assert loader is not None
    eventually(lambda: loader._to_read_back)
    return engine


def test_loads_that_cannot_begin_are_reported(rank: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU has no memory for the event that loads wait for: the engine goes on, and computes these requests."""
    source = rank()
    source.save()
    engine = rank(seed=2)
    before = engine.blocks(SOURCE)
    connector = KVStoreConnector.__new__(KVStoreConnector)
    connector.guarded_errors = 0
    connector.worker_side = engine.side
    metadata: Any = connector.build_connector_meta(None)
    metadata.jobs = engine.load_job(engine.stage())
    assert engine.side.loader is not None
    monkeypatch.setattr(engine.side.loader.device, "fence", raising)
    connector.bind_connector_metadata(metadata)
    connector.start_load_kv(None)
    assert connector.guarded_errors == 2
    assert engine.result() == ({"r"}, {"r"})
    assert not engine.side.loader.is_loading
    assert engine.blocks(SOURCE).equal(before)


def test_ranks_that_were_stopped_answer(rank: Make) -> None:
    """With the reason: at once, and again only with jobs, each of which ends as failed on every rank."""
    source = rank()
    source.save()
    ranks = [rank(rank=0, ranks=2, seed=2), rank(rank=1, ranks=2, seed=3)]
    for one in ranks:
        one.side.stop("other weights")
    reports = [one.side.take_report() for one in ranks]
    assert reports == [RankReport(refusal="other weights")] * 2
    jobs = replace(source.jobs(), audits=(AuditJob(7, b"", ()),))
    for one in ranks:
        one.side.save(StepJobs())
        assert one.side.take_report() is None
        one.side.save(jobs)
        one.side.save(StepJobs(audits=(AuditJob(8, b"", ()),)))
        one.side.stop("and others again")  # forgets no answer, nor the first reason
    told = reduce(RankReport.merge, [report for one in ranks if (report := one.side.take_report()) is not None])
    ids = {job.job_id for job in jobs.saves}
    assert (told.saves_done, told.saves_failed) == (dict.fromkeys(ids, 2), ids)
    assert (told.audits_done, told.audits_partial, told.refusal) == ({7: 2, 8: 2}, {7, 8}, "other weights")


def test_a_load_that_cannot_be_read_back_is_reported(rank: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As failed, after any error: vLLM would wait for the request for ever."""
    engine = loaded(rank)
    with monkeypatch.context() as patch:
        patch.setattr(engine.side.auditor, "read_back", raising)
        with pytest.raises(ZeroDivisionError):
            engine.side.take_results()
    assert engine.result() == ({"r"}, {"r"})
    assert engine.side.loader is not None and not engine.side.loader.is_loading


def test_a_comparison_that_dies_is_counted_and_told(
    rank: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing was compared: the load counts as one that is not read back, and the log has the traceback."""
    engine = loaded(rank)
    monkeypatch.setattr(engine.side.auditor, "_is_equal", raising)
    with caplog.at_level(logging.ERROR, logger="vllm.kvstore"):
        assert engine.result() == ({"r"}, set())
    assert engine.meters.get("connector_audit_skipped") == 1
    assert "ZeroDivisionError" in caplog.text
    assert engine.side.auditor is not None and engine.side.auditor._pages.used_bytes == 0


def test_an_audit_that_dies_loses_no_report(rank: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own comparisons are answered, so that their leases end, and the step's pages are saved."""
    engine = rank(audit_rate=1.0)
    engine.save()
    staged = engine.stage()
    assert staged.lease is not None
    piece = LoadPiece(staged.keys[0], 4, 0, (SOURCE[:4],))
    audits = tuple(AuditJob(number, staged.lease, (piece,)) for number in range(3))
    monkeypatch.setattr(engine.side.auditor, "_gather", raising)
    assert engine.side.auditor is not None and engine.side.saver is not None
    with pytest.raises(ZeroDivisionError):
        engine.side.save(replace(engine.jobs(first_id=20), audits=audits))
    assert engine.side.saver.drain(10)
    report = engine.side.take_report()
    assert report is not None
    assert report.audits_done == {0: 1, 1: 1, 2: 1}
    assert report.saves_done == {20: 1, 21: 1, 22: 1}


def test_no_memory_for_a_record(rank: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is lost, its host buffer is not: the fixture looks at that."""
    engine = rank()
    with monkeypatch.context() as patch:
        patch.setattr(RecordMemory, "take", raising)
        engine.side.save(engine.jobs())
        assert engine.side.saver is not None and engine.side.saver.drain(10)
    report = engine.side.take_report()
    assert report is not None
    assert (len(report.saves_done), report.saves_failed) == (3, {0, 1, 2})
