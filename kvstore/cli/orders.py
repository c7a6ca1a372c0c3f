"""`kvstore pin`, `unpin`, `quota` and `weights`: what operators order for all services that share a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape

from kvstore.cli.admin import (
    ONLY_OWN,
    AdminClient,
    NamespaceArgument,
    Yes,
    admin_verb,
    parse_duration,
    whole_namespace,
    whole_prefix,
)
from kvstore.cli.options import parse_size
from kvstore.cli.printing import bytes_text, echo_json, held_text, print_table, quotas_table, table_of, time_text
from kvstore.errors import InvalidRequest

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
        for note in made.get("notes", ()):  # an older release has none
            typer.echo(f"note: {note}")


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


@admin_verb(30.0)
def quota(  # noqa: PLR0917 - typer makes flags of them
    client: AdminClient,
    json_: bool,
    tenant: Annotated[str, typer.Argument(help="A tenant of the credentials file. Default: all with a quota.")] = "",
    guaranteed: Annotated[
        str, typer.Option(help="The tenant keeps this many bytes when others need room, like 10GiB.")
    ] = "",
    maximum: Annotated[
        str, typer.Option(help="Above this many bytes the tenant's own data is evicted, like 50GiB; none: no maximum.")
    ] = "",
    remove: Annotated[bool, typer.Option("--remove", help="Remove it, so that the settings apply again.")] = False,
) -> None:
    """Show quotas, or set or remove one tenant's while services run.

    A value whose option is not given stays as it is. Needs an operator's token.
    """
    is_set = bool(guaranteed or maximum)
    if (is_set or remove) and not tenant:
        raise InvalidRequest("--guaranteed, --maximum and --remove need a tenant: name it before the options")
    if is_set and remove:
        raise InvalidRequest("--remove excludes --guaranteed and --maximum: give one or the other")
    before = next((one for one in client.get("quotas")["quotas"] if one["tenant"] == tenant), None)
    removed = before if remove and before is not None and before["is_ordered"] else None
    if remove:
        client.call("DELETE", "quotas", tenant)
    if is_set:
        client.call("PUT", "quotas", tenant, body=_quota_body(before or {}, guaranteed, maximum))
    found = client.get("quotas")
    listed, unread = [one for one in found["quotas"] if tenant in ("", one["tenant"])], found["unread"]
    if json_:
        echo_json({"quotas": listed, "unread": unread} | ({"removed": removed} if remove else {}))
        return
    if unread:
        typer.echo(f"quotas as this service last knew them: {unread}", err=True)
    if removed is not None:
        sizes = f"{bytes_text(removed['guaranteed_bytes'])} guaranteed, at most {bytes_text(removed['maximum_bytes'])}"
        typer.echo(f"removed the quota of {tenant} that an operator had set: {sizes}")
    elif remove:
        typer.echo(f"nothing to do: no operator has set a quota of {tenant}")
    if listed:
        print_table(quotas_table(listed))
        _warn_of_quotas(listed if is_set else ())
    else:
        why = "none was known" if unread else "" if remove else ONLY_OWN
        typer.echo(f"no quota{' of ' + tenant if tenant else 's'}{': ' if why else ''}{why}")


def _quota_body(before: Mapping[str, Any], guaranteed: str, maximum: str) -> dict[str, int | None]:
    """The quota to set: what was not given stays as it is."""
    least, most = before.get("guaranteed_bytes", 0), before.get("maximum_bytes")
    if guaranteed:
        least = parse_size(guaranteed, "--guaranteed")
    if maximum:
        most = None if maximum == "none" else parse_size(maximum, "--maximum")
    if most is not None and not max(1, least) <= most:
        flag, expected = "--maximum", f"at least {bytes_text(max(1, least))}"
        if not maximum:
            flag, expected = "--guaranteed", f"at most {bytes_text(most)}, the tenant's maximum"
        elif least:
            expected += ", which is guaranteed to the tenant"
        raise InvalidRequest(f"{flag}: expected {expected}", seen=repr(maximum or guaranteed))
    return {"guaranteed_bytes": least} | ({"maximum_bytes": most} if most is not None else {})


def _warn_of_quotas(quotas: Sequence[dict[str, Any]]) -> None:
    """Say what a user who has just set these quotas may not have meant."""
    for one in quotas:
        if not one["is_known"]:
            typer.echo(f"note: no credential and no stored namespace is of a tenant {one['tenant']}: check its name")
        used, most = one["used_bytes"], one["maximum_bytes"]
        if used is not None and most is not None and used > most:
            typer.echo(f"note: {one['tenant']} uses {bytes_text(used)}, above its maximum: the rest will be evicted")


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
        _show_weights(found["weights"])
    else:
        typer.echo(f"no weights: nothing is stored yet, or its engines have no weights id. {ONLY_OWN.capitalize()}")
    if not found["is_complete"]:
        typer.echo("some namespaces have no description and are not listed here")


@weights.command()
@admin_verb(60.0)
def retire(client: AdminClient, json_: bool, weights_id: WeightsArgument, yes: Yes = False) -> None:
    """Make everything computed with these weights unreachable on every service; `kvstore gc` then deletes it."""
    if _change_weights(client, "POST", weights_id, yes=yes, json_=json_):
        typer.echo("retired: every service applies it within seconds; next: kvstore gc")


@weights.command()
@admin_verb(60.0)
def restore(client: AdminClient, json_: bool, weights_id: WeightsArgument, yes: Yes = False) -> None:
    """Undo a retirement: services serve again what was not deleted since."""
    if _change_weights(client, "DELETE", weights_id, yes=yes, json_=json_):
        typer.echo("restored: every service serves within seconds what was not deleted since")


def _change_weights(client: AdminClient, method: str, weights_id: str, *, yes: bool, json_: bool) -> bool:
    """Retire or restore weights, and show them; returns whether text was printed of a real change."""
    found = client.call(method, "weights", "retired", query={"weights_id": weights_id, "confirm": yes})
    if json_:
        echo_json(found)
        return False
    _show_weights([found["weights"]])
    is_change = found["is_change"]
    if not is_change:
        typer.echo(f"nothing to do: they are {'retired already' if method == 'POST' else 'not retired'}")
    elif not yes:
        typer.echo("nothing was changed: add --yes to do it")
    return yes and is_change


def _show_weights(listed: Sequence[dict[str, Any]]) -> None:
    table = table_of("weights", "weights id", "tenants", "namespaces", "held", "retired (UTC)", right=("namespaces",))
    for one in listed:
        tenants = ", ".join(escape(tenant) or "-" for tenant in one["tenants"])
        row = (escape(one["weights_id"]), tenants, str(len(one["namespaces"])), held_text(one["held"]))
        table.add_row(*row, time_text(one["retired_s"]))
    print_table(table)
