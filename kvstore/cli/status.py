"""`kvstore status`: what a running service holds and how it is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import typer
from rich.console import Console
from rich.table import Table

from kvstore.cli.asking import AsJson, Timeout, Url, asked

__all__ = ["status"]


def status(url: Url = "", json_: AsJson = False, timeout_s: Timeout = 3.0) -> None:
    """Show what a running service holds and how it is."""
    with asked(url, timeout_s, "status") as service:
        values = service.store.status(deadline=service.deadline)
    if json_:
        typer.echo(json.dumps(values, indent=2, sort_keys=True, default=str))
        return
    table = Table("what", "value", title=f"kvstore at {service.name}")
    for name, value in _flat(values):
        table.add_row(name, value)
    Console().print(table)


def _flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, int) and not isinstance(value, bool) and "bytes" in name:
            yield prefix + name, f"{value:,} ({value / (1 << 20):,.1f} MiB)"
        else:
            yield prefix + name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
