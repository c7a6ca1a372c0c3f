"""`kvstore weights`: list the weights that pages were computed with; retire old ones on all services at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape

from kvstore.cli.admin import ONLY_OWN, AdminClient, Yes, admin_verb
from kvstore.cli.printing import echo_json, held_text, print_table, table_of, time_text

weights = typer.Typer(
    add_completion=False,
    help="List weights and what is stored of them; retire old ones on all services at once.",
    no_args_is_help=True,
)

WeightsArgument = Annotated[str, typer.Argument(help="The weights id that `kvstore weights list` shows.")]


@weights.command("list")
@admin_verb(60.0)
def list_weights(client: AdminClient, json_: bool) -> None:
    """List weights and what is stored of them."""
    found = client.get("weights")
    if json_:
        echo_json(found)
        return
    if found["weights"]:
        _show(found["weights"])
    else:
        typer.echo(f"no weights: nothing is stored yet, or its engines have no weights id. {ONLY_OWN.capitalize()}")
    if not found["is_complete"]:
        typer.echo("some namespaces have no description and are not listed here")


@weights.command()
@admin_verb(60.0)
def retire(client: AdminClient, json_: bool, weights_id: WeightsArgument, yes: Yes = False) -> None:
    """Make everything computed with these weights unreachable on every service; `kvstore gc` then deletes it."""
    if _change(client, "POST", weights_id, yes=yes, json_=json_):
        typer.echo("retired: every service applies it within seconds; next: kvstore gc")


@weights.command()
@admin_verb(60.0)
def restore(client: AdminClient, json_: bool, weights_id: WeightsArgument, yes: Yes = False) -> None:
    """Undo a retirement: services serve again what was not deleted since."""
    _change(client, "DELETE", weights_id, yes=yes, json_=json_)


def _change(client: AdminClient, method: str, weights_id: str, *, yes: bool, json_: bool) -> bool:
    """Retire or restore weights, and show them; returns whether text was printed of a real change."""
    found = client.call(method, "weights", "retired", query={"weights_id": weights_id, "confirm": yes})
    if json_:
        echo_json(found)
        return False
    _show([found["weights"]])
    if not yes:
        typer.echo("nothing was changed: add --yes to do it")
    return yes


def _show(listed: Sequence[dict[str, Any]]) -> None:
    table = table_of("weights", "weights id", "tenants", "namespaces", "held", "retired (UTC)", right=("namespaces",))
    for one in listed:
        tenants = ", ".join(escape(tenant) or "-" for tenant in one["tenants"])
        row = (escape(one["weights_id"]), tenants, str(len(one["namespaces"])), held_text(one["held"]))
        table.add_row(*row, time_text(one["retired_s"]))
    print_table(table)
