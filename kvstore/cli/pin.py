"""`kvstore pin` and `kvstore unpin`: protect a boundary from eviction for a time."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.cli.admin import (
    AdminClient,
    NamespaceArgument,
    admin_verb,
    parse_duration,
    whole_namespace,
    whole_prefix,
)
from kvstore.cli.printing import echo_json, time_text

PrefixArgument = Annotated[str, typer.Argument(help="The boundary: 64 hex digits, from `kvstore ls`.")]


@admin_verb(30.0)
def pin(
    client: AdminClient,
    json_: bool,
    namespace: NamespaceArgument,
    prefix: PrefixArgument,
    for_: Annotated[str, typer.Option("--for", help="How long, like 12h, 7d or 4w.")] = "7d",
) -> None:
    """Protect a boundary, and all before it, from eviction and deletion for a time."""
    prefix, expires_in_s = whole_prefix(prefix), parse_duration(for_, "--for")
    body = {"namespace": whole_namespace(client, namespace), "prefix": prefix, "expires_in_s": expires_in_s}
    made = client.call("POST", "pins", body=body)
    if json_:
        echo_json(made)
    else:
        typer.echo(f"pinned until {time_text(made['pinned_until_s'])} UTC: {made['prefix']}")


@admin_verb(30.0)
def unpin(client: AdminClient, json_: bool, namespace: NamespaceArgument, prefix: PrefixArgument) -> None:
    """End a pin now."""
    prefix, whole = whole_prefix(prefix), whole_namespace(client, namespace)
    until_s = client.get("prefixes", whole, prefix, children_limit=0)["pinned_until_s"]
    client.call("DELETE", "pins", whole, prefix)
    if json_:
        echo_json({"namespace": whole, "prefix": prefix, "pinned_until_s": 0, "was_pinned_until_s": until_s})
    elif until_s:
        typer.echo(f"unpinned, it was pinned until {time_text(until_s)} UTC: {prefix}")
    else:
        typer.echo(f"nothing to do, it was not pinned: {prefix}")
