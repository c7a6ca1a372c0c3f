"""Prints for people and programs: tables, progress bars, JSON, and numbers with their units."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvstore.runtime.sizes import counted

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

_WIDTH_MIN = 160


def console_of() -> Console:
    """The terminal; if there is none, an output that is wide enough for all columns."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, _WIDTH_MIN))


def table_of(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table that wraps its cells and truncates none, so that names can be copied."""
    table = Table(title=escape(title), title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def print_table(table: Table) -> None:
    console_of().print(table)


def progress_bar(*columns: ProgressColumn, quiet: bool = False) -> Progress:
    """A bar on standard error that disappears at the end. Without a terminal there is none: a log would get empty
    lines."""
    from rich.progress import Progress  # slow to import, and most verbs show no bar

    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)


def echo_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))


def bytes_text(num_bytes: float | None) -> str:
    """A size with its unit, like `1.5 GiB`; `-` for `None`."""
    if num_bytes is None:
        return "-"
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"


def detail_text(name: str, value: object) -> tuple[str, str]:
    """A named value of a report, as `left_before_s` 90, in words: `left before` and `90 s`. Paths of fields stay."""
    words, unit = name, ""
    if "." not in name:
        stem, _, last = name.rpartition("_")
        unit = last if stem and last in ("bytes", "s", "ms", "tokens") else ""
        words = (stem if unit else name).replace("_", " ")
    if isinstance(value, bool):
        return words, "yes" if value else "no"
    if isinstance(value, Mapping):
        return words, ", ".join(" ".join(detail_text(str(key), one)) for key, one in value.items()) or "nothing"
    if isinstance(value, list | tuple):
        return words, ", ".join(map(str, value)) or "none"
    if not isinstance(value, int | float):
        return words, "-" if value is None else str(value)
    if unit == "bytes" or name == "bytes":
        return words, bytes_text(value)
    number = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    return words, f"{number} {unit}".rstrip()


def limit_text(tier: Mapping[str, Any]) -> str:
    """The limit of a tier, with the setting that sets it."""
    name = tier.get("limit_name")
    return f"{bytes_text(tier.get('limit_bytes'))}{f' ({name})' if name else ''}"


def used_text(name: str, tier: Mapping[str, Any]) -> str:
    """What a tier uses. Of Redis it is the memory of the servers, which others may use too: not what the store keeps
    there."""
    used = bytes_text(tier.get("used_bytes"))
    return f"{used} (server memory)" if name == "redis" and used != "-" else used


def share_text(amount: float | None, whole: float | None) -> str:
    """A percentage, also above 100; `0%` and `100%` are exact, `-` if one of the two is not known."""
    if amount is None or not whole:
        return "-"
    share = 100 * amount / whole
    if share <= 0 or share == 100:
        return f"{share:.0f}%"
    return f"{min(99, max(1, round(share))) if share < 100 else max(101, round(share)):,}%"


def span_text(seconds: float) -> str:
    """A duration in its two largest units, like `3 d 4 h`."""
    minutes, hours, days = int(seconds) // 60, int(seconds) // 3600, int(seconds) // 86_400
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min" if minutes else f"{int(seconds)} s"


def time_text(seconds: int | None) -> str:
    """A time in UTC; `-` for `None` and 0."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S") if seconds else "-"


def amounts_text(by_tier: Mapping[str, Any]) -> str:
    """Boundaries, records and bytes in each tier."""
    return (
        ", ".join(
            f"{counted(one['num_boundaries'], 'boundary', 'boundaries')} in {tier} "
            f"({counted(one['num_records'], 'record')}, {bytes_text(one['num_bytes'])})"
            for tier, one in by_tier.items()
        )
        or "nothing"
    )


def held_text(held: Mapping[str, Any]) -> str:
    """The bytes in each tier, like `redis 1.5 GiB, s3 2.0 GiB`; from amounts or plain bytes."""
    sizes = {tier: one["num_bytes"] if isinstance(one, Mapping) else one for tier, one in held.items()}
    return ", ".join(f"{tier} {bytes_text(size)}" for tier, size in sizes.items() if size) or "-"


def namespace_name(one: Mapping[str, Any]) -> str:
    """The model and types of a namespace, safe in a table."""
    return escape(one["name"] or "(its description is lost)")


def namespaces_table(title: str, namespaces: Iterable[Mapping[str, Any]]) -> Table:
    columns = ("model and types", "door", "namespace", "tenant", "boundaries", "held")
    table = table_of(title, *columns, right=("boundaries",))
    for one in namespaces:
        door = escape(one["door"] or "-")
        names = (namespace_name(one), door, one["namespace"], escape(one["tenant"]) or "-")
        table.add_row(*names, f"{one['num_boundaries']:,}", held_text(one["held"]))
    return table


def quotas_table(quotas: Iterable[Mapping[str, Any]]) -> Table:
    columns = ("tenant", "guaranteed", "maximum", "used", "full", "set by")
    table = table_of("quotas of the cold tier", *columns, right=columns[1:5])
    for one in quotas:
        sizes = [bytes_text(one[name]) for name in ("guaranteed_bytes", "maximum_bytes", "used_bytes")]
        full = share_text(one["used_bytes"], one["maximum_bytes"])
        table.add_row(escape(one["tenant"]), *sizes, full, "an operator" if one["is_ordered"] else "the settings")
    return table


def requests_table(title: str, requests: Iterable[Mapping[str, Any]]) -> Table:
    columns = ("request", "at (UTC)", "prompt", "resumed", "result", "reason")
    table = table_of(f"{title} (in tokens)", *columns, right=("prompt", "resumed"))
    for one in requests:
        tokens = (f"{one['prompt_tokens']:,}", f"{one['resume_tokens']:,}")
        at = str(one["at"])[:19].replace("T", " ")
        table.add_row(escape(one["request"]), at, *tokens, one["result"], one["reason"] or "-")
    return table
