"""`python -m kvstore.testing.engine.fork_server CONTROL_FD PARENT_PID`: has imported vLLM, and forks into engines.

The imports are most of an engine's start, some 9 s of one core, and the same each time.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import sys

from kvstore.testing.engine.main import serve
from kvstore.testing.forking import Order, end_process, fork_on_demand, tie_to_parent

_MODULES = ("vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker")
_STARTERS = ("vllm.v1.engine.utils", "vllm.v1.engine.coordinator", "vllm.v1.executor.multiproc_executor")
"""Modules that start processes."""
_COSTLY = ("vllm.model_executor.models.registry", "vllm.distributed.device_communicators.shm_broadcast")
_SPIN_S = 0.002


def main() -> None:
    """Fork engines until the other end of the control socket is closed; in each of them, be the engine."""
    tie_to_parent(int(sys.argv[2]))
    for module in _MODULES:
        importlib.import_module(module)
    _spare_the_processors()
    fork_on_demand(int(sys.argv[1]), _be_engine)


def _spare_the_processors() -> None:
    """Change what costs many engines on few processors most, and no result: vLLM inspects the class of a model in a new
    process, which imports all again, and an engine's processes wait for each other for a second without sleeping."""
    registry, queues = map(importlib.import_module, _COSTLY)
    registry._run_in_subprocess = lambda inspect: inspect()  # type: ignore[attr-defined]
    queues.SpinCondition.__init__.__defaults__ = (_SPIN_S,)


def _be_engine(order: Order, answers: int) -> None:
    # vLLM calls it twice at its end, and then collects what is shared with the fork server, which copies all of that
    gc.unfreeze = lambda: None
    _fork_workers()
    if "serve" in order:
        os.close(answers)
        sys.argv = ["vllm", "serve", *order["serve"]]
        importlib.import_module("vllm.entrypoints.cli.main").main()
    else:
        with os.fdopen(answers, "w", buffering=1) as file:
            serve(order["spec"], file)
    end_process()


def _fork_workers() -> None:
    """Let vLLM fork the processes of a multi-process engine: on a CPU it wants new ones, which import all again."""
    context = multiprocessing.get_context("fork")
    for module in _STARTERS:
        importlib.import_module(module).get_mp_context = lambda: context  # type: ignore[attr-defined]
    os.register_at_fork(after_in_child=_begin_worker)


def _begin_worker() -> None:
    import torch

    tie_to_parent(os.getppid())  # a killed engine leaves nothing behind that waits for it
    signal.set_wakeup_fd(-1)  # a server's event loop reads the other end: it would end with this process
    if num_threads := os.environ.get("OMP_NUM_THREADS"):  # read when torch was imported, and changed since
        torch.set_num_threads(int(num_threads))
        # so is numba's. vLLM's n-gram drafts set it back to that after each use, for torch as well, which shares the
        # OpenMP runtime: from then on some sums are split otherwise, and rounded otherwise.
        os.environ["NUMBA_NUM_THREADS"] = num_threads
        if (numba := sys.modules.get("numba")) is not None:
            numba.config.NUMBA_NUM_THREADS = int(num_threads)


if __name__ == "__main__":
    main()
