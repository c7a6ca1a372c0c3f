"""Weights that are read again while an engine runs: `collective_rpc("reload_weights")`."""

from __future__ import annotations

import functools
from typing import Any, Protocol
from weakref import WeakSet

from vllm.v1.worker.gpu_worker import Worker


class Watcher(Protocol):
    """Wants to know when a rank has read its weights again."""

    def on_weights_reloaded(self, *, from_files: bool) -> None: ...


_watchers: WeakSet[Watcher] = WeakSet()


def watch_weight_reloads(watcher: Watcher) -> None:
    """Tell `watcher` of each reload in this process from now on, as long as it lives, before the next step.

    vLLM has no hook for it. `from_files` is false for weights that a caller gave, and for a reload that failed.
    """
    _wrap_once()
    _watchers.add(watcher)


@functools.cache
def _wrap_once() -> None:
    reload = Worker.reload_weights

    @functools.wraps(reload)
    def reload_weights(self: Worker, *args: Any, **kwargs: Any) -> None:
        is_whole = False
        try:
            reload(self, *args, **kwargs)
            is_whole = True
        finally:
            given = args[0] if args else kwargs.get("weights_iterator")
            for watcher in tuple(_watchers):
                watcher.on_weights_reloaded(from_files=is_whole and given is None)

    Worker.reload_weights = reload_weights
