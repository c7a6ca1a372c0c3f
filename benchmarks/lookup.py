"""What a lookup costs: `python -m benchmarks.lookup`, on a real Redis that it starts and ends itself.

The prompt of 131,072 tokens has 2,048 boundaries, 4 groups and 8 slices; Redis holds a million entries. Some
figures are of the store's own `lookup`, from the query to the answer, and of the catalog's question alone. Others are
of the `POST /v1/query` of a router in a process of its own, from the request's first byte to the answer's last: `query`
asks about a new prompt, `query_next_turn` about one whose beginning was asked about the turn before. `hashes` is what
SHA-256 alone takes for the links of a new prompt, in Python and in the same run: no answer to `query` can be quicker.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import http.client
import json
import statistics
import sys
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt
import uvloop
from redis.asyncio import ConnectionPool, Redis
from rich.console import Console
from rich.table import Table

from benchmarks.node import temporary_folder
from kvstore.api import PrefixQuery
from kvstore.catalog.base import Addition
from kvstore.catalog.changes import packed_with
from kvstore.catalog.entry import EntryShape, Level
from kvstore.catalog.redis.catalog import RedisCatalog
from kvstore.client import ClientOptions, connect
from kvstore.format.record import Record
from kvstore.model.instance import EngineInstance
from kvstore.model.keys import Boundary, NamespaceId, PlainChain, PrefixHash, RecordKey
from kvstore.model.kinds import FullAttention
from kvstore.model.layout import GroupLayout, Layout
from kvstore.model.namespace import NamespaceDescription, describe_layout
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.meters import Meters
from kvstore.service.admin.port import Administered, admin_port
from kvstore.service.main import SWITCH_S
from kvstore.service.server import Server
from kvstore.settings import Settings, load_settings
from kvstore.store.recorder import Recorder
from kvstore.store.tiered import TieredStore
from kvstore.testing.servers import redis_server
from kvstore.testing.waiting import soon
from kvstore.tiers.base import Entry, PutOutcome, Tier, TierUsage
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.redis import RedisTier
from kvstore.wire.address import UnixAddress

__all__ = ["main"]

_LAYOUT = Layout(64, tuple(GroupLayout(FullAttention(), 8) for _ in range(4)))
_DESCRIPTION = NamespaceDescription.from_fields({"model": "lookup", "layout": describe_layout(_LAYOUT)})
_BOUNDARIES = 2048
_SCALES = (1, 4, 16)
_RECORD_BYTES = 3_000_000
_OF_TOKENS = 64
"""Prompts of token ids, those that routers ask about."""
_TURN_TOKENS = 2048
"""What a turn adds to a prompt."""
_REALLY_ADDED = 2
"""Prompts that go through the catalog's own `add`; the others' equal entries are written as they stand."""


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        what: `store_lookup`, `catalog_lookup`, `hashes`, `query`, `query_next_turn`, `s3_rounds` or `entry`.
        tokens: Of the prompt.
        p50_ms: Median.
        p90_ms: Nine of ten are quicker.
        round_trips: Most of one lookup.
        bytes_each: Of Redis for one entry, its key and its share of all tables included.
    """

    what: str
    tokens: int | None = None
    boundaries: int | None = None
    entries: int | None = None
    p50_ms: float | None = None
    p90_ms: float | None = None
    round_trips: int | None = None
    bytes_each: float | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table and a last line `BENCH [...]`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lookup", description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000, help="entries in Redis (default 1,000,000)")
    parser.add_argument("--repetitions", type=int, default=60, help="lookups for each figure (default 60)")
    parser.add_argument("--json", action="store_true", help="the last line alone")
    options = parser.parse_args(arguments)
    sys.setswitchinterval(SWITCH_S)  # as a service does
    rows = uvloop.run(_measure(options.entries, options.repetitions))
    if not options.json:
        Console(width=120).print(_table(rows))
    print("BENCH " + json.dumps([{k: v for k, v in asdict(row).items() if v is not None} for row in rows]), flush=True)
    return 0


async def _measure(num_entries: int, repetitions: int) -> list[Row]:
    with redis_server() as server:
        pool = _CountingPool(host=server.host, port=server.port)
        client = Redis(connection_pool=pool)
        try:
            catalog = RedisCatalog(client)
            await catalog.register(_DESCRIPTION.id, _LAYOUT, "", deadline=soon())
            num_prompts = max(*_SCALES, -(-num_entries // _BOUNDARIES))
            rows = [await _fill(client, catalog, num_prompts)]
            await catalog.mark_complete(await catalog.epoch(deadline=soon()), deadline=soon())
            rows += await _time_lookups(pool, catalog, server.url, num_prompts, repetitions)
        finally:
            await client.aclose()
    rows.append(await _count_rounds())
    return rows


async def _fill(client: Redis, catalog: RedisCatalog, num_prompts: int) -> Row:
    """Write the entries of `num_prompts` prompts; returns the bytes of Redis that one takes."""
    empty_bytes = (await client.info("memory"))["used_memory"]
    for number in range(_REALLY_ADDED):
        for boundary in _prompt(number, 1).boundaries:
            await catalog.add(_additions(boundary.prefix, boundary.tokens), deadline=soon())
    shape, now_s = EntryShape.of(_LAYOUT), SYSTEM_CLOCK.wall_ms() // 1000
    for number in range(_REALLY_ADDED, num_prompts):
        values = {
            f"c1/{_DESCRIPTION.id.hex()}/{{{boundary.prefix.hex()}}}": _entry(shape, boundary, now_s)
            for boundary in _prompt(number, 1).boundaries
        }
        await client.mset(values)
    used_bytes = (await client.info("memory"))["used_memory"]
    total = num_prompts * _BOUNDARIES
    name = f"c1/{_DESCRIPTION.id.hex()}/{{{_prompt(0, 1).boundaries[-1].prefix.hex()}}}"
    by_server = await client.memory_usage(name)
    each = (used_bytes - empty_bytes) / total
    return Row("entry", entries=total, bytes_each=round(max(each, float(by_server or 0)), 1))


async def _time_lookups(
    pool: _CountingPool, catalog: RedisCatalog, url: str, num_prompts: int, repetitions: int
) -> list[Row]:
    meters = Meters()
    memory, hot = MemoryTier(64 << 20), RedisTier(url)
    recorder = Recorder(catalog, Instruments(meters=meters))
    store = TieredStore(memory, hot, recorder=recorder, instruments=Instruments(meters=meters))
    rows = []
    try:
        await store.open_namespace(_DESCRIPTION, deadline=soon())
        for scale in _SCALES:
            for what in ("store_lookup", "catalog_lookup"):
                times, trips = [], 0
                for turn in range(repetitions + 3):
                    query = _prompt((turn * scale) % (num_prompts - scale + 1), scale)
                    prefixes = [boundary.prefix for boundary in query.boundaries]
                    before = await _round_trips(pool)
                    started_s = time.perf_counter()
                    if what == "store_lookup":
                        found = await store.lookup(query, deadline=soon())
                        seconds = time.perf_counter() - started_s
                        if found.resume_tokens != query.cap_tokens:
                            raise RuntimeError(f"{found.resume_tokens} tokens were found of {query.cap_tokens}")
                    else:
                        await catalog.lookup(_DESCRIPTION.id, prefixes, deadline=soon())
                        seconds = time.perf_counter() - started_s
                    if turn >= 3:  # the first ones connect, and ask whether the catalog is complete
                        times.append(seconds * 1000)
                        trips = max(trips, await _round_trips(pool) - before)
                times.sort()
                rows.append(
                    Row(
                        what,
                        tokens=scale * _BOUNDARIES * _LAYOUT.page_tokens,
                        boundaries=scale * _BOUNDARIES,
                        entries=num_prompts * _BOUNDARIES,
                        p50_ms=round(statistics.median(times), 2),
                        p90_ms=round(times[len(times) * 9 // 10], 2),
                        round_trips=trips,
                    )
                )
        settings = load_settings({"hot": url, "admin_listen": "127.0.0.1:0"})
        rows.append(_time_hashes(repetitions))
        for what in ("query", "query_next_turn"):
            rows.append(await _time_queries(what, store, settings, num_prompts, repetitions))
    finally:
        await store.aclose()
        await recorder.aclose()
        await hot.aclose()
        await memory.aclose()
    return rows


async def _time_queries(what: str, store: TieredStore, settings: Settings, num_prompts: int, repetitions: int) -> Row:
    """Questions of one router, one after the other, over one connection to a service that an engine is connected to."""
    prompts = [_tokens(turn % min(_OF_TOKENS, num_prompts)) for turn in range(repetitions + 3)]
    questions = [(_question(token_ids), len(token_ids)) for token_ids in prompts]
    if what == "query_next_turn":
        before = [token_ids[:-_TURN_TOKENS] for token_ids in prompts]
        asked_before = [(_question(token_ids), len(token_ids)) for token_ids in before]
        questions = [question for pair in zip(asked_before, questions, strict=True) for question in pair]
    instance = EngineInstance("engine", ("lookup",), step_tokens=_LAYOUT.page_tokens, whole_prompts=True)
    server = Server(store)
    with temporary_folder() as folder:
        address = UnixAddress(str(folder / "socket"))
        await server.listen([address])
        engine = connect(str(address), options=ClientOptions(instance=instance))
        try:
            await engine.open_namespace(_DESCRIPTION, deadline=soon())
            async with admin_port(Administered(settings, None, store, server)) as port:
                assert port is not None
                address_of_port = port.url.removeprefix("http://")
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as router:
                    loop = asyncio.get_running_loop()
                    times = await loop.run_in_executor(router, _ask, address_of_port, questions)
        finally:
            await engine.aclose()
            await server.aclose()
    each = len(questions) // len(prompts)  # the last one counts
    times = sorted(times[each - 1 :: each][3:])
    return Row(
        what,
        tokens=_BOUNDARIES * _LAYOUT.page_tokens,
        boundaries=_BOUNDARIES,
        entries=num_prompts * _BOUNDARIES,
        p50_ms=round(statistics.median(times), 2),
        p90_ms=round(times[len(times) * 9 // 10], 2),
    )


def _time_hashes(repetitions: int) -> Row:
    """A chain of hashes over a prompt's tokens, with nothing else."""
    words, times = [word for (word,) in Struct("64s").iter_unpack(_tokens(0).tobytes())], []
    for _ in range(repetitions):
        started_s, link, sha256 = time.perf_counter(), b"", hashlib.sha256
        for word in words:
            link = sha256(link + word).digest()
        times.append((time.perf_counter() - started_s) * 1000)
    times.sort()
    return Row(
        "hashes",
        tokens=_BOUNDARIES * _LAYOUT.page_tokens,
        boundaries=_BOUNDARIES,
        p50_ms=round(statistics.median(times), 2),
        p90_ms=round(times[len(times) * 9 // 10], 2),
    )


def _question(token_ids: npt.NDArray[np.uint32]) -> bytes:
    """As the routers of llm-d and Dynamo, in Go and Rust, write it: without spaces."""
    return json.dumps({"model": "lookup", "token_ids": token_ids.tolist()}, separators=(",", ":")).encode()


def _ask(address: str, questions: Sequence[tuple[bytes, int]]) -> list[float]:
    """Milliseconds of each question, which is a body and the number of tokens that must be found."""
    times = []
    connection = http.client.HTTPConnection(address)
    for body, num_tokens in questions:
        started_s = time.perf_counter()
        connection.request("POST", "/v1/query", body, {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        times.append((time.perf_counter() - started_s) * 1000)
        if (found := answer["default"]["engine"]["longest_matched"]) != num_tokens:
            raise RuntimeError(f"{found} tokens were found")
    connection.close()
    return times


class _CountingPool(ConnectionPool):
    """Counts its uses: the catalog takes a connection for each round trip, whose commands are sent together."""

    num_used = 0

    async def get_connection(self, *args: Any, **options: Any) -> Any:
        self.num_used += 1
        return await super().get_connection(*args, **options)  # type: ignore[no-untyped-call]


async def _round_trips(pool: _CountingPool) -> int:
    """To read entries so far, and to read records, were there any, each command by itself."""
    num_used = pool.num_used
    stats = await Redis(connection_pool=pool).info("commandstats")
    pool.num_used = num_used  # without the question itself
    return num_used + sum(int(stats[name]["calls"]) for name in ("cmdstat_strlen", "cmdstat_getrange") if name in stats)


async def _count_rounds() -> Row:
    """Most rounds of questions to a cold tier alone, over prompts that end after any number of pages in any group."""
    worst = 0
    memory = MemoryTier(64 << 20)
    query = _prompt(0, 1)
    index_of = {boundary.prefix: index for index, boundary in enumerate(query.boundaries)}
    for number in range(200):
        digest = hashlib.sha256(b"%d" % number).digest()
        cuts = [int.from_bytes(digest[4 * i : 4 * i + 4], "little") % (_BOUNDARIES + 1) for i in range(4)]
        cuts = [cuts[0]] * 4 if number % 2 else cuts
        cold = _Heads(lambda key, cuts=cuts: index_of[key.prefix] < cuts[key.group])  # type: ignore[misc]
        store = TieredStore(memory, None, cold)
        await store.open_namespace(_DESCRIPTION, deadline=soon())
        found = await store.lookup(query, deadline=soon())
        if found.resume_tokens > min(cuts) * _LAYOUT.page_tokens:
            raise RuntimeError("more was found than there is")
        worst = max(worst, cold.rounds)
        await store.aclose()
    await memory.aclose()
    return Row("s3_rounds", tokens=query.cap_tokens, boundaries=_BOUNDARIES, round_trips=worst)


class _Heads(Tier):
    """A tier of heads alone: each call of `head` stands for one round of parallel requests."""

    name = "heads"

    def __init__(self, holds: Callable[[RecordKey], bool]) -> None:
        self._holds = holds
        self.rounds = 0

    async def head(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> list[int | None]:
        self.rounds += 1
        return [_RECORD_BYTES if self._holds(key) else None for key in keys]

    async def get(
        self, key: RecordKey, *, deadline: Deadline, allocate: Callable[[int], memoryview] | None = None
    ) -> Record | None:
        return None

    async def put(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        return PutOutcome.FULL

    async def delete(self, key: RecordKey, *, deadline: Deadline) -> bool:
        return False

    async def quarantine(self, key: RecordKey, reason: str, *, seen: Record | None = None, deadline: Deadline) -> bool:
        return False

    async def scan(self, namespace: NamespaceId | None = None) -> AsyncIterator[Entry]:
        nothing: tuple[Entry, ...] = ()
        for entry in nothing:
            yield entry

    async def put_manifest(self, namespace: NamespaceId, manifest: bytes, *, deadline: Deadline) -> None:
        pass

    async def get_manifest(self, namespace: NamespaceId, *, deadline: Deadline) -> bytes | None:
        return None

    async def usage(self, *, deadline: Deadline) -> TierUsage:
        return TierUsage(None, None, None)

    async def aclose(self) -> None:
        pass


def _prompt(number: int, scale: int) -> PrefixQuery:
    """A prompt whose boundaries are those of `scale` of the short ones."""
    prefixes = [prefix for part in range(scale) for prefix in _prefixes(number + part)]
    step = _LAYOUT.page_tokens
    boundaries = tuple(Boundary((index + 1) * step, prefix) for index, prefix in enumerate(prefixes))
    return PrefixQuery(_DESCRIPTION.id, boundaries, local_tokens=0, cap_tokens=len(prefixes) * step, step_tokens=step)


def _prefixes(number: int) -> Iterator[PrefixHash]:
    """Of a short prompt: of token ids for those that a router asks for, else invented, which is quicker."""
    if number < _OF_TOKENS:
        chain = PlainChain(step_tokens=_LAYOUT.page_tokens)
        return (boundary.prefix for boundary in chain.extend(array("I", _tokens(number).tobytes())))
    return (PrefixHash(hashlib.sha256(b"%d:%d" % (number, index)).digest()) for index in range(_BOUNDARIES))


def _tokens(number: int) -> npt.NDArray[np.uint32]:
    """The token ids of a short prompt, as of a vocabulary of 150,000."""
    return np.random.default_rng(number).integers(150_000, size=_BOUNDARIES * _LAYOUT.page_tokens, dtype=np.uint32)


def _additions(prefix: PrefixHash, tokens: int) -> list[Addition]:
    return [
        Addition(RecordKey(_DESCRIPTION.id, prefix, group, slice_), Level.HOT, _RECORD_BYTES + slice_, tokens, prefix)
        for group in range(4)
        for slice_ in range(8)
    ]


_TEMPLATE: list[bytes] = []


def _entry(shape: EntryShape, boundary: Boundary, now_s: int) -> bytes:
    """What `add` makes of all slices of a boundary."""
    if not _TEMPLATE:
        _TEMPLATE.append(packed_with(shape, _additions(boundary.prefix, boundary.tokens), now_s))
    entry = bytearray(_TEMPLATE[0])
    entry[4:8], entry[8:40] = boundary.tokens.to_bytes(4, "little"), boundary.prefix
    return bytes(entry)


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="lookups", min_width=110)
    names = ("what", "tokens", "boundaries", "entries", "p50_ms", "p90_ms", "round_trips", "bytes_each")
    for name in names:
        table.add_column(name.replace("_", " "), justify="left" if name == "what" else "right")
    for row in rows:
        values = asdict(row)
        table.add_row(*(f"{v:,}" if isinstance(v := values[name], int) else str(v or "") for name in names))
    return table


if __name__ == "__main__":
    sys.exit(main())
