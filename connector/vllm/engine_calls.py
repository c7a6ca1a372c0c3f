"""What an operator lets a running engine do, and vLLM tells no connector: load an adapter, call its workers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakSet

from vllm.v1.engine.core import EngineCore


class Watcher(Protocol):
    """Wants to know of each such call."""

    def on_engine_call(self, method: str, arguments: Sequence[Any]) -> None: ...


KEEP_WEIGHTS = frozenset(
    (
        *("add_lora", "list_loras", "pin_lora", "remove_lora"),
        *("annotate_profile", "profile", "check_health", "execute_dummy_batch", "synchronize_device"),
        *("checkpoint_prepare", "checkpoint_restore", "shutdown", "sleep", "wake_up"),
        *("compute_weight_checksums", "get_model_inspection", "save_sharded_state", "save_tensorized_model"),
        *("get_cache_block_size_bytes", "get_compilation_match_table", "get_encoder_timing_stats", "get_kv_cache_spec"),
        *("get_kv_connector_handshake_metadata", "get_supported_tasks", "supports_draft_weight_updates"),
        *("reload_weights", "update_config", "update_max_model_len"),
        *("release_late_interaction_query_cache", "reset_encoder_cache", "reset_mm_cache"),
    )
)
"""Methods of vLLM's worker that leave the weights as they were, or of which each rank learns (`reload_weights`,
`update_config`, `sleep`). Any other may change them: those of a `worker_extension_cls`, or a trainer's.
"""

CHANGE_WEIGHTS = frozenset(
    (
        *("reload_weights", "reset_weights"),
        *("start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update"),
    )
)
"""Methods of vLLM's worker that do nothing else."""

_watchers: WeakSet[Watcher] = WeakSet()


def watch_engine_calls(watcher: Watcher) -> None:
    """Tell `watcher` of calls to engines of this process from now on, as long as it lives.

    Twice: before a call and behind it, since the files that it reads may change during it. The engine makes calls in
    the scheduler's process, between two steps: what was scheduled before is computed with the old weights, what is
    scheduled later with the new ones. A function that workers are to call has an empty name.
    """
    _wrap_once()
    _watchers.add(watcher)


def _tell(method: str, arguments: Sequence[Any]) -> None:
    for watcher in tuple(_watchers):
        watcher.on_engine_call(method, arguments)


@functools.cache
def _wrap_once() -> None:
    load, call = EngineCore.add_lora, EngineCore.collective_rpc

    @functools.wraps(load)
    def add_lora(self: EngineCore, lora_request: Any) -> bool:
        _tell("add_lora", (lora_request,))
        try:
            return load(self, lora_request)
        finally:
            _tell("add_lora", (lora_request,))

    @functools.wraps(call)
    def collective_rpc(
        self: EngineCore, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, arguments = method if isinstance(method, str) else "", (*(args or ()), *(kwargs or {}).values())
        _tell(name, arguments)
        try:
            return call(self, method, timeout, args, kwargs)
        finally:
            _tell(name, arguments)

    EngineCore.add_lora, EngineCore.collective_rpc = add_lora, collective_rpc
