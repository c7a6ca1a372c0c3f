"""How numbers, times, tiers and names are spelled in tables, and read from arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvstore.cli.administering import AdminClient
from kvstore.errors import InvalidRequest

__all__ = [
    "amounts_told",
    "bytes_text",
    "console_of",
    "echo_json",
    "held_text",
    "parse_duration",
    "print_table",
    "table_of",
    "time_text",
    "whole_namespace",
]

_WIDTH_MIN = 160
_DURATION = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_LISTED_MAX = 1000


def echo_json(value: object) -> None:
    """One JSON object, for programs."""
    typer.echo(json.dumps(value, indent=2))


def table_of(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table whose cells are folded, not cut: names are there to be copied."""
    table = Table(title=escape(title), title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def console_of() -> Console:
    """The terminal, or something wide enough for all columns where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, _WIDTH_MIN))


def print_table(table: Table) -> None:
    """On `console_of`."""
    console_of().print(table)


def bytes_text(num_bytes: float | None) -> str:
    """With a unit: `1.5 GiB`."""
    if num_bytes is None:
        return "-"
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"


def held_text(held: Mapping[str, Any]) -> str:
    """What tiers hold: `redis 1.5 GiB, s3 2.0 GiB`; from amounts or plain bytes."""
    sizes = {tier: one["num_bytes"] if isinstance(one, Mapping) else one for tier, one in held.items()}
    return ", ".join(f"{tier} {bytes_text(size)}" for tier, size in sizes.items() if size) or "-"


def time_text(seconds: int | None) -> str:
    """A time of the interface, in UTC; `-` where there is none."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S") if seconds else "-"


def parse_duration(text: str, name: str) -> int:
    """Seconds, from text like `90s`, `12h`, `7d`.

    Raises:
        InvalidRequest: It is none.
    """
    match = re.fullmatch(r"\s*([1-9]\d{0,8})\s*([smhdw]?)\s*", text)
    if match is None:
        raise InvalidRequest("expected a time like 90s, 15m, 12h, 7d or 2w", field=name, seen=repr(text))
    return int(match[1]) * _DURATION[match[2]]


def whole_namespace(client: AdminClient, text: str) -> str:
    """A namespace by its id, or by a start of it that no other one has.

    Raises:
        InvalidRequest: There is none, or several.
    """
    if re.fullmatch("[0-9a-f]{32}", text):
        return text
    if not re.fullmatch("[0-9a-f]{1,31}", text):
        raise InvalidRequest("a namespace is 32 hex digits, or a start of them: see `kvstore ls`", seen=repr(text))
    found: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        page = client.get("namespaces", limit=_LISTED_MAX, cursor=cursor)
        found += [one["namespace"] for one in page["namespaces"] if one["namespace"].startswith(text)]
        cursor = page["next_cursor"]
    if len(found) != 1:
        what = f"{len(found)} namespaces start" if found else "no namespace starts"
        raise InvalidRequest(f"{what} like that: see `kvstore ls`", seen=repr(text))
    return found[0]


def amounts_told(by_tier: Mapping[str, Any]) -> str:
    """What tiers hold, in words."""
    return (
        ", ".join(
            f"{one['num_boundaries']:,} boundaries in {tier} ({one['num_records']:,} records, "
            f"{bytes_text(one['num_bytes'])})"
            for tier, one in by_tier.items()
        )
        or "nothing"
    )
