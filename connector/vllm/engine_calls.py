"""What an operator lets a running engine do, and vLLM tells no connector: load an adapter, call workers by name."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakSet

from vllm.v1.engine.core import EngineCore


class Watcher(Protocol):
    """Wants to know of each such call."""

    def on_engine_call(self, method: str, arguments: Sequence[Any]) -> None: ...


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
