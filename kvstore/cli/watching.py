"""A job of the service, watched until it has ended: with a bar, and Ctrl-C cancels it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvstore.cli.administering import AdminClient
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
    """A job when it is done.

    Args:
        client: Whom to ask.
        route: What starts it.
        query: Of that call.
        body: Likewise.
        quiet: Without a bar.

    Raises:
        Unavailable: It failed, or somebody cancelled it.
        KeyboardInterrupt: Of whoever watches; the job has been cancelled then, and what it did is said.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[unit]}"))
    bars = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True, disable=quiet)
    job: Mapping[str, Any] | None = None
    try:
        job = started = client.call("POST", route, query=query, body=body)
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
        typer.echo(f"job {job['job']} {state}, {progress['done']:,} {progress['unit']} were done", err=True)
        raise
    if job["state"] != "done":
        raise Unavailable(f"the job {job['state']}: {job['error'] or 'somebody ended it'}; run it again to go on")
    return job
