"""`kvstore quota`: tenants' shares of the cold tier, on all services that share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape

from kvstore.cli.admin import ONLY_OWN, AdminClient, admin_verb
from kvstore.cli.options import parse_size
from kvstore.cli.printing import bytes_text, echo_json, print_table, table_of
from kvstore.errors import InvalidRequest


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
        client.call("PUT", "quotas", tenant, body=_body(before or {}, guaranteed, maximum))
    found = client.get("quotas")
    listed, unread = [one for one in found["quotas"] if tenant in ("", one["tenant"])], found.get("unread")
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
        _show(listed)
        _warn(listed if is_set else ())
    else:
        why = "none was known" if unread else "" if remove else ONLY_OWN
        typer.echo(f"no quota{' of ' + tenant if tenant else 's'}{': ' if why else ''}{why}")


def _body(before: Mapping[str, Any], guaranteed: str, maximum: str) -> dict[str, int | None]:
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


def _show(quotas: Sequence[dict[str, Any]]) -> None:
    columns = ("tenant", "guaranteed", "maximum", "used", "set by")
    table = table_of("quotas of the cold tier", *columns, right=("guaranteed", "maximum", "used"))
    for one in quotas:
        sizes = (bytes_text(one[name]) for name in ("guaranteed_bytes", "maximum_bytes", "used_bytes"))
        table.add_row(escape(one["tenant"]), *sizes, "an operator" if one["is_ordered"] else "the settings")
    print_table(table)


def _warn(quotas: Sequence[dict[str, Any]]) -> None:
    """Say what a user who has just set these quotas may not have meant."""
    for one in quotas:
        if not one.get("is_known", True):
            typer.echo(f"note: no credential and no stored namespace is of a tenant {one['tenant']}: check its name")
        used, most = one["used_bytes"], one["maximum_bytes"]
        if used is not None and most is not None and used > most:
            typer.echo(f"note: {one['tenant']} uses {bytes_text(used)}, above its maximum: the rest will be evicted")
