"""`kvstore weights`: list the weights that pages were computed with; retire old ones on all services at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from kvstore.cli.administering import AdminUrl, AsJson, Config, Timeout, TokenFile, Yes, administered
from kvstore.cli.shown import echo_json, held_text, time_text
from kvstore.cli.tables import print_table, table_of

__all__ = ["weights"]

weights = typer.Typer(
    add_completion=False,
    help="List weights and what is stored of them; retire old ones on all services at once.",
    no_args_is_help=True,
)

WeightsArgument = Annotated[str, typer.Argument(help="As `kvstore weights list` shows it.")]


@weights.command("list")
def list_weights(
    *,
    admin_url: AdminUrl = "",
    token_file: TokenFile = None,
    config: Config = None,
    timeout_s: Timeout = 60.0,
    json_: AsJson = False,
) -> None:
    """List weights and what is stored of them."""
    with administered(admin_url, token_file, timeout_s, config) as client:
        found = client.get("weights")
    if json_:
        echo_json(found)
        return
    _show(found["weights"])
    if not found["is_complete"]:
        typer.echo("some namespaces have no description and are not listed here")


@weights.command()
def retire(
    *,
    weights_id: WeightsArgument,
    yes: Yes = False,
    admin_url: AdminUrl = "",
    token_file: TokenFile = None,
    config: Config = None,
    timeout_s: Timeout = 60.0,
    json_: AsJson = False,
) -> None:
    """Make everything computed with these weights unreachable on every service; `kvstore gc` then deletes it."""
    _change("POST", weights_id, admin_url, token_file, config, timeout_s=timeout_s, yes=yes, as_json=json_)


@weights.command()
def restore(
    *,
    weights_id: WeightsArgument,
    yes: Yes = False,
    admin_url: AdminUrl = "",
    token_file: TokenFile = None,
    config: Config = None,
    timeout_s: Timeout = 60.0,
    json_: AsJson = False,
) -> None:
    """Undo a retirement: what has not been deleted meanwhile is served again."""
    _change("DELETE", weights_id, admin_url, token_file, config, timeout_s=timeout_s, yes=yes, as_json=json_)


def _change(
    method: str,
    weights_id: str,
    admin_url: str,
    token_file: Path | None,
    config: Path | None,
    *,
    timeout_s: float,
    yes: bool,
    as_json: bool,
) -> None:
    with administered(admin_url, token_file, timeout_s, config) as client:
        query = {"weights_id": weights_id, "confirm": yes}
        found = client.call(method, "weights", "retired", query=query)
    if as_json:
        echo_json(found)
        return
    _show([found["weights"]])
    if not yes:
        typer.echo("nothing was changed: add --yes to do it")
    elif method == "POST":
        typer.echo("retired: every service applies it within seconds; next: kvstore gc")


def _show(listed: Sequence[dict[str, Any]]) -> None:
    table = table_of("weights", "weights id", "tenants", "namespaces", "held", "retired (UTC)", right=("namespaces",))
    for one in listed:
        tenants = ", ".join(escape(tenant) or "-" for tenant in one["tenants"])
        row = (escape(one["weights_id"]), tenants, str(len(one["namespaces"])), held_text(one["held"]))
        table.add_row(*row, time_text(one["retired_s"]))
    print_table(table)
