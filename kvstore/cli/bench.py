"""`kvstore bench`: runs one of the benchmarks of the source tree; each also measures its ceiling in the same run."""

from __future__ import annotations

import typer

from kvstore.cli.source_tree import PASS_ALL, become
from kvstore.cli.tables import print_table, table_of
from kvstore.errors import InvalidRequest

__all__ = ["BENCHMARKS", "bench"]

BENCHMARKS = {
    "quick": ("quick", "codec, service, Redis and S3 in two minutes"),
    "store": ("store", "the byte paths to Redis, through the service and to S3"),
    "lookup": ("lookup", "long prompts among a million entries of the catalog"),
    "retention": ("retention", "ten times the budget, with and without a bound"),
    "ttft": ("repeat_ttft", "a long prompt's first token, computed and restored (starts vLLM)"),
    "overhead": ("overhead", "prefill and decode with a connector that helps nothing (starts vLLM)"),
    "encryption": ("encryption", "sealing and opening encrypted records"),
    "restart": ("restart", "reopening a directory of a million records"),
    "rounds": ("rounds", "how long retention holds up a service"),
    "gpu": ("gpu", "what the connector does on a GPU, checked and measured"),
}
"""The name of each, its module, and what it measures."""

bench = typer.Typer(add_completion=False, add_help_option=False)


@bench.command("bench", context_settings=PASS_ALL)
def run(context: typer.Context) -> None:
    """Measure this machine: `bench NAME [OPTIONS]`, without a name the list (source tree only)."""
    name, *arguments = context.args or ["--help"]
    if name in ("-h", "--help"):
        _list()
        return
    if name not in BENCHMARKS:
        raise InvalidRequest(f"unknown benchmark: choose one of {', '.join(BENCHMARKS)}", seen=name)
    become(f"benchmarks.{BENCHMARKS[name][0]}", arguments)


def _list() -> None:
    table = table_of("kvstore bench NAME; its options: kvstore bench NAME --help", "benchmark", "measures")
    for name, (_, measures) in BENCHMARKS.items():
        table.add_row(name, measures)
    print_table(table)
