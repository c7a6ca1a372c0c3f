"""`kvstore top`: a live view of a service: hits, tiers, largest namespaces, latest requests, jobs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from kvstore.cli.admin import INCOMPLETE, AdminClient, admin_verb
from kvstore.cli.jobs import job_progress
from kvstore.cli.printing import (
    bytes_text,
    console_of,
    echo_json,
    held_text,
    limit_text,
    namespaces_table,
    quotas_table,
    requests_table,
    share_text,
    span_text,
    table_of,
    time_text,
    used_text,
)
from kvstore.cli.status import hit_text
from kvstore.cli.status_problems import by_label, waiting_text
from kvstore.errors import Unavailable
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.sizes import counted

_NAMESPACES_SHOWN, _REQUESTS_SHOWN = 8, 8
_COUNTERS = (
    *("lookups", "lookup_hits", "served_records", "served_bytes", "saves", "write_back_bytes", "corrupt_records"),
    *("retention_boundaries", "retention_bytes"),
)
_LABELLED = (
    ("left ", "retention_boundaries", "reason"),
    ("requests ", "requests", "result"),
    ("tokens ", "request_tokens", "part"),
)
"""Counters by one label: what stands before its value in the counters of --json, the counter, the label."""


@admin_verb(10.0)
def top(
    client: AdminClient,
    json_: bool,
    once: Annotated[bool, typer.Option("--once", help="Print it once, and end.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", min=0.2, max=60, help="Seconds between updates.")] = 2.0,
) -> None:
    """Show a running service live: hits, tiers, namespaces, requests and jobs. Ctrl-C ends it.

    Counters need an operator's token; a tenant's token shows that tenant's own data.
    """
    values = read_values(client)
    console = console_of()
    if json_:
        echo_json(values)
    elif once or not console.is_terminal:
        console.print(screen_of(client.url, values))
    else:
        _live(client, console, values, interval_s)


def _live(client: AdminClient, console: Console, values: Mapping[str, Any], interval_s: float) -> None:
    before, at_s = values, time.monotonic()
    try:
        with Live(screen_of(client.url, values), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                try:
                    values = read_values(client)
                except Unavailable as error:  # it may return: show the error, and continue
                    text = f"{escape(error.sentence())}\n(tried again every {interval_s:g} s; Ctrl-C ends)"
                    live.update(text, refresh=True)
                    continue
                now_s = time.monotonic()
                live.update(screen_of(client.url, values, before, now_s - at_s), refresh=True)
                before, at_s = values, now_s
    except KeyboardInterrupt:
        return


def read_values(client: AdminClient) -> dict[str, Any]:
    """Everything to show, as one object."""
    values: dict[str, Any] = {"tiers": client.get("tiers")["tiers"], "counters": None}
    try:
        values["counters"] = _counters(client)
    except Unavailable as error:  # as with a tenant's token
        values["no_counters"] = error.sentence()
    try:
        listed = client.get("namespaces", order="bytes", limit=_NAMESPACES_SHOWN)
        values |= {name: listed[name] for name in ("namespaces", "total", "is_complete")}
        values["quotas"] = client.get("quotas")["quotas"]
    except Unavailable as error:  # a service without a catalog, or whose Redis does not answer
        values |= {"namespaces": [], "total": {}, "quotas": [], "catalog": error.sentence()}
    values["requests"] = client.get("requests")["requests"][:_REQUESTS_SHOWN]
    values["jobs"] = [job for job in client.get("jobs")["jobs"] if job["state"] == "running"]
    return values


def _counters(client: AdminClient) -> dict[str, float]:
    """Counters, summed over all labels."""
    lines = client.text("/metrics").splitlines()
    samples = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}
    meters = {name: f"kvstore_{name}_total" for name in _COUNTERS}
    meters |= {"uptime_s": "kvstore_uptime_seconds", "sessions": "kvstore_sessions"}
    meters |= {name: f"kvstore_{name}" for name in ("catalog_waiting_changes", "catalog_waiting_seconds")}
    found = {name: sum(by_label(samples, meter, "").values(), 0.0) for name, meter in meters.items()}
    for start, name, label in _LABELLED:
        found |= {f"{start}{value}": num for value, num in by_label(samples, f"kvstore_{name}_total", label).items()}
    return found


def screen_of(
    url: str, values: Mapping[str, Any], before: Mapping[str, Any] | None = None, seconds: float = 0.0
) -> Group:
    """The screen, with rates since the values of `before`, which are this many seconds old."""
    parts: list[Any] = [_headline(url, values, before, seconds), _tiers(values["tiers"])]
    counters = values["counters"] or {}
    if waits_s := counters.get("catalog_waiting_seconds"):
        since_s = int(SYSTEM_CLOCK.wall_ms() / 1000 - waits_s)
        parts.append(f"[yellow]{waiting_text(counters['catalog_waiting_changes'], since_s)}[/]")
    if values["quotas"]:
        parts.append(quotas_table(values["quotas"]))
    if values["namespaces"]:
        table = namespaces_table("largest namespaces", values["namespaces"])
        parts += [table, f"in total: {held_text(values['total'])}"]
    elif "catalog" in values:
        parts.append(f"namespaces: {escape(values['catalog'])}")
    if not values.get("is_complete", True):
        parts.append(f"namespaces: {INCOMPLETE}")
    if values["requests"]:
        parts.append(requests_table("latest requests", values["requests"]))
    parts += [f"job {job['job']}: {job['kind']}, {job_progress(job)}" for job in values["jobs"]]
    return Group(*parts)


def _headline(url: str, values: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float) -> str:
    now = values["counters"]
    if now is None:
        return f"[bold]kvstore at {escape(url)}[/bold] (no counters: {escape(values['no_counters'])})"
    lines = [
        f"[bold]kvstore at {escape(url)}[/bold], up {span_text(now['uptime_s'])}, "
        f"{counted(now['sessions'], 'connection')}",
        _rates("since its start", now, None),
    ]
    then = before["counters"] if before is not None else None
    if then is not None and seconds > 0 and now["uptime_s"] >= then["uptime_s"]:
        lines.append(_rates("now", {name: now[name] - then.get(name, 0) for name in now}, seconds))
    return "\n".join(lines)


def _rates(title: str, counts: Mapping[str, float], seconds: float | None) -> str:
    per, unit = (seconds, "/s") if seconds else (1.0, "")
    parts = [
        hit_text(_labelled(counts, "requests "), _labelled(counts, "tokens ")),
        f"{counts['served_records'] / per:,.0f}{unit} records served, {bytes_text(counts['served_bytes'] / per)}{unit}",
        f"{counts['saves'] / per:,.0f}{unit} saved, {bytes_text(counts['write_back_bytes'] / per)}{unit} written back",
    ]
    if evicted := counts["retention_boundaries"]:
        causes = sorted(_labelled(counts, "left ").items(), key=lambda one: -one[1])
        shown = ", ".join(f"{cause} {num:,.0f}" for cause, num in causes if num)
        freed = bytes_text(counts["retention_bytes"] / per)
        number = f"{evicted / per:,.1f}" if seconds else f"{evicted:,.0f}"
        parts.append(f"{number}{unit} boundaries evicted, {freed}{unit} ({shown})")
    corrupt = f", [bold red]{counts['corrupt_records']:,.0f} corrupt[/]" if counts["corrupt_records"] else ""
    return f"{title}: {'; '.join(parts)}{corrupt}"


def _labelled(counts: Mapping[str, float], start: str) -> dict[str, float]:
    return {name.removeprefix(start): num for name, num in counts.items() if name.startswith(start)}


def _tiers(tiers: list[dict[str, Any]]) -> Table:
    table = table_of("tiers", "tier", "state", "records", "used", "of", "full", "waiting", "kept here")
    for one in tiers:
        usage, last = one["usage"] or {}, one["last_known"]
        state = "[green]healthy[/]" if one["healthy"] else f"[bold red]{one['problem']}[/]"
        if one["write_back"] == "paused":
            state += " [yellow]write-back paused[/]"
        if last is not None:
            state += f", [yellow]sizes of {time_text(last['at_s'])} UTC[/]"
        waiting, usage = usage.get("waiting_records"), last or usage
        records = usage.get("num_records")
        table.add_row(
            one["name"],
            state,
            f"{records:,}" if records is not None else "-",
            used_text(one["name"], usage),
            limit_text(usage),
            share_text(usage.get("used_bytes"), usage.get("limit_bytes")),
            f"{waiting:,}" if waiting is not None else "-",
            bytes_text(one["own"]["num_bytes"]) if one["own"] else "-",
        )
    return table
