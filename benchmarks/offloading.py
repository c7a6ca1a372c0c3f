"""`python -m benchmarks.offloading`: chunks of vLLM's offloading, between its host tier and a service.

What our tier does with a job of vLLM: from the call that submits it until it can be reported. The host tier is memory
of this process.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import uvloop

from benchmarks.ceilings import Peer, tcp_peer, unix_peer
from benchmarks.measure import Amounts, Ceiling, Row, Work, measure
from benchmarks.node import Node, temporary_folder
from benchmarks.program import Section, run_sections
from benchmarks.stores import SAVE_MEMORY_BYTES
from connector.offloading.lookups import Request
from connector.offloading.transfers import Job, Transfers
from kvstore.client import BlockingStore, ClientOptions, PageDoor, describe_pages
from kvstore.codec import CodecPool
from kvstore.errors import Unavailable
from kvstore.testing.program import Say
from kvstore.testing.servers import redis_server

__all__ = ["main"]

_MIB = 1 << 20
_CHUNK_TOKENS = 256
_WAIT_S = 60.0
_POLL_S = 0.0005


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; returns the exit status."""
    gc.collect()
    gc.freeze()  # as vLLM's engine does once it has started; else a turn may collect what was imported
    return run_sections(
        "python -m benchmarks.offloading",
        "Measure stores and loads of vLLM's offloading, beside raw sockets.",
        arguments,
        sections=SECTIONS,
        defaults=Amounts(sizes=(_MIB, 4 * _MIB), in_flights=(1, 4), total_bytes=128 * _MIB, repetitions=5),
    )


class _Tier:
    """The part of our tier behind vLLM's calls, with a host tier of its own.

    Args:
        url: Of the service.
        chunk_bytes: Of a chunk.
        num_chunks: That are stored or loaded in one turn.
    """

    def __init__(self, url: str, chunk_bytes: int, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        made = np.random.default_rng(1).integers(0, 256, (num_chunks, chunk_bytes), np.uint8)
        self.memory = made
        self._store = BlockingStore(url, options=ClientOptions(save_memory_bytes=SAVE_MEMORY_BYTES))
        self._threads = CodecPool(num_threads=4, limit_bytes=256 * _MIB)
        self._transfers = Transfers(made.data, _WAIT_S)
        described = describe_pages({"benchmark": chunk_bytes}, page_tokens=_CHUNK_TOKENS)
        self._doors = {0: PageDoor(self._store, described, timeout_s=_WAIT_S, pool=self._threads)}
        self._doors[0].open()
        self._numbers = count()

    def prompt(self, name: str) -> tuple[Request, list[bytes]]:
        """The keys of a prompt with a chunk for each slot."""
        request, keys = Request(name), []
        for number in range(self.num_chunks):
            keys.append(hashlib.sha256(f"{name} {number}".encode()).digest() + bytes(4))
            request.note(keys[-1], (number + 1) * _CHUNK_TOKENS)
        return request, keys

    def move(self, prompt: tuple[Request, list[bytes]], num_jobs: int, *, loads: bool) -> None:
        """Store or load all slots.

        Raises:
            RuntimeError: Not all chunks were.
        """
        request, keys = prompt
        step = -(-len(keys) // num_jobs)
        for start in range(0, len(keys), step):
            slots = list(range(start, min(start + step, len(keys))))
            job = Job(next(self._numbers), request, [keys[slot] for slot in slots], slots, loads)
            self._transfers.submit(job, self._doors)
        moved = 0
        while self._transfers.num_running:
            moved += sum(len(done.succeeded) for done in self._transfers.finished())
            time.sleep(_POLL_S)
        if moved != len(keys):
            raise RuntimeError(f"{len(keys) - moved} of {len(keys)} chunks were not {'loaded' if loads else 'stored'}")

    def wait_ready(self) -> None:
        """Return when the service answers again.

        Raises:
            Unavailable: It does not.
        """
        ends_s = time.monotonic() + _WAIT_S
        while True:
            try:
                self._doors[0].present([b"any"])
                return
            except Unavailable:
                if time.monotonic() > ends_s:
                    raise
                time.sleep(0.05)

    def close(self) -> None:
        self._transfers.close()
        self._store.close()
        self._threads.close()


class _Stores(Work):
    """Store every slot under new keys."""

    def __init__(self, tier: _Tier, num_jobs: int, settle: Callable[[], object]) -> None:
        self._tier, self._num_jobs, self._settle = tier, num_jobs, settle
        self._turns = count()

    async def before(self) -> None:
        self._prompt = self._tier.prompt(f"{self._num_jobs} {next(self._turns)}")

    async def run(self) -> None:
        self._tier.move(self._prompt, self._num_jobs, loads=False)

    async def after(self) -> None:
        self._settle()


class _Loads(Work):
    """Load every slot, from a service that has the chunks in the tier that is measured."""

    def __init__(self, tier: _Tier, num_jobs: int, forget: Callable[[], object]) -> None:
        self._tier, self._num_jobs, self._forget = tier, num_jobs, forget
        self._prompt = tier.prompt("loaded")
        self._expected = tier.memory.copy()
        tier.move(self._prompt, 1, loads=False)

    async def before(self) -> None:
        self._forget()
        self._tier.wait_ready()
        self._tier.memory[:] = 0

    async def run(self) -> None:
        self._tier.move(self._prompt, self._num_jobs, loads=True)

    async def after(self) -> None:
        if not np.array_equal(self._tier.memory, self._expected):
            raise RuntimeError("other bytes were loaded than were stored")


def _rows(name: str, node: Node, peer: Peer, amounts: Amounts, say: Say, *, restarts: bool) -> list[Row]:
    """Rows of one service.

    Args:
        restarts: Whether the service's memory is empty before each load.
    """
    rows: list[Row] = []

    async def row(what: str, work: Work, ceiling: Ceiling, tier: _Tier, num_jobs: int) -> None:
        say(f"{what}: {tier.num_chunks} chunks in {num_jobs} jobs")
        size_bytes = tier.memory.shape[1]
        sizes = {"size_bytes": size_bytes, "num_bytes": tier.memory.nbytes, "in_flight": num_jobs}
        rows.append(await measure(what, work, ceiling, **sizes, repetitions=amounts.repetitions))

    def forget() -> None:
        if restarts:
            node.wait_idle()
            node.stop()
            node.start()

    for size_bytes in amounts.sizes:
        tier = _Tier(node.url, size_bytes, amounts.num_pages(size_bytes))
        slots = [memoryview(slot) for slot in tier.memory]
        try:
            for num_jobs in amounts.in_flights:
                if "put" in amounts.verbs:
                    work: Work = _Stores(tier, num_jobs, node.settle)
                    uvloop.run(
                        row(f"{name} store", work, peer.puts([bytearray(slot) for slot in slots]), tier, num_jobs)
                    )
                if "get" in amounts.verbs:
                    targets = [memoryview(bytearray(size_bytes)) for _ in slots]
                    work = _Loads(tier, num_jobs, forget)
                    uvloop.run(row(f"{name} load", work, peer.gets(targets), tier, num_jobs))
        finally:
            tier.close()
    return rows


def _service(amounts: Amounts, say: Say) -> list[Row]:
    """The service's memory, beside the same bytes over one Unix socket."""
    say("service: starting it")
    memory_bytes = max(512 * _MIB, 6 * amounts.total_bytes)
    with (
        temporary_folder() as folder,
        unix_peer(folder) as peer,
        Node(folder, "service", memory_bytes=memory_bytes) as node,
    ):
        say("service: filling its memory")  # else the first rows would show what a first touch costs
        tier = _Tier(node.url, 4 * _MIB, 16)
        try:
            for turn in range(-(-memory_bytes // tier.memory.nbytes)):
                tier.move(tier.prompt(f"fills memory {turn}"), 1, loads=False)
            node.settle()
        finally:
            tier.close()
        return _rows("service", node, peer, amounts, say, restarts=False)


def _redis(amounts: Amounts, say: Say) -> list[Row]:
    """Redis behind a service that has just started, so its memory is empty and not touched yet, beside the same bytes
    over one TCP connection. Loads only: a store is done when the service has it."""
    say("redis: starting it")
    logging.getLogger("kvstore.client").setLevel(logging.ERROR)  # it warns whenever the service is started afresh
    with (
        temporary_folder() as folder,
        tcp_peer(folder) as peer,
        redis_server() as redis,
        Node(folder, "service", hot=redis.url, memory_bytes=max(512 * _MIB, 6 * amounts.total_bytes)) as node,
    ):
        return _rows("redis", node, peer, replace(amounts, verbs=("get",)), say, restarts=True)


SECTIONS: dict[str, Section] = {"service": _service, "redis": _redis}


if __name__ == "__main__":
    sys.exit(main())
