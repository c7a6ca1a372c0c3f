"""`kvstore quota`: what tenants get of the cold tier, on all services that share it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape

from kvstore.cli.administering import AdminUrl, AsJson, Config, Timeout, TokenFile, administered
from kvstore.cli.shown import bytes_text, echo_json, print_table, table_of
from kvstore.errors import InvalidRequest
from kvstore.settings import parse_bytes

__all__ = ["quota"]


def quota(
    *,
    tenant: Annotated[str, typer.Argument(help="As the credentials file names it; none: all with a quota.")] = "",
    guaranteed: Annotated[str, typer.Option(help="Within these bytes nothing leaves for others, like 10GiB.")] = "",
    maximum: Annotated[str, typer.Option(help="Beyond these bytes it leaves before all others, like 50GiB.")] = "",
    remove: Annotated[bool, typer.Option("--remove", help="Let the settings count again.")] = False,
    admin_url: AdminUrl = "",
    token_file: TokenFile = None,
    config: Config = None,
    timeout_s: Timeout = 30.0,
    json_: AsJson = False,
) -> None:
    """Show quotas, or set or remove one tenant's while services run.

    What is not given with --guaranteed or --maximum is as if there were none. It needs an operator's token.
    """
    is_set = bool(guaranteed or maximum)
    if (is_set or remove) and not tenant:
        raise InvalidRequest("whose quota? name the tenant before the options")
    if is_set and remove:
        raise InvalidRequest("either a quota or --remove")
    with administered(admin_url, token_file, timeout_s, config) as client:
        if remove:
            client.call("DELETE", "quotas", tenant)
        if is_set:
            body: dict[str, int] = {"guaranteed_bytes": _bytes(guaranteed or "0", "guaranteed")}
            if maximum:
                body["maximum_bytes"] = _bytes(maximum, "maximum")
            client.call("PUT", "quotas", tenant, body=body)
        listed = client.get("quotas")["quotas"]
    if tenant:
        listed = [one for one in listed if one["tenant"] == tenant]
    if json_:
        echo_json({"quotas": listed})
    elif not listed:
        typer.echo(f"no quota{' of ' + tenant if tenant else 's'}")
    else:
        _show(listed)


def _show(quotas: Sequence[dict[str, Any]]) -> None:
    columns = ("tenant", "guaranteed", "maximum", "takes", "set by")
    table = table_of("quotas of the cold tier", *columns, right=("guaranteed", "maximum", "takes"))
    for one in quotas:
        sizes = (bytes_text(one[name]) for name in ("guaranteed_bytes", "maximum_bytes", "used_bytes"))
        table.add_row(escape(one["tenant"]), *sizes, "an operator" if one["is_ordered"] else "the settings")
    print_table(table)


def _bytes(text: str, name: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise InvalidRequest(f"{name}: {error}", seen=repr(text)) from error
