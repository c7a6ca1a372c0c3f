"""Blending in live engines: its error at ratio 1, what it stores and says, its gate, and who never gets it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from kvstore.testing.checkpoints import write_checkpoint
from kvstore.testing.engine import EngineProcess, EngineSpec
from kvstore.testing.engine.spec import TrafficRequest
from kvstore.testing.waiting import eventually
from tests.connector.support.blending import RECORDS, SALT, blended, computed, difference, explained, spec_of
from tests.connector.support.service import DirectoryService

pytestmark = pytest.mark.engine

Start = Callable[[EngineSpec], EngineProcess]

BLOCK = 128
SCHEDULER = "llm.llm_engine.engine_core.engine_core.scheduler.connector"
REQUESTS = 10_000 if os.environ.get("KVSTORE_TEST_FULL") == "1" else 120


def num_saved(service: DirectoryService) -> float:
    """Records that were saved so far."""
    return float(service.status()["counters"].get('saves{outcome="stored"}', 0.0))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_at_ratio_one_it_is_a_split(engine: Start, service: DirectoryService, work: Path, kind: str) -> None:
    """With all tokens computed again the answer differs from a full computation by no more than a split prompt does."""
    checkpoint = write_checkpoint(kind, work / "checkpoints")
    orders = [(0, 1, 2), (2, 0, 1), (1, 2, 0)]
    whole = engine(EngineSpec(checkpoint=checkpoint, max_model_len=4096))
    full = [whole.generate([computed(order)])[0] for order in orders]
    whole.stop()
    cut = engine(EngineSpec(checkpoint=checkpoint, max_model_len=4096, max_num_batched_tokens=BLOCK))
    split = [cut.generate([computed(order)])[0] for order in orders]
    cut.stop()
    blending = engine(spec_of(checkpoint, service, blend_recompute_ratio=1.0))
    made = [blending.generate([blended(order)])[0] for order in orders]
    assert [answer.num_cached_tokens for answer in made] == [512] * 3
    by_split = max(difference(one, other) for one, other in zip(full, split, strict=True))
    by_blending = max(difference(one, other) for one, other in zip(full, made, strict=True))
    print(f"{kind}: split {by_split:.2g}, blended {by_blending:.2g}")
    assert by_blending <= by_split + 1e-6
    assert [answer.tokens for answer in made] == [answer.tokens for answer in full]
    blending.stop()


def test_documents_are_stored_once_and_explained(engine: Start, service: DirectoryService, llama: Path) -> None:
    """A fresh engine reuses what another one stored, in another order; `explain` says how much was computed again.

    The first one has its core in a process of its own, as in production.
    """
    first = engine(replace(spec_of(llama, service), multiprocess=True))
    first.generate([blended((0, 1, 2))])
    eventually(lambda: num_saved(service) == 3 * RECORDS)  # an engine that ends drops what it has not stored yet
    first.stop()
    (told,) = explained(service, "blended")
    assert told["detail"]["stored_documents"] == "0 of 3"
    service.settle()
    second = engine(spec_of(llama, service))
    (answer,) = second.generate([blended((2, 0, 1))])
    assert answer.num_cached_tokens == 512
    told = explained(service, "blended")[0]
    assert told["result"] == "hit" and told["resume_tokens"] == 512
    assert told["detail"]["stored_documents"] == "3 of 3"
    recomputed = int(told["detail"]["blended"].removesuffix(" of 512 tokens recomputed"))
    assert 21 + 0.15 * 491 <= recomputed < 21 + 0.15 * 491 + 2
    counters = second.connector_counters()
    assert counters["connector_blended_tokens"] == 512
    assert counters["connector_blend_recomputed_tokens"] == recomputed
    second.generate([blended((2, 0, 1), salt="blend:other")])
    assert explained(service, "blended")[0]["detail"]["stored_documents"] == "0 of 3"  # they belong to the salt
    second.stop()


def test_many_at_once(engine: Start, service: DirectoryService, llama: Path) -> None:
    """Requests that come together are blended one after the other, beside others that are computed."""
    running = engine(spec_of(llama, service))
    orders = [(0, 1, 2), (1, 2, 0), (2, 0, 1), (0, 2, 1)]
    requests = [blended(order, number) for number, order in enumerate(orders)]
    answers = running.generate([*requests, *(computed(order, 9) for order in orders)])
    assert [answer.num_cached_tokens for answer in answers[:4]] == [512] * 4
    assert running.connector_counters()["connector_blended_requests"] == 4
    alone = [
        running.generate([blended(order, number, salt=f"blend:{number}")])[0] for number, order in enumerate(orders)
    ]
    assert max(difference(one, other) for one, other in zip(answers[:4], alone, strict=True)) < 1e-3
    running.stop()


def test_requests_that_have_gone_are_not_blended(engine: Start, service: DirectoryService, llama: Path) -> None:
    """A client that gives up while it waits for others holds nobody up, and its blocks are free at once."""
    running = engine(spec_of(llama, service))
    asked = [blended(order, number) for number, order in enumerate([(0, 1, 2), (1, 2, 0), (2, 0, 1), (0, 2, 1)])]
    requests = [
        TrafficRequest(one.prompt, max_tokens=2, cache_salt=one.cache_salt, kv_transfer_params=one.kv_transfer_params)
        for one in asked
    ]
    requests[1:3] = [replace(one, abort_state="loading") for one in requests[1:3]]
    report = running.traffic(requests, in_flight=4)
    assert set(report.aborted.values()) == {"loading"} and len(report.aborted) == 2
    assert all(answer.num_cached_tokens == 512 for answer in (report.answers[0], report.answers[3]) if answer)
    counters = running.connector_counters()
    assert counters["connector_blended_requests"] == 2
    assert counters.get("connector_blend_failed", 0) == 0
    assert running.reset_prefix_cache(), "no block is held"
    running.stop()


def test_bad_audits_turn_blending_off(engine: Start, service: DirectoryService, llama: Path) -> None:
    """A model with random weights is far from what blending assumes: audits end it, and later requests are computed."""
    running = engine(spec_of(llama, service, blend_audit_rate=1.0, blend_recompute_ratio=0.0))
    for number in range(100):
        running.generate([blended((number % 3, 3, 4), number, salt=f"blend:{number}")])  # vLLM's own cache has none
        while running.evaluate(f"{SCHEDULER}.has_pending_push_work()"):
            running.evaluate("llm.llm_engine.step() and None")
        if running.connector_counters().get("connector_blend_turned_off"):
            break
    assert running.connector_counters()["connector_blend_turned_off"] == 1
    assert "this engine does not blend: 8 audits found a mean difference of" in running.log_text()
    told = explained(service, "blended")[0]
    assert told["detail"]["audit_kl"] > 0.1
    assert len(told["detail"]["audit_keys"].split()) == 4
    (answer,) = running.generate([blended((5, 3, 4), salt="blend:later")])
    assert answer.num_cached_tokens == 0
    running.stop()


ADAPTERS: Mapping[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["qkv_proj"]}
"""The other modules stay as they are."""


@pytest.mark.parametrize(
    ("kind", "runner", "arguments", "reason"),
    [
        ("gemma3", "v1", {}, "sliding window"),
        ("llama", "v2", {}, "model runner"),
        ("llama", "v1", ADAPTERS, "adapters"),
    ],
)
def test_an_engine_that_cannot(
    engine: Start,
    service: DirectoryService,
    work: Path,
    kind: str,
    runner: Literal["v1", "v2"],
    arguments: Mapping[str, Any],
    reason: str,
) -> None:
    """It says why at its start, and computes what asks to be blended."""
    checkpoint = write_checkpoint(kind, work / "checkpoints")
    running = engine(replace(spec_of(checkpoint, service), runner=runner, arguments=arguments))
    (answer,) = running.generate([blended((0, 1, 2))])
    assert answer.num_cached_tokens == 0
    assert f"this engine does not blend: {reason}" in running.log_text()
    running.stop()


def test_no_other_connector_stores_what_is_blended(engine: Start, service: DirectoryService, llama: Path) -> None:
    """Under `MultiConnector` each connector sees all requests' blocks: one that knows nothing of blending would store
    them under the names of exact prefixes, and give them to engines that do not blend.
    """
    common = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    ours = {"kv_connector": "KVStoreConnector", "kv_connector_module_path": "connector", **common}
    both = [{**ours, "kv_connector_extra_config": {"url": service.url, "blend": blend}} for blend in (True, False)]
    transfer = {"kv_connector": "MultiConnector", **common, "kv_connector_extra_config": {"connectors": both}}
    running = engine(EngineSpec(checkpoint=llama, kv_transfer=transfer, max_model_len=4096))
    (answer,) = running.generate([blended((0, 1, 2))])
    assert answer.num_cached_tokens == 0
    assert "this engine does not blend: MultiConnector" in running.log_text()
    running.stop()


def test_nothing_is_imported_without_it(engine: Start, service: DirectoryService, llama: Path) -> None:
    """Without `blend = true` no module of blending is imported, and a wish is ignored and named in the log."""
    running = engine(replace(spec_of(llama, service), connector={"url": service.url}))
    (answer,) = running.generate([blended((0, 1, 2))])
    assert answer.num_cached_tokens == 0
    assert (
        running.evaluate("[name for name in __import__('sys').modules if 'connector' in name and 'blend' in name]")
        == []
    )
    assert "this engine's settings have no blend = true" in running.log_text()
    running.stop()


def test_who_did_not_ask_never_gets_it(engine: Start, service: DirectoryService, llama: Path) -> None:
    """Random requests, with and without the salt and the wish, in two engines over one store: what was not asked for
    with the salt equals a full computation, and blended requests save nothing under the name of a prefix.
    """
    orders = [(0, 1), (1, 0), (0, 2), (2, 1)]
    plain = engine(EngineSpec(checkpoint=llama, max_model_len=4096))
    right = {order: plain.generate([computed(order)])[0] for order in orders}
    plain.stop()
    # nothing is computed again but first tokens, so that a blended block shows
    engines = [engine(spec_of(llama, service, blend_recompute_ratio=0.0)) for _ in range(2)]
    random = np.random.default_rng(5)
    wrong = 0
    for number in range(REQUESTS):
        running, order = engines[random.integers(2)], orders[random.integers(len(orders))]
        kind = random.integers(4)
        if kind == 0:
            (answer,) = running.generate([blended(order)])
            wrong += difference(answer, right[order]) > 0.1
        elif kind == 1:  # the salt alone: it may get blended blocks of vLLM's own cache, and saves nothing
            running.generate([computed(order, salt=SALT)])
        else:
            salt = None if kind == 2 else "team"
            asked = computed(order, salt=salt)
            if random.integers(2):  # a wish without the salt
                asked = replace(asked, kv_transfer_params=blended(order).kv_transfer_params)
            (answer,) = running.generate([asked])
            assert difference(answer, right[order]) < 1e-3, f"request {number} of kind {kind}"
        if random.integers(10) == 0:
            assert running.reset_prefix_cache()
    assert wrong > REQUESTS / 20, "blended answers must differ here, or this test finds nothing"
    for running in engines:
        running.stop()


def test_nothing_blended_is_saved(engine: Start, service: DirectoryService, llama: Path) -> None:
    """Neither pages of a blended request nor those of one with its salt, which gets blocks of vLLM's own cache."""
    running = engine(spec_of(llama, service))
    running.generate([blended((0, 1, 2))])
    (answer,) = running.generate([computed((0, 1, 2), 5, salt=SALT)])
    assert answer.num_cached_tokens == 512
    running.generate([computed((0, 1, 2), 5, salt="blend:other")])
    counters = running.connector_counters()
    assert counters.get("connector_saved_bytes", 0) == 0
    assert counters['connector_uncacheable_requests{reason="blended"}'] == 3
    running.generate([computed((0, 1, 2), 5, salt="team")])
    running.stop()
    service.settle()
    fresh = engine(spec_of(llama, service))
    (salted,) = fresh.generate([computed((0, 1, 2), 5, salt=SALT)])
    (saved,) = fresh.generate([computed((0, 1, 2), 5, salt="team")])
    assert (salted.num_cached_tokens, saved.num_cached_tokens) == (0, 640)
    fresh.stop()
