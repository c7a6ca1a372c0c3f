"""Engines that are forked from a process which has imported vLLM already, for who starts several."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.testing.forking import ForkedProcess, ForkServers

SERVE = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
"""What the command `vllm serve` of this Python's environment runs."""

_LATE = ("AWS_", "KVSTORE_", "XDG_", "VLLM_CPU_", "VLLM_ENABLE_V1_MULTIPROCESSING")
# each takes some 600 MiB
_FORKS = ForkServers("kvstore.testing.engine.fork_server", _LATE, servers_max=3)
warm_starts = _FORKS.running
"""A context manager; within its block engines are forked from a process that has imported vLLM. An engine is then as
fresh as any, but for its imports: what they depend on (environment, hash seed) is as given."""


def start_warm(
    spec: Mapping[str, Any], environment: Mapping[str, str], output: int, answers: int
) -> ForkedProcess | None:
    """Fork an engine; `None` outside of `warm_starts`.

    Args:
        spec: As JSON.
        environment: All of it.
        output: Descriptor for what it prints.
        answers: Descriptor for what it says to us. Both stay open here.

    Raises:
        OSError: The fork server could not be started.
    """
    return _FORKS.fork({"spec": spec}, environment, output, answers)


def start_warm_server(command: Sequence[str], environment: Mapping[str, str], output: int) -> ForkedProcess | None:
    """Fork a `vllm serve`; `None` outside of `warm_starts`.

    Args:
        command: `SERVE`, and its arguments.
        environment: All of it.
        output: Descriptor for what it prints. It stays open here.

    Raises:
        OSError: The fork server could not be started.
    """
    return _FORKS.fork({"serve": list(command[len(SERVE) :])}, environment, output)
