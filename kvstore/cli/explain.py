"""`kvstore explain`: how much of a request was resumed, why not more, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import typer
from rich.markup import escape

from kvstore.cli.options import AsJson, Config, TokenFile
from kvstore.cli.printing import detail_text, echo_json, print_table, requests_table, table_of
from kvstore.cli.service import DataTimeout, Url, connected
from kvstore.errors import InvalidRequest, next_step


def explain(  # noqa: PLR0917 - typer makes flags of them
    request: Annotated[
        str, typer.Argument(help="vLLM's id of a request, or its start. Default: list the latest requests.")
    ] = "",
    url: Url = "",
    token_file: TokenFile = None,
    config: Config = None,
    json_: AsJson = False,
    timeout_s: DataTimeout = 5.0,
) -> None:
    """Show how much of a request was resumed, why not more, and what to do about it."""
    with connected(url, timeout_s, "explain", token_file, config) as service:
        try:
            values = service.store.explain(request, deadline=service.deadline)
        except InvalidRequest as error:  # about the request, whose name this process cannot check
            cause, step = next_step(str(error))
            raise InvalidRequest(f"REQUEST: {cause}: {step}") from error
    if json_:
        echo_json(values)
    elif request:
        _show(values, f"{service.address}, {service.found}")
    else:
        _list(cast(Sequence[Mapping[str, Any]], values["requests"]), f"{service.address}, {service.found}")


def _list(requests: Sequence[Mapping[str, Any]], where: str) -> None:
    if not requests:
        typer.echo(f"no engine has reported a request since the service started ({where})")
        return
    print_table(requests_table(f"latest requests at {where}", requests))


def _show(values: Mapping[str, Any], where: str) -> None:
    table = table_of(f"request {values['request']}", "what", "value")
    table.add_row("at", values["at"])
    if values["reason"] != "hinted":  # there was no request
        table.add_row("result", f"{values['result']}: resumed from token {values['resume_tokens']:,}")
    table.add_row("prompt", f"{values['prompt_tokens']:,} tokens, {values['cap_tokens']:,} could have been resumed")
    if values["local_tokens"]:
        table.add_row("engine's own cache", f"{values['local_tokens']:,} tokens")
    if values["stopped_at_tokens"]:
        table.add_row("stopped at", f"token {values['stopped_at_tokens']:,}")
    table.add_row("why", escape(f"{values['why']} ({values['reason'] or 'whole'})"))
    for name, value in values["detail"].items():
        words, text = detail_text(name, value)
        table.add_row(escape(f"  {words}"), escape(text))
    for name, value in values["hints"].items():
        table.add_row(escape(f"hint: {name}"), escape(str(value)))
    if values["advice"]:
        table.add_row("next", escape(values["advice"]))
    if values["namespace"]:
        name = values["namespace_name"]
        table.add_row("namespace", f"{escape(name)} ({values['namespace']})" if name else values["namespace"])
    table.add_row("service", escape(where))
    print_table(table)
