"""`kvstore explain`: why a request was resumed no further than it was."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

from kvstore.cli.asking import AsJson, Timeout, Url, asked

__all__ = ["explain"]


def explain(
    request: Annotated[
        str, typer.Argument(help="vLLM's id of a request, or its start; without one the latest requests are listed.")
    ] = "",
    url: Url = "",
    json_: AsJson = False,
    timeout_s: Timeout = 5.0,
) -> None:
    """Say how far a request was resumed, why no further, and what to do about it."""
    with asked(url, timeout_s, "explain") as service:
        values = service.store.explain(request, deadline=service.deadline)
    if json_:
        typer.echo(json.dumps(values, indent=2, default=str))
    elif request:
        _show(values)
    else:
        _list(cast(Sequence[Mapping[str, Any]], values["requests"]), service.name)


def _list(requests: Sequence[Mapping[str, Any]], name: str) -> None:
    table = Table(title=f"latest requests at {name}")
    for title in ("request", "at", "prompt tokens", "resumed from", "result", "reason"):
        table.add_column(title, justify="right" if title in ("prompt tokens", "resumed from") else "left")
    for one in requests:
        tokens = (f"{one['prompt_tokens']:,}", f"{one['resume_tokens']:,}")
        table.add_row(one["request"], one["at"], *tokens, one["result"], one["reason"])
    Console().print(table)


def _show(values: Mapping[str, Any]) -> None:
    table = Table(show_header=False, title=f"request {values['request']}")
    table.add_row("asked", values["at"])
    table.add_row("result", f"{values['result']}: resumed from token {values['resume_tokens']:,}")
    table.add_row("prompt", f"{values['prompt_tokens']:,} tokens, {values['cap_tokens']:,} could have been resumed")
    if values["local_tokens"]:
        table.add_row("engine's own cache", f"{values['local_tokens']:,} tokens")
    if values["stopped_at_tokens"]:
        table.add_row("stopped at", f"token {values['stopped_at_tokens']:,}")
    table.add_row("why", f"{values['why']} ({values['reason'] or 'whole'})")
    for name, value in values["detail"].items():
        table.add_row(f"  {name}", f"{value:,.4g}" if isinstance(value, float) else str(value))
    if values["advice"]:
        table.add_row("next", values["advice"])
    if values["namespace"]:
        table.add_row("namespace", values["namespace"])
    Console().print(table)
