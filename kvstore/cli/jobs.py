"""`kvstore jobs`: long operations of a service, and those that a restart cut short, with what starts them again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.markup import escape

from kvstore.cli.administering import AdminUrl, AsJson, Config, Timeout, TokenFile, administered
from kvstore.cli.shown import echo_json, time_text
from kvstore.cli.tables import print_table, table_of
from kvstore.errors import InvalidRequest

__all__ = ["jobs"]


def jobs(  # noqa: PLR0917 - typer makes flags of them
    job: Annotated[str, typer.Argument(help="One, by its id; without it all are listed.")] = "",
    cancel: Annotated[
        bool, typer.Option("--cancel", help="End it if it runs; forget it if it was interrupted.")
    ] = False,
    admin_url: AdminUrl = "",
    token_file: TokenFile = None,
    config: Config = None,
    timeout_s: Timeout = 60.0,
    json_: AsJson = False,
) -> None:
    """List jobs (gc, deletions, verify, reindex, drain): running, ended within the hour, and interrupted ones."""
    if cancel and not job:
        raise InvalidRequest("which one: name its id, as `kvstore jobs` tells it", field="cancel")
    with administered(admin_url, token_file, timeout_s, config) as client:
        found = client.call("DELETE" if cancel else "GET", "jobs", job) if job else client.get("jobs")
    if json_:
        echo_json(found)
    elif job:
        _show(found)
    else:
        _list(found["jobs"], client.url)


def _list(found: list[Mapping[str, Any]], url: str) -> None:
    if not found:
        typer.echo(f"no job runs at {url} or ended there within the hour, and none was interrupted")
        return
    table = table_of(f"jobs at {url}", "job", "kind", "state", "done", "began (UTC)", "ended (UTC)")
    for one in found:
        times = (time_text(one["created_s"]), time_text(one["ended_s"]))
        table.add_row(one["job"], _kind(one), one["state"], _progress(one), *times)
    print_table(table)
    for one in found:
        if one["again"]:
            typer.echo(f"{one['job']} was interrupted; to start it again: {one['again']}")


def _show(one: Mapping[str, Any]) -> None:
    table = table_of(f"job {one['job']}", "what", "value")
    table.add_row("kind", _kind(one))
    table.add_row("state", one["state"])
    table.add_row("done", _progress(one))
    table.add_row("began, ended (UTC)", f"{time_text(one['created_s'])}, {time_text(one['ended_s'])}")
    for name, value in {**one["about"], **one["report"]}.items():
        table.add_row(escape(name), escape(str(value)))
    if one["error"]:
        table.add_row("why", escape(one["error"]))
    if one["again"]:
        table.add_row("to start it again", escape(one["again"]))
    print_table(table)


def _kind(one: Mapping[str, Any]) -> str:
    about = " ".join(str(value) for value in one["about"].values() if value)
    trial = " (dry run)" if one["is_dry_run"] else ""
    return escape(f"{one['kind']} {about}".strip() + trial)


def _progress(one: Mapping[str, Any]) -> str:
    progress = one["progress"]
    total = f" of {progress['total']:,}" if progress["total"] is not None else ""
    return f"{progress['done']:,}{total} {progress['unit']}"
