"""Adapters that an operator lets vLLM load before a request names them: `add_lora`, or `/v1/load_lora_adapter`."""

from __future__ import annotations

import functools
from typing import Any, Protocol
from weakref import WeakSet

from vllm.v1.executor.abstract import Executor


class Watcher(Protocol):
    """Wants to know of each adapter before it is loaded."""

    def on_adapter_load(self, lora_request: Any) -> None: ...


_watchers: WeakSet[Watcher] = WeakSet()


def watch_adapter_loads(watcher: Watcher) -> None:
    """Tell `watcher` of adapters that engines of this process load from now on, as long as it lives.

    vLLM has no hook for it. It calls the executor in the scheduler's process, between two steps: what was scheduled
    before is computed with the old files, what is scheduled later with the new ones.
    """
    _wrap_once()
    _watchers.add(watcher)


@functools.cache
def _wrap_once() -> None:
    load = Executor.add_lora

    @functools.wraps(load)
    def add_lora(self: Executor, lora_request: Any) -> bool:
        for watcher in tuple(_watchers):
            watcher.on_adapter_load(lora_request)
        return load(self, lora_request)

    Executor.add_lora = add_lora
