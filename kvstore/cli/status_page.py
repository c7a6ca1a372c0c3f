"""A service's status as a page for people: first whether it works, then what they ask next. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from kvstore.cli.shown import bytes_text, counted
from kvstore.cli.status_findings import Finding, by_label, findings, part_of

__all__ = ["page_of"]

_REASONS_SHOWN = 4
_NAMES_MAX = 8


def page_of(name: str, values: Mapping[str, Any]) -> Group:
    """The page.

    Args:
        name: Where the service is.
        values: What it answered to `status`; of a neighbouring release too.
    """
    service = values.get("service", {})
    up = f", up {_span(service['uptime_s'])}" if "uptime_s" in service else ""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    sections = {
        "working": _working(findings(values)),
        "hits": _hits(values),
        "tiers": _tiers(values),
        "write-back": _waiting(values),
        "engines": _engines(name, values),
        "memory": _memory(values),
    }
    for title, lines in sections.items():
        for index, line in enumerate(lines):
            grid.add_row("" if index else title, line)
    return Group(f"[bold]kvstore {escape(str(values.get('version', '')))} at {escape(name)}[/bold]{up}", "", grid)


def _working(found: list[Finding]) -> Iterator[str]:
    now, before = [one for one in found if one.is_now], [one for one in found if not one.is_now]
    if not now:
        yield "[green]yes[/green]"
    elif len(now) == 1:
        yield f"[yellow]in part[/yellow]: {_told(now[0])}"
    else:
        yield f"[yellow]in part[/yellow], {len(now)} things are wrong:"
        yield from (f"- {_told(one)}" for one in now)
    yield from (f"since its start: {_told(one)}" for one in before)


def _told(finding: Finding) -> str:
    return f"{escape(finding.what)}. [bold]Next:[/bold] {escape(finding.step)}"


def _hits(values: Mapping[str, Any]) -> Iterator[str]:
    counters, recent = values.get("counters", {}), values.get("recent", {})
    if recent:
        when = f"last {recent['window_s'] // 60} minutes"
        yield f"{when}: {_ratio(recent['requests'], recent['tokens'])}"
        reasons = sorted(recent["reasons"].items(), key=lambda one: -one[1])
        if reasons:
            shown = ", ".join(f"{word} {num:,}" for word, num in reasons[:_REASONS_SHOWN])
            others = f" and {len(reasons) - _REASONS_SHOWN} others" if len(reasons) > _REASONS_SHOWN else ""
            yield f"  why no further: {escape(shown)}{others} ([bold]kvstore explain[/bold] has each request)"
    requests = by_label(counters, "requests", "result")
    yield f"since its start: {_ratio(requests, by_label(counters, 'request_tokens', 'part'))}"
    if not sum(requests.values()) and counters.get("lookups"):
        hits = counters.get("lookup_hits", 0)
        yield f"  of {counters['lookups']:,.0f} lookups {part_of(hits, counters['lookups'])} found something"


def _ratio(requests: Mapping[str, float], tokens: Mapping[str, float]) -> str:
    num_requests = sum(requests.values())
    if not num_requests:
        return "no engine told of a request"
    resumed = requests.get("hit", 0) + requests.get("part", 0)
    prompt, own = tokens.get("prompt", 0), tokens.get("local", 0)
    text = f"{part_of(tokens.get('resumed', 0), prompt)} of {prompt:,.0f} prompt tokens came from here"
    text += f", {part_of(own, prompt)} from engines' own caches" if own else ""
    return f"{text}; {resumed:,.0f} of {num_requests:,.0f} requests resumed"


def _tiers(values: Mapping[str, Any]) -> Iterator[str]:
    is_open = by_label(values.get("counters", {}), "tier_open", "tier")
    for name, tier in values.get("tiers", {}).items():
        if not tier.get("healthy"):
            yield f"{escape(name)}: [red]does not answer[/red]"
            continue
        state = "[red]left alone after failures[/red]" if is_open.get(name) else "[green]works[/green]"
        used, limit, records = tier.get("used_bytes"), tier.get("limit_bytes"), tier.get("num_records")
        if used is None:
            holds = "what it holds is not counted here (kvstore top)"
            holds += f", at most {_limit_text(tier)}" if limit else ""
        else:
            holds = f"holds {bytes_text(used)}"
            holds += f" in {records:,} records" if records is not None else ""
            holds += f", {part_of(used, limit)} of {_limit_text(tier)}" if limit else ", without a bound"
        aside = f"; {tier['num_quarantined']:,} damaged records put aside" if tier.get("num_quarantined") else ""
        yield f"{escape(name)}: {state}, {holds}{aside}"
    yield from _left(values.get("counters", {}))
    for tenant, quota in values.get("quotas", {}).items():
        yield f"tenant {escape(tenant)}: {_quota_text(quota)} of the cold tier"


def _limit_text(tier: Mapping[str, Any]) -> str:
    """A bound, with the setting behind it."""
    name = tier.get("limit_name")
    return f"{bytes_text(tier['limit_bytes'])}{f' ({name})' if name else ''}"


def _left(counters: Mapping[str, float]) -> Iterator[str]:
    """What left slower tiers since the start, by cause."""
    causes = by_label(counters, "retention_boundaries", "reason")
    if sum(causes.values()):
        told = ", ".join(f"{cause} {num:,.0f}" for cause, num in sorted(causes.items(), key=lambda one: -one[1]) if num)
        freed = bytes_text(sum(by_label(counters, "retention_bytes", "reason").values()))
        boundaries = counted(sum(causes.values()), "boundary", "boundaries")
        yield f"left since its start: {boundaries}, {freed} ({escape(told)})"
    for tier, num in by_label(counters, "tier_evicted_records", "tier").items():
        if num:
            yield f"left {escape(tier)} since its start, one by one: {num:,.0f} records"
    if num := counters.get("catalog_reconciled", 0):
        yield f"let go by Redis itself since its start: {num:,.0f} records"


def _quota_text(quota: Mapping[str, Any]) -> str:
    used, maximum, least = quota.get("used_bytes"), quota.get("maximum_bytes"), quota.get("guaranteed_bytes")
    text = bytes_text(used) if used is not None else "not known how much"
    if maximum:
        text += f", {part_of(used, maximum)} of at most" if used is not None else ", at most"
        text += f" {bytes_text(maximum)}"
    return text + (f", {bytes_text(least)} guaranteed," if least else "")


def _waiting(values: Mapping[str, Any]) -> Iterator[str]:
    counters, has_any = values.get("counters", {}), False
    for name, queue in values.get("write_back", {}).items():
        if queue["records"]:
            has_any = True
            records = counted(queue["records"], "record", "records")
            yield f"{records} ({bytes_text(queue['bytes'])}) wait here for {escape(name)}"
    if num_records := counters.get("pending_records", 0):
        has_any = True
        limit = counters.get("pending_limit_bytes")
        most = f", at most {bytes_text(limit)}" if limit else ""
        held = bytes_text(counters.get("pending_bytes", 0))
        yield f"of all services {num_records:,.0f} records ({held}{most}) are hot and not yet cold"
    if not has_any:
        yield "nothing waits"


def _engines(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    service = values.get("service", {})
    num_namespaces = values.get("namespaces", 0)
    opened = f"{num_namespaces:,} namespace{'' if num_namespaces == 1 else 's'} opened since its start"
    num_connections = service.get("sessions_of_engines")
    if num_connections is None:
        yield opened
    elif num_connections:
        yield f"{counted(num_connections, 'connection', 'connections')}; {opened}"
        names = [escape(engine) for engine in service.get("engines", ())]
        yield from names[:_NAMES_MAX]
        if len(names) > _NAMES_MAX:
            yield f"and {len(names) - _NAMES_MAX:,} more"
    elif num_namespaces:
        yield f"none is connected; {opened}"
    else:
        yield f'none has connected: set "url":"{escape(name)}" in kv_connector_extra_config of vLLM'


def _memory(values: Mapping[str, Any]) -> Iterator[str]:
    memory, leases, service = values.get("tiers", {}).get("memory", {}), values.get("leases", {}), values["service"]
    if "used_bytes" not in memory:
        yield f"{bytes_text(leases.get('pinned_bytes', 0))} are leased to this tenant; a tenant is told no more"
        return
    used, limit = memory.get("used_bytes", 0), memory.get("limit_bytes") or 0
    text = f"{bytes_text(used)} of {bytes_text(limit)} hold pages ({part_of(used, limit)})"
    if leases.get("active"):
        text += f", of these {bytes_text(leases['pinned_bytes'])} are leased to engines"
    yield text
    if receiving := service.get("receive_bytes_used"):
        yield f"{bytes_text(receiving)} of {bytes_text(service['receive_bytes_limit'])} are saves on their way in"


def _span(seconds: float) -> str:
    minutes, hours, days = int(seconds) // 60, int(seconds) // 3600, int(seconds) // 86_400
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min" if minutes else f"{int(seconds)} s"
