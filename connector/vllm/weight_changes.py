"""Weights that change on a rank while its engine runs: read again, loaded into the model, or lost in a deep sleep."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import MethodType
from typing import Any, Protocol
from weakref import WeakSet

from vllm.v1.worker.gpu_worker import Worker

_SLEEP_WITHOUT_WEIGHTS = 2
"""The level from which on vLLM does not keep them."""


class Watcher(Protocol):
    """Wants to know of each change of its rank's weights."""

    def on_weights_loaded(self, *, from_files: bool) -> None: ...

    def on_weights_lost(self) -> None: ...


_watchers: WeakSet[Watcher] = WeakSet()
_reloading: list[Worker] = []


def watch_weights(watcher: Watcher, models: Iterable[Any]) -> None:
    """Tell `watcher` of each change in this process from now on, as long as it lives, before the next step.

    vLLM has no hook for it. What a caller writes to a parameter itself is not seen.

    `from_files` is true only for vLLM's own reload of all weights from files. Trainers call `load_weights` of the model
    or of a part of it.

    Args:
        models: The rank's modules, which may share parts.
    """
    _wrap_worker_once()
    for module in {part for model in models for part in model.modules()}:
        if callable(getattr(module, "load_weights", None)):
            _wrap_load(module)
    _watchers.add(watcher)


def _tell_loaded(*, from_files: bool) -> None:
    for watcher in tuple(_watchers):
        watcher.on_weights_loaded(from_files=from_files)


def _wrap_load(module: Any) -> None:
    load = module.load_weights
    of_any = getattr(load, "__func__", None)  # `None`: a trainer has put a plain function in its place

    @functools.wraps(load)
    def load_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _reloading:
            _tell_loaded(from_files=False)
        return load(*args, **kwargs) if of_any is None else of_any(self, *args, **kwargs)

    module.load_weights = MethodType(load_weights, module)  # a copy of the module gets a method of its own


@functools.cache
def _wrap_worker_once() -> None:
    reload, sleep = Worker.reload_weights, Worker.sleep

    @functools.wraps(reload)
    def reload_weights(self: Worker, *args: Any, **kwargs: Any) -> None:
        is_whole = False
        _reloading.append(self)
        try:
            reload(self, *args, **kwargs)
            is_whole = True
        finally:
            _reloading.pop()
            given = args[0] if args else kwargs.get("weights_iterator")
            _tell_loaded(from_files=is_whole and given is None)

    @functools.wraps(sleep)
    def sleep_and_tell(self: Worker, level: int = 1, *args: Any, **kwargs: Any) -> None:
        if level >= _SLEEP_WITHOUT_WEIGHTS:
            for watcher in tuple(_watchers):
                watcher.on_weights_lost()
        sleep(self, level, *args, **kwargs)

    Worker.reload_weights, Worker.sleep = reload_weights, sleep_and_tell
