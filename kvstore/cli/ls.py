"""`kvstore ls`: namespaces, or the boundaries or pins of one."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

from kvstore.cli.admin import INCOMPLETE, ONLY_OWN, AdminClient, admin_verb, whole_namespace
from kvstore.cli.printing import bytes_text, echo_json, held_text, namespaces_table, print_table, table_of, time_text
from kvstore.errors import InvalidRequest


class ListOrder(Enum):
    """The order of listed boundaries."""

    HITS = "hits"
    BYTES = "bytes"
    AGE = "age"
    IDLE = "idle"
    STORED = "stored"


@admin_verb(30.0)
def ls(  # noqa: PLR0917 - typer makes flags of them
    client: AdminClient,
    json_: bool,
    namespace: Annotated[
        str, typer.Argument(help="List the boundaries of this one: its id or its first digits. Default: namespaces.")
    ] = "",
    order: Annotated[
        ListOrder, typer.Option(help="Largest first; idle: longest unused first; stored: unordered.")
    ] = ListOrder.HITS,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The most entries to list.")] = 50,
    pins: Annotated[bool, typer.Option("--pins", help="The namespace's pins instead.")] = False,
    cursor: Annotated[str, typer.Option(help="Continue after a page: its next_cursor.")] = "",
) -> None:
    """List namespaces with what they hold, or a namespace's boundaries or pins."""
    if pins and not namespace:
        raise InvalidRequest("--pins needs a namespace: name it first, `kvstore ls` lists namespaces")
    if not namespace:
        found = client.get("namespaces", limit=limit, cursor=cursor)
    else:
        whole = whole_namespace(client, namespace)
        route, query = ("pins", {}) if pins else ("prefixes", {"order": order.value})
        found = client.get(route, namespace=whole, limit=limit, cursor=cursor, **query)
    if json_:
        echo_json(found)
        return
    if not namespace:
        _show_namespaces(found, client)
    elif pins:
        _show_pins(found)
    else:
        _show_prefixes(found)
    if found["next_cursor"]:
        typer.echo(f"there are more: --cursor {found['next_cursor']}")


def _show_namespaces(found: dict[str, Any], client: AdminClient) -> None:
    is_complete = found["is_complete"]
    if not found["namespaces"] and not is_complete:
        typer.echo(f"the catalog at {client.url} lists nothing. {INCOMPLETE}")
        return
    if not found["namespaces"]:
        why = f"no engine has saved a page yet, or all were evicted or deleted since. {ONLY_OWN.capitalize()}"
        typer.echo(f"nothing is stored at {client.url}: {why}")
        return
    print_table(namespaces_table(f"namespaces at {client.url}", found["namespaces"]))
    typer.echo(f"in total: {held_text(found['total'])}")
    if not is_complete:
        typer.echo(INCOMPLETE)


def _show_prefixes(found: dict[str, Any]) -> None:
    if not found["prefixes"]:
        typer.echo("the namespace holds no boundaries")
        return
    table = table_of(
        "boundaries", "prefix", "tokens", "hits", "bytes", "held", "last use (UTC)", right=("tokens", "hits", "bytes")
    )
    for one in found["prefixes"]:
        sizes = one["num_bytes"]
        tokens = f"{one['tokens']:,}" if one["tokens"] else "?"
        pin = " pinned" if one["pinned_until_s"] else ""
        largest = bytes_text(max(sizes.values(), default=0))
        tiers = ", ".join(tier for tier, size in sizes.items() if size) + pin
        table.add_row(one["prefix"], tokens, f"{one['hits']:,}", largest, tiers, time_text(one["last_use_s"]))
    print_table(table)
    if not found["is_complete"]:
        typer.echo("the catalog was not read to its end in time: entries may be missing")


def _show_pins(found: dict[str, Any]) -> None:
    if not found["pins"]:
        typer.echo("no boundary of this namespace is pinned: `kvstore pin NAMESPACE PREFIX` pins one")
        return
    table = table_of("pins", "prefix", "until (UTC)")
    for one in found["pins"]:
        table.add_row(one["prefix"], time_text(one["pinned_until_s"]))
    print_table(table)
