"""What the benchmarks with engines make of their figures; the engines themselves are not started here."""

from __future__ import annotations

import argparse
import itertools
import json
import math

import pytest
from rich.console import Console

from benchmarks import overhead, repeat_ttft
from benchmarks.overhead import BASELINE, VARIANTS
from benchmarks.program import run_benchmark
from benchmarks.repeat_ttft import MODELS
from kvstore.testing.engine import EngineFailed


def line_of(text: str) -> list[dict[str, object]]:
    word, _, rest = text.partition(" ")
    assert word == "BENCH"
    return json.loads(rest)


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
    line, failures = repeat_ttft.report([(MODELS["llama-demo"], 8192, figures)], console)
    (row,) = line_of(line)
    assert failures == []
    assert (row["ratio"], row["ratio_wanted"], row["ceiling_s"], row["tiers"]) == (40.0, 40.0, 0.1, ["redis"])
    assert row["repetitions"]["restored_s"] == [0.3, 0.2, 9.0]  # type: ignore[index]


def test_a_restored_run_that_answers_otherwise_fails_the_benchmark() -> None:
    """A figure of a run with another answer is not worth having; the line stays JSON where tokens differ."""
    one = [1.0]
    figures = repeat_ttft.Figures(one, one, one, one, one, one, outputs_equal=False, difference=math.inf)
    line, failures = repeat_ttft.report([(MODELS["llama-demo"], 8193, figures)], None)
    assert failures == ["llama-demo: a restored run's answer is not that from an engine's own cache"]
    assert line_of(line)[0]["logprob_difference"] is None


def test_prompts_leave_one_token_behind_a_block() -> None:
    """What stands behind the last block is computed anew: prompts are chosen so that it is one token."""
    assert MODELS["llama-demo"].prompt_tokens % 128 == 1
    assert MODELS["qwen3next-demo"].prompt_tokens % 640 == 1


def test_overhead_is_fair() -> None:
    """Of three engines each is first once in three turns, and in some turn each is measured behind each other."""
    orders = [overhead.in_turn(number, 3) for number in range(-3, 3)]
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    assert [order[0] for order in orders] == [0, 1, 2, 0, 1, 2]
    assert len({pair for order in orders for pair in itertools.pairwise(order)}) == 6


def test_overhead_compares_round_by_round() -> None:
    """A round that was slow for everybody is slow for the baseline too; less time for a token is a higher ratio."""
    baseline = overhead.Figures([1000.0, 500.0, 1000.0], [0.02, 0.04, 0.02], [0.0] * 3)
    figures = overhead.Figures([970.0, 490.0, 990.0], [0.025, 0.05, 0.02], [0.1] * 3)
    prefill, decode = figures.ratios(baseline)
    assert prefill == pytest.approx([0.97, 0.98, 0.99])
    assert decode == pytest.approx([0.8, 0.8, 1.0])
    chosen = argparse.Namespace(free_core=False, sets=1, rounds=3, prompt_tokens=2048)
    line, failures = overhead.report([(BASELINE, baseline), (VARIANTS["saves"], figures)], chosen, None)
    first, second = line_of(line)
    assert failures == []
    assert (first["prefill_ratio"], first["decode_ratio"]) == (1.0, 1.0)
    assert (second["variant"], second["prefill_ratio"], second["decode_ratio"]) == ("saves", 0.98, 0.8)


@pytest.mark.parametrize(("main", "flag"), [(overhead.main, "--variants"), (repeat_ttft.main, "--models")])
def test_unknown_names_are_usage_errors(main: object, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that nobody has ends with the list of those there are."""
    with pytest.raises(SystemExit) as refused:
        main([flag, "tape"])  # type: ignore[operator]
    assert refused.value.code == 2
    assert "tape" in capsys.readouterr().err


def test_an_engine_that_fails_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback, exit status 1."""

    def measure(say: object) -> None:
        raise EngineFailed("the engine ended (exit 9)")

    assert run_benchmark(measure, lambda _result, _console: ("BENCH []", []), quiet=True) == 1
    captured = capsys.readouterr()
    assert "the engine ended (exit 9)" in captured.err
    assert captured.out == ""


def test_a_failure_of_the_figures_still_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    """The line is printed and the exit status is 1."""
    assert run_benchmark(lambda _say: 7, lambda seen, _console: (f"BENCH {seen}", ["wrong"]), quiet=True) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("BENCH 7\n", "bench: wrong\n")
