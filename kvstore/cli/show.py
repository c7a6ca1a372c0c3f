"""`kvstore show`: one namespace with its description, or one boundary with its records, parents and children."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape

from kvstore.cli.admin import AdminClient, NamespaceArgument, admin_verb, whole_namespace, whole_prefix
from kvstore.cli.printing import bytes_text, echo_json, held_text, namespace_name, print_table, table_of, time_text
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.model.namespace import field_differences, flat_fields
from kvstore.runtime.sizes import counted

_FAMILY_SHOWN = 8


@admin_verb(30.0)
def show(
    client: AdminClient,
    json_: bool,
    namespace: NamespaceArgument,
    prefix: Annotated[str, typer.Argument(help="A boundary of it: 64 hex digits, from `kvstore ls`.")] = "",
    compare: Annotated[str, typer.Option(help="Another namespace (its id or first digits): how they differ.")] = "",
) -> None:
    """Show one namespace with all fields of its description, one of its boundaries, or how it differs from another."""
    if prefix and compare:
        raise InvalidRequest("give a boundary or --compare, not both")
    prefix = whole_prefix(prefix) if prefix else ""
    whole = whole_namespace(client, namespace)
    compared = whole_namespace(client, compare, "--compare") if compare else ""
    found = client.get("prefixes", whole, prefix) if prefix else client.get("namespaces", whole)
    if compare:
        other = client.get("namespaces", compared)
        _show_differences(found, other, json_=json_)
    elif json_:
        echo_json(found)
    elif prefix:
        _show_prefix(found)
    else:
        _show_namespace(found)


def _show_differences(one: dict[str, Any], other: dict[str, Any], *, json_: bool) -> None:
    """Two namespaces side by side: the fields that differ."""
    for asked in (one, other):
        if asked["description"] is None:
            raise Unavailable(
                f"the description of namespace {asked['namespace']} is lost: an engine that opens it writes it again"
            )
    differences = field_differences(one["description"], other["description"])
    if one["tenant"] != other["tenant"]:
        differences = {"tenant": (one["tenant"], other["tenant"]), **differences}
    if json_:
        echo_json({"namespaces": [one["namespace"], other["namespace"]], "differences": differences})
        return
    num_equal = len(dict(flat_fields(one["description"])).keys() - differences.keys())
    titles = [f"{namespace_name(asked)}\n{asked['namespace']}" for asked in (one, other)]
    table = table_of("how they differ", "field", *titles)
    for field, values in sorted(differences.items()):
        table.add_row(escape(field), *("-" if value is None else escape(str(value)) for value in values))
    print_table(table)
    typer.echo(f"{counted(len(differences), 'field differs', 'fields differ')}, {num_equal:,} are equal")


def _show_namespace(found: dict[str, Any]) -> None:
    table = table_of(f"namespace {found['namespace']}", "what", "value")
    table.add_row("model and types", namespace_name(found))
    table.add_row("tenant", escape(found["tenant"]) or "-")
    table.add_row("boundaries", f"{found['num_boundaries']:,}")
    table.add_row("held", held_text(found["held"]))
    if found["is_retired"]:
        table.add_row("retired", "its weights are retired: services serve nothing of it")
    for name, value in flat_fields(found["description"] or {}):
        table.add_row(escape(name), escape(str(value)))
    print_table(table)
    if found["description"] is None:
        typer.echo("its description is lost: an engine that opens the namespace writes it again")


def _show_prefix(found: dict[str, Any]) -> None:
    table = table_of(f"boundary {found['prefix']}", "what", "value")
    table.add_row("namespace", found["namespace"])
    table.add_row("tokens", f"{found['tokens']:,}" if found["tokens"] else "not known until it is read")
    table.add_row("hits", f"{found['hits']:,}")
    table.add_row("first use (UTC)", time_text(found["first_use_s"]))
    table.add_row("last use (UTC)", time_text(found["last_use_s"]))
    table.add_row("pinned until (UTC)", time_text(found["pinned_until_s"]))
    if found["leaving"]:
        table.add_row("being deleted from", ", ".join(found["leaving"]))
    for group in found["groups"]:
        held = ", ".join(
            f"{tier} {len(one['slices'])}/{group['num_slices']} ({bytes_text(one['num_bytes'])})"
            for tier, one in group["held"].items()
        )
        table.add_row(f"group {group['group']}: {group['kind']}, {group['record']}", held or "nothing")
    for name in ("parents", "children"):
        listed = found[name]
        for one in listed[:_FAMILY_SHOWN]:
            table.add_row(name[:-1] if name == "parents" else "child", f"{one['prefix']} at {one['tokens']:,}")
        if len(listed) > _FAMILY_SHOWN:
            table.add_row("", f"and {len(listed) - _FAMILY_SHOWN:,} more {name}: --json")
    print_table(table)
