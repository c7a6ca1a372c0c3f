"""Services that are forked from a process which has imported what they need; `python -m` this is that process.

So is the client of `attacked.py`. The imports are most of their start, over a second of one core on a slow machine, and
the same each time.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence

from kvstore.testing.forking import ForkedProcess, ForkServers, Order, end_process, fork_on_demand

_PROGRAMS = {"kvstore.cli": "kvstore.cli.main", "kvstore.service": "kvstore.service.main"}
_PROGRAMS |= {"kvstore.testing.attacked": "kvstore.testing.attacked"}
"""By what `python -m` runs, the module with its `main`."""
_MODULES = (
    *("kvstore.testing.attacked", "kvstore.cli.serve", "kvstore.cli.verbs", "kvstore.tiers.redis", "kvstore.tiers.s3"),
    *("kvstore.catalog.redis.pending", "kvstore.catalog.redis.reconcile"),
    *("kvstore.catalog.sqlite.catalog", "kvstore.tiers.filesystem.tier", "kvstore.service.admin.app"),
)
_LATE = ("AWS_", "KVSTORE_", "XDG_")
_SERVERS_MAX = 3

_fork_servers: ForkServers | None = None


@contextlib.contextmanager
def warm_services() -> Iterator[None]:
    """Within the block services are forked; with its end all of them are killed."""
    global _fork_servers
    _fork_servers = servers = ForkServers(__name__, _LATE, _SERVERS_MAX)
    try:
        yield
    finally:
        _fork_servers = None
        servers.close()


def start_warm(command: Sequence[str], environment: Mapping[str, str], output: int) -> ForkedProcess | None:
    """Fork a service; `None` outside of `warm_services`, and for other commands.

    Args:
        command: `python -m` with one of three modules, and its arguments.
        environment: All of it.
        output: Descriptor for what it prints. It stays open here.

    Raises:
        OSError: The fork server could not be started.
    """
    if _fork_servers is None or list(command[:2]) != [sys.executable, "-m"] or command[2] not in _PROGRAMS:
        return None
    order = {"module": command[2], "arguments": list(command[3:])}
    process = _fork_servers.fork(order, environment, output, output)
    process.stdin.close()
    return process


def _be_service(order: Order, answers: int) -> None:
    os.close(answers)
    sys.argv = [order["module"], *order["arguments"]]
    end_process(importlib.import_module(_PROGRAMS[order["module"]]).main(order["arguments"]))


if __name__ == "__main__":
    for name in _MODULES:
        importlib.import_module(name)
    fork_on_demand(int(sys.argv[1]), _be_service)
