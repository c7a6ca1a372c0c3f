"""Lets a method of ours fail once on one rank of an engine. Named as a worker's extension, which each rank imports."""

from __future__ import annotations

import importlib
from typing import Any

from vllm.v1.worker.gpu_worker import Worker

__all__ = ["WorkerExtension"]


class WorkerExtension:
    """Adds nothing: an engine is not cached any more once a method is called that was added to its workers."""


def _break_once(worker: Any, *told: Any) -> None:
    """Let the next call of a method raise on a rank: in place of vLLM's method, which does nothing.

    Args:
        worker: vLLM's.
        told: The rank; the module of the method's class, the class and the method; the name of a class in
            `kvstore.errors`, or of one that is built in.
    """
    if not told or told[0] != worker.rank:
        return
    _, module, name, method, error = told
    owner = getattr(importlib.import_module(module), name)
    whole = getattr(owner, method)
    errors, built_in = importlib.import_module("kvstore.errors"), importlib.import_module("builtins")
    raised = getattr(errors, error, None) or getattr(built_in, error)

    def broken(*_: Any, **__: Any) -> None:
        setattr(owner, method, whole)
        raise raised("broken by a test")

    setattr(owner, method, broken)


Worker.check_health = _break_once
