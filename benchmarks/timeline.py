"""Where the time of a restored first token goes: its parts, one after the other, from the marks of its engine."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.table import Table

from benchmarks.peer import tune

__all__ = ["PARTS", "Mark", "parts_of", "round_trip_s", "timeline_table"]

PARTS = {
    "hash": "from the request's arrival until its prompt is hashed",
    "lookup": "until the service has said what is stored",
    "poll": "until the engine asks again, and the fetch begins",
    "stage": "the service fetches the records into its memory",
    "admission": "until the engine asks again, allocates blocks and orders the load",
    "locate": "where the records are in the service's memory",
    "decode and scatter": "until the last block is written",
    "report": "until the engine collects the load",
    "next step": "until the engine begins to compute",
    "first forward": "the tokens behind the hit",
    "rest": "before the arrival, and behind the forward: sampling and the answer",
}
"""The parts in their order, each from the end of the one before."""

COUNTS = ("verify", "decode", "scatter")
"""What threads do during `decode and scatter`: seconds of all threads together."""

_ROUND_TRIPS = 20


class Mark(NamedTuple):
    """One call of a wrapped function in an engine.

    Attributes:
        begin_s: Monotonic time, as `end_s`.
        faults: Page faults of the process until the end.
    """

    name: str
    begin_s: float
    end_s: float
    faults: int


def parts_of(marks: Sequence[Mark], ttft_s: float) -> dict[str, float]:
    """Seconds of each part of the one request that the marks are of, and of its threads. Also `faults`: the pages of
    memory that were first touched between the end of the stage and that of the load.

    Args:
        ttft_s: Until its first token.

    Raises:
        RuntimeError: A part is missing: nothing was loaded.
    """
    ordered = sorted(marks, key=lambda mark: mark.begin_s)

    def first(name: str, from_s: float = 0.0) -> Mark:
        found = next((mark for mark in ordered if mark.name == name and mark.end_s >= from_s), None)
        if found is None:
            raise RuntimeError(f"the engine did not come to this part of a load: {name}")
        return found

    arrived, hashed = first("arrived"), first("hash")
    lookup = first("lookup", hashed.end_s)
    stage = first("stage", lookup.end_s)
    order = first("order", stage.end_s)
    locate = first("locate", order.begin_s)
    loaded = first("loaded", locate.end_s)
    noticed = first("noticed", loaded.end_s)
    forward = first("forward", noticed.end_s)
    ends = (
        hashed.end_s,
        lookup.end_s,
        stage.begin_s,
        stage.end_s,
        order.begin_s,
        locate.end_s,
        loaded.end_s,
        noticed.end_s,
        forward.begin_s,
        forward.end_s,
    )
    parts, last_s = {}, arrived.begin_s
    for name, end_s in zip(PARTS, ends, strict=False):
        parts[name], last_s = end_s - last_s, end_s
    parts["rest"] = ttft_s - (forward.end_s - arrived.begin_s)
    for name in COUNTS:
        parts[f"{name}, threads"] = sum(
            mark.end_s - mark.begin_s
            for mark in ordered
            if mark.name == name and stage.end_s <= mark.begin_s <= loaded.end_s
        )
    parts["faults"] = loaded.faults - stage.faults
    return parts


def timeline_table(name: str, timelines: Sequence[Mapping[str, float]], ceilings: Mapping[str, float]) -> Table:
    """Milliseconds of each part, in each repetition, beside the least that it can take."""
    table = Table(title=f"{name}: where the time of a restored first token goes, ms")
    table.add_column("part")
    for number in range(1, len(timelines) + 1):
        table.add_column(str(number), justify="right")
    for heading in ("median", "ceiling"):
        table.add_column(heading, justify="right")
    table.add_column("what it is")
    for part in timelines[0]:
        values = [timeline[part] for timeline in timelines]
        show = _count if part == "faults" else _ms
        ceiling = _ms(ceilings.get(part, 0.0)) if part in PARTS and part != "rest" else ""
        table.add_row(part, *map(show, values), show(statistics.median(values)), ceiling, PARTS.get(part, ""))
    sums = [sum(timeline[part] for part in PARTS) for timeline in timelines]
    table.add_row("sum", *map(_ms, sums), _ms(statistics.median(sums)), _ms(sum(ceilings.values())), "")
    return table


def round_trip_s(port: int) -> float:
    """The median time of a command to a Redis on this machine and its answer, on a blocking socket."""
    with socket.create_connection(("127.0.0.1", port), 10.0) as connection:
        tune(connection)
        times = []
        for _ in range(_ROUND_TRIPS):
            started_s = time.perf_counter()
            connection.sendall(b"PING\r\n")
            if connection.recv(16) != b"+PONG\r\n":
                raise RuntimeError("Redis did not answer a ping")
            times.append(time.perf_counter() - started_s)
    return statistics.median(times)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _count(number: float) -> str:
    return f"{number:,.0f}"
