"""`kvstore verify` as a process: statuses, the report, and a directory that a service owns."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.format.names import format_name
from kvstore.runtime.deadline import Deadline
from kvstore.testing.records import make_key, make_record
from kvstore.tiers.filesystem import FilesystemTier

COMMAND = [sys.executable, "-m", "kvstore.cli", "verify"]


def run(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


async def _fill(root: Path) -> None:
    tier = await FilesystemTier.open(root, budget_bytes=1 << 30)
    for number in range(5):
        await tier.put(make_record(number, 3000), deadline=Deadline.after(30))
    await tier.aclose()


def test_a_directory_before_and_after_damage(tmp_path: Path) -> None:
    """All whole is 0; a bad record is 3, once, with its name and reason; afterwards it is out of reach and 0 again."""
    asyncio.run(_fill(tmp_path / "records"))
    where = f"file://{tmp_path / 'records'}"
    code, out, err = run(where)
    assert (code, err.count("Traceback")) == (0, 0)
    assert f"{where}: 5 records, 5 whole (15,960 bytes" in out
    path = tmp_path / "records" / format_name(make_key(3))
    path.write_bytes(path.read_bytes().replace(b"KVR1", b"KVR?"))
    code, out, _ = run(where, "--json", "--rate", "1GiB")
    report = json.loads(out)
    assert code == 3
    assert (report["tier"], report["num_records"], report["num_whole"], report["num_bad"]) == (where, 5, 4, 1)
    assert report["bad"][0]["name"] == format_name(make_key(3))
    assert "magic" in report["bad"][0]["reason"]
    assert run(where)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["file:///nonexistent/records"], 1, "there are no records: check the path"),
        (["memory:"], 2, "no such tier"),
        (["hot"], 2, "no such tier"),
        (["tape://drive"], 2, "cold must be s3://bucket/prefix"),
        (["--rate", "quick"], 2, "expected bytes"),
        (["--rate", "0"], 2, "--rate: expected at least 1 B"),
        (["--namespace", "all"], 2, "32 hex digits"),
    ],
)
def test_wrong_calls_say_what_to_change(arguments: list[str], status: int, text: str) -> None:
    """One line, and a status that tells a wrong call from a failure."""
    code, out, err = run(*arguments)
    assert (code, out) == (status, "")
    assert text in err and len(err.splitlines()) == 1
