"""`python -m kvstore.testing.engine.fork_server CONTROL_FD PARENT_PID`: has imported vLLM, and forks into engines.

The imports are most of an engine's start, some 9 s of one core, and the same each time. An order is one message on the
control socket with an engine's environment and spec, and four descriptors: its stdin, its output, where it answers, and
where its exit status goes. The answer is its process number.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
from typing import Any, NoReturn

from kvstore.testing.engine.forked import ORDER_BYTES_MAX
from kvstore.testing.engine.main import serve, tie_to_parent

_NUM_DESCRIPTORS = 4
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
    gc.freeze()  # what is never freed should not be copied page by page where engines collect garbage
    woken, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waking)
    reports: dict[int, int] = {}
    with socket.socket(fileno=int(sys.argv[1])) as control:
        while True:
            ready = select.select([control.fileno(), woken], [], [])[0]
            if woken in ready:
                os.read(woken, 4096)
                _report_ended(reports)
            if control.fileno() not in ready:
                continue
            message, descriptors, _, _ = socket.recv_fds(control, ORDER_BYTES_MAX, _NUM_DESCRIPTORS)
            if not message:
                return
            *streams, report = descriptors
            parent, pid = os.getpid(), os.fork()
            if pid == 0:
                break
            for stream in streams:
                os.close(stream)
            reports[pid] = report
            control.send(b"%d" % pid)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor in (woken, waking, report, *reports.values()):
        os.close(descriptor)
    _be_engine(parent, json.loads(message), *streams)


def _spare_the_processors() -> None:
    """Change what costs many engines on few processors most, and no result: vLLM inspects the class of a model in a new
    process, which imports all again, and an engine's processes wait for each other for a second without sleeping."""
    registry, queues = map(importlib.import_module, _COSTLY)
    registry._run_in_subprocess = lambda inspect: inspect()  # type: ignore[attr-defined]
    queues.SpinCondition.__init__.__defaults__ = (_SPIN_S,)


def _report_ended(reports: dict[int, int]) -> None:
    while reports:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        report = reports.pop(pid)
        os.write(report, b"%d" % os.waitstatus_to_exitcode(status))
        os.close(report)


def _be_engine(parent_pid: int, order: dict[str, Any], stdin: int, output: int, answers: int) -> None:
    os.setsid()
    tie_to_parent(parent_pid)
    for stream, standard in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(stream, standard)
    os.close(stdin)
    os.close(output)
    sys.stdin = os.fdopen(0, closefd=False)
    os.environ.update(order["environment"])  # beside what was set while vLLM was imported
    os.set_inheritable(answers, False)
    # vLLM calls it twice at its end, and then collects what is shared with the fork server, which copies all of that
    gc.unfreeze = lambda: None
    _fork_workers()
    with os.fdopen(answers, "w", buffering=1) as file:
        serve(order["spec"], file)
    _end()


def _fork_workers() -> None:
    """Let vLLM fork the processes of a multi-process engine: on a CPU it wants new ones, which import all again."""
    context = multiprocessing.get_context("fork")
    for module in _STARTERS:
        importlib.import_module(module).get_mp_context = lambda: context  # type: ignore[attr-defined]
    os.register_at_fork(after_in_child=_begin_worker)


def _begin_worker() -> None:
    import torch

    tie_to_parent(os.getppid())  # a killed engine leaves nothing behind that waits for it
    if num_threads := os.environ.get("OMP_NUM_THREADS"):  # read when torch was imported, and changed since
        torch.set_num_threads(int(num_threads))
        # so is numba's. vLLM's n-gram drafts set it back to that after each use, for torch as well, which shares the
        # OpenMP runtime: from then on some sums are split otherwise, and rounded otherwise.
        os.environ["NUMBA_NUM_THREADS"] = num_threads
        if (numba := sys.modules.get("numba")) is not None:
            numba.config.NUMBA_NUM_THREADS = int(num_threads)


def _end() -> NoReturn:
    """What the interpreter does at its end, but for taking every module apart: that is seconds of copying pages which
    are shared with the fork server."""
    threading._shutdown()  # type: ignore[attr-defined]  # the one way to end the threads of executors as well
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
