"""What one seed's cluster looks like: sizes that are often too small, prompts that share prefixes."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from kvstore.store.limits import StoreLimits
from kvstore.testing.prompts import ATTENTION, HYBRID, WINDOWED, Prompt
from tests.simulation.service import LOOK_S, ServiceSizes

_COST_BYTES = 1024
"""What a record is charged in memory beside its bytes."""


@dataclass(frozen=True)
class Plan:
    """All that is decided before the cluster begins.

    Attributes:
        prompts: What engines are asked for.
        sizes: Of each service.
        hot_bytes: Capacity of Redis, if it has one.
        num_clients: Engines.
        lasts_s: Virtual seconds of work and faults; what comes after takes as long as it takes.
        fault_every_s: Mean time between faults.
        failing: Share of calls that fail when nothing special is wrong.
        may_lose: Redis may lose what it keeps, all or part of it.
    """

    prompts: list[Prompt]
    sizes: ServiceSizes
    hot_bytes: int | None
    num_clients: int
    lasts_s: float
    fault_every_s: float
    failing: float
    may_lose: bool


def draw_plan(numbers: random.Random) -> Plan:
    """A plan; the same for the same numbers."""
    payload_bytes = numbers.choice((100, 400, 1500))
    record_bytes = payload_bytes + 192
    prompts = []
    for model, layout in (("one", ATTENTION), ("two", numbers.choice((HYBRID, WINDOWED)))):
        for name in "abc"[: numbers.randint(1, 3)]:
            for _ in range(2):  # of two prompts with one name the shorter is a prefix of the longer
                num_tokens = 16 * numbers.randint(4, 26)
                prompts.append(Prompt(layout, f"{model}-{name}", num_tokens, model=model, payload_bytes=payload_bytes))
    memory_bytes = numbers.choice((30, 120, 1000)) * (record_bytes + _COST_BYTES)
    sizes = ServiceSizes(
        memory_bytes=memory_bytes,
        limits=StoreLimits(
            stage_bytes=int(memory_bytes * numbers.choice((0.25, 0.75))),
            stage_records_in_flight=numbers.choice((2, 16)),
            stage_bytes_in_flight=numbers.choice((2, 8, 100)) * record_bytes,
            fetch_timeout_s=numbers.choice((1.0, 5.0)),
            lease_s=numbers.choice((1.0, 3.0)),
            leases_max=numbers.choice((3, 4096)),
            save_bytes_in_flight=numbers.choice((4, 50)) * record_bytes,
            write_back_bytes=numbers.choice((10, 60, 1000)) * record_bytes,
            write_back_in_flight=numbers.choice((1, 4)),
            pending_bytes=numbers.choice((20, 100, 10_000)) * record_bytes,
            finish_bytes_in_flight=numbers.choice((2, 100)) * record_bytes,
            write_back_attempts=numbers.choice((2, 8)),
            write_back_timeout_s=3.0,
            manifest_check_s=LOOK_S,
            absent_s=numbers.choice((2.0, 60.0)),
        ),
        pending_lease_s=numbers.choice((2.0, 5.0)),
        cold_bytes=numbers.choice((None, 80, 200)) and numbers.choice((80, 200)) * record_bytes,
    )
    hot_records = numbers.choice((None, 60, 300))
    plan = Plan(
        prompts=prompts,
        sizes=sizes,
        hot_bytes=hot_records and hot_records * record_bytes,
        num_clients=numbers.randint(2, 4),
        lasts_s=numbers.choice((3.0, 8.0)),
        fault_every_s=numbers.choice((0.4, 1.0, 3.0)),
        failing=numbers.choice((0.0, 0.01, 0.05)),
        may_lose=numbers.random() < 0.25,
    )
    # drawn last, so that all before is as it was
    admission = numbers.choice(("auto", "auto", "second_sight", "second_sight", "all"))
    return replace(plan, sizes=replace(sizes, admission=admission))
