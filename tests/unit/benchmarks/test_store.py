"""The store benchmark's output, on sizes that take no time; no figure is judged."""

from __future__ import annotations

import json

import pytest

from benchmarks.store import SECTIONS, main

COLUMNS = {"what", "size_bytes", "in_flight", "gb_s", "ceiling", "ceiling_gb_s", "ratio", "cpu_s_per_gb"}


@pytest.mark.servers
def test_rows_of_redis(capsys: pytest.CaptureFixture[str]) -> None:
    """Our tier, redis-py and the service, put and get, for each size and number in flight, in the last line."""
    tiny = ["--sizes", "4KiB,5MiB", "--in-flight", "1,3", "--total-bytes", "32KiB", "--repetitions", "1"]
    assert main(["--only", "redis,service", *tiny]) == 0
    output = capsys.readouterr().out
    word, _, line = output.splitlines()[-1].partition(" ")
    assert word == "BENCH"
    rows = json.loads(line)
    whats = {f"{store}_{verb}" for store in ("redis", "redispy", "service_redis") for verb in ("put", "get")}
    seen = {(row["what"], row["size_bytes"], row["in_flight"]) for row in rows}
    whats |= {"redis_raw_get", "redis_raw_ranged_get"}
    assert seen == {(what, size, calls) for what in whats for size in (4096, 5 << 20) for calls in (1, 3)}
    for row in rows:
        assert set(row) == COLUMNS | ({"raw_get_gb_s", "raw_get_ratio"} if row["what"] == "redis_get" else set())
        assert row["gb_s"] > 0 and row["ceiling_gb_s"] > 0 and row["cpu_s_per_gb"] > 0
        # the ceiling has as many connections as the tier uses: one for each record under way, four at most
        if not row["what"].startswith("redispy"):
            calls = row["in_flight"]
            assert row["ceiling"] == ("raw loopback TCP" if calls == 1 else f"raw loopback TCP x {calls}")


@pytest.mark.parametrize(
    "arguments", [["--only", "tape"], ["--sizes", "12"], ["--in-flight", "0"], ["--verbs", "head"]]
)
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A section or verb that does not exist, records smaller than their header and no calls are usage errors."""
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_section_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a server cannot be had the exit status tells, and the line is there all the same."""

    def fails(plan: object, say: object) -> list[object]:
        raise OSError("no room for a server")

    monkeypatch.setitem(SECTIONS, "s3", fails)
    assert main(["--only", "s3", "--json"]) == 1
    captured = capsys.readouterr()
    assert "s3: no room for a server" in captured.err
    assert captured.out == "BENCH []\n"
