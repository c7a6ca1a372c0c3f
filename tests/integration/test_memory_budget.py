"""A real service's resident memory while ten times its budget is pushed through it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from kvstore.api import Ack, SaveOutcome
from kvstore.client import connect
from kvstore.client.remote import RemoteStore
from kvstore.errors import KVStoreError
from kvstore.runtime.deadline import Deadline
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.servers import redis_server
from kvstore.testing.servers.process import ServerProcess

pytestmark = pytest.mark.servers

_MIB = 1 << 20
_BUDGET_BYTES = 64 * _MIB
_OVER_BYTES = 256 * _MIB
_RECORD_BYTES = 2 * _MIB
_SAVES_AT_ONCE = 16


class Service:
    """A service process with a small budget, and its memory as the kernel counts it."""

    def __init__(self, folder: Path, hot: str) -> None:
        self.url = f"unix:{folder}/service.sock"
        flags = {"listen": self.url, "hot": hot, "cold": f"file://{folder}/records", "memory-bytes": str(_BUDGET_BYTES)}
        flags |= {"disk-bytes": "256MiB"}
        command = [sys.executable, "-m", "kvstore.service"]
        command += [part for flag, value in flags.items() for part in (f"--{flag}", value)]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("KVSTORE_")}
        self.process = ServerProcess(command, folder / "service.log", environment)

    def resident_bytes(self) -> int:
        """Pages of the process that are in memory, those of its arena included."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        (line,) = [line for line in lines if line.startswith("VmRSS:")]
        return int(line.split()[1]) * 1024


@pytest.mark.parametrize(
    ("outage", "ack"),
    [
        pytest.param("", Ack.MEMORY, id="memory"),
        pytest.param("", Ack.HOT, id="hot"),
        pytest.param("frozen", Ack.MEMORY, id="with Redis frozen"),
    ],
)
async def test_ten_times_the_budget_leaves_memory_within_it(tmp_path: Path, outage: str, ack: Ack) -> None:
    """Saves as fast as the service takes them, its Redis small, or frozen: what finds no room is dropped, and at no
    moment does the process hold more than its budget and 256 MiB."""
    with redis_server(maxmemory_bytes=128 * _MIB) as hot:
        service = Service(tmp_path, hot.url)
        most_bytes = 0
        outcomes: dict[SaveOutcome, int] = {}
        try:
            service.process.start()
            async with asyncio.timeout(60.0):
                store = await _connected(service)
            if outage:
                hot.freeze()
            num_saves = 10 * _BUDGET_BYTES // _RECORD_BYTES
            for first in range(0, num_saves, _SAVES_AT_ONCE):
                saves = [_save(store, number, ack) for number in range(first, first + _SAVES_AT_ONCE)]
                for outcome in await asyncio.gather(*saves):
                    outcomes[outcome] = outcomes.get(outcome, 0) + 1
                most_bytes = max(most_bytes, service.resident_bytes())
            await store.aclose()
        finally:
            if outage:
                hot.thaw()
            service.process.kill9()
    counted = {outcome.value: count for outcome, count in outcomes.items()}
    print(f"budget={_BUDGET_BYTES // _MIB} MiB, most={most_bytes // _MIB} MiB, saves={counted}")
    assert outcomes[SaveOutcome.STORED] > 0
    if ack is Ack.MEMORY:
        assert outcomes[SaveOutcome.STORED] > num_saves // 2
    assert most_bytes < _BUDGET_BYTES + _OVER_BYTES


async def _connected(service: Service) -> RemoteStore:
    while True:
        store = connect(service.url)
        try:
            await store.open_namespace(_prompt(0).description, deadline=Deadline.after(2.0))
        except KVStoreError:
            assert service.process.running, service.process.log_tail()
            await store.aclose()
            await asyncio.sleep(0.3)
        else:
            return store


def _prompt(number: int) -> Prompt:
    return Prompt(ATTENTION, f"budget {number}", 64, payload_bytes=_RECORD_BYTES - 192)


async def _save(store: RemoteStore, number: int, ack: Ack) -> SaveOutcome:
    return await store.save(_prompt(number).record(64), ack=ack, deadline=Deadline.after(30.0))
