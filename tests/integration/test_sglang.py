"""SGLang's HiCache over a real service: the backend with its pools, ranks, restarts, damage and outages.

With the published package of SGLang at hand (`tests/connector/support/hicache.py`) these are its own classes.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore.client import BlockingStore
from kvstore.client.pages import name_of_page
from kvstore.errors import Unavailable
from kvstore.model.keys import RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.testing.serve import Service
from kvstore.testing.servers import CephRgw
from kvstore.testing.waiting import eventually
from tests.connector.support.hicache import ROOT, HostPool, StatePool, filled, find_sglang, hicache, holds
from tests.connector.support.service import DirectoryService

WEIGHTS = "weights of the test"
needs_sglang = pytest.mark.skipif(find_sglang() is None, reason="no sglang here: run tools/other_packages.py sglang")


@pytest.fixture
def arguments() -> SimpleNamespace:
    return SimpleNamespace(model_path="a/model", load_format="auto", dtype="bfloat16", kv_cache_dtype="auto")


@pytest.fixture
def sglang(arguments: SimpleNamespace) -> Iterator[SimpleNamespace]:
    with hicache(arguments) as modules:
        yield modules


Make = Callable[..., Any]


@pytest.fixture
def make(sglang: SimpleNamespace, service: DirectoryService) -> Iterator[Make]:
    """Makes backends of one rank and one pool each, which know their weights."""
    made: list[Any] = []

    def make_one(
        pool: Any, *, extra: dict[str, Any] | None = None, more: dict[str, Any] | None = None, **rank: Any
    ) -> Any:
        fields = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
        fields |= {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True}
        settings = {"url": service.url, "interface_v1": 1, "weights_id": WEIGHTS, **(extra or {})}
        config = sglang.interface.HiCacheStorageConfig(
            **{**fields, "model_name": "a name", **rank}, extra_config=settings
        )
        backend = sglang.backend.KVStoreHiCache(config, {})
        made.append(backend)
        backend.register_mem_pool_host(pool)
        for name, other in (more or {}).items():
            backend.register_mem_host_pool_v2(other, name)
        settle(backend)
        return backend

    yield make_one
    for backend in made:
        backend.close()


def settle(backend: Any) -> None:
    """Wait until it knows its weights and has reached the service, or has said why not."""
    assert backend.identified.wait(30)
    backend.exists("nothing")


def test_pages_come_back_in_place(make: Make) -> None:
    """Eight pages are written; another engine's pool gets them bit for bit, at other slots, and no others."""
    source, keys = filled(8)
    writer = make(source)
    assert writer.batch_exists(keys) == 0
    assert writer.batch_set_v1(keys, source.slots(*range(8))) == [True] * 8
    target = HostPool()
    reader = make(target)
    assert reader.batch_exists([*keys, "unknown"]) == 8
    assert reader.batch_get_v1([*keys, "unknown"], target.slots(*range(20, 29))) == [True] * 8 + [False]
    assert holds(target, list(range(20, 28)), source, list(range(8)))
    assert not target.content(19).any() and not target.content(28).any()
    assert reader.batch_exists(["unknown", *keys]) == 0


def test_whole_pages_come_back_too(make: Make) -> None:
    """Without `interface_v1`, pages go through tensors of SGLang's: batches, and one at a time."""
    source, keys = filled(3)
    plain = {"interface_v1": 0}
    writer = make(source, extra=plain)
    assert writer.batch_set(keys[:2], [source.get_data_page(4 * page) for page in range(2)])
    assert writer.set(keys[2], source.get_data_page(8))
    target = HostPool()
    reader = make(target, extra=plain)
    assert reader.batch_exists(keys) == 3 and reader.exists(keys[2]) and not reader.exists("unknown")
    found = reader.batch_get([*keys, "unknown"], [target.get_dummy_flat_data_page() for _ in range(4)])
    assert found[3] is None
    assert all(torch.equal(found[page], source.get_data_page(4 * page)) for page in range(3))
    single = reader.get(keys[1], target.get_dummy_flat_data_page())
    assert single is not None and torch.equal(single, source.get_data_page(4))
    assert reader.get("unknown", target.get_dummy_flat_data_page()) is None


DIFFERENT: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("other weights", {"extra": {"weights_id": "others"}}, {}),
    ("another layout", {}, {"layout": "page_head"}),
    ("another type", {}, {"dtype": torch.float16}),
    ("other pages", {}, {"page_size": 8}),
    ("other heads", {}, {"heads": 8}),
    ("another stage", {"pp_rank": 1, "pp_size": 2}, {}),
    ("another part of the context", {"attn_cp_rank": 1, "attn_cp_size": 2}, {}),
    ("more ranks", {"tp_size": 2}, {}),
    ("copies instead of buffers", {"extra": {"interface_v1": 0}}, {}),
]


@pytest.mark.parametrize(("rank", "kind"), [one[1:] for one in DIFFERENT], ids=[one[0] for one in DIFFERENT])
def test_engines_that_would_misread_each_other_never_meet(
    make: Make, rank: dict[str, Any], kind: dict[str, Any]
) -> None:
    """Where anything differs that bytes depend on, the same keys find nothing."""
    source, keys = filled(2)
    make(source).batch_set_v1(keys, source.slots(0, 1))
    assert make(HostPool(), tp_rank=0).batch_exists(keys) == 2
    assert make(HostPool(**kind), **rank).batch_exists(keys) == 0


@pytest.mark.parametrize("name", ["kv_cache_dtype", "rl_quant_profile", "enable_decoder_swa_bounded_replay"])
def test_settings_of_the_engine_are_told_apart(make: Make, arguments: SimpleNamespace, name: str) -> None:
    """The same weights with another setting that changes the cache are another namespace."""
    source, keys = filled(2)
    make(source).batch_set_v1(keys, source.slots(0, 1))
    setattr(arguments, name, "another")
    assert make(HostPool()).batch_exists(keys) == 0


def test_weights_are_known_by_their_content(make: Make, arguments: SimpleNamespace, tmp_path: Path) -> None:
    """A model of equal files under another name shares pages; one changed byte, or another configuration, ends that."""
    models = [tmp_path / name for name in ("one", "equal", "other", "configured")]
    for number, model in enumerate(models):
        model.mkdir()
        (model / "model.safetensors").write_bytes(b"weights" + bytes([number == 2]))
        (model / "config.json").write_text(json.dumps({"architectures": ["A"], "rope_theta": int(number == 3)}))
    source, keys = filled(2)
    found = []
    for model in models:
        arguments.model_path = str(model)
        backend = make(source, extra={"weights_id": None})
        found.append(backend.batch_exists(keys))
        backend.batch_set_v1(keys, source.slots(0, 1))
    assert found == [0, 2, 0, 0]


def test_a_models_own_code_counts(make: Make, arguments: SimpleNamespace, tmp_path: Path) -> None:
    """Of equal weights with other Python files nothing is shared, if SGLang may run them."""
    source, keys = filled(2)
    for number in range(2):
        model = tmp_path / f"model-{number}"
        model.mkdir()
        (model / "model.safetensors").write_bytes(b"weights")
        (model / "modeling_own.py").write_text(f"SHARE = {number}")
    found = []
    for is_trusted in (False, True):
        arguments.trust_remote_code = is_trusted
        for number in (0, 1, 0):
            arguments.model_path = str(tmp_path / f"model-{number}")
            backend = make(source, extra={"weights_id": None})
            found.append(backend.batch_exists(keys))
            backend.batch_set_v1(keys, source.slots(0, 1))
    assert found == [0, 2, 2, 0, 0, 2]


def test_two_ranks_see_what_both_have(make: Make) -> None:
    """Heads are divided over two ranks: a page is there once both have stored their part, and each reads its own."""
    pools = [filled(4, seed=seed)[0] for seed in (10, 20)]
    keys = [f"shared-{page}" for page in range(4)]
    ranks = [make(pool, tp_rank=rank, tp_size=2) for rank, pool in enumerate(pools)]
    assert ranks[0].batch_set_v1(keys, pools[0].slots(*range(4))) == [True] * 4
    assert [rank.batch_exists(keys) for rank in ranks] == [0, 0]
    assert ranks[1].batch_set_v1(keys[:3], pools[1].slots(*range(3))) == [True] * 3
    assert [rank.batch_exists(keys) for rank in ranks] == [3, 3]
    for rank, pool in enumerate(pools):
        target = HostPool()
        reader = make(target, tp_rank=rank, tp_size=2)
        assert reader.batch_get_v1(keys[:3], target.slots(5, 6, 7)) == [True] * 3
        assert holds(target, [5, 6, 7], pool, [0, 1, 2])


def test_ranks_that_hold_the_same_store_it_once(make: Make, service: DirectoryService) -> None:
    """MLA: the first rank writes, any rank of any size reads; Mamba's states beside it are each rank's own."""
    source, keys = filled(4)
    states = [StatePool(), StatePool()]
    for rank, pool in enumerate(states):
        pool.fill(0, seed=100 + rank)
    ranks = [make(source, tp_rank=n, tp_size=2, is_mla_model=True, more={"mamba": states[n]}) for n in range(2)]
    assert ranks[1].batch_set_v1(keys, source.slots(*range(4))) == [True] * 4
    assert ranks[1].batch_exists(keys) == 0  # it left the task to the other
    assert ranks[0].batch_set_v1(keys, source.slots(*range(4))) == [True] * 4
    target = HostPool()
    alone = make(target, tp_rank=2, tp_size=4, is_mla_model=True)
    assert alone.batch_exists(keys) == 4
    assert alone.batch_get_v1(keys, target.slots(*range(4))) == [True] * 4
    assert holds(target, list(range(4)), source, list(range(4)))


def test_a_draft_with_heads_is_no_ranks_of_another(sglang: SimpleNamespace, make: Make) -> None:
    """A target with MLA, and a draft whose heads are divided over the ranks: SGLang has the first rank store the
    draft's pages, and another rank would read that one's heads. Nothing is found, and KV alone is shared as before.
    """
    target, keys = filled(2)
    ranks, drafts = [], [filled(2, seed=seed)[0] for seed in (100, 200)]
    for rank, draft in enumerate(drafts):
        vars(draft)["head_num"] = 4
        ranks.append(make(target, tp_rank=rank, tp_size=2, is_mla_model=True, more={"draft": draft}))
    assert ranks[0].batch_set_v1(keys, target.slots(0, 1)) == [True, True]
    given = transfer(sglang, "draft", keys, last=False, slots=drafts[0].slots(0, 1))
    assert ranks[0].batch_set_v2([given])["draft"] == [False, False]
    for rank in ranks:
        assert rank.batch_exists_v2(keys, [given]).kv_hit_pages == 0 and rank.batch_exists(keys) == 2
        assert rank.batch_get_v2([given])["draft"] == [False, False]
    alone = make(target, is_mla_model=True, more={"draft": drafts[0]})
    assert (
        alone.batch_set_v2([given])["draft"] == [True, True] and alone.batch_exists_v2(keys, [given]).kv_hit_pages == 2
    )


def test_heads_that_are_split_are_shared_between_sizes(make: Make) -> None:
    """With `tp_lcm_size` an engine of two ranks writes what one of four ranks reads, head by head."""
    pools = [filled(2, seed=seed, layout="page_head")[0] for seed in (1, 5)]
    keys = ["page-0", "page-1"]
    split = {"should_split_heads": True, "tp_lcm_size": 4}
    for rank, pool in enumerate(pools):
        assert make(pool, tp_rank=rank, tp_size=2, **split).batch_set_v1(keys, pool.slots(0, 1)) == [True, True]
    for rank in range(4):
        target = HostPool(heads=2, layout="page_head")
        # SGLang splits only where the common size is larger than its own
        reader = make(target, tp_rank=rank, tp_size=4, tp_lcm_size=4)
        assert reader.batch_get_v1(keys, target.slots(0, 1)) == [True, True]
        whole, first = pools[rank // 2], rank % 2 * 2
        for page in range(2):
            assert torch.equal(target.kv_buffer[:, page], whole.kv_buffer[:, page, first : first + 2])


def test_a_miss_is_explained_under_its_last_key(make: Make, service: DirectoryService) -> None:
    """SGLang names no request to its storage: the last key of a query stands for it, and the reason is the store's."""
    source, keys = filled(4)
    backend = make(source)
    assert backend.batch_exists(keys) == 0
    backend.batch_set_v1(keys[:3], source.slots(*range(3)))
    service.settle()
    assert backend.batch_exists_v2(keys).kv_hit_pages == 3
    with BlockingStore(service.url) as store:
        found = store.explain(keys[-1], deadline=Deadline.after(10))
    assert (found["result"], found["resume_tokens"], found["reason"]) == ("part", 12, "never_stored")
    assert found["detail"] == {**found["detail"], "page_key": keys[3]}  # type: ignore[dict-item]


# several pools


def transfer(sglang: SimpleNamespace, name: str, keys: list[str], *, last: bool, slots: Any = None) -> Any:
    policy = sglang.interface.PoolHitPolicy
    return sglang.interface.PoolTransfer(
        name=name,
        keys=list(keys),
        host_indices=slots,
        hit_policy=policy.TRAILING_PAGES if last else policy.ALL_PAGES,
    )


def test_no_pool_is_reported_beyond_the_shortest(sglang: SimpleNamespace, make: Make) -> None:
    """KV of ten pages, an indexer of eight, states after pages 3 and 7, a window that lacks page 6."""
    source, keys = filled(10)
    state, window, indexer = StatePool(), HostPool(), HostPool(heads=1)
    for page in range(10):
        for pool in (state, window, indexer):
            pool.fill(page, seed=page + 50)
    backend = make(source, more={"mamba": state, "swa": window, "indexer": indexer})
    assert all(backend.batch_set_v1(keys, source.slots(*range(10))))
    stored = {"mamba": [3, 7, 9], "indexer": list(range(8)), "swa": [0, 1, 2, 3, 4, 5, 7, 8, 9]}
    pools = {"mamba": state, "indexer": indexer, "swa": window}
    for name, pages in stored.items():
        given = transfer(sglang, name, [keys[page] for page in pages], last=False, slots=pools[name].slots(*pages))
        assert backend.batch_set_v2([given])[name] == [True] * len(pages)

    def asked(*names: str) -> tuple[int, list[int]]:
        wanted = {"mamba": keys[-1:], "swa": keys[-2:], "indexer": keys}
        transfers = [transfer(sglang, name, wanted[name], last=name != "indexer") for name in names]
        found = backend.batch_exists_v2(keys, transfers)
        return found.kv_hit_pages, found.restorable_prefix_pages

    assert asked() == (10, list(range(1, 11)))
    assert asked("mamba") == (10, [4, 8, 10])
    assert asked("indexer") == (8, list(range(1, 9)))
    assert asked("mamba", "indexer") == (8, [4, 8])
    assert asked("swa") == (10, [1, 2, 3, 4, 5, 6, 9, 10])
    assert asked("mamba", "indexer", "swa") == (4, [4])
    target = StatePool()
    reader = make(HostPool(), more={"mamba": target})
    answer = reader.batch_get_v2([transfer(sglang, "mamba", [keys[3]], last=True, slots=target.slots(9))])
    assert answer["mamba"] == [True]
    assert holds(target, [9], state, [3])


@pytest.mark.servers
def test_a_state_at_the_end_of_what_is_stored_is_found_without_an_index(
    sglang: SimpleNamespace, make: Make, tmp_path: Path, shared_rgw: CephRgw
) -> None:
    """S3 alone, where a lookup asks for some pages of a prompt: a state behind 50 of its 300 pages is one of them."""
    source, keys = filled(50)
    state, prompt = StatePool(), [*keys, *(f"new {number}" for number in range(250))]
    shared_rgw.create_bucket("states")
    flags = {"hot": "memory:", "cold": "s3://states/pages", "memory_bytes": "64MiB"}
    with Service(tmp_path, flags, name="of-s3", environment=shared_rgw.environment) as service:
        writer = make(source, more={"mamba": state}, extra={"url": service.url})
        assert all(writer.batch_set_v1(keys, source.slots(*range(50))))
        given = transfer(sglang, "mamba", keys[-1:], last=True, slots=state.slots(1))
        assert writer.batch_set_v2([given])["mamba"] == [True]
        service.settle()
        service.stop()
        service.start()
        reader = make(HostPool(), more={"mamba": StatePool()}, extra={"url": service.url})
        found = reader.batch_exists_v2(prompt, [transfer(sglang, "mamba", prompt[-1:], last=True)])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (50, [50])


def _is_connected(store: BlockingStore) -> bool:
    try:
        store.status(deadline=Deadline.after(1))
    except Unavailable:
        return False
    return True


def test_what_is_reported_can_be_read_whatever_is_lost(
    sglang: SimpleNamespace, make: Make, service: DirectoryService
) -> None:
    """Random losses of records and restarts of the service between random prompts: every page that a query reports is
    read bit for bit, KV and state alike, and nearly all that is left is reported.
    """
    rng, num_pages = random.Random(7), 12
    source, state = HostPool(), StatePool()
    target, target_state = HostPool(), StatePool()
    writer, reader = make(source, more={"mamba": state}), make(target, more={"mamba": target_state})
    ground = {"kv": set[str](), "mamba": set[str]()}
    reported = lost = missed = expected = 0
    with BlockingStore(service.url) as store:
        for step in range(250):
            prompt = rng.randrange(12)
            keys = [f"{prompt}-{page}" for page in range(num_pages)]
            for page in range(num_pages):
                source.fill(page, prompt * 100 + page)
                state.fill(page, prompt * 100 + page)
            length = rng.randrange(1, num_pages + 1)
            if rng.random() < 0.5:
                assert all(writer.batch_set_v1(keys[:length], source.slots(*range(length))))
                ends = [length - 1]
                given = transfer(sglang, "mamba", [keys[length - 1]], last=True, slots=state.slots(*ends))
                assert writer.batch_set_v2([given])["mamba"] == [True]
                ground["kv"].update(keys[:length])
                ground["mamba"].add(keys[length - 1])
            for _ in range(rng.randrange(30)):
                pool = rng.choice(["kv", "kv", "mamba"])
                key = f"{rng.randrange(12)}-{rng.randrange(num_pages)}"
                if (namespace := writer.namespaces().get(pool)) is not None:
                    name = RecordKey(namespace, name_of_page(key), 0, 0)
                    store.discard(name, "lost by the test", deadline=Deadline.after(10))
                    ground[pool].discard(key)
                    lost += 1
            if step % 80 == 79:
                service.settle()
                service.stop()
                service.start()
                here = source.slots(0)
                eventually(lambda: writer.batch_set_v1(["x"], here) == [True] and reader.batch_exists(["x"]) == 1)  # noqa: B023
                eventually(lambda: _is_connected(store))
            asked = transfer(sglang, "mamba", keys[-1:], last=True)
            found = reader.batch_exists_v2(keys, [asked])
            run = next((at for at, key in enumerate(keys) if key not in ground["kv"]), num_pages)
            possible = [n for n in range(1, run + 1) if keys[n - 1] in ground["mamba"]]
            # a record that was lost on its way to the directory may come back; a writer may take a lost one for stored
            missed += len(set(possible).difference(found.restorable_prefix_pages or ()))
            expected += len(possible)
            assert found.kv_hit_pages == max(found.restorable_prefix_pages or [0]), step
            if count := found.kv_hit_pages:
                reported += count
                assert reader.batch_get_v1(keys[:count], target.slots(*range(count))) == [True] * count
                assert holds(target, list(range(count)), source, list(range(count)))
                got = transfer(sglang, "mamba", [keys[count - 1]], last=True, slots=target_state.slots(0))
                assert reader.batch_get_v2([got])["mamba"] == [True]
                assert holds(target_state, [0], state, [count - 1])
    assert reported > 100 and lost > 1000 and missed <= expected // 10


# damage and outages


def test_damaged_pages_are_missing(make: Make, service: DirectoryService) -> None:
    """One bit of each stored record is flipped on disk: nothing of it is reported or read, and a new write mends it."""
    source, keys = filled(16)
    writer = make(source)
    assert all(writer.batch_set_v1(keys, source.slots(*range(16))))
    service.settle()
    service.stop()
    rng, damaged = random.Random(3), 0
    for file in service.records.rglob("*"):
        if file.is_file() and file.read_bytes()[:4] == b"KVR1":
            data = bytearray(file.read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            file.write_bytes(data)
            damaged += 1
    assert damaged == 16
    service.start()
    target = HostPool()
    reader = make(target)
    assert reader.batch_exists(keys) == 0
    for key in keys:
        assert reader.batch_get_v1([key], target.slots(0)) == [False]
    assert not target.kv_buffer.any()
    assert all(reader.batch_set_v1(keys, source.slots(*range(16))))
    assert reader.batch_exists(keys) == 16


def calls(backend: Any, sglang: SimpleNamespace, pool: HostPool, keys: list[str]) -> dict[str, Callable[[], Any]]:
    """Every call that SGLang makes, with its answer when nothing is there."""
    slots, pages = pool.slots(*range(len(keys))), [pool.get_dummy_flat_data_page() for _ in keys]
    given = transfer(sglang, "kv", keys, last=False, slots=slots)
    return {
        "exists": lambda: backend.exists(keys[0]) is False,
        "batch_exists": lambda: backend.batch_exists(keys) == 0,
        "batch_exists_v2": lambda: backend.batch_exists_v2(keys, [given]).kv_hit_pages == 0,
        "get": lambda: backend.get(keys[0], pages[0]) is None,
        "batch_get": lambda: backend.batch_get(keys, pages) == [None] * len(keys),
        "batch_get_v1": lambda: backend.batch_get_v1(keys, slots) == [False] * len(keys),
        "batch_get_v2": lambda: list(backend.batch_get_v2([given]).values()) == [[False] * len(keys)],
        "set": lambda: backend.set(keys[0], pages[0]) is False,
        "batch_set": lambda: backend.batch_set(keys, pages) is False,
        "batch_set_v1": lambda: backend.batch_set_v1(keys, slots) == [False] * len(keys),
        "batch_set_v2": lambda: list(backend.batch_set_v2([given]).values()) == [[False] * len(keys)],
        "clear": lambda: backend.clear() is False,
    }


@pytest.mark.parametrize("fault", ["killed", "frozen", "refused", "closed"])
def test_no_call_raises_whatever_fails(
    sglang: SimpleNamespace,
    make: Make,
    service: DirectoryService,
    arguments: SimpleNamespace,
    fault: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The service is dead, frozen, or the engine is not cached: every call answers in time that nothing is there, and
    each kind of failure is logged once."""
    pool, keys = filled(4)
    if fault == "refused":
        arguments.enable_lora = True
    backend = make(pool, extra={"max_wait_ms": 1000})
    if fault == "killed":
        service.kill()
    elif fault == "frozen":
        service.freeze()
    elif fault == "closed":
        backend.close()
    for _ in range(3):
        for name, call in calls(backend, sglang, pool, keys).items():
            started_s = time.monotonic()
            assert call(), name
            assert time.monotonic() - started_s < 5, name
    said = [record.getMessage() for record in caplog.records if record.name == "sglang.kvstore"]
    assert len(said) == len(set(said)) and (said or fault == "frozen")
    if fault == "frozen":
        service.thaw()


def test_wrong_arguments_are_answered_too(sglang: SimpleNamespace, make: Make) -> None:
    """Slots that do not fit, pools that nobody registered, no keys, keys twice: no call raises, and none reads on."""
    pool, keys = filled(4)
    backend = make(pool)
    assert backend.batch_set_v1(keys, pool.slots(*range(4))) == [True] * 4
    assert backend.batch_get_v1(keys, pool.slots(0, 1)) == [False] * 4
    assert backend.batch_set_v1(keys, pool.slots(0)) == [False] * 4
    assert backend.batch_get_v1([], pool.slots(0)[:0]) == []
    assert backend.batch_set_v1([], pool.slots(0)[:0]) == []
    assert backend.batch_exists([]) == 0 and backend.batch_exists([keys[0], keys[0]]) == 0
    assert backend.batch_exists_v2([], []).kv_hit_pages == 0
    nobody = transfer(sglang, "indexer", keys, last=False, slots=pool.slots(*range(4)))
    assert backend.batch_get_v2([nobody])["indexer"] == [False] * 4
    assert backend.batch_set_v2([nobody])["indexer"] == [False] * 4
    assert backend.batch_exists_v2(keys, [nobody]).kv_hit_pages == 0
    assert backend.batch_get_v2([replace(nobody, host_indices=None)])["indexer"] == [False] * 4
    states = StatePool()
    copied = make(pool, more={"mamba": states})
    given = transfer(sglang, "mamba", keys, last=False, slots=states.slots(*range(4)))
    assert copied.batch_set_v2([given])["mamba"] == [True] * 4
    for slots in (None, states.slots(0, 1), states.slots(*range(5))):  # not as many as pages: none can be told
        assert copied.batch_get_v2([replace(given, host_indices=slots)])["mamba"] == [False] * 4
    assert backend.get(keys[0], torch.zeros(3)) is None
    assert backend.batch_exists(keys) == 4


def test_media_are_cached_only_where_their_hashes_are_trusted(arguments: SimpleNamespace, make: Make) -> None:
    """A client that sends processed images chooses their hashes, which page keys hold."""
    pool, keys = filled(2)
    arguments.is_multimodal = True
    assert make(pool).batch_set_v1(keys, pool.slots(0, 1)) == [False, False]
    assert make(pool, extra={"trust_mm_uuids": True}).batch_set_v1(keys, pool.slots(0, 1)) == [True, True]


@pytest.mark.parametrize("is_told", [False, True])
def test_other_weights_end_the_use(sglang: SimpleNamespace, make: Make, is_told: bool) -> None:
    """SGLang is told that its weights changed, or reads its folder again: nothing is read or written any more."""
    pool, keys = filled(2)
    backend = make(pool)
    assert backend.batch_set_v1(keys, pool.slots(0, 1)) == [True, True]
    sglang.changes.append(("a request", {"weight_version": "next"} if is_told else {"model_path": "a/model"}))
    sglang.serving.weight_version = "next" if is_told else "default"
    assert backend.batch_exists(keys) == 0
    assert backend.batch_set_v1(["new"], pool.slots(0)) == [False]
    sglang.serving.weight_version = "default"
    assert backend.batch_exists(keys) == 0


def test_weights_that_were_sent_are_others_when_the_storage_is_attached_again(
    sglang: SimpleNamespace, make: Make
) -> None:
    """They are in no file, so all that tells them apart is their version."""
    pool, keys = filled(2)
    assert make(pool).batch_set_v1(keys, pool.slots(0, 1)) == [True, True]
    assert make(pool).batch_exists(keys) == 2
    sglang.serving.weight_version = "next"
    assert make(pool).batch_exists(keys) == 0


@pytest.mark.parametrize("wrong", [{"urll": "unix:/x"}, {"url": "nowhere"}, {"mode": "sometimes"}, {"audit_rate": 1}])
def test_wrong_settings_are_named_at_the_start(make: Make, wrong: dict[str, Any]) -> None:
    """An operator's mistake ends the attachment, with its name. What SGLang reads itself is none."""
    make(HostPool(), extra={"allocator": "shm", "prefetch_threshold": 64, "prefetch_timeout_base": 2})
    with pytest.raises(Exception, match=next(iter(wrong))):
        make(HostPool(), extra=wrong)


# SGLang's own classes


def documented() -> dict[str, Any]:
    """The extra config of docs/engines.md."""
    text = (ROOT / "docs" / "engines.md").read_text()
    found = re.search(r"--hicache-storage-backend-extra-config '(\{.*?\})'", text, re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


@needs_sglang
def test_the_real_factory_makes_it_from_the_documented_configuration(
    sglang: SimpleNamespace, service: DirectoryService
) -> None:
    """SGLang's factory imports, checks and makes the class that docs/engines.md names."""
    extra = {**documented(), "url": service.url, "weights_id": WEIGHTS}
    config = sglang.interface.HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "a", extra_config=extra)
    pool, keys = filled(4)
    backend = sglang.factory.StorageBackendFactory.create_backend("dynamic", config, pool)
    assert isinstance(backend, sglang.interface.HiCacheStorage)
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    settle(backend)
    assert backend.batch_set_v1(keys, pool.slots(*range(4))) == [True] * 4
    assert backend.batch_exists(keys) == 4
    backend.close()


@needs_sglang
def test_behind_the_real_failure_injector(sglang: SimpleNamespace, make: Make) -> None:
    """SGLang's injector fails every third call or so: what is read is right all the same."""
    source, keys = filled(8)
    target = HostPool()
    inject = sglang.interface.HiCacheStorageFailureInjector
    writer, reader = inject(make(source), 0.002, 0.3), inject(make(target), 0.002, 0.3)
    num_read = 0
    for _ in range(60):
        writer.batch_set_v1(keys, source.slots(*range(8)))
        target.kv_buffer.zero_()
        if reader.batch_exists_v2(keys).kv_hit_pages:
            was_read = reader.batch_get_v1(keys, target.slots(*range(8)))
            pages = list(range([*was_read, False].index(False)))
            assert holds(target, pages, source, pages)
            num_read += len(pages)
    assert num_read > 50
