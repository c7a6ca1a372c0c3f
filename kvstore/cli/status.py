"""`kvstore status`: the status of a running service."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated

import typer
from rich.markup import escape

from kvstore.cli.asking import AsJson, Config, Timeout, TokenFile, Url, asked
from kvstore.cli.status_page import page_of
from kvstore.cli.tables import console_of, print_table, table_of

__all__ = ["status"]


def status(  # noqa: PLR0917 - typer makes flags of them
    url: Url = "",
    token_file: TokenFile = None,
    config: Config = None,
    json_: AsJson = False,
    all_: Annotated[bool, typer.Option("--all", help="Every value behind the page, as --json has them.")] = False,
    timeout_s: Timeout = 3.0,
) -> None:
    """Show whether a running service works and what to do if not, its hits, tiers, write-backs, engines and memory."""
    with asked(url, timeout_s, "status", token_file, config) as service:
        values = service.store.status(deadline=service.deadline)
    if json_:
        typer.echo(json.dumps(values, indent=2, sort_keys=True, default=str))
        return
    console_of().print(page_of(service.name, values), highlight=False)
    if not all_:
        return
    typer.echo()
    table = table_of("all values", "what", "value")
    for name, value in _flat(values):
        table.add_row(escape(name), escape(value))
    print_table(table)


def _flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, given in values.items():
        # counters are floats with whole values
        value = int(given) if isinstance(given, float) and given.is_integer() else given
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, bool):
            yield prefix + name, "yes" if value else "no"
        elif isinstance(value, int) and "bytes" in name:
            yield prefix + name, f"{value:,} ({value / (1 << 20):,.1f} MiB)"
        elif isinstance(value, int) and name != "pid":
            yield prefix + name, f"{value:,}"
        else:
            yield prefix + name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
