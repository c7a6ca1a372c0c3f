"""Files of a service are for its own user alone, also in a folder with open permissions; each log record is one
line."""

from __future__ import annotations

import logging
import os
import stat
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.compose import open_store
from kvstore.eviction.holdings import Quota
from kvstore.service.logs import ServiceFormatter
from kvstore.settings import load_settings
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.store_node import save_all
from kvstore.testing.waiting import soon


@pytest.fixture
def lax_umask() -> Iterator[None]:
    before = os.umask(0o000)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in files}


@pytest.mark.usefixtures("lax_umask")
@pytest.mark.parametrize("was_lax", [False, True], ids=["fresh", "made by an earlier release"])
async def test_every_file_is_its_users_alone(tmp_path: Path, was_lax: bool) -> None:
    """In a folder that everybody may use, with a umask that takes nothing away: records, manifests, catalog, orders."""
    folder = tmp_path / "records"
    folder.mkdir(mode=0o777)
    settings = load_settings({"hot": "memory:", "cold": f"file://{folder}", "memory_bytes": 8 << 20})
    prompt = Prompt(ATTENTION, "a", 256)
    for run in range(2 if was_lax else 1):
        async with open_store(settings) as store:
            await save_all(store, prompt)
            await store.inner.drain(soon()) if hasattr(store, "inner") else await store.drain(soon())
            assert store.operations.operator_rules is not None
            await store.operations.operator_rules.set_quota("red", Quota(0, 1 << 20), deadline=soon())
            seen = modes(folder)
            if was_lax and run == 0:
                for name in seen:
                    if "catalog" in name or "pending" in name:
                        (folder / name).chmod(0o666)
    assert {"catalog.db"} <= seen.keys() and len(seen) > 8
    assert {name: oct(mode) for name, mode in seen.items() if mode & 0o077} == {}


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_line_is_one_line_whatever_a_peer_says(log_format: str) -> None:
    """Every character that begins a line, moves a cursor or turns the direction of text is escaped; others are not."""
    formatter = ServiceFormatter()
    formatter.shape(log_format, ())  # type: ignore[arg-type]
    told = "".join(map(chr, [*range(0x20, 0x3000), 0xFEFF, *range(0x1F600, 0x1F640)]))
    record = logging.LogRecord("kvstore", logging.INFO, __file__, 1, "client %s", (told,), None)
    line = formatter.format(record)
    assert len(line.splitlines()) == 1
    bad = [character for character in line if unicodedata.category(character) in ("Cc", "Zl", "Zp")]
    turning = [character for character in line if unicodedata.bidirectional(character) in TURNS]
    assert (bad, turning) == ([], [])
    if log_format == "text":
        assert "é" in line and "\\x85" in line and "\\u2028" in line and "\\u202e" in line


def test_a_traceback_moves_no_cursor() -> None:
    """The message of an error may hold what a peer sent."""
    try:
        raise ValueError("\x1b[2J\u0085\u202e\x9b")
    except ValueError as error:
        record = logging.LogRecord("kvstore", logging.ERROR, __file__, 1, "failed", (), (ValueError, error, None))
    text = ServiceFormatter().format(record)
    assert "\\x1b[2J\\x85\\u202e\\x9b" in text
    assert len(text.split("\n")) == len(text.splitlines()) == 2


TURNS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
