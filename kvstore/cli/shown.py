"""Formats numbers, times, tiers and names for tables, and parses arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from kvstore.errors import InvalidRequest

if TYPE_CHECKING:  # `status`, which probes run every few seconds, needs none of it
    from kvstore.cli.administering import AdminClient

__all__ = [
    "amounts_text",
    "bytes_text",
    "counted",
    "echo_json",
    "held_text",
    "namespace_name",
    "parse_duration",
    "time_text",
    "whole_namespace",
    "whole_prefix",
]

_DURATION = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_LISTED_MAX = 1000


def echo_json(value: object) -> None:
    """Print one JSON object, for programs."""
    typer.echo(json.dumps(value, indent=2))


def bytes_text(num_bytes: float | None) -> str:
    """A size with a unit, like `1.5 GiB`; `-` for `None`."""
    if num_bytes is None:
        return "-"
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"


def counted(number: float, one: str, many: str) -> str:
    """A number with its noun, like `1 boundary` or `1,024 boundaries`."""
    return f"{number:,.0f} {one if number == 1 else many}"


def held_text(held: Mapping[str, Any]) -> str:
    """What tiers hold, like `redis 1.5 GiB, s3 2.0 GiB`; from amounts or plain bytes."""
    sizes = {tier: one["num_bytes"] if isinstance(one, Mapping) else one for tier, one in held.items()}
    return ", ".join(f"{tier} {bytes_text(size)}" for tier, size in sizes.items() if size) or "-"


def namespace_name(one: Mapping[str, Any]) -> str:
    """What people call a namespace, safe in a table."""
    return escape(one.get("name") or "(its description is lost)")


def time_text(seconds: int | None) -> str:
    """A time in UTC; `-` for none or 0."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S") if seconds else "-"


def parse_duration(text: str, name: str) -> int:
    """Seconds, from text like `90s`, `12h`, `7d`.

    Raises:
        InvalidRequest: It is not a duration.
    """
    match = re.fullmatch(r"\s*([1-9]\d{0,8})\s*([smhdw])\s*", text)
    if match is None:
        raise InvalidRequest("expected a time with its unit, like 90s, 15m, 12h, 7d or 2w", field=name, seen=repr(text))
    return int(match[1]) * _DURATION[match[2]]


def whole_namespace(client: AdminClient, text: str) -> str:
    """The id of a namespace, from its id or a unique start of it.

    Raises:
        InvalidRequest: No namespace, or several, match.
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


def whole_prefix(text: str) -> str:
    """Return a boundary's prefix hash as it was given.

    Raises:
        InvalidRequest: It is not 64 hex digits.
    """
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise InvalidRequest(
            "a boundary is 64 hex digits, all of them: see `kvstore ls NAMESPACE`", field="prefix", seen=repr(text)
        )
    return text


def amounts_text(by_tier: Mapping[str, Any]) -> str:
    """Boundaries, records and bytes per tier."""
    return (
        ", ".join(
            f"{counted(one['num_boundaries'], 'boundary', 'boundaries')} in {tier} "
            f"({counted(one['num_records'], 'record', 'records')}, "
            f"{bytes_text(one['num_bytes'])})"
            for tier, one in by_tier.items()
        )
        or "nothing"
    )
