"""vLLM's own offloading over a real service: its real connector, manager and primary tier drive our tier."""

from __future__ import annotations

import gc
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_offload.base import LookupResult, OffloadingEvent
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from connector.offloading import tier
from connector.offloading.lookups import Request
from connector.settings import ConnectorSettings
from kvstore.client import BlockingStore
from kvstore.client.pages import name_of_page
from kvstore.errors import InvalidRequest
from kvstore.format.names import format_name
from kvstore.model.keys import RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.testing.checkpoints import write_checkpoint
from kvstore.testing.waiting import eventually
from tests.connector.support.offloading import (
    Offloader,
    OffloaderMaker,
    cache_of,
    chain,
    content_of,
    engine_config,
    full,
    offloading,
    window,
)
from tests.connector.support.service import DirectoryService

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return engine_config(write_checkpoint("llama", tmp_path_factory.mktemp("checkpoint")))


@pytest.fixture
def make(config: Any, service: DirectoryService) -> Iterator[OffloaderMaker]:
    with offloading(config, service.url) as maker:
        yield maker


def stored(engine: Offloader, keys: list[bytes], request: str = "writer") -> None:
    """Have an engine offload chunks, and wait until the store has them."""
    context = engine.begin(request, keys=keys)
    size = engine.tier.block_size_bytes
    assert engine.offload(context, keys, [content_of(key, size) for key in keys]) == len(keys)
    engine.settle()
    engine.end(request)


def restored(engine: Offloader, keys: list[bytes], request: str = "reader") -> int:
    """How many chunks another engine gets, all of them right."""
    context = engine.begin(request, keys=keys)
    num_found = engine.find(context, keys)
    for key in keys[:num_found]:
        assert engine.content(context, key) == content_of(key, engine.tier.block_size_bytes)
    engine.end(request)
    return num_found


def test_chunks_come_back(make: OffloaderMaker) -> None:
    """Twelve chunks are offloaded; another engine's primary tier gets them bit for bit, and no others."""
    keys = chain("a", 12)
    writer = make(enable_kv_events=True)
    assert restored(writer, keys, "before") == 0
    stored(writer, keys)
    reader = make()
    assert restored(reader, [*keys, *chain("b", 3)]) == 12
    assert restored(reader, chain("b", 3), "other") == 0
    assert [result.success for result in writer.results] == [True]
    events = [event for event in writer.manager.take_events() if isinstance(event, OffloadingEvent)]
    told = [event for event in events if event.medium.value == "STORAGE"]
    assert [set(event.keys) for event in told] == [set(keys)] and not any(event.removed for event in told)
    assert reader.tier.guarded_errors == writer.tier.guarded_errors == 0


def test_what_is_stored_is_not_stored_again(make: OffloaderMaker, service: DirectoryService) -> None:
    """A second engine offloads the same chunks and two more: the store writes the two."""
    keys, writer = chain("a", 6), make()
    (namespace,) = writer.tier.namespaces().values()
    files = [service.records / format_name(RecordKey(namespace, name_of_page(key), 0, 0)) for key in keys]
    stored(writer, keys[:4])
    service.settle()
    assert [file.exists() for file in files] == [True] * 4 + [False] * 2
    before = [file.stat().st_mtime_ns for file in files[:4]]
    stored(make(), keys)
    service.settle()
    assert [file.exists() for file in files] == [True] * 6
    assert [file.stat().st_mtime_ns for file in files[:4]] == before


def test_windows_need_their_last_chunks_alone(make: OffloaderMaker) -> None:
    """A model with a window beside full attention: of the window a chunk is found without those before it."""
    cache = cache_of(full(), window(256))
    chunks, last = chain("a", 8), chain("a", 8, group=1)[-3:]
    writer, reader = make(cache), make(cache)
    stored(writer, [*chunks, *last])
    context = reader.begin("r", keys=chunks)
    assert reader.find(context, chunks) == 8
    assert reader.find(context, last) == 3 and reader.find(context, chain("a", 8, group=1)[:1]) == 0
    for key in last:
        assert reader.content(context, key) == content_of(key, reader.tier.block_size_bytes)


def change(**values: Any) -> Callable[[Any], None]:
    """Change an engine's configuration: `part_field`."""

    def apply(config: Any) -> None:
        for name, value in values.items():
            part, _, field = name.partition("__")
            setattr(getattr(config, part), field, value)

    return apply


DIFFERENT: list[tuple[str, dict[str, Any]]] = [
    ("other weights", {"weights_id": "others"}),
    ("another cache type", {"change": change(cache_config__cache_dtype="fp8_e4m3")}),
    ("another computation type", {"change": change(model_config__dtype="float16")}),
    ("another quantization", {"change": change(model_config__quantization="fp8")}),
    ("another hash", {"change": change(cache_config__prefix_caching_hash_algo="sha256_cbor")}),
    ("another layout of blocks", {"change": change(cache_config__kv_cache_layout="BLHNC")}),
    ("other heads", {"cache": cache_of(full(num_kv_heads=4, head_size=8))}),
    ("other layers", {"cache": cache_of(full(), layers=5)}),
    ("larger chunks", {"extra": {"blocks_per_chunk": 2}}),
]


@pytest.mark.parametrize("other", [one[1] for one in DIFFERENT], ids=[one[0] for one in DIFFERENT])
def test_engines_that_would_misread_each_other_never_meet(make: OffloaderMaker, other: dict[str, Any]) -> None:
    """Where anything differs that bytes depend on, the same keys find nothing."""
    keys = chain("a", 3)
    stored(make(), keys)
    assert restored(make(), keys) == 3
    cache = other.pop("cache", None) if "cache" in other else None
    assert restored(make(cache, **other), keys) == 0


def test_weights_are_known_by_their_content(make: OffloaderMaker, config: Any, tmp_path: Path) -> None:
    """Equal files under another path share chunks; one changed byte ends that. Nothing but the tier's line is set."""
    models = [tmp_path / name for name in ("one", "equal", "other")]
    source = Path(config.model_config.model)
    for number, model in enumerate(models):
        model.mkdir()
        for file in source.iterdir():
            (model / file.name).write_bytes(file.read_bytes())
        weights = next(model.glob("*.safetensors"))
        weights.write_bytes(weights.read_bytes()[:-1] + bytes([number // 2]))
    keys, found = chain("a", 2), []
    for number, model in enumerate(models):
        engine = make(weights_id=None, change=change(model_config__model=str(model)))
        found.append(restored(engine, keys))
        stored(engine, keys) if not number else None
    assert found == [0, 2, 0]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("adapters", {"change": lambda config: setattr(config, "lora_config", object())}, "adapter"),
    ("a hash that is none", {"change": change(cache_config__prefix_caching_hash_algo="xxhash")}, "one key"),
    ("weights of nowhere", {"weights_id": None, "change": change(model_config__model="no/where")}, "weights_id"),
]


@pytest.mark.parametrize(("other", "reason"), [one[1:] for one in REFUSED], ids=[one[0] for one in REFUSED])
def test_what_cannot_be_told_apart_is_not_cached(make: OffloaderMaker, other: dict[str, Any], reason: str) -> None:
    """The engine runs without the store, and its log says why."""
    engine = make(ready=False, **other)
    assert engine.tier.identified.wait(30) and reason in engine.tier.refusal
    keys = chain("a", 3)
    context = engine.begin("r", keys=keys)
    assert engine.find(context, keys) == 0
    engine.offload(context, keys, [bytes(engine.tier.block_size_bytes)] * 3)
    engine.settle()
    assert [result.success for result in engine.results] == [False] and engine.tier.guarded_errors == 0


def test_an_untested_release_is_not_cached(make: OffloaderMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM calls its interface experimental: another release needs `allow_untested_vllm`."""
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    engine = make(ready=False)
    assert "0.32" in engine.tier.refusal and "allow_untested_vllm" in engine.tier.refusal
    make(allow_untested_vllm=True)


@pytest.mark.parametrize("wrong", [{"urll": "unix:/x"}, {"url": "nowhere"}, {"mode": "sometimes"}, {"audit_rate": 1}])
def test_wrong_settings_are_named_at_the_start(make: OffloaderMaker, wrong: dict[str, Any]) -> None:
    """An operator's mistake ends the start, with its name."""
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        make(**wrong)


@pytest.mark.parametrize(
    ("settings", "parameters"),
    [({"mode": "save"}, None), ({"mode": "off"}, None), ({}, {"kvstore": {"load": False}})],
    ids=["saves alone", "off", "a request that opted out"],
)
def test_an_operator_or_a_request_may_want_no_loads(
    make: OffloaderMaker, settings: dict[str, Any], parameters: Any
) -> None:
    """What is stored is not loaded, and nothing waits for it."""
    keys = chain("a", 3)
    stored(make(), keys)
    reader = make(**settings)
    assert reader.poll(reader.begin("r", keys=keys, parameters=parameters), keys) == 0


def test_a_request_may_want_no_saves(make: OffloaderMaker) -> None:
    """Its chunks stay in the primary tier."""
    keys, engine = chain("a", 3), make()
    context = engine.begin("r", keys=keys, parameters={"kvstore": {"save": False}})
    engine.offload(context, keys, [bytes(engine.tier.block_size_bytes)] * 3)
    engine.settle()
    assert not engine.results[0].success and restored(make(), keys) == 0


# loads that fail


def lose(engine: Offloader, service: DirectoryService, *keys: bytes) -> None:
    """Have the service lose chunks, also those that it promised."""
    with BlockingStore(service.url) as store:
        for key in keys:
            namespace = engine.tier.namespaces()[int.from_bytes(key[-4:], "big")]
            store.discard(RecordKey(namespace, name_of_page(key), 0, 0), "lost", deadline=Deadline.after(10))


def test_a_load_that_fails_in_part_names_what_it_has(make: OffloaderMaker, service: DirectoryService) -> None:
    """The fourth of eight chunks is lost between lookup and load: three are used, and the fourth is not tried again."""
    keys = chain("a", 8)
    stored(make(), keys)
    reader = make()
    context = reader.begin("r", keys=keys)
    assert reader.poll(context, keys) is None
    reader.step()
    eventually(lambda: all(reader.tier.lookup(key, context) is LookupResult.HIT for key in keys))
    lose(reader, service, keys[3])
    assert reader.find(context, keys) == 3
    (result,) = reader.results
    assert not result.success and list(result.successful_keys or ()) == keys[:3]
    assert reader.tier.lookup(keys[3], context) is LookupResult.MISS
    for key in keys[:3]:
        assert reader.content(context, key) == content_of(key, reader.tier.block_size_bytes)
    reader.end("r")
    assert restored(reader, keys, "again") == 3


def test_behind_a_lost_chunk_of_a_window_others_are_loaded(make: OffloaderMaker, service: DirectoryService) -> None:
    """Chunks of a window are of use alone."""
    cache, keys = cache_of(full(), window(256)), chain("a", 5, group=1)
    stored(make(cache), keys)
    reader = make(cache)
    context = reader.begin("r", keys=keys)
    reader.poll(context, keys)
    reader.step()
    eventually(lambda: all(reader.tier.lookup(key, context) is LookupResult.HIT for key in keys))
    lose(reader, service, keys[1])
    reader.poll(context, keys)
    reader.step()
    reader.settle()
    (result,) = reader.results
    assert set(result.successful_keys or ()) == {*keys[:1], *keys[2:]}


def test_a_request_that_ends_before_its_load_begins_is_forgotten(make: OffloaderMaker) -> None:
    """It ends between its lookups and the end of the step, which begins the load: its chunks arrive for others, and
    nothing is kept of it."""
    keys = chain("a", 4)
    stored(make(), keys)
    reader = make()
    before = num_requests_known()
    context = reader.begin("r", keys=keys)
    reader.poll(context, keys)
    reader.step()
    eventually(lambda: all(reader.tier.lookup(key, context) is LookupResult.HIT for key in keys))
    reader.poll(context, keys)
    reader.end("r")
    reader.step()
    reader.settle()
    assert [result.success for result in reader.results] == [True]
    reader.results.clear()
    assert restored(reader, keys, "another") == 4 and num_requests_known() == before


def num_requests_known() -> int:
    gc.collect()
    return sum(type(one) is Request for one in gc.get_objects())


def test_a_full_primary_tier_loads_nothing(make: OffloaderMaker) -> None:
    """All of its slots are in use: vLLM answers a miss, and the next request finds what is stored."""
    keys = chain("a", 4)
    stored(make(), keys)
    reader = make(slots=4)
    context = reader.begin("busy")
    held = chain("held", 4)
    prepared = reader.manager.prepare_store(held, context)  # type: ignore[arg-type] # never completed
    assert prepared is not None and len(prepared.keys_to_store) == 4
    assert restored(reader, keys) == 0
    reader.manager.complete_store(held, context, success=False)  # type: ignore[arg-type]
    assert restored(reader, keys, "again") == 4


# resets, back-pressure, ends


def test_a_reset_while_jobs_run_leaves_no_slot_in_use(make: OffloaderMaker, service: DirectoryService) -> None:
    """vLLM empties its primary tier while chunks are stored and loaded: each job is reported once, and from then on
    nothing of ours touches the memory."""
    keys, engine = chain("a", 16), make(slots=128)
    stored(make(), keys)
    reading = engine.begin("r", keys=keys)
    engine.poll(reading, keys)
    engine.step()
    eventually(lambda: all(engine.tier.lookup(key, reading) is LookupResult.HIT for key in keys))
    engine.poll(reading, keys)
    size = engine.tier.block_size_bytes
    writing = engine.begin("w")
    for number in range(16):
        engine.offload(writing, chain(f"new {number}", 1), [bytes([number]) * size])
    engine.step()
    engine.manager.reset_cache()  # asserts that no job is left
    ids = [result.job_id for result in engine.results]
    assert len(ids) == len(set(ids)) == 17
    engine.memory[:] = 7
    time.sleep(0.3)
    assert (engine.memory == 7).all()
    assert restored(engine, keys, "again") == 16


def test_new_weights_end_the_use_where_they_may_change(make: OffloaderMaker) -> None:
    """vLLM resets its caches when its weights change: with `weights_may_change` nothing is loaded or stored then."""
    keys = chain("a", 3)
    plain, careful = make(), make(weights_may_change=True)
    stored(careful, keys)
    for engine in (plain, careful):
        engine.manager.reset_cache()
    assert restored(plain, keys) == 3 and restored(careful, keys) == 0
    assert "weights" in careful.tier.refusal


@pytest.mark.parametrize(
    ("call", "arguments", "replaced", "found"),
    [
        pytest.param("reload_weights", (), False, 3, id="the same files"),
        pytest.param("reload_weights", (), True, 0, id="other files"),
        pytest.param("reload_weights", (iter(()),), False, 0, id="no files"),
        pytest.param("update_config", ({"model_config": {"model": "other"}},), False, 0, id="another model"),
        pytest.param("sleep", (), True, 3, id="no reload"),
        pytest.param("update_of_a_trainer", (), False, 0, id="a trainer"),
        pytest.param(print, (), False, 0, id="a function"),
    ],
)
def test_weights_that_are_read_again(
    make: OffloaderMaker, config: Any, tmp_path: Path, call: Any, arguments: Any, *, replaced: bool, found: int
) -> None:
    """A running engine's workers read weights, which need not be those of its namespaces."""
    model = tmp_path / "model"
    shutil.copytree(config.model_config.model, model)
    keys = chain("a", 3)
    engine = make(change=change(model_config__model=str(model)))
    stored(engine, keys)
    engine.manager.reset_cache()
    if replaced:
        next(model.glob("*.safetensors")).touch()
    core: Any = SimpleNamespace(model_executor=SimpleNamespace(collective_rpc=lambda *_: [None]))
    EngineCore.collective_rpc(core, call, args=arguments)
    assert restored(engine, keys) == found
    assert ("weights may be others" in engine.tier.refusal) == (not found)


def test_weights_that_are_read_again_before_the_store_is_used(config: Any, tmp_path: Path) -> None:
    """Digesting the weights takes minutes: what was refused meanwhile stays refused."""
    service = DirectoryService(tmp_path)
    with offloading(config, service.url) as make:
        engine = make(ready=False, weights_may_change=True)
        engine.manager.reset_cache()
        with service:
            assert engine.tier.identified.wait(60)
            assert "weights" in engine.tier.refusal and not engine.tier.namespaces()


def test_stores_that_wait_do_not_fill_the_primary_tier(make: OffloaderMaker, service: DirectoryService) -> None:
    """The service is frozen: a quarter of the slots wait to be stored, the rest is refused and can be evicted."""
    engine = make(slots=32, max_wait_ms=1500)
    size = engine.tier.block_size_bytes
    context = engine.begin("w")
    service.freeze()
    for number in range(64):
        assert engine.offload(context, chain(f"p{number}", 1), [bytes(size)]) == 1
        engine.step()
    service.thaw()
    engine.settle()
    ids = [result.job_id for result in engine.results]
    assert len(ids) == len(set(ids)) == 64
    stats = engine.tier.get_stats()
    assert stats is not None
    refused = stats.reduce()["vllm:kvstore_tier_chunks:('store', 'busy')"]
    assert 32 < refused < 64


def test_vllms_back_pressure_works_beside_ours(make: OffloaderMaker) -> None:
    """vLLM's detector gets the times of stores, from the tier's own line of configuration."""
    engine = make(backpressure={"backpressure_cls": "EMABackpressureDetector", "warmup_completions": 1})
    stored(engine, chain("a", 4))
    assert engine.tier.bp_detector is not None and engine.tier.bp_detector.stats["store_latency_ema"] > 0


def test_the_metrics_are_those_that_are_declared(make: OffloaderMaker) -> None:
    """What the tier counts is what it declares to vLLM, which has no other."""
    engine = make()
    stored(engine, chain("a", 2))
    restored(engine, chain("b", 2))
    assert engine.tier.lookup([], engine.begin("an error of ours")) is LookupResult.MISS  # type: ignore[arg-type]
    stats = engine.tier.get_stats()
    assert stats is not None
    entry = {"type": "KVStoreTier", "module_path": "connector.offloading"}
    declared = TieringOffloadingSpec.build_metric_definitions({"secondary_tiers": [entry]})
    assert {name.partition(":(")[0] for name in stats.reduce()} <= set(declared)
    assert stats.reduce()["vllm:kvstore_tier_misses:('nothing_stored',)"] >= 1
    assert stats.reduce()["vllm:kvstore_tier_chunks:('store', 'done')"] == 2
    assert stats.reduce()["vllm:kvstore_tier_guarded_errors"] == 1
    later = engine.tier.get_stats()
    assert later is not None and later.reduce() == {}  # each is told once


@pytest.mark.parametrize("fault", ["killed", "frozen", "closed"])
def test_no_call_of_the_scheduler_raises_or_waits(make: OffloaderMaker, service: DirectoryService, fault: str) -> None:
    """The service is dead or silent, or the tier is shut down: every lookup is soon a miss, every job is
    reported once, and no call takes a millisecond of the scheduler's thread."""
    keys, engine = chain("a", 64), make(slots=256, max_wait_ms=1000, lookup_timeout_ms=80)
    stored(engine, keys)
    engine.manager.primary_tier.reset_cache()
    getattr(service, {"killed": "kill", "frozen": "freeze", "closed": "status"}[fault])()
    if fault == "closed":
        engine.tier.shutdown()
    engine.calls.clear()
    engine.results.clear()
    for number in range(5):
        context = engine.begin(f"r{number}", keys=keys)
        started_s = time.monotonic()
        assert engine.find(context, keys) == 0
        assert time.monotonic() - started_s < 0.2
        size = engine.tier.block_size_bytes
        new = chain(f"new {number}", 4)
        engine.offload(context, new, [content_of(key, size) for key in new])
        engine.end(f"r{number}")
    engine.settle()
    assert len(engine.results) == len({result.job_id for result in engine.results}) == 5
    assert not any(result.success for result in engine.results)
    assert max(used_s for _, used_s, _ in engine.calls) < 0.001, max(engine.calls, key=lambda call: call[1])
    if fault == "frozen":
        service.thaw()


def test_the_store_is_used_once_it_is_there(config: Any, tmp_path: Path) -> None:
    """The engine starts before the service: misses until then, hits afterwards."""
    service = DirectoryService(tmp_path)
    with offloading(config, service.url) as make:
        engine = make(ready=False)
        keys = chain("a", 3)
        assert engine.find(engine.begin("early", keys=keys), keys) == 0
        with service:
            engine.wait_ready()
            stored(engine, keys)
            assert restored(make(), keys) == 3


def test_a_killed_service_costs_chunks_and_no_job(make: OffloaderMaker, service: DirectoryService) -> None:
    """The service is killed in the middle of 100 jobs: each is reported exactly once, and what was loaded is right."""
    engine, prompts = make(slots=1024), [chain(f"p{number}", 4) for number in range(50)]
    size = engine.tier.block_size_bytes
    for number, keys in enumerate(prompts):
        stored(engine, keys, f"w{number}")
    service.settle()
    engine.manager.primary_tier.reset_cache()
    engine.results.clear()
    reading = [engine.begin(f"r{number}", keys=keys) for number, keys in enumerate(prompts)]
    for context, keys in zip(reading, prompts, strict=True):
        engine.poll(context, keys)
    engine.step()
    every = [(context, key) for context, keys in zip(reading, prompts, strict=True) for key in keys]
    eventually(lambda: all(engine.tier.lookup(key, context) is LookupResult.HIT for context, key in every))
    for context, keys in zip(reading, prompts, strict=True):
        engine.poll(context, keys)  # fifty loads
    for number in range(50):  # fifty stores
        new = chain(f"new {number}", 4)
        engine.offload(reading[number], new, [content_of(key, size) for key in new])
    killer = threading.Timer(0.02, service.kill)
    killer.start()
    engine.step()
    engine.settle()
    killer.join()
    ids = [result.job_id for result in engine.results]
    assert len(ids) == len(set(ids)) == 100
    assert not engine.manager.has_pending_work()
    for context, keys in zip(reading, prompts, strict=True):
        num_found = engine.find(context, keys)
        for key in keys[:num_found]:
            assert engine.content(context, key) == content_of(key, size)


# what operators see


def explained(service: DirectoryService, request: str) -> dict[str, Any]:
    with BlockingStore(service.url) as store:
        return dict(store.explain(request, deadline=Deadline.after(10)))


def test_misses_are_explained_by_key(make: OffloaderMaker, service: DirectoryService) -> None:
    """A hit, a miss and a part, each under vLLM's id of the request, with the key of the missing chunk."""
    keys, writer = chain("a", 6), make()
    restored(writer, keys, "first")
    stored(writer, keys)
    service.settle()
    reader = make()
    restored(reader, keys, "all-of-it")
    restored(make(), [*keys, *chain("b", 2)], "a-part")
    first, whole, part = (explained(service, name) for name in ("first", "all-of-it", "a-part"))
    assert first["result"] == "miss" and first["detail"]["page_key"] == keys[0].hex()
    assert (whole["result"], whole["resume_tokens"]) == ("hit", 768)
    assert (part["result"], part["resume_tokens"], part["stopped_at_tokens"]) == ("part", 768, 896)
    assert part["detail"]["page_key"] == chain("b", 2)[0].hex()
    assert first["reason"] in ("never_stored", "stored_since") and part["reason"] == "never_stored"


def test_another_namespace_is_named_field_by_field(make: OffloaderMaker, service: DirectoryService) -> None:
    """The same chunks are stored by an engine with another cache type: the reason names the field."""
    keys = chain("a", 3)
    stored(make(change=change(cache_config__cache_dtype="fp8_e4m3")), keys)
    service.settle()
    restored(make(), keys, "r")
    found = explained(service, "r")
    assert found["reason"] == "namespace_differs" and "cache_dtype" in found["detail"]["fields"]


def documented() -> dict[str, Any]:
    """The `--kv-transfer-config` of docs/engines.md."""
    text = (ROOT / "docs" / "engines.md").read_text()
    found = re.search(r"--kv-transfer-config '(\{.*?\})'\n", text, re.DOTALL)
    assert found is not None
    value: dict[str, Any] = json.loads(found[1])
    return value


def test_the_documented_configuration_makes_it(make: OffloaderMaker) -> None:
    """vLLM's factory makes the tier from the line that docs/engines.md has."""
    given = documented()
    assert (given["kv_connector"], given["kv_role"]) == ("OffloadingConnector", "kv_both")
    extra = given["kv_connector_extra_config"]
    (tier,) = extra["secondary_tiers"]
    assert extra["spec_name"] == "TieringOffloadingSpec" and tier["url"].startswith("unix:")
    names = {name: value for name, value in tier.items() if name not in ("url", "weights_id")}
    keys = chain("a", 2)
    stored(make(**names), keys)
    assert restored(make(), keys) == 2


@pytest.mark.parametrize(
    ("method", "may_change", "is_refused"),
    [
        ("update_weights", True, True),  # its caches should have been emptied before
        ("a_method_of_the_operators", True, False),
        ("a_method_of_the_operators", False, True),
        ("list_loras", False, False),
        ("reload_weights", True, False),  # of the same files
    ],
)
def test_calls_that_change_weights_behind_vllms_own_offloading(
    monkeypatch: pytest.MonkeyPatch, method: str, *, may_change: bool, is_refused: bool
) -> None:
    """The tier is not used from then on."""
    monkeypatch.setattr(tier, "would_read_the_same", lambda config, model: True)
    made = tier.KVStoreTier.__new__(tier.KVStoreTier)
    settings, engine = ConnectorSettings(weights_may_change=may_change), SimpleNamespace(config=None, model=None)
    vars(made).update(refusal="", guarded_errors=0, _settings=settings, _engine=engine, _doors={})
    made.on_engine_call(method, ())
    assert (bool(made.refusal), made.guarded_errors) == (is_refused, 0)
