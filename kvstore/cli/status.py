"""`kvstore status`: whether a running service works and what to do if not, then its numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from kvstore.cli.options import AsJson, Config, TokenFile
from kvstore.cli.printing import (
    bytes_text,
    console_of,
    limit_text,
    print_table,
    share_text,
    span_text,
    table_of,
    time_text,
)
from kvstore.cli.service import DataTimeout, Url, connected
from kvstore.cli.status_problems import Problem, by_label, problems_of
from kvstore.runtime.sizes import counted

_REASONS_SHOWN = 4
_ENGINES_SHOWN = 8
_HOLDS = ("holds", "it held", "")


def status(  # noqa: PLR0917 - typer makes flags of them
    url: Url = "",
    token_file: TokenFile = None,
    config: Config = None,
    json_: AsJson = False,
    all_: Annotated[bool, typer.Option("--all", help="Every value behind the page, as --json has them.")] = False,
    timeout_s: DataTimeout = 3.0,
) -> None:
    """Show whether a running service works and what to do if not, its hits, tiers, write-backs, engines and memory."""
    with connected(url, timeout_s, "status", token_file, config) as service:
        values = service.store.status(deadline=service.deadline)
    if json_:
        typer.echo(json.dumps(values, indent=2, sort_keys=True, default=str))
        return
    console_of().print(page_of(service.address, values, service.found), highlight=False)
    if all_:
        typer.echo()
        table = table_of("all values", "what", "value")
        for name, value in _flat(values):
            table.add_row(escape(name), escape(value))
        print_table(table)


def _flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, given in values.items():
        # counters are floats with whole values
        value = int(given) if isinstance(given, float) and given.is_integer() else given
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, bool):
            yield prefix + name, "yes" if value else "no"
        elif isinstance(value, int) and "bytes" in name:
            yield prefix + name, f"{value:,} ({bytes_text(value)})"
        elif isinstance(value, int) and name != "pid":
            yield prefix + name, f"{value:,}"
        else:
            yield prefix + name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def page_of(address: str, values: Mapping[str, Any], found: str = "") -> Group:
    """The page for people. Pure.

    Args:
        address: Of the service.
        values: Its answer to `status`; a service of a neighbouring release may lack some values.
        found: How the address was found.
    """
    service = values.get("service", {})
    where = f"{escape(address)}[/bold]{f', {escape(found)}' if found else ''}"
    up = f", up {span_text(service['uptime_s'])}" if "uptime_s" in service else ""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    sections = {
        "working": _working(problems_of(values)),
        "hits": _hits(values),
        "tiers": _tiers(values),
        "write-back": _waiting(values),
        "engines": _engines(address, values),
        "memory": _memory(values),
    }
    for title, lines in sections.items():
        for index, line in enumerate(lines):
            grid.add_row("" if index else title, line)
    return Group(f"[bold]kvstore {escape(str(values.get('version', '')))} at {where}{up}", "", grid)


def _working(found: list[Problem]) -> Iterator[str]:
    now, before = [one for one in found if not one.past], [one for one in found if one.past]
    if not now:
        yield "[green]yes[/green]"
    elif len(now) == 1:
        yield f"[yellow]in part[/yellow]: {_problem_text(now[0])}"
    else:
        yield f"[yellow]in part[/yellow], {len(now)} problems:"
        yield from (f"- {_problem_text(one)}" for one in now)
    yield from (f"{one.past}: {_problem_text(one)}" for one in before)


def _problem_text(problem: Problem) -> str:
    return f"{escape(problem.what)}. [bold]Next:[/bold] {escape(problem.step)}"


def _hits(values: Mapping[str, Any]) -> Iterator[str]:
    counters, recent = values.get("counters", {}), values.get("recent", {})
    if recent:
        yield f"last {recent['window_s'] // 60} minutes: {hit_text(recent['requests'], recent['tokens'])}"
        reasons = sorted(recent["reasons"].items(), key=lambda one: -one[1])
        if reasons:
            shown = ", ".join(f"{word} {num:,}" for word, num in reasons[:_REASONS_SHOWN])
            num_others = len(reasons) - _REASONS_SHOWN
            others = f" and {counted(num_others, 'other')}" if num_others > 0 else ""
            yield f"  why not more: {escape(shown)}{others} ([bold]kvstore explain[/bold] shows each request)"
    requests = by_label(counters, "requests", "result")
    yield f"since its start: {hit_text(requests, by_label(counters, 'request_tokens', 'part'))}"
    if not sum(requests.values()) and counters.get("lookups"):
        hits, served = counters.get("lookup_hits", 0), sum(by_label(counters, "served_records", "tier").values())
        found = f"{share_text(hits, counters['lookups'])} of {counters['lookups']:,.0f} lookups found something"
        yield f"  {found}, {counted(served, 'record')} were read"  # a `PageDoor` looks up only what it writes


def hit_text(requests: Mapping[str, float], tokens: Mapping[str, float]) -> str:
    """How much of the prompts came from the store, from numbers of requests by result and of tokens by part."""
    num_requests = sum(requests.values())
    if not num_requests:
        return "no engine has reported a request"
    resumed = requests.get("hit", 0) + requests.get("part", 0)
    prompt, own = tokens.get("prompt", 0), tokens.get("local", 0)
    text = f"{share_text(tokens.get('resumed', 0), prompt)} of {prompt:,.0f} prompt tokens came from here"
    text += f", {share_text(own, prompt)} from the engines' own caches" if own else ""
    return f"{text}; {resumed:,.0f} of {num_requests:,.0f} requests resumed"


def _tiers(values: Mapping[str, Any]) -> Iterator[str]:
    for name, tier in values.get("tiers", {}).items():
        if not tier.get("healthy"):
            state = "[red]does not answer[/red]"
        elif tier.get("refuses_writes"):
            state = "[red]accepts no writes[/red]"
        else:
            state = "[green]works[/green]"
        num_bad = tier.get("num_quarantined")
        bad = f"; {counted(num_bad, 'corrupt record')} quarantined" if num_bad else ""
        yield f"{escape(name)}: {state}{_sizes(name, tier)}{bad}"
    yield from _evicted(values.get("counters", {}))
    for tenant, quota in values.get("quotas", {}).items():
        yield f"tenant {escape(tenant)}: {_quota_text(quota)} of the cold tier"


def _sizes(name: str, tier: Mapping[str, Any]) -> str:
    """What a tier holds, or what it held when that was last known; after a comma, or empty."""
    last = tier.get("last_known")
    shown = tier if last is None else last
    used, limit, records = shown.get("used_bytes"), shown.get("limit_bytes"), shown.get("num_records")
    if used is not None:
        # of Redis it is the memory of the servers, which others may use too: not what the store keeps there
        verb, verbed, unit = ("its server uses", "its server used", " of memory") if name == "redis" else _HOLDS
        if last is not None:
            verb = f"when last known, at {time_text(last['at_ms'] // 1000)} UTC, {verbed}"
        text = f", {verb} {bytes_text(used)}{unit}"
        text += f" in {records:,} records" if records is not None else ""
        return text + (f", {share_text(used, limit)} of {limit_text(shown)}" if limit else ", without a limit")
    if not tier.get("healthy"):
        return ""
    return ", its bytes are not counted here (kvstore top)" + (f", at most {limit_text(tier)}" if limit else "")


def _evicted(counters: Mapping[str, float]) -> Iterator[str]:
    """What was evicted from the slower tiers since the start, by cause."""
    causes = by_label(counters, "retention_boundaries", "reason")
    if sum(causes.values()):
        shown = ", ".join(f"{cause} {num:,.0f}" for cause, num in sorted(causes.items(), key=lambda it: -it[1]) if num)
        freed = bytes_text(sum(by_label(counters, "retention_bytes", "reason").values()))
        boundaries = counted(sum(causes.values()), "boundary", "boundaries")
        yield f"evicted since its start: {boundaries}, {freed} ({escape(shown)})"
    for tier, num in by_label(counters, "tier_evicted_records", "tier").items():
        if num:
            yield f"evicted by {escape(tier)} itself since its start: {counted(num, 'record')}"
    if num := counters.get("catalog_reconciled", 0):
        yield f"evicted or lost by Redis since its start (a restart or a failover loses some): {counted(num, 'record')}"


def _quota_text(quota: Mapping[str, Any]) -> str:
    used, maximum, least = quota.get("used_bytes"), quota.get("maximum_bytes"), quota.get("guaranteed_bytes")
    text = bytes_text(used) if used is not None else "an unknown number of bytes"
    if maximum:
        text += f", {share_text(used, maximum)} of at most" if used is not None else ", at most"
        text += f" {bytes_text(maximum)}"
    return text + (f", {bytes_text(least)} guaranteed," if least else "")


def _waiting(values: Mapping[str, Any]) -> Iterator[str]:
    counters, has_any = values.get("counters", {}), False
    for name, queue in values.get("write_back", {}).items():
        if queue["records"]:
            has_any = True
            yield f"{counted(queue['records'], 'record')} ({bytes_text(queue['bytes'])}) wait here for {escape(name)}"
    if num_records := counters.get("pending_records", 0):
        has_any = True
        limit = counters.get("pending_limit_bytes")
        most = f", at most {bytes_text(limit)}" if limit else ""
        held = bytes_text(counters.get("pending_bytes", 0))
        yield f"{counted(num_records, 'record')} ({held}{most}) of all services are not in the cold tier yet"
    if not has_any:
        yield "nothing waits"


def _engines(address: str, values: Mapping[str, Any]) -> Iterator[str]:
    service = values.get("service", {})
    num_namespaces = values.get("namespaces", 0)
    opened = f"{counted(num_namespaces, 'namespace')} opened since its start"
    num_connections = service.get("sessions_of_engines")
    if num_connections is None:
        yield opened
    elif num_connections:
        yield f"{counted(num_connections, 'connection')}; {opened}"
        names = [escape(engine) for engine in service.get("engines", ())]
        yield from names[:_ENGINES_SHOWN]
        if len(names) > _ENGINES_SHOWN:
            yield f"and {len(names) - _ENGINES_SHOWN:,} more"
    elif num_namespaces:
        yield f"none is connected; {opened}"
    else:
        yield f'none has connected: set "url":"{escape(address)}" in kv_connector_extra_config of vLLM'


def _memory(values: Mapping[str, Any]) -> Iterator[str]:
    service, leased = values["service"], bytes_text(values.get("leases", {}).get("pinned_bytes", 0))
    if "used_bytes" not in values.get("tiers", {}).get("memory", {}):
        yield f"{leased} are leased to this tenant; only operators see the rest"
        return
    yield f"{leased} are leased to engines"
    if receiving := service.get("receive_bytes_used"):
        limit = bytes_text(service["receive_bytes_limit"])
        yield f"saves that are being received use {bytes_text(receiving)} of {limit}"
