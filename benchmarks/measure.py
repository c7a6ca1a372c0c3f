"""What a row of a benchmark is, and how it is measured: work and ceiling in turn, medians of both."""

from __future__ import annotations

import asyncio
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Amounts", "Ceiling", "Row", "Work", "measure", "measure_in_turn", "windowed"]

GB = 1e9


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much is measured.

    Attributes:
        sizes: Bytes of pages and records.
        in_flights: Calls at a time, for stores.
        total_bytes: What one repetition moves, in whole records.
        repetitions: Timed ones; one more precedes them untimed.
        verbs: What stores are measured at.
    """

    sizes: tuple[int, ...]
    in_flights: tuple[int, ...]
    total_bytes: int
    repetitions: int
    verbs: tuple[str, ...] = ("put", "get")

    def num_pages(self, size_bytes: int) -> int:
        return max(self.total_bytes // size_bytes, 1)


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What the machine does with the same bytes: its name, and the call that moves them once."""

    name: str
    run: Callable[[], None]


class Work(ABC):
    """What is measured: `run` is timed, `before` and `after` are not."""

    async def before(self) -> None:  # noqa: B027 - most need nothing
        """Prepare one repetition."""

    @abstractmethod
    async def run(self) -> None:
        """Move all bytes once."""

    async def after(self) -> None:  # noqa: B027 - most need nothing
        """Check what `run` did and make room for the next repetition."""

    def cpu_s(self) -> float:
        """Processor time so far of the processes whose cost counts: this one, all threads, user and system."""
        return time.process_time()


@dataclass(frozen=True, slots=True)
class Row:
    """One figure beside its ceiling.

    Attributes:
        what: What was done.
        size_bytes: Bytes of each page or record.
        in_flight: Calls at a time.
        gb_s: Median, in 10^9 bytes a second.
        ceiling: What it is compared with.
        ceiling_gb_s: Median of the same bytes' ceiling, measured in turn with `gb_s`.
        cpu_s_per_gb: Median processor seconds, as `Work.cpu_s` counts them.
        raw_gb_s: For our puts to and gets from Redis: the most that raw commands to the same Redis moved in the same
            turns.
        stored_ratio: For the codec: bytes of the payloads, by bytes of the pages.
    """

    what: str
    size_bytes: int
    in_flight: int
    gb_s: float
    ceiling: str
    ceiling_gb_s: float
    cpu_s_per_gb: float
    raw_gb_s: float | None = None
    stored_ratio: float | None = None

    @property
    def ratio(self) -> float:
        return self.gb_s / self.ceiling_gb_s

    @property
    def verb(self) -> str:
        """The last word of `what`: `put` or `get`, in rows of stores."""
        return self.what.replace("_", " ").rpartition(" ")[2]

    @property
    def raw_ratio(self) -> float | None:
        return self.gb_s / self.raw_gb_s if self.raw_gb_s is not None else None

    def as_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "what": self.what,
            "size_bytes": self.size_bytes,
            "in_flight": self.in_flight,
            "gb_s": round(self.gb_s, 4),
            "ceiling": self.ceiling,
            "ceiling_gb_s": round(self.ceiling_gb_s, 4),
            "ratio": round(self.ratio, 4),
            "cpu_s_per_gb": round(self.cpu_s_per_gb, 4),
        }
        if self.raw_gb_s is not None and self.raw_ratio is not None:
            names = (f"raw_{self.verb}_gb_s", f"raw_{self.verb}_ratio")
            fields |= dict(zip(names, (round(self.raw_gb_s, 4), round(self.raw_ratio, 4)), strict=True))
        if self.stored_ratio is not None:
            fields["stored_ratio"] = round(self.stored_ratio, 4)
        return fields


async def measure(
    what: str, work: Work, ceiling: Ceiling, *, size_bytes: int, num_bytes: int, in_flight: int, repetitions: int
) -> Row:
    """`measure_in_turn` of one work."""
    (row,) = await measure_in_turn(
        [(what, work)],
        ceiling,
        size_bytes=size_bytes,
        num_bytes=num_bytes,
        in_flight=in_flight,
        repetitions=repetitions,
    )
    return row


async def measure_in_turn(
    works: Sequence[tuple[str, Work]],
    ceiling: Ceiling,
    *,
    size_bytes: int,
    num_bytes: int,
    in_flight: int,
    repetitions: int,
) -> list[Row]:
    """Run ceiling and works in turn, so that other load of the machine meets all alike. The first turn is not timed.

    Args:
        works: The name of each row, and what moves `num_bytes` in each run.
        ceiling: Moves the same number of bytes.
        size_bytes: Of one page or record.
        num_bytes: Of all of them.
        in_flight: Calls at a time.
        repetitions: Timed turns, at least one.
    """
    gb = num_bytes / GB
    ceiling_rates: list[float] = []
    rates: list[list[float]] = [[] for _ in works]
    costs: list[list[float]] = [[] for _ in works]
    for turn in range(1 + repetitions):
        started_s = time.perf_counter()
        ceiling.run()
        ceiling_s = time.perf_counter() - started_s
        if turn > 0:
            ceiling_rates.append(gb / ceiling_s)
        for index, (_, work) in enumerate(works):
            await work.before()
            cpu_s, started_s = work.cpu_s(), time.perf_counter()
            await work.run()
            work_s, cpu_s = time.perf_counter() - started_s, work.cpu_s() - cpu_s
            await work.after()
            await asyncio.sleep(0)  # work that never waits could not be interrupted
            if turn > 0:
                rates[index].append(gb / work_s)
                costs[index].append(cpu_s / gb)
    median = statistics.median
    ceiling_gb_s = median(ceiling_rates)
    return [
        Row(what, size_bytes, in_flight, median(rates[index]), ceiling.name, ceiling_gb_s, median(costs[index]))
        for index, (what, _) in enumerate(works)
    ]


async def windowed(calls: Iterable[Callable[[], Awaitable[None]]], in_flight: int) -> None:
    """Make all calls, `in_flight` at a time; the first failure is raised."""

    async def make(remaining: Iterator[Callable[[], Awaitable[None]]]) -> None:
        for call in remaining:
            await call()

    remaining = iter(calls)
    await asyncio.gather(*(make(remaining) for _ in range(in_flight)))
