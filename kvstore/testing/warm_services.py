"""Services that are forked from a process which has imported what they need; `python -m` this is that process.

So is the client of `attacked.py`. The imports are most of their start, over a second of one core on a slow machine, and
the same each time.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence

from kvstore.testing.forking import ForkedProcess, ForkServers, Order, end_process, fork_on_demand

_PROGRAMS = {"kvstore.cli": "kvstore.cli.main", "kvstore.service": "kvstore.service.main"}
_PROGRAMS |= {"kvstore.testing.attacked": "kvstore.testing.attacked"}
"""By what `python -m` runs, the module with its `main`."""
_MODULES = (
    *("kvstore.testing.attacked", "kvstore.cli.serve", "kvstore.cli.verbs", "kvstore.tiers.redis", "kvstore.tiers.s3"),
    *("kvstore.catalog.redis.pending", "kvstore.catalog.redis.reconcile"),
    *("kvstore.catalog.sqlite.catalog", "kvstore.tiers.filesystem.tier", "kvstore.service.admin.app"),
)

_FORKS = ForkServers(__name__, ("AWS_", "KVSTORE_", "XDG_"), servers_max=3)
warm_services = _FORKS.running
"""A context manager; within its block services are forked."""


def start_warm(command: Sequence[str], environment: Mapping[str, str], output: int) -> ForkedProcess | None:
    """Fork a service; `None` outside of `warm_services`, and for other commands.

    Args:
        command: `python -m` with one of three modules, and its arguments.
        environment: All of it.
        output: Descriptor for what it prints. It stays open here.

    Raises:
        OSError: The fork server could not be started.
    """
    if list(command[:2]) != [sys.executable, "-m"] or command[2] not in _PROGRAMS:
        return None
    return _FORKS.fork({"module": command[2], "arguments": list(command[3:])}, environment, output)


def _be_service(order: Order, answers: int) -> None:
    os.close(answers)
    sys.argv = [order["module"], *order["arguments"]]
    end_process(importlib.import_module(_PROGRAMS[order["module"]]).main(order["arguments"]))


if __name__ == "__main__":
    for name in _MODULES:
        importlib.import_module(name)
    fork_on_demand(int(sys.argv[1]), _be_service)
