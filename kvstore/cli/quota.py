"""`kvstore quota`: tenants' shares of the cold tier, on all services that share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape

from kvstore.cli.administering import AdminUrl, AsJson, Config, Timeout, TokenFile, administered
from kvstore.cli.options import parse_size
from kvstore.cli.shown import bytes_text, echo_json
from kvstore.cli.tables import print_table, table_of
from kvstore.errors import InvalidRequest

__all__ = ["quota"]


def quota(
    *,
    tenant: Annotated[str, typer.Argument(help="As the credentials file names it; none: all with a quota.")] = "",
    guaranteed: Annotated[str, typer.Option(help="Up to these bytes nothing is evicted for others, like 10GiB.")] = "",
    maximum: Annotated[
        str, typer.Option(help="Beyond these bytes the tenant's own is evicted, like 50GiB; none: no maximum.")
    ] = "",
    remove: Annotated[bool, typer.Option("--remove", help="Remove it, so that the settings apply again.")] = False,
    admin_url: AdminUrl = "",
    token_file: TokenFile = None,
    config: Config = None,
    timeout_s: Timeout = 30.0,
    json_: AsJson = False,
) -> None:
    """Show quotas, or set or remove one tenant's while services run.

    An option that is not given leaves that value as it is. It needs an operator's token.
    """
    is_set = bool(guaranteed or maximum)
    if (is_set or remove) and not tenant:
        raise InvalidRequest("whose quota? name the tenant before the options")
    if is_set and remove:
        raise InvalidRequest("either a quota or --remove")
    with administered(admin_url, token_file, timeout_s, config) as client:
        before = next((one for one in client.get("quotas")["quotas"] if one["tenant"] == tenant), None)
        if remove:
            client.call("DELETE", "quotas", tenant)
        if is_set:
            client.call("PUT", "quotas", tenant, body=_body(before or {}, guaranteed, maximum))
        listed = client.get("quotas")["quotas"]
    if remove and before is not None and not json_:
        sizes = f"{bytes_text(before['guaranteed_bytes'])} guaranteed, at most {bytes_text(before['maximum_bytes'])}"
        typer.echo(f"removed the quota of {tenant} that an operator had set: {sizes}")
    if tenant:
        listed = [one for one in listed if one["tenant"] == tenant]
    if json_:
        echo_json({"quotas": listed})
    elif not listed:
        typer.echo(f"no quota{' of ' + tenant if tenant else 's'}")
    else:
        _show(listed)


def _body(before: Mapping[str, Any], guaranteed: str, maximum: str) -> dict[str, int | None]:
    """The quota to set: what was not given stays as it is."""
    least, most = before.get("guaranteed_bytes", 0), before.get("maximum_bytes")
    if guaranteed:
        least = parse_size(guaranteed, "guaranteed")
    if maximum:
        most = None if maximum == "none" else parse_size(maximum, "maximum")
    return {"guaranteed_bytes": least} | ({"maximum_bytes": most} if most is not None else {})


def _show(quotas: Sequence[dict[str, Any]]) -> None:
    columns = ("tenant", "guaranteed", "maximum", "takes", "set by")
    table = table_of("quotas of the cold tier", *columns, right=("guaranteed", "maximum", "takes"))
    for one in quotas:
        sizes = (bytes_text(one[name]) for name in ("guaranteed_bytes", "maximum_bytes", "used_bytes"))
        table.add_row(escape(one["tenant"]), *sizes, "an operator" if one["is_ordered"] else "the settings")
    print_table(table)
