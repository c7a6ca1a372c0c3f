"""A service whose disk is full: it starts, serves from memory, and uses the disk again once there is room."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.small_disk import run_on_disk

_COMMON = """
import asyncio, os, sys
from pathlib import Path

root, when = Path(sys.argv[1]), sys.argv[2]

def fill():
    with open(root / "fill", "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                pass
    assert os.statvfs(root).f_bavail == 0
"""

_STORE = (
    _COMMON
    + """
from kvstore.api import SaveOutcome
from kvstore.compose import open_store
from kvstore.runtime.deadline import Deadline
from kvstore.settings import load_settings
from kvstore.store.upkeep import catalog_keeper
from kvstore.testing.store_node import save_all
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.waiting import soon

catalog_keeper._REST_S = 0.5

settings = load_settings({
    "cold": f"file://{root / 'records'}", "memory_bytes": 32 << 20, "disk_bytes": 1 << 30,
    "listen": f"unix:{root / 'sock'}", "drain_timeout_s": 0.2,
})

async def check(store, name):
    prompt = Prompt(ATTENTION, name, 64)
    await save_all(store, prompt)
    assert (await store.lookup(prompt.query(), deadline=soon())).resume_tokens == 64
    staged = await store.stage(prompt.query(), deadline=soon())
    assert staged.resume_tokens == 64
    await store.release(staged.lease)
    await store.drain(Deadline.after(1.0))
    tiers = {tier.name: tier for tier in await store.operations.tiers(deadline=soon())}
    assert not any(tier.is_open for tier in tiers.values())
    return tiers["filesystem"].usage.num_records

async def main():
    if when != "the first start":
        async with open_store(settings) as store:
            assert await check(store, "before") > 0
            if when == "while it runs":
                fill()
                await check(store, "filled")
    if when != "while it runs":
        fill()
    async with open_store(settings) as store:
        held = await check(store, "full")
        os.unlink(root / "fill")
        async with asyncio.timeout(30):
            number = 0
            while await check(store, f"room {number}") == held:
                number += 1
                await asyncio.sleep(0.1)
            while not await store.recorder.catalog.is_complete(deadline=soon()):
                await asyncio.sleep(0.1)
    async with open_store(settings) as store:
        assert await check(store, "again") > held

asyncio.run(main())
"""
)

_SERVICE = (
    _COMMON
    + """
import signal, socket, subprocess, time
from kvstore.client import BlockingStore
from kvstore.runtime.deadline import Deadline
from kvstore.testing.prompts import ATTENTION, Prompt

log = open(root / "log", "wb", buffering=0)
fill()
if when == "serve":
    verb = "import sys; from kvstore.cli.main import main; sys.exit(main())"
    address = f"unix:{root / 'sock'}"
    command = ["-c", verb, "serve", "--cold", f"file://{root / 'records'}", "--listen", address]
    command += ["--admin-listen", "off"]
else:
    from kvstore.wire.private_place import private_socket_path
    address = f"unix:{private_socket_path(root / 'private')}"
    command = ["-m", "kvstore.service", "--embedded", "--directory", str(root / "private")]
process = subprocess.Popen([sys.executable, *command, "--memory-bytes", "32MiB"], stdout=log, stderr=log)
until = time.monotonic() + 60
while not Path(address.removeprefix("unix:")).is_socket():
    assert process.poll() is None and time.monotonic() < until, (process.poll(), (root / "log").read_bytes())
    time.sleep(0.05)
with BlockingStore(address) as store:
    prompt = Prompt(ATTENTION, "a", 64)
    for _ in range(100):
        try:
            store.open_namespace(prompt.description, deadline=Deadline.after(5.0))
            break
        except Exception as error:
            said = error
            time.sleep(0.1)
    else:
        raise said
    for record in prompt.records():
        store.save(record, deadline=Deadline.after(5.0))
    assert store.lookup(prompt.query(), deadline=Deadline.after(5.0)).resume_tokens == 64
process.send_signal(signal.SIGTERM)
assert process.wait(30) == 0
"""
)


@pytest.mark.parametrize("when", ["the first start", "a later start", "while it runs"])
def test_a_store_on_a_full_disk(when: str, tmp_path: Path) -> None:
    """Saves and lookups go on; once there is room records are kept there, and the catalog knows all of them."""
    run_on_disk(tmp_path / "disk", "4m", _STORE, when)


@pytest.mark.parametrize("kind", ["serve", "embedded"])
def test_a_service_on_a_full_disk(kind: str, tmp_path: Path) -> None:
    """The process itself, with its log on that disk too: it serves, and ends without a complaint."""
    run_on_disk(tmp_path / "disk", "4m", _SERVICE, kind)
