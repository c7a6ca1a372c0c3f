"""`python -m benchmarks.node_plan`: what a node can load and save, from costs measured here. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.ceilings import memcpy, tcp_peer
from benchmarks.loads import load_rows
from benchmarks.measure import GB, Amounts, Row
from benchmarks.node import Node, temporary_folder
from benchmarks.node_model import (
    Costs,
    NodeShape,
    event_loops_for,
    read_config,
    settings_of,
    token_bytes_of,
    ways_of,
)
from benchmarks.pages import RecordPages, benchmark_namespace, bf16_page
from benchmarks.program import count, run_benchmark
from benchmarks.store import SECTIONS
from benchmarks.stores import Service, TierStore, fill, store_rows
from kvstore.client import connect
from kvstore.codec import PLANES2, encode, max_payload_bytes
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.sizes import format_bytes, parse_bytes
from kvstore.testing.program import Say
from kvstore.testing.servers import redis_server

__all__ = ["Check", "main", "measure_costs"]

_MIB = 1 << 20
_PAGES = 8
_START_S = 20.0
_MEMORY_BYTES = 512 * _MIB
_AMOUNTS = Amounts(sizes=(4 * _MIB,), in_flights=(4,), total_bytes=64 * _MIB, repetitions=3)


@dataclass(frozen=True, slots=True)
class Check:
    """A whole way on this machine, measured, and what the costs of its parts say: processor seconds for a GB."""

    what: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.node_plan", description=__doc__)
    parser.add_argument("--gpus", type=count, default=8, metavar="COUNT")
    parser.add_argument("--cores", type=count, default=os.cpu_count(), metavar="COUNT", help="for engines and service")
    parser.add_argument("--gpu-link", type=rate, default=55.0, metavar="RATE", help="to and from a GPU, like 55GB/s")
    parser.add_argument("--network", type=rate, default=12.5, metavar="RATE", help="to and from Redis")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="with a config.json; or --token-bytes")
    parser.add_argument("--token-bytes", type=parse_bytes, default=128 << 10, metavar="BYTES", help="KV of a token")
    parser.add_argument("--gpus-per-model", type=count, default=1, metavar="COUNT")
    parser.add_argument("--step-tokens", type=count, default=8192, metavar="COUNT")
    parser.add_argument(
        "--prompt-tokens", type=count, default=8192, metavar="COUNT", help="of prompts that are resumed"
    )
    parser.add_argument(
        "--event-loops", type=count, default=1, metavar="COUNT", help="loops that move bytes: a service has one"
    )
    parser.add_argument("--memory", type=parse_bytes, default=0, metavar="BYTES", help="of the node (0: unknown)")
    parser.add_argument("--json", action="store_true", help="print the BENCH line alone")
    chosen = parser.parse_args(arguments)
    token_bytes = chosen.token_bytes
    if chosen.model is not None:
        try:
            token_bytes = token_bytes_of(read_config(chosen.model))
        except (OSError, ValueError, KeyError) as error:
            parser.error(f"--model: the KV of a token cannot be read from {chosen.model}/config.json: {error}")
    shape = NodeShape(
        chosen.gpus,
        chosen.cores,
        chosen.gpu_link,
        chosen.network,
        token_bytes,
        gpus_per_model=chosen.gpus_per_model,
        step_tokens=chosen.step_tokens,
        prompt_tokens=chosen.prompt_tokens,
        event_loops=chosen.event_loops,
        memory_bytes=chosen.memory,
    )

    def measure(say: Say) -> tuple[NodeShape, Costs, list[Check]]:
        return (shape, *measure_costs(say))

    return run_benchmark(measure, report, quiet=chosen.json)


def measure_costs(say: Say) -> tuple[Costs, list[Check]]:
    """The costs of this machine, and whole ways beside what their parts' costs say, both of the same minute."""
    say("encoding pages")
    stored_ratio, encode_s = _encoding()
    (load,) = load_rows(_AMOUNTS, say)
    redis = _redis_rows(say)
    send_s, take_s = _saving(say)
    costs = Costs(
        stored_ratio=stored_ratio,
        encode=encode_s,
        load=load.cpu_s_per_gb,
        send=send_s,
        take=take_s,
        put=redis["put"].cpu_s_per_gb,
        get=redis["get"].cpu_s_per_gb,
    )
    through = {row.verb: row for row in SECTIONS["service"](_AMOUNTS, say)}
    # a get of the benchmark ends with a copy out of shared memory
    predicted = {"put": costs.send + costs.take + costs.put, "get": costs.get + _copying()}
    checks = [Check(f"service redis {verb}", predicted[verb], row.cpu_s_per_gb) for verb, row in through.items()]
    return costs, checks


def _encoding() -> tuple[float, float]:
    """Stored bytes of a byte, and processor seconds of encoding a GB."""
    pages = [bf16_page(_AMOUNTS.sizes[0], seed=seed) for seed in range(_PAGES)]
    payload = memoryview(bytearray(b"\1") * max_payload_bytes(_AMOUNTS.sizes[0]))
    stored, costs = 0, []
    for _ in range(1 + _AMOUNTS.repetitions):
        cpu_s = time.process_time()
        stored = sum(encode(PLANES2, page.data, payload).payload_bytes for page in pages)
        costs.append((time.process_time() - cpu_s) / (_PAGES * _AMOUNTS.sizes[0] / GB))
    return stored / (_PAGES * _AMOUNTS.sizes[0]), statistics.median(costs[1:])


def _copying() -> float:
    """Processor seconds of copying a GB in memory."""
    pages = RecordPages(_AMOUNTS.sizes[0], _PAGES)
    copy = memcpy(pages.sources, pages.targets)
    costs = []
    for _ in range(1 + _AMOUNTS.repetitions):
        cpu_s = time.process_time()
        copy.run()
        costs.append((time.process_time() - cpu_s) / (pages.num_bytes / GB))
    return statistics.median(costs[1:])


def _redis_rows(say: Say) -> dict[str, Row]:
    """Our tier's put and get."""
    from kvstore.tiers.redis import RedisTier

    async def run(url: str) -> list[Row]:
        store = TierStore(RedisTier(url))
        try:
            return await store_rows(store, peer, _AMOUNTS, say)
        finally:
            await store.aclose()

    with temporary_folder() as folder, tcp_peer(folder) as peer, redis_server() as server:
        return {row.verb: row for row in uvloop.run(run(server.url))}


def _saving(say: Say) -> tuple[float, float]:
    """Processor seconds of a save of a GB: of the client, and of the service, which keeps it in memory."""
    say("saving to a service")
    with temporary_folder() as folder, Node(folder, "service", memory_bytes=_MEMORY_BYTES) as node:

        async def run() -> tuple[float, float]:
            client = connect(node.url)
            try:
                await client.wait_ready(deadline=Deadline.after(_START_S))
                await client.open_namespace(benchmark_namespace(), deadline=Deadline.after(_START_S))
                service = Service(client)
                await fill(service, _AMOUNTS.sizes[0], _MEMORY_BYTES)
                pages = RecordPages(_AMOUNTS.sizes[0], _AMOUNTS.num_pages(_AMOUNTS.sizes[0]))
                sent, taken = [], []
                for _ in range(1 + _AMOUNTS.repetitions):
                    batch = pages.batch()
                    own_s, node_s = time.process_time(), node.cpu_s()
                    await service.put_all(batch, _AMOUNTS.in_flights[0])
                    sent.append((time.process_time() - own_s) / (pages.num_bytes / GB))
                    taken.append((node.cpu_s() - node_s) / (pages.num_bytes / GB))
                return statistics.median(sent[1:]), statistics.median(taken[1:])
            finally:
                await client.aclose()

        return uvloop.run(run())


def report(result: tuple[NodeShape, Costs, list[Check]], console: Console | None) -> tuple[str, list[str]]:
    """Show the tables; returns the BENCH line, and nothing that is wrong."""
    shape, costs, checks = result
    ways, settings = ways_of(shape, costs), settings_of(shape, costs)
    tokens_per_gb = GB / shape.token_bytes
    loops = event_loops_for(shape, costs)
    if console is not None:
        title = f"{shape.gpus} GPUs, {shape.cores} cores, {format_bytes(shape.token_bytes)} of KV for a token"
        table = _table(title, "way", "GB/s of KV", "for each GPU", "tokens/s", "the limit", "all limits, GB/s")
        for way in ways:
            low = way.lowest
            limits = ", ".join(f"{limit.part} {limit.gb_s:.1f}" for limit in way.limits)
            each, tokens = f"{low.gb_s / shape.gpus:.1f}", f"{low.gb_s * tokens_per_gb:,.0f}"
            table.add_row(way.name, f"{low.gb_s:.1f}", each, tokens, low.part, limits)
        console.print(table)
        names = ("cost", "CPU s/GB")
        table = _table(f"costs of this machine; a byte of KV is stored as {costs.stored_ratio:.2f}", *names)
        for name, value in asdict(costs).items():
            if name != "stored_ratio":
                table.add_row(name, f"{value:.3f}")
        console.print(table)
        table = _table("whole ways on this machine, CPU s/GB", "way", "by its parts", "measured", "ratio")
        for check in checks:
            table.add_row(check.what, f"{check.predicted:.3f}", f"{check.measured:.3f}", f"{check.ratio:.2f}")
        console.print(table)
        values = ", ".join(f"{name} = {format_bytes(value)}" for name, value in settings.items())
        console.print(f"set {values}")
        console.print(
            "in a service one event loop moves the bytes; "
            f"{loops} would be needed so that none of them limits a load from Redis"
        )
    line: dict[str, Any] = {
        "node": asdict(shape),
        "costs": asdict(costs),
        "ways": [
            {"way": way.name, "limit": way.lowest.part, "gb_s": round(way.lowest.gb_s, 3)}
            | {"limits": {limit.part: round(limit.gb_s, 3) for limit in way.limits}}
            for way in ways
        ],
        "checks": [{**asdict(check), "ratio": round(check.ratio, 3)} for check in checks],
        "event_loops_needed": loops,
        "settings": settings,
    }
    return "BENCH " + json.dumps([line]), []


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title)
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def rate(text: str) -> float:
    """10^9 bytes a second, from text like `55GB/s`."""
    try:
        return parse_bytes(text.removesuffix("/s")) / GB
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a rate, like 55GB/s, got {text!r}") from error


if __name__ == "__main__":
    sys.exit(main())
