"""The order in which releases of vLLM call the hooks of a step: each save is made once, when its bytes are final."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults

from connector.jobs import SaveJob, StepJobs
from connector.settings import ConnectorSettings
from connector.vllm import connector as vllm_connector
from connector.vllm import engine_facts
from connector.vllm.connector import KVStoreConnector, _RankProof, _StepMetadata
from kvstore.model.keys import NamespaceId, PrefixHash
from tests.unit.connector.scheduler_harness import harness

ENDED = SaveJob(7, NamespaceId(bytes(16)), PrefixHash(bytes(16)), 0, 0, 64, ((1, 2, 3, 4),))


class Rank:
    """A worker side that notes its calls."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.fails = False
        self.waited = False

    def begin_step(self, jobs: StepJobs) -> None:
        pass

    def start_loads(self, jobs: StepJobs) -> None:
        self.told.append("load")

    def save(self, jobs: StepJobs) -> None:
        self.told.append("save")
        if self.fails:
            raise ZeroDivisionError

    def take_results(self, *, may_wait: bool) -> tuple[set[str], set[str]]:
        self.told.append("results")
        self.waited = may_wait
        return {"r"}, set()

    def drain(self) -> None:
        self.told.append("drain")

    def register(self, layers: object) -> None:
        pass

    def stop(self, reason: str) -> None:
        self.told.append("stop")


@pytest.fixture
def made() -> Iterator[tuple[KVStoreConnector, Rank]]:
    connector = KVStoreConnector.__new__(KVStoreConnector)
    connector.guarded_errors = 0
    connector._saved = None
    connector.worker_side = rank = Rank()  # type: ignore[assignment]
    yield connector, rank


def step(connector: KVStoreConnector, *hooks: str, computes: bool) -> KVConnectorTransferResults:
    """One step of a runner that calls these hooks."""
    results = KVConnectorTransferResults()
    connector.bind_connector_metadata(_StepMetadata(StepJobs(saves=(ENDED,), computes=computes)))
    connector.start_load_kv(None)
    for hook in hooks:
        if hook == "get_transfer_results":
            results = connector.get_transfer_results(set())
        else:
            getattr(connector, hook)()
    connector.clear_connector_metadata()
    return results


@pytest.mark.parametrize(
    ("computes", "hooks", "told"),
    [
        pytest.param(False, ["get_transfer_results"], ["save", "results"], id="0.30, nothing to compute"),
        pytest.param(
            False, ["wait_for_save", "get_transfer_results"], ["save", "results"], id="0.31, nothing to compute"
        ),
        pytest.param(True, ["wait_for_save", "get_transfer_results"], ["save", "results"], id="a step that computes"),
        pytest.param(True, ["get_transfer_results", "wait_for_save"], ["results", "save"], id="with drafts"),
        pytest.param(False, ["get_transfer_results", "wait_for_save"], ["save", "results"], id="drafts, no forward"),
    ],
)
def test_each_save_is_made_once(
    made: tuple[KVStoreConnector, Rank], computes: bool, hooks: list[str], told: list[str]
) -> None:
    """In a step that computes only when vLLM says that all is written. In another step also if vLLM does not call the
    hook, and before the results, so that an idle engine waits for the saves that it has just begun."""
    connector, rank = made
    for _ in range(2):
        rank.told.clear()
        step(connector, *hooks, computes=computes)
        assert rank.told == ["load", *told]


def test_a_stage_before_the_last_does_not_wait_for_drafts(made: tuple[KVStoreConnector, Rank]) -> None:
    """With drafts the first runner of 0.30 and 0.31 calls `wait_for_save` in a pipeline's last stage only."""
    connector, rank = made
    vars(connector)["_is_last_stage"] = False
    step(connector, "get_transfer_results", computes=True)
    assert rank.told == ["load", "save", "results"]
    rank.told.clear()
    step(connector, "wait_for_save", "get_transfer_results", computes=True)
    assert rank.told == ["load", "save", "results"]


@pytest.mark.parametrize("may_wait", [False, True])
def test_a_step_that_computes_nothing_waits_only_where_it_may(
    made: tuple[KVStoreConnector, Rank], *, may_wait: bool
) -> None:
    """vLLM sends such steps to ranks between steps that compute, whose tokens would be late."""
    connector, rank = made
    connector.bind_connector_metadata(_StepMetadata(StepJobs(computes=False, may_wait=may_wait)))
    connector.get_transfer_results(set())
    assert rank.waited == may_wait


def test_a_save_that_fails_loses_no_load(made: tuple[KVStoreConnector, Rank]) -> None:
    """And is not tried a second time: its jobs were answered with the error."""
    connector, rank = made
    rank.fails = True
    results = step(connector, "get_transfer_results", "wait_for_save", computes=False)
    assert results.finished_recving == {"r"}
    assert rank.told == ["load", "save", "results"]
    assert connector.guarded_errors == 1


def test_an_engine_that_sleeps_ends_its_copies_first(made: tuple[KVStoreConnector, Rank]) -> None:
    """Both hooks are called in each state of the connector."""
    connector, rank = made
    connector.unregister_kv_caches()
    connector.restore_kv_caches()
    assert rank.told == ["drain"]
    connector.worker_side = None
    connector.unregister_kv_caches()
    assert connector.guarded_errors == 0


def test_an_engine_that_wakes_up_keeps_its_scheduler_side(tmp_path: Path) -> None:
    """vLLM gives the handshake again. The blocks are empty: what was to be saved of them is dropped, and unpinned."""
    unpinned: list[int] = []
    with harness(tmp_path) as at:
        at.side.bind_pins(SimpleNamespace(pin=lambda _: None, unpin=unpinned.extend))
        connector = KVStoreConnector.__new__(KVStoreConnector)
        connector.guarded_errors = 0
        connector.scheduler_side = at.side
        at.new("a", 64)
        at.hashed("a")
        at.side.on_finished("a", 64, [range(1, 5)])
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): _RankProof(at.facts, None)})
        assert connector.scheduler_side is at.side and connector.guarded_errors == 0
        assert at.step().saves == () and not at.side.has_pending_saves
        assert sorted(unpinned) == [1, 2, 3, 4]


def test_a_configuration_that_is_not_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The table cannot foresee everything: the rank stays out, says why, and does not end."""

    def changed(*_: Any, **__: Any) -> Any:
        raise AttributeError("no attribute 'tensor_parallel_size'")

    monkeypatch.setattr("connector.vllm.connector.read_facts", changed)
    transfer = SimpleNamespace(kv_connector_extra_config={}, kv_role="kv_both")
    rank = KVStoreConnector(SimpleNamespace(kv_transfer_config=transfer), KVConnectorRole.WORKER, SimpleNamespace())
    assert rank.worker_side is None and rank.get_handshake_metadata() is None
    assert "this engine is not cached" in caplog.text and "tensor_parallel_size" in caplog.text


def test_the_hashs_tokens_are_read_from_every_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """`KVCacheConfig` tells them since 0.32 only; what vLLM itself computes them with tells them in all."""
    monkeypatch.setattr(engine_facts, "resolve_kv_cache_block_sizes", lambda kv_cache, vllm: (640, 128))
    assert engine_facts.hash_block_tokens(SimpleNamespace(), SimpleNamespace()) == 128


def test_weights_that_were_lost_end_caching_once_something_is_computed(made: tuple[KVStoreConnector, Rank]) -> None:
    """An engine that slept at level 2 is given its weights back some calls after it woke up."""
    connector, rank = made
    connector.on_weights_lost()
    step(connector, computes=False)
    assert "stop" not in rank.told
    step(connector, computes=True)
    assert rank.told.count("stop") == 1


@pytest.mark.parametrize(
    ("has_draft", "kept", "ends"),
    [(False, [], False), (True, [], True), (True, ["*.engram", "draft.*"], False)],
)
def test_drafts_that_were_lost_end_caching(
    made: tuple[KVStoreConnector, Rank],
    monkeypatch: pytest.MonkeyPatch,
    kept: list[str],
    *,
    has_draft: bool,
    ends: bool,
) -> None:
    """vLLM's reload behind a sleep of level 2 reads the model's weights alone: a draft model computes with what is left
    in memory, unless the sleep kept its weights."""
    connector, rank = made
    models = [torch.nn.Linear(1, 1) for _ in range(1 + has_draft)]
    monkeypatch.setattr(vllm_connector, "find_models", lambda: models)
    monkeypatch.setattr(vllm_connector, "would_read_the_same", lambda config, facts: True)
    config = SimpleNamespace(model_config=SimpleNamespace(sleep_preserve_parameter_names=kept))
    vars(connector).update(_settings=ConnectorSettings(), _facts=SimpleNamespace(), _vllm_config=config)
    connector.register_kv_caches({})
    connector.on_weights_loaded(from_files=True)
    assert "stop" not in rank.told
    connector.on_weights_lost()
    connector.on_weights_loaded(from_files=True)
    assert (("stop" in rank.told), connector.guarded_errors) == (ends, 0)
