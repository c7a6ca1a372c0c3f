"""Waits for a job of the service, with a progress bar; Ctrl-C cancels the job."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from kvstore.cli.administering import AdminClient
from kvstore.cli.bars import bar_of
from kvstore.errors import Unavailable

__all__ = ["watched"]

_LOOK_S_MIN, _LOOK_S_MAX = 0.02, 0.5


def watched(
    client: AdminClient,
    route: str,
    *,
    query: Mapping[str, object],
    body: object | None = None,
    quiet: bool,
) -> Mapping[str, Any]:
    """Start a job and return it once it is done.

    Args:
        client: The service.
        route: The route that starts the job, like `tiers/cold/verify`.
        query: Query of that call.
        body: Body of that call.
        quiet: Show no bar.

    Raises:
        Unavailable: The job failed or was cancelled by somebody else.
        KeyboardInterrupt: Ctrl-C; the job was cancelled, and what it did is printed.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[unit]}"))
    bars = bar_of(*columns, TimeElapsedColumn(), quiet=quiet)
    job: Mapping[str, Any] | None = None
    try:
        job = started = client.call("POST", *route.split("/"), query=query, body=body)
        with bars:
            bar = bars.add_task(str(started["kind"]), total=None, unit=started["progress"]["unit"])
            pause_s = _LOOK_S_MIN
            while job["state"] == "running":
                time.sleep(pause_s)
                pause_s = min(_LOOK_S_MAX, 1.5 * pause_s)
                job = client.get("jobs", job["job"])
                progress = job["progress"]
                bars.update(bar, completed=progress["done"], total=progress["total"], unit=progress["unit"])
    except KeyboardInterrupt:
        if job is None:
            typer.echo("interrupted before the service answered: `kvstore top` shows whether the job runs", err=True)
            raise
        ended = client.call("DELETE", "jobs", job["job"])
        progress = ended["progress"]
        state = "cancelled" if ended["state"] == "cancelled" else f"had ended: {ended['state']}"
        typer.echo(f"job {job['job']} {state}, after {progress['done']:,} {progress['unit']}", err=True)
        raise
    if job["state"] != "done":
        raise Unavailable(f"the job {job['state']}: {job['error'] or 'somebody ended it'}; run it again to continue")
    return job
