"""vLLM's own offloading beside real servers that fail: damaged records, a frozen Redis, and all doors on one Redis."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
import secrets
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult

from kvstore.client import BlockingStore
from kvstore.client.pages import name_of_page
from kvstore.model.keys import RecordKey
from kvstore.testing.checkpoints import write_checkpoint
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.records import DAMAGE
from kvstore.testing.serve import Service, bare_environment
from kvstore.testing.servers import RedisServer, redis_server
from kvstore.testing.servers.ports import free_ports
from kvstore.testing.tier_contract import RawMedium
from kvstore.testing.waiting import soon
from tests.connector.support.hicache import HostPool, hicache
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
from tests.contract.media import RedisMedium, S3Medium
from tests.fuzz.inputs import mutated

pytestmark = pytest.mark.servers

_DAMAGED_SHARE = 0.7
_PROMPT_CHUNKS = 40
DOORS = ("offloading", "sglang", "connector")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return engine_config(write_checkpoint("llama", tmp_path_factory.mktemp("checkpoint")))


# damaged records


@pytest.fixture
def service(medium: RawMedium, tmp_path: Path) -> Iterator[Service]:
    """With one slower tier, on the medium; not started."""
    # All chunks that are stored at once may wait for the slower tier. By default a tier that a busy machine keeps from
    # answering for 400 ms is given up, which is a miss of a good chunk.
    patient = {"stall_timeout_ms": "5000", "fetch_timeout_ms": "30000"}
    flags = {"memory_bytes": "512MiB", "write_back_bytes": "512MiB", **patient}
    if isinstance(medium, RedisMedium):
        service = Service(tmp_path, flags | {"hot": medium.url, "cold": "memory:"})
    elif isinstance(medium, S3Medium):
        flags |= {"hot": "memory:", "cold": f"s3://{medium.bucket}/{medium.prefix}"}
        service = Service(tmp_path, flags, environment=medium.server.environment)
    else:
        service = DirectoryService(tmp_path, flags)
    try:
        yield service
    finally:
        service.kill()


@pytest.fixture
def client_said() -> Iterator[Callable[[], str]]:
    """The last lines of the clients' logs, which say why a page was not read."""
    lines: deque[str] = deque(maxlen=20)

    class Last(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, loggers = Last(), [logging.getLogger(name) for name in ("kvstore.client", "vllm.kvstore")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    yield lambda: "; ".join(lines)
    for logger, level in zip(loggers, before, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.mark.parametrize("num_damaged", [100, pytest.param(100_000, marks=pytest.mark.full)])
def test_no_damaged_chunk_is_loaded(
    config: Any,
    medium: RawMedium,
    service: Service,
    num_damaged: int,
    tell: Callable[[str], None],
    client_said: Callable[[], str],
) -> None:
    """Chunks are stored, most of their records are damaged in the tier, and the service starts with an empty memory:
    vLLM loads each other chunk, and none of the damaged ones."""
    seed = secrets.randbits(32)
    print(f"seed={seed}")
    choose, num_changed, num_loaded = random.Random(seed), 0, 0
    cache = cache_of(full(num_kv_heads=1, head_size=16), window(1 << 20), layers=1)
    prompts_at_once = 4 if num_damaged < 1000 else 200
    with offloading(config, service.url) as make:
        service.start()
        patient = {
            "lookup_timeout_ms": 30_000,
            "stall_timeout_ms": 10_000,
            "max_wait_ms": 60_000,
        }  # a busy machine loses no chunk
        engine = make(cache, slots=_PROMPT_CHUNKS * (prompts_at_once + 1), **patient)
        while num_changed < num_damaged:
            prompts = [chain(f"{seed} {num_changed} {n}", _PROMPT_CHUNKS, group=1) for n in range(prompts_at_once)]
            keys = [key for prompt in prompts for key in prompt]
            store_chunks(engine, keys)
            service.settle()
            service.stop()
            victims = {key for key in keys if choose.random() < _DAMAGED_SHARE}
            damage_chunks(engine, medium, sorted(victims), keys, choose)
            service.start()
            engine.manager.reset_cache()
            wait_reachable(engine)
            for number, prompt in enumerate(prompts):
                loaded = load_chunks(engine, f"r{number}", prompt)
                assert not victims.intersection(loaded)
                said = f"prompt {number} after {num_changed}: {misses_of(engine)}; {client_said()}"
                assert loaded == {key for key in prompt if key not in victims}, said
                num_loaded += len(loaded)
            num_changed += len(victims)
            print(f"{type(medium).__name__}: {num_changed:,} of {num_damaged:,}", flush=True)  # in S3 it takes long
    assert num_loaded > 0
    tell(f"{type(medium).__name__}: {num_changed:,} damaged chunks, 0 loaded; {num_loaded:,} good ones loaded")


def misses_of(engine: Offloader) -> dict[str, Any]:
    """Why chunks were not found since the last call."""
    stats = engine.tier.get_stats()
    return stats.reduce() if stats is not None else {}


def wait_reachable(engine: Offloader, seconds: float = 60.0) -> None:
    """Return when lookups reach the service again, whichever of the client's connections they take."""
    ends_s, number, reached = time.monotonic() + seconds, 0, 0
    while reached < 10:
        assert time.monotonic() < ends_s, "the service does not come back"
        number += 1
        key = chain(f"probe {number} {ends_s}", 1, group=1)
        engine.find(engine.begin(f"probe {number}", keys=key), key)
        engine.end(f"probe {number}")
        reached = reached + 1 if any("nothing_stored" in name for name in misses_of(engine)) else 0
        time.sleep(0.05)


def store_chunks(engine: Offloader, keys: list[bytes]) -> None:
    engine.results.clear()
    for start in range(0, len(keys), 32):
        part = keys[start : start + 32]
        context = engine.begin(f"w{start}", keys=part)
        contents = [content_of(key, engine.tier.block_size_bytes) for key in part]
        assert engine.offload(context, part, contents) == len(part)
        engine.settle()
        engine.end(f"w{start}")
    assert all(result.success for result in engine.results)


def damage_chunks(
    engine: Offloader, medium: RawMedium, victims: list[bytes], keys: list[bytes], choose: random.Random
) -> None:
    namespace = engine.tier.namespaces()[1]

    def record_of(key: bytes) -> RecordKey:
        return RecordKey(namespace, name_of_page(key), 0, 0)

    def stored(key: bytes) -> bytes:
        data = asyncio.run(medium.read(record_of(key)))
        assert data is not None
        return data

    def damage(key: bytes, choose: random.Random) -> None:
        data = changed = stored(key)
        while changed == data:
            if choose.random() < 0.5:
                changed = mutated(data, choose)
            elif (other := choose.choice(keys)) != key:
                changed = DAMAGE[choose.choice(list(DAMAGE))](data, stored(other))
        asyncio.run(medium.write(record_of(key), changed))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(damage, victims, [random.Random(choose.random()) for _ in victims]))


def load_chunks(engine: Offloader, request: str, keys: list[bytes]) -> set[bytes]:
    """The chunks of a window that vLLM gets, all of them right."""
    context = engine.begin(request, keys=keys)
    ends_s = time.monotonic() + 120
    waiting = True
    while waiting:
        assert time.monotonic() < ends_s, "the scheduler gets no answer"
        found = {key: engine.manager.lookup(key, context) for key in keys}  # type: ignore[arg-type]
        waiting = any(one in (LookupResult.RETRY, LookupResult.HIT_PENDING) for one in found.values())
        engine.step()
        time.sleep(0.001)
    loaded = {key for key, one in found.items() if one is LookupResult.HIT}
    for key in loaded:
        assert engine.content(context, key) == content_of(key, engine.tier.block_size_bytes)
    engine.end(request)
    return loaded


# a frozen Redis


def test_a_frozen_redis_costs_misses(config: Any, tmp_path: Path, tell: Callable[[str], None]) -> None:
    """Redis has the chunks and stops answering: each request has its miss within 100 ms and a step of the test, no call
    of the scheduler takes a millisecond of its thread, and once Redis answers again so does the store."""
    keys = chain("a", 64)
    with redis_server() as redis:
        flags = {"hot": redis.url, "cold": "memory:", "memory_bytes": "256MiB"}
        with Service(tmp_path, flags) as service, offloading(config, service.url) as make:
            engine = make(slots=256, lookup_timeout_ms=80)
            store_all(engine, keys)
            service.settle()
            service.kill()
            service.start()
            engine.manager.reset_cache()
            assert ready_again(engine, keys)
            service.kill()
            service.start()  # with an empty memory
            engine.manager.reset_cache()
            engine.calls.clear()
            redis.freeze()
            waited_s = []
            for number in range(20):
                context = engine.begin(f"r{number}", keys=keys)
                started_s = time.monotonic()
                assert engine.find(context, keys) == 0
                waited_s.append(time.monotonic() - started_s)
                engine.end(f"r{number}")
            engine.settle()
            used_s = max(used for _, used, _ in engine.calls)
            redis.thaw()
            tell(f"frozen Redis: misses after {max(waited_s) * 1e3:.0f} ms at most, {used_s * 1e3:.2f} ms of a call")
            assert max(waited_s) < 0.2 and used_s < 0.001
            assert ready_again(engine, keys)


def store_all(engine: Offloader, keys: list[bytes]) -> None:
    context = engine.begin("w", keys=keys)
    for start in range(0, len(keys), 16):
        part = keys[start : start + 16]
        engine.offload(context, part, [content_of(key, engine.tier.block_size_bytes) for key in part])
        engine.settle()
    engine.end("w")
    assert all(result.success for result in engine.results)


def ready_again(engine: Offloader, keys: list[bytes]) -> bool:
    """Whether the store restores a prompt again before long."""
    ends_s = time.monotonic() + 60
    number = 0
    while time.monotonic() < ends_s:
        number += 1
        context = engine.begin(f"again {number}", keys=keys)
        num_found = engine.find(context, keys)
        for key in keys[:num_found]:
            assert engine.content(context, key) == content_of(key, engine.tier.block_size_bytes)
        engine.end(f"again {number}")
        if num_found == len(keys):
            return True
        time.sleep(0.2)
    return False


# all doors on one Redis


class Node:
    """A service with a Redis, a directory with a budget, and a tenant for each door.

    Attributes:
        maximum_bytes: What each tenant may hold in the directory, of whose budget it is a quarter.
    """

    def __init__(self, folder: Path, redis: RedisServer, maximum_bytes: int) -> None:
        self.maximum_bytes = maximum_bytes
        (port,) = free_ports(1)
        self.admin, self.folder = f"127.0.0.1:{port}", folder
        tokens = {**{door: f"token of {door}" for door in DOORS}, "*": "the operator's token"}
        text = ""
        for tenant, token in tokens.items():
            scopes = '["admin"]' if tenant == "*" else '["read", "save"]'
            digest = hashlib.sha256(token.encode()).hexdigest()
            text += f'[[credential]]\ntenant = "{tenant}"\ntoken_sha256 = "{digest}"\nscopes = {scopes}\n'
            self.token_file(tenant).write_text(token)
            self.token_file(tenant).chmod(0o600)
        credentials = folder / "credentials.toml"
        credentials.write_text(text)
        credentials.chmod(0o600)
        self.service = Service(
            folder,
            {
                "hot": redis.url,
                "cold": f"file://{folder / 'records'}",
                "memory_bytes": "64MiB",
                "cold_bytes": str(4 * maximum_bytes),
                "quotas": ",".join(f"{door}=:{maximum_bytes}" for door in DOORS),
                "credentials_file": str(credentials),
                "admin_listen": self.admin,
                "retention_admission": "all",
            },
        )

    def token_file(self, tenant: str) -> Path:
        return self.folder / f"token-{'operator' if tenant == '*' else tenant}"

    def command(self, *arguments: str) -> Any:
        """A verb of ours as the operator, as JSON."""
        settings = {"KVSTORE_ADMIN_LISTEN": self.admin, "KVSTORE_LISTEN": self.service.url}
        done = subprocess.run(
            [sys.executable, "-m", "kvstore.cli", *arguments, "--json", "--token-file", str(self.token_file("*"))],
            env={**bare_environment(), **settings},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("seconds", "maximum_bytes"), [(8, 1 << 20), pytest.param(600, 16 << 20, marks=pytest.mark.full)]
)
def test_all_doors_use_one_redis(
    config: Any, tmp_path: Path, seconds: float, maximum_bytes: int, tell: Callable[[str], None]
) -> None:
    """vLLM's offloading, SGLang and pages as our connector saves them, each with a quota, write more than the budget
    and read each other's nothing: what is read is right, each stays within its quota, every record is good, and `ls`
    names the door of each namespace."""
    arguments = SimpleNamespace(model_path="a/model", load_format="auto", dtype="bfloat16", kv_cache_dtype="auto")
    evicts = ("--maxmemory-policy", "volatile-lru")  # as our docs say: else Redis would keep all that was ever written
    with redis_server(maxmemory_bytes=256 << 20, arguments=evicts) as redis, hicache(arguments) as sglang:
        node = Node(tmp_path, redis, maximum_bytes)
        with node.service as service, offloading(config, service.url) as make:
            ends_s = time.monotonic() + seconds
            done: Counter[str] = Counter()
            failed: list[str] = []
            workers = {
                "offloading": lambda: use_offloading(make, node, ends_s, done),
                "sglang": lambda: use_sglang(sglang, node, ends_s, done),
                "connector": lambda: use_as_connector(node, ends_s, done),
            }

            def run(name: str) -> None:
                try:
                    workers[name]()
                except BaseException as error:
                    failed.append(f"{name}: {error!r}")
                    raise

            threads = [threading.Thread(target=run, args=(name,)) for name in workers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(seconds + 120)
            assert failed == [] and not any(thread.is_alive() for thread in threads)
            service_settles(node, 120)  # what Redis has goes on to the directory, and is evicted there
            listed = node.command("ls")["namespaces"]
            assert {one["tenant"]: one["door"].split()[0] for one in listed} == {
                "offloading": "vllm",
                "sglang": "sglang",
                "connector": "connector",
            }
            for tier in ("hot", "cold"):
                report = node.command("verify", tier, "--by-service", "--rate", "1GiB")
                assert not report["bad"] and report["num_records"] > 0, report
    assert all(done[f"{door} read"] > 0 for door in DOORS), done
    assert done["offloading written"] * 64 * 1024 > maximum_bytes, "too little was written to evict anything"
    tell(f"three doors, {seconds:.0f} s: {dict(done)}")


def service_settles(node: Node, patience_s: float) -> None:
    """Wait until each door is within its quota."""
    ends_s = time.monotonic() + patience_s
    while True:
        held: Counter[str] = Counter()
        for one in node.command("ls")["namespaces"]:
            held[one["tenant"]] += one["held"].get("filesystem", {}).get("num_bytes", 0)
        if all(held[door] <= node.maximum_bytes for door in DOORS):
            return
        assert time.monotonic() < ends_s, held
        time.sleep(0.5)


def use_offloading(make: OffloaderMaker, node: Node, ends_s: float, done: Counter[str]) -> None:
    token = str(node.token_file("offloading"))
    writer, reader = (make(slots=64, token_file=token) for _ in range(2))
    choose, size = random.Random(1), writer.tier.block_size_bytes
    number = 0
    while time.monotonic() < ends_s:
        keys = chain(f"prompt {number}", 6)
        context = writer.begin(f"w{number}", keys=keys)
        writer.offload(context, keys, [content_of(key, size) for key in keys])
        writer.settle()
        writer.end(f"w{number}")
        done["offloading written"] += len(keys)
        wanted = chain(f"prompt {number - choose.randrange(min(number + 1, 8))}", 6)
        context = reader.begin(f"r{number}", keys=wanted)
        num_found = reader.find(context, wanted)
        for key in wanted[:num_found]:
            assert reader.content(context, key) == content_of(key, size)
        reader.end(f"r{number}")
        done["offloading read"] += num_found
        number += 1


def use_sglang(sglang: SimpleNamespace, node: Node, ends_s: float, done: Counter[str]) -> None:
    extra = {
        "url": node.service.url,
        "interface_v1": 1,
        "weights_id": "w",
        "token_file": str(node.token_file("sglang")),
    }
    rank = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    rank |= {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "m"}
    pools, backends = [HostPool(head_elements=512) for _ in range(2)], []
    for pool in pools:
        backend = sglang.backend.KVStoreHiCache(sglang.interface.HiCacheStorageConfig(**rank, extra_config=extra), {})
        backend.register_mem_pool_host(pool)
        assert backend.identified.wait(60)
        backends.append(backend)
    writer, reader = backends
    number = 0
    while time.monotonic() < ends_s:
        keys = [f"{number}-{page}" for page in range(6)]
        for page in range(6):
            pools[0].fill(page, number * 10 + page)
        assert writer.batch_set_v1(keys, pools[0].slots(*range(6))) == [True] * 6
        done["sglang written"] += 6
        num_found = reader.batch_exists(keys)
        were = reader.batch_get_v1(keys[:num_found], pools[1].slots(*range(num_found))) if num_found else []
        for page, was_read in enumerate(were):
            assert not was_read or pools[1].content(page).equal(pools[0].content(page))
        done["sglang read"] += sum(were)
        number += 1
    for backend in backends:
        backend.close()


def use_as_connector(node: Node, ends_s: float, done: Counter[str]) -> None:
    """Canonical pages in a namespace of attention, as our connector's ranks save and stage them."""
    token = node.token_file("connector").read_text()
    number = 0
    with BlockingStore(node.service.url, token=token) as store:
        while time.monotonic() < ends_s:
            prompt = Prompt(ATTENTION, f"p{number}", 256, payload_bytes=20_000, model="a model", tenant="connector")
            store.open_namespace(prompt.description, deadline=soon())
            for record in prompt.records():
                store.save(record, deadline=soon())
            done["connector written"] += len(prompt.records())
            staged = store.stage(prompt.query(), deadline=soon())
            expected = {record.key: record.data for record in prompt.records()}
            for key in staged.keys:
                assert staged.lease is not None
                assert store.load(staged.lease, key, deadline=soon()).data == expected[key]
            if staged.lease is not None:
                store.release(staged.lease)
            done["connector read"] += len(staged.keys)
            number += 1
