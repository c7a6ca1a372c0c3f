"""Engines that are forked from a process which has imported vLLM already, for who starts several."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvstore.testing.forking import ForkedProcess, ForkServers

SERVE = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
"""What the command `vllm serve` of this Python's environment runs."""

_SERVERS_MAX = 3
"""Each takes some 600 MiB."""

_LATE = ("AWS_", "KVSTORE_", "XDG_", "VLLM_CPU_", "VLLM_ENABLE_V1_MULTIPROCESSING")

_fork_servers: ForkServers | None = None


@contextlib.contextmanager
def warm_starts() -> Iterator[None]:
    """Within the block engines are forked from a process that has imported vLLM; with its end all of them are killed.

    An engine is then as fresh as any, but for its imports: what they depend on (environment, hash seed) is as given.
    """
    global _fork_servers
    _fork_servers = servers = ForkServers("kvstore.testing.engine.fork_server", _LATE, _SERVERS_MAX)
    try:
        yield
    finally:
        _fork_servers = None
        servers.close()


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
    return None if _fork_servers is None else _fork_servers.fork({"spec": spec}, environment, output, answers)


def start_warm_server(command: Sequence[str], environment: Mapping[str, str], output: int) -> ForkedProcess | None:
    """Fork a `vllm serve`; `None` outside of `warm_starts`.

    Args:
        command: `SERVE`, and its arguments.
        environment: All of it.
        output: Descriptor for what it prints. It stays open here.

    Raises:
        OSError: The fork server could not be started.
    """
    if _fork_servers is None:
        return None
    process = _fork_servers.fork({"serve": list(command[len(SERVE) :])}, environment, output, output)
    process.stdin.close()
    return process
