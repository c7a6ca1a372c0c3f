"""Services on a shared Redis and S3 that are killed at random moments while they save, and what must be true after."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.api import Ack, SaveOutcome
from kvstore.client import connect
from kvstore.errors import KVStoreError
from kvstore.format.record import Record
from kvstore.model.keys import RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.serve import bare_environment
from kvstore.testing.servers import CephRgw, RedisServer
from kvstore.testing.servers.process import ServerProcess

PENDING_LEASE_S = 1.0

_START_S = 180.0
"""However busy the machine is."""
_SAVERS = 6
"""Tasks that save on each service."""
_LARGE_BYTES = 5 << 20
"""More than one Redis value."""


def service(folder: Path, name: str, redis: RedisServer, rgw: CephRgw, bucket: str, io_threads: int) -> ServerProcess:
    """A service that is not started yet; it listens on a socket in `folder`."""
    flags = {
        "listen": f"unix:{folder / name}.sock",
        "hot": redis.url,
        "cold": f"s3://{bucket}/kills",
        "memory-bytes": "64MiB",
        "write-back-bytes": "16MiB",
        "pending-lease-s": str(PENDING_LEASE_S),
        "io-threads": str(io_threads),
    }
    arguments = [part for flag, value in flags.items() for part in (f"--{flag}", value)]
    return ServerProcess(
        [sys.executable, "-m", "kvstore.service", *arguments],
        folder / f"{name}.log",
        {**bare_environment(), **rgw.environment},
    )


@dataclass
class Promises:
    """What services have acknowledged.

    Attributes:
        by_prompt: For each prompt the records that were acknowledged at `hot` or `cold`.
        num_acknowledged: By level.
    """

    by_prompt: dict[str, dict[RecordKey, tuple[int, int]]] = field(default_factory=dict)
    num_acknowledged: dict[Ack, int] = field(default_factory=lambda: dict.fromkeys(Ack, 0))

    def made(self, prompt: Prompt, tokens: int, slice_: int, ack: Ack) -> None:
        """One more."""
        self.num_acknowledged[ack] += 1
        if ack is not Ack.MEMORY:
            self.by_prompt.setdefault(prompt.name, {})[prompt.key(tokens, 0, slice_)] = (tokens, slice_)

    def records(self) -> list[Record]:
        """Every promised record, as it must be."""
        return [
            prompt_named(name).record(tokens, 0, slice_)
            for name, places in self.by_prompt.items()
            for tokens, slice_ in places.values()
        ]


def prompt_named(name: str) -> Prompt:
    """Prompts of few and of many bytes; the name decides all of it."""
    is_large = name.endswith("large")
    return Prompt(ATTENTION, name, 64 if is_large else 256, payload_bytes=_LARGE_BYTES if is_large else 40_000)


class Node:
    """One of the services, the tasks that save on it, and the killing.

    Args:
        process: The service.
        url: Where it listens.
        promises: Told of what is acknowledged.
        numbers: Decides which prompts, levels and moments.
    """

    def __init__(self, process: ServerProcess, url: str, promises: Promises, numbers: random.Random) -> None:
        self.process = process
        self.num_kills = 0
        self.num_kills_in_flight = 0
        self._url = url
        self._promises = promises
        self._numbers = numbers
        self._num_in_flight = 0
        self._num_acknowledged = 0

    async def start(self) -> None:
        """Return when it answers."""
        self.process.start()
        async with asyncio.timeout(_START_S):
            while not await self._answers():
                assert self.process.running, self.process.log_tail()
                await asyncio.sleep(0.02)

    async def _answers(self) -> bool:
        try:
            _, writer = await asyncio.open_unix_connection(self._url.removeprefix("unix:"))
        except OSError:
            return False
        writer.close()
        return True

    async def live_and_die(self, kills: int) -> None:
        """Be killed so often, each time some moments after the first save was acknowledged."""
        for _ in range(kills):
            await self.start()
            self._num_acknowledged = 0
            savers = [asyncio.ensure_future(self._save_on()) for _ in range(_SAVERS)]
            give_up_s = time.monotonic() + _START_S
            while self._num_acknowledged == 0 and time.monotonic() < give_up_s:
                await asyncio.sleep(0.001)
            assert self._num_acknowledged, f"nothing is acknowledged:\n{self.process.log_tail()}"
            await asyncio.sleep(self._numbers.random() ** 2 * 0.4)
            self.num_kills_in_flight += self._num_in_flight > 0
            self.process.kill9()
            self.num_kills += 1
            for saver in savers:
                saver.cancel()
            ended = await asyncio.gather(*savers, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended

    async def _save_on(self) -> None:
        """Save prompts until cancelled; both nodes draw from the same prompts, so that they race for some."""
        numbers = random.Random(self._numbers.random())
        store = connect(self._url)
        try:
            while True:
                number = numbers.randrange(50) + 10 * self.num_kills
                prompt = prompt_named(f"{number}{'large' if number % 25 == 0 else ''}")
                with_level = numbers.choices(list(Ack), (2, 5, 2))[0]
                await self._save_prompt(store, prompt, with_level)
        finally:
            await store.aclose()

    async def _save_prompt(self, store: object, prompt: Prompt, ack: Ack) -> None:
        from kvstore.client.remote import RemoteStore

        assert isinstance(store, RemoteStore)
        try:
            await store.open_namespace(prompt.description, deadline=Deadline.after(5.0))
            for record, (tokens, slice_) in zip(prompt.records(), places(prompt), strict=True):
                self._num_in_flight += 1
                try:
                    outcome = await store.save(record, ack=ack, deadline=Deadline.after(20.0))
                finally:
                    self._num_in_flight -= 1
                if outcome in {SaveOutcome.STORED, SaveOutcome.EXISTS}:
                    self._num_acknowledged += 1
                    self._promises.made(prompt, tokens, slice_, ack)
        except KVStoreError:  # it was killed, and nothing was promised
            await asyncio.sleep(0.01)


def places(prompt: Prompt) -> list[tuple[int, int]]:
    """Boundary and slice of each of the prompt's records, in order."""
    num_slices = prompt.layout.groups[0].num_slices
    page_tokens = prompt.layout.page_tokens
    return [
        (tokens, slice_)
        for tokens in range(page_tokens, prompt.num_tokens + 1, page_tokens)
        for slice_ in range(num_slices)
    ]
