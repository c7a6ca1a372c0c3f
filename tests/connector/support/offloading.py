"""vLLM's offloading without an engine: its real connector on the scheduler's side, manager and primary tier included.

What is missing is the GPU: a test writes chunks into the primary tier where a worker would have copied them.
"""

from __future__ import annotations

import copy
import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import JobResult
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from connector.offloading import KVStoreTier

BLOCK_TOKENS = 128
WEIGHTS = "weights of the test"
Key = bytes


def engine_config(checkpoint: Path, **arguments: Any) -> VllmConfig:
    """The configuration of an engine that offloads, as vLLM makes it; `offloader` adds the tier's."""
    return EngineArgs(
        model=str(checkpoint), skip_tokenizer_init=True, enforce_eager=True, max_model_len=2048, **arguments
    ).create_engine_config()


def full(**changes: Any) -> FullAttentionSpec:
    values = {"block_size": BLOCK_TOKENS, "num_kv_heads": 2, "head_size": 16, "dtype": torch.bfloat16}
    return FullAttentionSpec(**{**values, **changes})


def window(tokens: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=16, dtype=torch.bfloat16, sliding_window=tokens
    )


def cache_of(*specs: Any, layers: int = 4) -> KVCacheConfig:
    """A cache with one group for each spec."""
    groups = [
        KVCacheGroupSpec([f"model.layers.{layers * group + layer}.self_attn.attn" for layer in range(layers)], spec)
        for group, spec in enumerate(specs)
    ]
    return KVCacheConfig(num_blocks=256, kv_cache_tensors=[], kv_cache_groups=groups)


class Offloader:
    """One engine's offloading.

    Attributes:
        calls: Each call of the tier by the scheduler: its name, seconds of processor time, and seconds.
        results: Every job that the tier reported.
    """

    def __init__(self, connector: OffloadingConnector) -> None:
        self._connector = connector
        manager = connector.scheduler.manager
        assert isinstance(manager, TieringOffloadingManager)
        self.manager = manager
        tier = manager.secondary_tiers[0]
        assert isinstance(tier, KVStoreTier)
        self.tier = tier
        self.calls: list[tuple[str, float, float]] = []
        self.results: list[JobResult] = []
        self.contexts: dict[str, ReqContext] = {}
        for name in ("lookup", "submit_store", "submit_load", "on_schedule_end", "on_new_request", "get_finished_jobs"):
            setattr(tier, name, self._timed(name, getattr(tier, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started_s, used_s = time.monotonic(), time.thread_time()
            result = call(*args, **kwargs)
            self.calls.append((name, time.thread_time() - used_s, time.monotonic() - started_s))
            if name == "get_finished_jobs":
                self.results += result
            return result

        return timed

    def wait_ready(self, seconds: float = 60.0) -> None:
        assert self.tier.identified.wait(seconds), "the namespaces do not open"
        assert not self.tier.refusal, self.tier.refusal

    @property
    def memory(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The primary tier: [slots, bytes]."""
        return np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)

    # requests

    def begin(self, request: str, *, keys: Sequence[Key] = (), parameters: Any = None) -> ReqContext:
        context = self.contexts[request] = ReqContext(req_id=request, kv_transfer_params=parameters)
        for number, key in enumerate(keys):
            context.set_offload_key_position(key, (number + 1) * BLOCK_TOKENS)  # type: ignore[arg-type]
        self.manager.on_new_request(context)
        return context

    def end(self, request: str) -> None:
        self.manager.on_request_finished(self.contexts.pop(request))

    def step(self) -> None:
        """The end of a scheduler's step."""
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self, seconds: float = 60.0) -> None:
        """Step until no job runs."""
        ends_s = time.monotonic() + seconds
        while self.manager.has_pending_work():
            assert time.monotonic() < ends_s, "jobs do not end"
            self.step()
            time.sleep(0.001)

    def offload(self, context: ReqContext, keys: Sequence[Key], contents: Sequence[bytes]) -> int:
        """Store chunks in the primary tier, which has its tiers store them; returns how many the primary tier took."""
        prepared = self.manager.prepare_store(keys, context)  # type: ignore[arg-type]
        if prepared is None:
            return 0
        of = dict(zip(keys, contents, strict=True))
        for key, slot in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True):  # type: ignore[attr-defined]
            self.memory[slot] = np.frombuffer(of[key], np.uint8)
        self.manager.complete_store(prepared.keys_to_store, context)
        return len(prepared.keys_to_store)

    def poll(self, context: ReqContext, keys: Sequence[Key]) -> int | None:
        """The scheduler's question: how many chunks from the first on can be loaded now; `None`: ask again."""
        num_found, waits = 0, False
        for key in keys:
            found = self.manager.lookup(key, context)  # type: ignore[arg-type]
            if found is LookupResult.MISS:
                break
            waits = waits or found is not LookupResult.HIT
            num_found += 1
        return None if waits else num_found

    def find(self, context: ReqContext, keys: Sequence[Key], seconds: float = 60.0) -> int:
        """Step until the scheduler has its answer."""
        ends_s = time.monotonic() + seconds
        while (found := self.poll(context, keys)) is None:
            assert time.monotonic() < ends_s, "the scheduler gets no answer"
            self.step()
            time.sleep(0.001)
        return found

    def content(self, context: ReqContext, key: Key) -> bytes:
        """A chunk in the primary tier, as a worker would read it."""
        spec = self.manager.prepare_load([key], context)  # type: ignore[list-item]
        content = self.memory[int(spec.chunk_ids[0])].tobytes()  # type: ignore[attr-defined]
        self.manager.complete_load([key], context)  # type: ignore[list-item]
        return content

    def close(self) -> None:
        self._connector.shutdown()


class OffloaderMaker:
    """Makes engines' offloading, and ends it. A context manager.

    Args:
        config: The engine's configuration, which each engine gets a copy of.
        url: Of the service.
    """

    def __init__(self, config: VllmConfig, url: str) -> None:
        self._config, self._url = config, url
        self.made: list[Offloader] = []

    def __call__(
        self,
        cache: KVCacheConfig | None = None,
        *,
        slots: int = 64,
        ready: bool = True,
        change: Callable[[VllmConfig], None] = lambda _: None,
        extra: Mapping[str, Any] | None = None,
        **tier: Any,
    ) -> Offloader:
        cache = cache or cache_of(full())
        config = copy.copy(self._config)
        for part in ("cache_config", "model_config"):
            setattr(config, part, copy.copy(getattr(config, part)))
        entry: dict[str, Any] = {
            "type": "KVStoreTier",
            "module_path": "connector.offloading",
            "url": self._url,
            "weights_id": WEIGHTS,
        }
        entry["lookup_timeout_ms"] = 20_000  # a busy machine is no miss
        row_bytes = sum(group.kv_cache_spec.page_size_bytes * len(group.layer_names) for group in cache.kv_cache_groups)
        blocks = int((extra or {}).get("blocks_per_chunk", 1))
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            engine_id=f"test-{os.getpid()}-{uuid.uuid4().hex[:8]}",
            kv_connector_extra_config={
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": slots * -(-row_bytes * blocks // 4096) * 4096,
                "secondary_tiers": [{**entry, **tier}],
                **(extra or {}),
            },
        )
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        change(config)
        made = Offloader(OffloadingConnector(config, KVConnectorRole.SCHEDULER, cache))
        self.made.append(made)
        if ready:
            made.wait_ready()
        return made

    def __enter__(self) -> OffloaderMaker:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.made:
            one.close()


@contextmanager
def offloading(config: VllmConfig, url: str) -> Iterator[OffloaderMaker]:
    with OffloaderMaker(config, url) as make:
        yield make


def chain(name: str, length: int, group: int = 0) -> list[Key]:
    """The keys of a prompt's chunks."""
    found, before = [], name.encode()
    for _ in range(length):
        before = hashlib.sha256(before).digest()
        found.append(bytes(make_offload_key(before, group)))
    return found


def content_of(key: Key, num_bytes: int) -> bytes:
    """What a chunk holds: a function of its key."""
    seed = int.from_bytes(hashlib.sha256(key).digest()[:8], "big")
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8).tobytes()
