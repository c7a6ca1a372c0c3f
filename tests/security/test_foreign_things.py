"""Things that are not ours, in our folders and under the names of our files: the service starts, serves and ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest

from kvstore.runtime.deadline import Deadline
from kvstore.testing.attacked import AttackedService
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.tiers.base import PutOutcome
from kvstore.tiers.filesystem import FilesystemTier


async def test_a_directory_with_foreign_things(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Directories and links where records are written and put aside: a line names them, and records are stored."""
    root, prompt = tmp_path / "records", Prompt(ATTENTION, "a", 128)
    for number in range(70):
        (root / "quarantine" / f"{number:03d}").mkdir(parents=True)
    (root / "quarantine" / "link").symlink_to(tmp_path / "nowhere")
    for name in ("0.tmp", "1.tmp"):
        (root / "tmp" / name).mkdir(parents=True)
    os.mkfifo(root / "index")
    (root / "index.new").write_bytes(b"x")
    for _ in range(2):
        tier = await FilesystemTier.open(root, budget_bytes=1 << 30)
        outcomes = [await tier.put(record, deadline=Deadline.after(20)) for record in prompt.records()]
        await tier.aclose()
    assert outcomes == [PutOutcome.EXISTS] * len(outcomes)
    for path in (root / "tmp" / "0.tmp", root / "quarantine" / "069", root / "index"):
        assert f"remove it path={path}" in caplog.text
    assert caplog.text.count("not a file of this service") == 4  # a line for each folder at each start


async def test_pipes_under_the_names_of_our_files(folder: Path) -> None:
    """Opened like files they would keep a thread for ever, and with it the end of the service."""
    prompt = Prompt(ATTENTION, "a", 128, payload_bytes=1000)

    async def save() -> None:
        client = service.client()
        await client.open_namespace(prompt.description, deadline=Deadline.after(20))
        for record in prompt.records():
            await client.save(record, deadline=Deadline.after(20))
        await client.aclose()

    records = folder / "records"
    with AttackedService(folder) as service:
        await save()
    (records / "orders.json").write_text(json.dumps({}))
    manifests = list(records.glob("v1/*/manifest"))
    assert len(manifests) == 1
    for path in (records / "orders.json", records / "index", *manifests):
        path.unlink()
        os.mkfifo(path)
    with AttackedService(folder) as service:
        await save()
        os.kill(service.pid, signal.SIGTERM)
        give_up_s = time.monotonic() + 15
        while service.process.running and time.monotonic() < give_up_s:
            await asyncio.sleep(0.02)
        has_ended = not service.process.running
        if not has_ended:
            os.kill(service.pid, signal.SIGKILL)
    assert has_ended
