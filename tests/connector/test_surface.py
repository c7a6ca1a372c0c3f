"""What users of a vLLM server see of the connector: its name alone to configure it, `/metrics`, and cache events."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

import pytest
import zmq
from msgspec import msgpack

from kvstore.testing.engine import EngineSpec, Request, seeded_prompt
from kvstore.testing.engine.server import ApiServer, start_api_server
from kvstore.testing.servers.otlp import span_receiver
from kvstore.testing.waiting import eventually
from tests.connector.support.releases import RELEASE
from tests.connector.support.service import DirectoryService

pytestmark = pytest.mark.engine

PATIENCE_S = 60.0
PROMPT = seeded_prompt(771, 2500)
RESTORED = 2432
BLOCK = 128
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACED = {("vllm", "llm_request"), *(("kvstore", f"kvstore.{call}") for call in ("lookup", "stage", "locate"))}


def by_name(url: str) -> dict[str, object]:
    """What a user writes where the package is installed: vLLM finds the connector by its entry point."""
    return {
        "kv_connector": "KVStoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": url, "lookup_timeout_ms": 20_000},  # a busy machine is no miss
    }


class Listener:
    """A subscriber of vLLM's cache events, as a router is one."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe("")
        self._socket.connect(endpoint)
        self.events: list[dict[str, object]] = []

    def ours(self, kind: str) -> list[dict[str, object]]:
        """Events of the store so far; those of vLLM itself are on the GPU."""
        while self._socket.poll(50):
            _topic, _sequence, payload = self._socket.recv_multipart()
            self.events += msgpack.decode(payload)[1]
        return [event for event in self.events if event["type"] == kind and event["medium"] != "GPU"]

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


@contextmanager
def listening(endpoint: str) -> Iterator[Listener]:
    listener = Listener(endpoint)
    try:
        yield listener
    finally:
        listener.close()


def forget_local_cache(server: ApiServer) -> None:
    """Empty vLLM's own prefix cache; blocks that are still being saved are waited for."""

    def reset() -> bool:
        call = urllib.request.Request(f"{server.url}/reset_prefix_cache", b"", method="POST")
        with urllib.request.urlopen(call, timeout=PATIENCE_S) as answer:
            return bool(answer.status == 200)

    eventually(reset, why="the engine's own cache cannot be emptied")


def blocks_of(events: list[dict[str, object]]) -> set[object]:
    return {block_hash for event in events for block_hash in event["block_hashes"]}  # type: ignore[attr-defined]


def test_a_server_shows_what_the_connector_does(llama: Path, work: Path, tmp_path: Path) -> None:
    """A server that knows the connector by its name computes a prompt, restores it, and later finds it gone.

    Its `/metrics` count each, and its cache events name the pages: stored in memory, with the hashes and tokens of
    vLLM's own events, again after vLLM dropped its cache, and removed when a prompt finds them gone. A request that
    belongs to a trace shows what it asked of the store there.
    """
    endpoint = f"ipc://{tmp_path}/events"
    with (
        span_receiver() as receiver,
        DirectoryService(tmp_path, {"otlp_traces_endpoint": receiver.endpoint}) as service,
        listening(endpoint) as listener,
    ):
        spec = EngineSpec(
            checkpoint=llama,
            kv_transfer=by_name(service.url),
            arguments={
                "kv_events_config": {"enable_kv_cache_events": True, "endpoint": endpoint},
                "otlp_traces_endpoint": receiver.endpoint,
            },
            environment={
                "VLLM_SERVER_DEV_MODE": "1",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
                "OTEL_SERVICE_NAME": "vllm",
            },
        )
        with start_api_server(spec, work=work, name="surface") as server:
            assert server.metrics()["vllm:kvstore_hits_total"] == 0.0
            server.complete(Request(seeded_prompt(772, 300), max_tokens=2))
            computed = server.complete(Request(PROMPT), kv_transfer_params={"do_remote_decode": True})
            assert computed.num_cached_tokens == 0
            assert computed.kv_transfer_params == {"kvstore_handoff": {"tokens": RESTORED}}
            eventually(
                lambda: len(blocks_of(listener.ours("BlockStored"))) >= (RESTORED + 256) // BLOCK,
                why="events of stored pages do not come",
            )
            see_stored(server, listener)

            forget_local_cache(server)
            restored = server.complete(Request(PROMPT), traceparent=f"00-{TRACE}-{CALLER}-01")
            assert restored.tokens == computed.tokens
            assert restored.num_cached_tokens == RESTORED
            assert restored.kv_transfer_params is None
            see_restored(server)
            eventually(lambda: is_told_again(listener), why="events of the hit do not come")
            eventually(
                lambda: {(span.service, span.name) for span in receiver.of_trace(TRACE)} >= TRACED, why="spans are lost"
            )
            assert {span.parent for span in receiver.of_trace(TRACE) if (span.service, span.name) in TRACED} == {CALLER}

            service.stop()
            rmtree(service.records)
            service.start()
            eventually(lambda: is_answered(server), why="the connector does not find the service again")
            assert server.complete(Request(PROMPT, max_tokens=2)).tokens == computed.tokens[:2]
            eventually(
                lambda: len(blocks_of(listener.ours("BlockRemoved"))) == RESTORED // BLOCK,
                why="events of removed pages do not come",
            )
            stored = [event["block_hashes"] for event in listener.ours("BlockStored")]
            assert all(event["block_hashes"] in stored for event in listener.ours("BlockRemoved"))


def is_told_again(listener: Listener) -> bool:
    """Whether the pages of a hit were published after vLLM said that it dropped its cache: routers dropped them too."""
    ours, cleared = listener.ours("BlockStored"), [event["type"] for event in listener.events]
    return "AllBlocksCleared" in cleared and ours[-1] in listener.events[cleared.index("AllBlocksCleared") :]


def see_stored(server: ApiServer, listener: Listener) -> None:
    metrics = server.metrics()
    assert metrics["vllm:kvstore_ready"] == 1.0
    assert metrics['vllm:kvstore_misses_total{reason="nothing_stored"}'] == 2.0
    assert metrics['vllm:kvstore_saves_total{outcome="stored"}'] > 0.0
    assert metrics["vllm:kvstore_saved_raw_bytes_total"] >= metrics["vllm:kvstore_saved_bytes_total"] > 0.0
    assert metrics["vllm:kvstore_lookup_seconds_count"] >= 2.0
    assert metrics["vllm:kvstore_external_tokens_total"] == 0.0
    mine = listener.ours("BlockStored")
    assert {(event["medium"], event["locality"], event["block_size"]) for event in mine} == {("CPU", "LOCAL", BLOCK)}
    tokens = [token for event in mine for token in event["token_ids"]]  # type: ignore[attr-defined]
    assert tuple(tokens[-RESTORED:]) == PROMPT[:RESTORED]
    gpu = [event for event in listener.events if event["type"] == "BlockStored" and event["medium"] == "GPU"]
    assert blocks_of(mine) <= blocks_of(gpu)


def see_restored(server: ApiServer) -> None:
    metrics = server.metrics()
    assert metrics["vllm:kvstore_hits_total"] == 1.0
    assert metrics["vllm:kvstore_external_tokens_total"] == RESTORED
    if RELEASE >= (0, 32):  # before, vLLM does not ask where a hit came from
        assert metrics['vllm:prompt_tokens_cached_by_source_total{source="host"}'] == RESTORED
    assert metrics['vllm:kvstore_staged_records_total{tier="memory"}'] > 0.0
    assert metrics["vllm:kvstore_stage_seconds_count"] == 1.0
    assert metrics["vllm:kvstore_load_seconds_count"] == 1.0
    assert metrics["vllm:kvstore_loaded_bytes_total"] == RESTORED * 4096
    assert metrics["vllm:kvstore_guarded_errors_total"] == 0.0
    assert metrics["vllm:kvstore_load_errors_total"] == 0.0


def is_answered(server: ApiServer) -> bool:
    """Whether a new prompt is looked up again, and not found."""
    missed = 'vllm:kvstore_misses_total{reason="nothing_stored"}'
    before = server.metrics()[missed]
    server.complete(Request(seeded_prompt(time.monotonic_ns() % 10**9, 300), max_tokens=2))
    return server.metrics()[missed] > before
