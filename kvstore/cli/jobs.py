"""`kvstore jobs`: long operations of a service, and the command that starts an interrupted one again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.markup import escape

from kvstore.cli.admin import AdminClient, admin_verb
from kvstore.cli.printing import detail_text, echo_json, print_table, table_of, time_text
from kvstore.errors import InvalidRequest, next_step


@admin_verb(60.0)
def jobs(
    client: AdminClient,
    json_: bool,
    job: Annotated[str, typer.Argument(help="The id of one job. Default: all jobs.")] = "",
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel it if it runs; forget it if interrupted.")] = False,
) -> None:
    """List jobs (gc, deletions, verify, reindex, drain): running, ended within the hour, and interrupted ones."""
    if cancel and not job:
        raise InvalidRequest("--cancel needs the id of a job: `kvstore jobs` lists them")
    found = client.call("DELETE" if cancel else "GET", "jobs", *([job] if job else []))
    if json_:
        echo_json(found)
    elif job:
        _show(found)
    else:
        _list(found["jobs"], client.url, found["unread"])


def _list(found: list[Mapping[str, Any]], url: str, unread: str | None) -> None:
    if unread:
        cause, step = next_step(unread)
        step = step or "run `kvstore doctor`, which says what does not answer"
        typer.echo(f"interrupted jobs are not known now: {cause}: {step}", err=True)
    if not found and unread:
        typer.echo(f"no job of {url} is running, or ended within the hour")
        return
    if not found:
        typer.echo(f"no job of {url} is running, ended within the hour, or was interrupted")
        return
    table = table_of(f"jobs at {url}", "job", "kind", "state", "done", "began (UTC)", "ended (UTC)")
    for one in found:
        times = (time_text(one["created_s"]), time_text(one["ended_s"]))
        table.add_row(one["job"], _kind(one), one["state"], job_progress(one), *times)
    print_table(table)
    for one in found:
        if one["state"] == "failed":
            typer.echo(f"{one['job']} failed: {one['error']}")
        if one["again"]:
            typer.echo(f"{one['job']} was interrupted; to start it again: {one['again']}")


def _show(one: Mapping[str, Any]) -> None:
    table = table_of(f"job {one['job']}", "what", "value")
    table.add_row("kind", _kind(one))
    table.add_row("state", one["state"])
    table.add_row("done", job_progress(one))
    table.add_row("began, ended (UTC)", f"{time_text(one['created_s'])}, {time_text(one['ended_s'])}")
    for name, value in {**one["about"], **one["report"]}.items():
        words, text = detail_text(name, value)
        table.add_row(escape(words), escape(text))
    if one["error"]:
        table.add_row("why", escape(one["error"]))
    if one["again"]:
        table.add_row("to start it again", escape(one["again"]))
    print_table(table)


def _kind(one: Mapping[str, Any]) -> str:
    about = " ".join(str(value) for value in one["about"].values() if value)
    trial = " (dry run)" if one["is_dry_run"] else ""
    return escape(f"{one['kind']} {about}".strip() + trial)


def job_progress(one: Mapping[str, Any]) -> str:
    progress = one["progress"]
    total = f" of {progress['total']:,}" if progress["total"] is not None else ""
    return f"{progress['done']:,}{total} {progress['unit']}"
