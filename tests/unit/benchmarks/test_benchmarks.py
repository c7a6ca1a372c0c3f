"""The benchmarks' last lines, on sizes that take no time, and what they make of their figures; no figure is judged."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from benchmarks import (
    documents,
    io_threads,
    offloading,
    overhead,
    quick,
    repeat_ttft,
    restart,
    retention,
    store,
    timeline,
)
from benchmarks.lmcache_peer import lmcache_server
from kvstore.testing.engine import EngineFailed
from kvstore.testing.program import run_program

TINY = ["--total-bytes", "32KiB", "--repetitions", "1"]
COLUMNS = {"what", "size_bytes", "in_flight", "gb_s", "ceiling", "ceiling_gb_s", "ratio", "cpu_s_per_gb"}


def rows_of(output: str) -> list[dict[str, Any]]:
    """Of the last line."""
    word, _, line = output.splitlines()[-1].partition(" ")
    assert word == "BENCH"
    return json.loads(line)


# ---- byte paths


def test_codec(capsys: pytest.CaptureFixture[str]) -> None:
    """A table, then the line: each row beside memcpy of the same bytes, and the ratio is that of the two figures."""
    assert quick.main(["--only", "codec", "--sizes", "4KiB,8KiB", *TINY]) == 0
    output = capsys.readouterr().out
    rows = rows_of(output)
    calls = ["codec encode", "codec encode, tiles", "codec decode", "codec decode, tiles", "verify"]
    assert [row["what"] for row in rows] == calls
    assert [row["size_bytes"] for row in rows] == [8192] * 4 + [8192 - 64]
    assert [0.6 < row.pop("stored_ratio") < 0.8 for row in rows[:4]] == [True] * 4
    for row in rows:
        assert row["what"] in output.partition("BENCH ")[0]
        assert set(row) == COLUMNS
        assert (row["ceiling"], row["in_flight"]) == ("memcpy", 1)
        # both figures and their ratio are rounded to four places
        assert row["ratio"] == pytest.approx(row["gb_s"] / row["ceiling_gb_s"], rel=0.02, abs=2e-4)


def test_loads(capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each compression: a small prompt through a service and a rank of its own, whose blocks are compared."""
    assert quick.main(["--only", "load", "--json", *TINY]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert [row["what"] for row in rows] == ["load", "load, not compressed"]
    for row in rows:
        assert set(row) == COLUMNS
        assert (row["size_bytes"], row["ceiling"]) == (32 << 20, "memcpy")


def test_ordering(capsys: pytest.CaptureFixture[str]) -> None:
    """A small prompt is loaded and compared, then loaded by a device that copies nothing, beside the link's time."""
    from benchmarks import ordering  # needs torch

    flags = ["--models", "8B", "--tokens", "256", "--repetitions", "1", "--gpu-link", "10GB/s", "--json"]
    assert ordering.main(flags) == 0
    (row,) = rows_of(capsys.readouterr().out)
    assert (row["model"], row["records"], row["num_bytes"]) == ("8B", 8, 32 << 20)
    assert row["link_ms"] == pytest.approx((32 << 20) / 1e7)
    assert row["ratio"] == pytest.approx(row["link_ms"] / row["interpreter_ms"])


def test_offloading(capsys: pytest.CaptureFixture[str]) -> None:
    """Stores and loads of chunks through a service, of which the loaded bytes are compared, beside a raw socket."""
    assert offloading.main(["--only", "service", "--sizes", "8KiB", "--in-flight", "1,2", "--json", *TINY]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert [(row["what"], row["in_flight"]) for row in rows] == [
        ("service store", 1),
        ("service load", 1),
        ("service store", 2),
        ("service load", 2),
    ]
    assert all(set(row) == COLUMNS and row["ceiling"] == "raw Unix socket" for row in rows)


@pytest.mark.servers
def test_documents_in_the_planned_order(capsys: pytest.CaptureFixture[str]) -> None:
    """One row: each promised hit is what the store restores, or the program fails; and some tokens are saved."""
    flags = ["--queries", "12", "--documents", "6", "--each", "4", "--tokens", "150", "--page", "64"]
    assert documents.main([*flags, "--exponents", "1.5", "--within-ms", "1000", "--json"]) == 0
    (row,) = rows_of(capsys.readouterr().out)
    assert row["ratio"] == pytest.approx(row["computed_given"] / row["computed_planned"], abs=1e-3)
    assert row["ratio"] > 1.0
    assert len(row["ratios"]) == 4
    assert 0 < row["computed_planned"] < row["tokens"]


def test_blending(capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each way to compute the trained model's questions: all right in full, and what blending computes."""
    from benchmarks import blend  # needs torch and transformers

    assert blend.main(["--prompts", "3", "--random", "", "--json"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert [(row["way"], row["ratio"]) for row in rows] == [
        *(("full", None), ("reused", None), ("rotated", None)),
        *(("blended", ratio) for ratio in (0.05, 0.15, 0.3, 1.0)),
    ]
    full, last = rows[0], rows[-1]
    assert (full["right"], full["kl"], full["computed"], full["faster"]) == (1.0, 0.0, 1.0, 1.0)
    assert (last["right"], last["computed"]) == (1.0, 1.0) and last["kl"] < 1e-4
    assert all(row["prompts"] == 3 and row["tokens"] == 234 for row in rows)


@pytest.mark.servers
def test_redis(capsys: pytest.CaptureFixture[str]) -> None:
    """Our tier with one and two threads, redis-py and the service, put and get, for each size and number in flight."""
    sizes = ["--sizes", "4KiB,5MiB", "--in-flight", "1,3"]
    assert store.main(["--only", "redis,service", "--json", *sizes, *TINY]) == 0
    output = capsys.readouterr().out
    assert len(output.splitlines()) == 1
    rows = rows_of(output)
    whats = {
        f"{client}_{verb}"
        for client in ("redis", "redis_2_threads", "redispy", "service_redis")
        for verb in ("put", "get")
    }
    seen = {(row["what"], row["size_bytes"], row["in_flight"]) for row in rows}
    whats |= {"redis_raw_put", "redis_raw_get", "redis_raw_ranged_get"}
    assert seen == {(what, size, calls) for what in whats for size in (4096, 5 << 20) for calls in (1, 3)}
    for row in rows:
        raw = {
            f"raw_{verb}_{figure}"
            for verb in ("put", "get")
            for figure in ("gb_s", "ratio")
            if row["what"] in (f"redis_{verb}", f"redis_2_threads_{verb}")
        }
        assert set(row) == COLUMNS | raw
        assert row["gb_s"] > 0 and row["ceiling_gb_s"] > 0 and row["cpu_s_per_gb"] > 0
        # the ceiling has the number of connections that the tier uses: one for each record in flight, at most four
        calls = row["in_flight"]
        assert row["ceiling"] == ("raw loopback TCP" if calls == 1 else f"raw loopback TCP x {calls}")


def test_io_threads(capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each verb, whose parts are positive, and more threads gain no more than their number."""
    assert io_threads.main(["--json", "--sizes", "1MiB", "--repetitions", "1"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert [row["verb"] for row in rows] == ["put", "get"]
    for row in rows:
        shares = io_threads.Shares(**row)
        assert shares.size_bytes == 1 << 20 and shares.lock_s > 0 and shares.total_s > shares.lock_s
        assert shares.gain(2) <= 2 and shares.gain(8) <= 8


def test_a_section_that_fails_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a server cannot be started, the other sections are measured and the exit status is 1."""

    def fails(amounts: object, say: object) -> list[Any]:
        raise OSError("no room for a server")

    monkeypatch.setitem(quick.SECTIONS, "s3", fails)
    assert quick.main(["--only", "s3,codec", "--json", "--sizes", "4KiB", *TINY]) == 1
    captured = capsys.readouterr()
    assert "s3: no room for a server" in captured.err
    assert len(rows_of(captured.out)) == 5


def test_an_interrupted_benchmark_shows_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sections that had ended, in a table; the exit status is that of an interrupt, and there is no last line."""

    def is_interrupted(amounts: object, say: object) -> list[Any]:
        raise KeyboardInterrupt

    monkeypatch.setitem(quick.SECTIONS, "s3", is_interrupted)
    assert quick.main(["--only", "codec,s3", "--sizes", "4KiB", *TINY]) == 130
    captured = capsys.readouterr()
    assert "codec decode, tiles" in captured.out and "BENCH" not in captured.out
    assert "interrupted" in captured.err


def test_an_engine_that_fails_is_reported_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback, exit status 1; a failure of the figures shows them all the same."""

    def measure(say: object) -> int:
        raise EngineFailed("the engine ended (exit 9)")

    assert run_program("bench", measure, lambda _result, _console: ("BENCH []", []), quiet=True) == 1
    captured = capsys.readouterr()
    assert "the engine ended (exit 9)" in captured.err and captured.out == ""
    assert run_program("bench", lambda _: 7, lambda seen, _: (f"BENCH {seen}", ["wrong"]), quiet=True) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("BENCH 7\n", "bench: wrong\n")


# ---- places


def test_openings_of_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without an index, after a clean end and after a kill, all records are found; no file remains."""
    assert restart.main(["--records", "700", "--folder", str(tmp_path)]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert [row["what"] for row in rows] == ["without an index", "after a clean end", "after a kill"]
    assert all(row["records"] == 700 and row["seconds"] > 0 for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_retention_of_a_directory(capsys: pytest.CaptureFixture[str]) -> None:
    """A row with rates, their ratio, and how much of the budget was held; nothing is refused."""
    tiny = ["--budget", "2MiB", "--times", "2", "--payload", "8KiB", "--repetitions", "1"]
    assert retention.main(["--only", "directory", *tiny]) == 0
    (row,) = rows_of(capsys.readouterr().out)
    assert (row["what"], row["budget_bytes"], row["refused"]) == ("directory", 2 << 20, 0)
    assert row["written_bytes"] >= 4 << 20
    assert row["gb_s"] > 0 and row["unbounded_gb_s"] > 0 and row["ratio"] > 0
    assert 0 < row["usage"] <= 1.05


# ---- with engines, which are not started here


def test_the_ratio_of_a_repeat_is_that_of_medians() -> None:
    """One slow run of either kind does not decide; the ceiling is one transfer, one copy and a hit in its own cache."""
    figures = repeat_ttft.Figures(
        recompute_s=[10.0, 12.0, 99.0],
        local_s=[0.04] * 3,
        restored_s=[0.3, 0.2, 9.0],
        transfer_s=[0.05] * 3,
        copy_s=[0.01] * 3,
        decode_s=[0.02] * 3,
        external_tokens=8192,
        stored_bytes=1 << 20,
        raw_bytes=2 << 20,
        tiers={"redis"},
    )
    assert figures.ratio() == pytest.approx(40.0)
    assert figures.ceiling_s() == pytest.approx(0.1)
    console = Console(width=200, record=True, quiet=True)
    line, failures = repeat_ttft.report([(repeat_ttft.MODELS["llama-demo"], 8192, figures)], console)
    (row,) = rows_of(line)
    assert failures == []
    assert (row["ratio"], row["ratio_wanted"], row["ceiling_s"], row["tiers"]) == (40.0, 40.0, 0.1, ["redis"])
    assert row["repetitions"]["restored_s"] == [0.3, 0.2, 9.0]


def test_a_restored_run_that_answers_otherwise_fails_the_benchmark() -> None:
    """The figures of a run with another answer are not used; the line stays JSON where tokens differ."""
    one = [1.0]
    figures = repeat_ttft.Figures(one, one, one, one, one, one, outputs_equal=False, difference=math.inf)
    line, failures = repeat_ttft.report([(repeat_ttft.MODELS["llama-demo"], 8193, figures)], None)
    assert failures == ["llama-demo: a restored run's answer is not that from an engine's own cache"]
    assert rows_of(line)[0]["logprob_difference"] is None


MARKS = [
    timeline.Mark("arrived", 1.0, 1.0, 0),
    timeline.Mark("hash", 1.001, 1.01, 0),
    timeline.Mark("lookup", 1.01, 1.02, 0),
    timeline.Mark("stage", 1.03, 1.13, 100),
    timeline.Mark("order", 1.14, 1.141, 100),
    timeline.Mark("locate", 1.141, 1.145, 100),
    timeline.Mark("decode", 1.15, 1.20, 100),
    timeline.Mark("decode", 1.15, 1.19, 100),
    timeline.Mark("scatter", 1.20, 1.22, 100),
    timeline.Mark("loaded", 1.22, 1.225, 350),
    timeline.Mark("noticed", 1.23, 1.23, 350),
    timeline.Mark("forward", 1.24, 1.27, 350),
    timeline.Mark("decode", 1.28, 1.29, 350),
    timeline.Mark("forward", 1.30, 1.31, 350),
]


def test_the_parts_of_a_first_token() -> None:
    """They follow each other, and their sum is the time of the token; what comes later is not theirs."""
    parts = timeline.parts_of(MARKS, ttft_s=0.3)
    assert sum(parts[part] for part in timeline.PARTS) == pytest.approx(0.3)
    assert [round(parts[part] * 1e3) for part in timeline.PARTS] == [10, 10, 10, 100, 10, 5, 80, 5, 10, 30, 30]
    assert (parts["decode, threads"], parts["scatter, threads"]) == (pytest.approx(0.09), pytest.approx(0.02))
    assert parts["faults"] == 250
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(timeline.timeline_table("a model", [parts, parts], {"stage": 0.05, "first forward": 0.03}))
    shown = console.export_text()
    assert "100.0" in shown and "50.0" in shown and "300.0" in shown and "80.0" in shown


def test_a_token_that_was_not_restored_has_no_parts() -> None:
    """The part that the engine did not come to is named."""
    with pytest.raises(RuntimeError, match="stage"):
        timeline.parts_of([mark for mark in MARKS if mark.name in ("arrived", "hash", "lookup", "forward")], 0.3)


def test_what_is_marked_exists() -> None:
    """The functions of the connector that are marked may be renamed; each is wrapped once."""
    pytest.importorskip("torch")
    program = "import benchmarks.marks as marks; from connector.prefix_hash import PrefixChain"
    program += "; PrefixChain(16).extend(range(32)); print([mark[0] for mark in marks.take()], marks.take())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['hash'] []"


def test_prompts_leave_one_token_behind_a_block() -> None:
    """The engine computes the tokens behind the last block: prompts are chosen so that it is one token."""
    assert repeat_ttft.MODELS["llama-demo"].prompt_tokens % 128 == 1
    assert repeat_ttft.MODELS["qwen3next-demo"].prompt_tokens % 640 == 1


def test_overhead_is_fair() -> None:
    """Of three engines each is first once in three turns, and in some turn each is measured behind each other."""
    orders = [overhead.in_turn(number, 3) for number in range(-3, 3)]
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    assert [order[0] for order in orders] == [0, 1, 2, 0, 1, 2]
    assert len({pair for order in orders for pair in itertools.pairwise(order)}) == 6


def test_overhead_compares_round_by_round() -> None:
    """A round that was slow for all engines is slow for the baseline too; less time for a token is a higher ratio."""
    baseline = overhead.Figures([1000.0, 500.0, 1000.0], [0.02, 0.04, 0.02], [0.0] * 3)
    figures = overhead.Figures([970.0, 490.0, 990.0], [0.025, 0.05, 0.02], [0.1] * 3)
    prefill, decode = figures.ratios(baseline)
    assert prefill == pytest.approx([0.97, 0.98, 0.99])
    assert decode == pytest.approx([0.8, 0.8, 1.0])
    chosen = argparse.Namespace(free_core=False, sets=1, rounds=3, prompt_tokens=2048)
    rows = [(overhead.BASELINE, baseline), (overhead.VARIANTS["saves"], figures)]
    line, failures = overhead.report(rows, chosen, None)
    first, second = rows_of(line)
    assert failures == []
    assert (first["prefill_ratio"], first["decode_ratio"]) == (1.0, 1.0)
    assert (second["variant"], second["prefill_ratio"], second["decode_ratio"]) == ("saves", 0.98, 0.8)


def test_torch_reports_that_there_is_no_amx() -> None:
    """`bench-ttft --without-amx` replaces functions of torch that its releases may rename."""
    pytest.importorskip("torch")
    program = "import torch; (torch.cpu._is_amx_tile_supported, torch.cpu._init_amx); import benchmarks.without_amx"
    program += "; print(torch.cpu._is_amx_tile_supported(), torch.cpu._init_amx())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_peer_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache's server ends at once: the error has its last words, and nothing is waited for."""
    program = tmp_path / "lmcache"
    program.write_text("#!/bin/sh\necho no such adapter\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    redis: Any = SimpleNamespace(port=1)
    with pytest.raises(RuntimeError, match="no such adapter"), lmcache_server(redis, tmp_path):
        pass
