"""`kvstore top`: a live view of a service: lookups and hits, tiers, largest namespaces, latest requests, jobs."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from kvstore.cli.administering import AdminClient, AdminUrl, AsJson, Config, Timeout, TokenFile, administered
from kvstore.cli.shown import bytes_text, counted, echo_json, held_text, namespace_name
from kvstore.cli.status_findings import part_of
from kvstore.cli.tables import console_of, table_of
from kvstore.errors import Unavailable

__all__ = ["top"]

_NAMESPACES_SHOWN, _REQUESTS_SHOWN = 8, 8
_NAMESPACES_MAX = 1000
_SAMPLE = re.compile(r"^(kvstore_[a-z0-9_]+)(?:\{[^}]*\})? (\S+)$")
_COUNTED = (
    *("lookups", "lookup_hits", "served_records", "served_bytes", "saves", "write_back_bytes", "corrupt_records"),
    *("retention_boundaries", "retention_bytes"),
)
_CAUSE = re.compile(r'^kvstore_retention_boundaries_total\{.*?reason="([a-z_]+)".*\} (\S+)$')


_LEFT = "left "


def top(
    *,
    once: Annotated[bool, typer.Option("--once", help="Print it once, and end.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", min=0.2, max=60, help="Seconds between updates.")] = 2.0,
    admin_url: AdminUrl = "",
    token_file: TokenFile = None,
    config: Config = None,
    timeout_s: Timeout = 10.0,
    json_: AsJson = False,
) -> None:
    """Show a running service live: hits, tiers, namespaces, requests and jobs. Ctrl-C ends it.

    Counters need an operator's token; a tenant's token shows that tenant's own data.
    """
    with administered(admin_url, token_file, timeout_s, config) as client:
        seen = _look(client)
        console = console_of()
        if json_:
            echo_json(seen)
        elif once or not console.is_terminal:
            console.print(_shown(client.url, seen, None, 0))
        else:
            _live(client, console, seen, interval_s)


def _live(client: AdminClient, console: Console, seen: Mapping[str, Any], interval_s: float) -> None:
    before, at_s = seen, time.monotonic()
    try:
        with Live(_shown(client.url, seen, None, 0), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                try:
                    seen = _look(client)
                except Unavailable as error:  # it may come back: show the error, and continue
                    live.update(
                        f"{escape(str(error))}\n(asked again every {interval_s:g} s, Ctrl-C ends)", refresh=True
                    )
                    continue
                now_s = time.monotonic()
                live.update(_shown(client.url, seen, before, now_s - at_s), refresh=True)
                before, at_s = seen, now_s
    except KeyboardInterrupt:
        return


def _look(client: AdminClient) -> dict[str, Any]:
    """Everything to show, as one object."""
    tiers = client.get("tiers")["tiers"]
    seen: dict[str, Any] = {"tiers": tiers, "counters": _counters(client)}
    try:
        listed = client.get("namespaces", limit=_NAMESPACES_MAX)
        namespaces = sorted(listed["namespaces"], key=lambda one: -_size(one))
        seen |= {"namespaces": namespaces[:_NAMESPACES_SHOWN], "total": listed["total"]}
        seen["quotas"] = client.get("quotas")["quotas"]
    except Unavailable as error:  # a service without a catalog, or whose Redis is away
        seen |= {"namespaces": [], "total": {}, "quotas": [], "catalog": str(error)}
    seen["requests"] = client.get("requests")["requests"][:_REQUESTS_SHOWN]
    seen["jobs"] = [job for job in client.get("jobs")["jobs"] if job["state"] == "running"]
    return seen


def _size(namespace: Mapping[str, Any]) -> int:
    return max((held["num_bytes"] for held in namespace["held"].values()), default=0)


def _counters(client: AdminClient) -> dict[str, float] | None:
    """Counters, summed over all labels; `None`: they cannot be read, as with a tenant's token."""
    try:
        text = client.text("/metrics")
    except Unavailable:
        return None
    wanted = {f"kvstore_{name}_total": name for name in _COUNTED} | {"kvstore_uptime_seconds": "uptime_s"}
    wanted |= {"kvstore_sessions": "sessions"}
    found = dict.fromkeys(wanted.values(), 0.0)
    for line in text.splitlines():
        if (cause := _CAUSE.match(line)) is not None:
            name = f"{_LEFT}{cause[1]}"
            found[name] = found.get(name, 0.0) + float(cause[2])
        if (match := _SAMPLE.match(line)) is not None and match[1] in wanted:
            found[wanted[match[1]]] += float(match[2])
    return found


def _shown(url: str, seen: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float) -> Group:
    parts: list[Any] = [_headline(url, seen, before, seconds), _tiers(seen["tiers"])]
    if seen["quotas"]:
        parts.append(_quotas(seen["quotas"]))
    if seen["namespaces"]:
        parts.append(_namespaces(seen))
    elif "catalog" in seen:
        parts.append(f"namespaces: {escape(seen['catalog'])}")
    if seen["requests"]:
        parts.append(_requests(seen["requests"]))
    for job in seen["jobs"]:
        progress = job["progress"]
        total = f" of {progress['total']:,}" if progress["total"] is not None else ""
        parts.append(f"job {job['job']}: {job['kind']}, {progress['done']:,}{total} {progress['unit']}")
    return Group(*parts)


def _headline(url: str, seen: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float) -> str:
    now = seen["counters"]
    if now is None:
        return f"[bold]kvstore at {escape(url)}[/bold] (counters need an operator's token)"
    connections = counted(now["sessions"], "connection", "connections")
    lines = [
        f"[bold]kvstore at {escape(url)}[/bold], up {_span(now['uptime_s'])}, {connections}",
        _rates("since its start", now, None),
    ]
    then = before["counters"] if before is not None else None
    if then is not None and seconds > 0 and now["uptime_s"] >= then["uptime_s"]:
        lines.append(_rates("now", {name: now[name] - then.get(name, 0) for name in now}, seconds))
    return "\n".join(lines)


def _rates(title: str, counts: Mapping[str, float], seconds: float | None) -> str:
    share = f"{counts['lookup_hits'] / counts['lookups']:.0%}" if counts["lookups"] else "-"
    per, unit = (seconds, "/s") if seconds else (1.0, "")
    numbers: tuple[str, ...] = (
        f"{counts['lookups'] / per:,.0f}{unit} lookups, {share} hits",
        f"{counts['served_records'] / per:,.0f}{unit} records served, {bytes_text(counts['served_bytes'] / per)}{unit}",
        f"{counts['saves'] / per:,.0f}{unit} saved, {bytes_text(counts['write_back_bytes'] / per)}{unit} written back",
    )
    left = counts["retention_boundaries"]
    if left:
        causes = {name.removeprefix(_LEFT): num for name, num in counts.items() if name.startswith(_LEFT) and num}
        told = ", ".join(f"{cause} {num:,.0f}" for cause, num in sorted(causes.items(), key=lambda one: -one[1]))
        freed = bytes_text(counts["retention_bytes"] / per)
        numbers += (f"{left / per:,.1f}{unit} boundaries evicted, {freed}{unit} ({told})",)
    corrupt = f", [bold red]{counts['corrupt_records']:,.0f} corrupt[/]" if counts["corrupt_records"] else ""
    return f"{title}: {'; '.join(numbers)}{corrupt}"


def _span(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours // 24} d {hours % 24} h" if hours >= 24 else f"{hours}:{rest // 60:02}:{rest % 60:02}"


def _tiers(tiers: list[dict[str, Any]]) -> Table:
    table = table_of("tiers", "tier", "state", "records", "used", "of", "full", "waiting", "of the store")
    for one in tiers:
        usage = one["usage"] or {}
        state = "[green]healthy[/]" if one["healthy"] else f"[bold red]{one['breaker']}: does not answer[/]"
        if one["write_back"] == "paused":
            state += " [yellow]write-back paused[/]"
        records, waiting = usage.get("num_records"), usage.get("waiting_records")
        table.add_row(
            one["name"],
            state,
            f"{records:,}" if records is not None else "-",
            bytes_text(usage.get("used_bytes")),
            _limit_text(usage),
            _full_text(usage),
            f"{waiting:,}" if waiting is not None else "-",
            bytes_text(one["own"]["num_bytes"]) if one["own"] else "-",
        )
    return table


def _limit_text(usage: Mapping[str, Any]) -> str:
    name = usage.get("limit_name")
    return f"{bytes_text(usage.get('limit_bytes'))}{f' ({name})' if name else ''}"


def _full_text(usage: Mapping[str, Any]) -> str:
    used, limit = usage.get("used_bytes"), usage.get("limit_bytes")
    return part_of(used, limit) if used is not None and limit else "-"


def _quotas(quotas: list[dict[str, Any]]) -> Table:
    table = table_of("quotas of the cold tier", "tenant", "used", "at most", "full", "guaranteed")
    for one in quotas:
        used, most = one["used_bytes"], one["maximum_bytes"]
        full = part_of(used, most) if used is not None and most else "-"
        sizes = (bytes_text(used), bytes_text(most), full, bytes_text(one["guaranteed_bytes"]))
        table.add_row(escape(one["tenant"]), *sizes)
    return table


def _namespaces(seen: Mapping[str, Any]) -> Table:
    table = table_of("largest namespaces", "model and types", "namespace", "tenant", "boundaries", "held")
    for one in seen["namespaces"]:
        names = (namespace_name(one), one["namespace"], escape(one["tenant"]) or "-")
        table.add_row(*names, f"{one['num_boundaries']:,}", held_text(one["held"]))
    table.add_row("all", "", "", "", held_text(seen["total"]))
    return table


def _requests(requests: list[dict[str, Any]]) -> Table:
    columns = ("request", "prompt tokens", "resumed from", "result", "why no further")
    table = table_of("latest requests", *columns)
    for one in requests:
        tokens = (f"{one['prompt_tokens']:,}", f"{one['resume_tokens']:,}")
        table.add_row(escape(one["request"]), *tokens, one["result"], one["reason"] or "-")
    return table
