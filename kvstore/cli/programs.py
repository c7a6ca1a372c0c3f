"""`kvstore bench` and `kvstore demo`: run programs of the source tree that the installed package does not have."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import typer

import kvstore
from kvstore.cli.printing import print_table, table_of
from kvstore.errors import InvalidRequest

BENCHMARKS = {
    "quick": ("quick", "codec, service, Redis and S3 in two minutes"),
    "store": ("store", "the byte paths to Redis, through the service and to S3"),
    "lookup": ("lookup", "long prompts among a million entries of the catalog"),
    "retention": ("retention", "ten times the budget, with and without a bound"),
    "ttft": ("repeat_ttft", "a long prompt's first token, computed and restored (starts vLLM)"),
    "overhead": ("overhead", "prefill and decode with a connector that finds nothing (starts vLLM)"),
    "publishing": ("publishing", "processor time that cache events add to a save"),
    "agent": ("agent_pause", "first token after an agent's pause: from memory, prefetched, from S3 (starts vLLM)"),
    "offloading": ("offloading", "chunks of vLLM's own offloading to and from a service and Redis"),
    "documents": ("documents", "hits of documents in the given and in the planned order"),
    "blend": ("blend", "blending by ratio: right answers of a small model, and time (needs torch, transformers)"),
    "plan": ("node_plan", "what a node can load and save, from costs measured here"),
    "io-threads": ("io_threads", "what part of a byte's cost keeps Python's lock, and what more io_threads can gain"),
    "encryption": ("encryption", "sealing and opening encrypted records"),
    "restart": ("restart", "reopening a directory of a million records"),
    "rounds": ("rounds", "how long an eviction run delays a service"),
    "ordering": ("ordering", "what a load to a GPU takes of the interpreter, without a GPU (needs torch)"),
    "gpu": ("gpu", "what the connector does on a GPU, checked and measured"),
}
"""The name of each, its module, and what it measures."""

_PASS_ALL = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
_ROOT = Path(kvstore.__file__).resolve().parents[1]

bench = typer.Typer(add_completion=False, add_help_option=False)
demo = typer.Typer(add_completion=False, add_help_option=False)


@bench.command("bench", context_settings=_PASS_ALL)
def run_benchmark(context: typer.Context) -> None:
    """Measure this machine: `bench NAME [OPTIONS]`; without a name, list the benchmarks. Needs the source tree."""
    name, *arguments = context.args or ["--help"]
    if name in ("-h", "--help"):
        table = table_of("kvstore bench NAME; its options: kvstore bench NAME --help", "benchmark", "measures")
        for one, (_, measures) in BENCHMARKS.items():
            table.add_row(one, measures)
        print_table(table)
        return
    if name not in BENCHMARKS:
        raise InvalidRequest(f"unknown benchmark {name!r}: choose one of {', '.join(BENCHMARKS)}")
    _become(f"benchmarks.{BENCHMARKS[name][0]}", arguments)


@demo.command("demo", context_settings=_PASS_ALL)
def run_demo(context: typer.Context) -> None:
    """Show that a new vLLM process resumes what another one saved. Needs the source tree; see --help."""
    _become("demo", context.args)


def _become(module: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by `python -m module` of the source tree that this package was imported from.

    Raises:
        InvalidRequest: It was imported from an installed package, not from a source tree.
    """
    if not (_ROOT / "pyproject.toml").is_file():
        raise InvalidRequest(
            f"{module} is not part of the package that is installed in {_ROOT}: clone the repository and run "
            f"`make env` there, then `.venv/bin/python -m {module}`"
        )
    environment = os.environ  # noqa: TID251 - passed on
    path = os.pathsep.join(filter(None, [str(_ROOT), environment.get("PYTHONPATH")]))
    sys.stdout.flush()
    # -P: do not import a folder of that name in the current directory
    os.execve(sys.executable, [sys.executable, "-P", "-m", module, *arguments], {**environment, "PYTHONPATH": path})
