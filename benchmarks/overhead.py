"""`python -m benchmarks.overhead`: what a connector that helps nothing costs the engine. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.node import WORK, Node, temporary_folder
from benchmarks.program import run_benchmark
from kvstore.testing.checkpoints import VOCABULARY, write_checkpoint
from kvstore.testing.engine import EngineProcess, EngineSpec, Request, seeded_prompt, start_engine
from kvstore.testing.servers import redis_server

__all__ = ["main"]

_ANSWER_S = 240.0
_FIRST_SEED = 31_000
_WARM_UP_TOKENS = 300
_WARM_UP_ROUNDS = 3
_BLOCK_TOKENS = 128
_STORED_BYTES = 20_000
"""Of a token, or a little more: the service's memory is full after the warm-up, as a cache's is. While it fills, the
system zeroes fresh pages on the engine's cores."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Variant:
    """An engine that is compared with the one without a connector.

    Attributes:
        name: For people.
        wanted: The least ratio of both figures that counts as good. It is printed beside the measured ones.
        connector: Beside the url; `None`: no connector.
        redis: Whether a Redis stands behind its service, on the same cores.
    """

    name: str
    wanted: float
    connector: Mapping[str, Any] | None
    redis: bool = False


BASELINE = Variant("no connector", 1.0, None)
VARIANTS = {
    # nothing is stored, and nothing is saved, so that it stays like that
    "zero-hit": Variant("zero-hit", 0.97, {"mode": "load"}),
    "saves": Variant("saves", 0.93, {"mode": "both"}),
    "saves-redis": Variant("saves-redis", 0.93, {"mode": "both"}, redis=True),
}


@dataclass(slots=True)
class Figures:
    """Of one variant, a value for each round.

    Attributes:
        prefill_tokens_s: Prompt tokens over the time to the first generated one.
        decode_s: Seconds for each further token.
        settle_s: Seconds from the complete answer to the last save.
    """

    prefill_tokens_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)
    settle_s: list[float] = field(default_factory=list)

    def ratios(self, baseline: Figures) -> tuple[list[float], list[float]]:
        """Of prefill and decode throughput, round by round: more is better."""
        prefill = [mine / its for mine, its in zip(self.prefill_tokens_s, baseline.prefill_tokens_s, strict=True)]
        decode = [its / mine for mine, its in zip(self.decode_s, baseline.decode_s, strict=True)]
        return prefill, decode


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--variants", type=lambda text: text.split(","), default=list(VARIANTS), metavar="NAMES")
    parser.add_argument("--sets", type=int, default=3, metavar="COUNT", help="fresh engines of every kind")
    parser.add_argument("--rounds", type=int, default=5, metavar="COUNT", help="of each set")
    parser.add_argument("--prompt-tokens", type=int, default=2048, metavar="COUNT")
    parser.add_argument("--tokens", type=int, default=65, metavar="COUNT", help="to generate")
    parser.add_argument("--free-core", action="store_true", help="the engines compute on all cores but one")
    parser.add_argument("--json", action="store_true", help="print the BENCH line alone")
    chosen = parser.parse_args(arguments)
    if unknown := sorted(set(chosen.variants) - set(VARIANTS)):
        parser.error(f"there is no {', '.join(unknown)}: choose from {', '.join(VARIANTS)}")
    variants = [BASELINE, *(VARIANTS[name] for name in chosen.variants)]
    return run_benchmark(
        lambda say: measure(variants, chosen, say),
        lambda figures, console: report(figures, chosen, console),
        quiet=chosen.json,
    )


def measure(variants: Sequence[Variant], chosen: argparse.Namespace, say: Say) -> list[tuple[Variant, Figures]]:
    """Several sets of engines, since equal processes differ by a tenth for all their lives; figures of all sets."""
    figures = [(variant, Figures()) for variant in variants]
    for number in range(1, chosen.sets + 1):
        with ExitStack() as stack:
            _measure_set(figures, number, stack, chosen, partial(_say_of_set, say, number))
    return figures


def _say_of_set(say: Say, number: int, text: str) -> None:
    say(f"set {number}: {text}")


def in_turn(number: int, count: int) -> list[int]:
    """An order of `count` engines for each number: they are first in turn, and none is always behind the same one.

    Each place has its own luck with memory and processors, which would count as the variant's.
    """
    step = 1 if number % 2 else -1
    return [(number + step * place) % count for place in range(count)]


def _measure_set(
    figures: Sequence[tuple[Variant, Figures]], number: int, stack: ExitStack, chosen: argparse.Namespace, say: Say
) -> None:
    """All engines live at once and take turns, each with a prompt of the round that it has never seen."""
    checkpoint = write_checkpoint("llama-demo", WORK / "checkpoints")
    folder = stack.enter_context(temporary_folder())
    engines: dict[int, tuple[EngineProcess, Node | None]] = {}
    for place in in_turn(number, len(figures)):
        variant, _ = figures[place]
        say(f"starting an engine: {variant.name}")
        engines[place] = _start(variant, checkpoint, folder, stack, chosen)
    for turn in range(-_WARM_UP_ROUNDS, chosen.rounds):  # these are not counted
        for place in in_turn(turn, len(figures)):
            measured = figures[place][1] if turn >= 0 else Figures()
            _ask(*engines[place], _FIRST_SEED + turn, chosen, measured)
        if turn >= 0:
            rates = (f"{one.prefill_tokens_s[-1]:.0f}/s {one.decode_s[-1] * 1000:.1f} ms" for _, one in figures)
            say(f"round {turn + 1}/{chosen.rounds}: {', '.join(rates)}")


def _start(
    variant: Variant, checkpoint: Path, folder: Path, stack: ExitStack, chosen: argparse.Namespace
) -> tuple[EngineProcess, Node | None]:
    environment = _without_last_core() if chosen.free_core else {}
    node = None
    connector = None
    if variant.connector is not None:
        hot = stack.enter_context(redis_server()).url if variant.redis else "memory:"
        memory_bytes = _WARM_UP_ROUNDS * _STORED_BYTES * chosen.prompt_tokens
        node = stack.enter_context(Node(folder, variant.name, hot=hot, memory_bytes=memory_bytes))
        connector = {"url": node.url, **variant.connector}
    spec = EngineSpec(
        checkpoint=checkpoint,
        connector=connector,
        environment=environment,
        max_model_len=chosen.prompt_tokens + chosen.tokens,
        kv_cache_bytes=1 << 30,
        arguments={"num_gpu_blocks_override": _num_blocks(chosen)},
    )
    engine = stack.enter_context(start_engine(spec, work=WORK, name=f"bench-{variant.name.replace(' ', '-')}"))
    engine.generate([Request(seeded_prompt(_FIRST_SEED - 9, _WARM_UP_TOKENS), max_tokens=2)], timeout_s=_ANSWER_S)
    return engine, node


def _without_last_core() -> dict[str, str]:
    """vLLM's compute threads stay on the other cores: what it sets itself for workers in processes of their own. These
    engines are one process, in which torch has read it before vLLM does."""
    cores = list(map(str, sorted(os.sched_getaffinity(0))[:-1]))
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(cores),
        "OMP_NUM_THREADS": str(len(cores)),
        "OMP_PLACES": ",".join(f"{{{core}}}" for core in cores),
        "OMP_PROC_BIND": "true",
    }


def _num_blocks(chosen: argparse.Namespace) -> int:
    """So few that the rounds before the first one touch all: a connector warms the cache, which is not what counts."""
    tokens: int = chosen.prompt_tokens + chosen.tokens
    return _WARM_UP_ROUNDS * -(-tokens // _BLOCK_TOKENS) + 1


def _ask(engine: EngineProcess, node: Node | None, seed: int, chosen: argparse.Namespace, figures: Figures) -> None:
    prompt = seeded_prompt(seed, chosen.prompt_tokens, vocabulary=VOCABULARY)
    (answer,) = engine.generate([Request(prompt, max_tokens=chosen.tokens, logprobs=None)], timeout_s=_ANSWER_S)
    if answer.num_cached_tokens:
        raise RuntimeError(f"{answer.num_cached_tokens} tokens were not computed: the prompt was known")
    figures.prefill_tokens_s.append(chosen.prompt_tokens / answer.ttft_s)
    figures.decode_s.append((answer.total_s - answer.ttft_s) / (chosen.tokens - 1))
    figures.settle_s.append(node.wait_idle() if node is not None else 0.0)


def report(
    rows: Sequence[tuple[Variant, Figures]], chosen: argparse.Namespace, console: Console | None
) -> tuple[str, list[str]]:
    """Show a table; returns the BENCH line and what is wrong."""
    cores = "all cores but one" if chosen.free_core else "all cores, which the service shares"
    title = f"{chosen.sets} sets of engines on {cores}; {chosen.rounds} rounds each: medians, ratios by round"
    table = Table(title=title)
    for name in ("engine", "prefill tokens/s", "ratio", "decode ms/token", "ratio", "wanted", "saves end after"):
        table.add_column(name, justify="left" if name == "engine" else "right")
    baseline, line, median = rows[0][1], [], statistics.median
    for variant, figures in rows:
        prefill, decode = figures.ratios(baseline)
        table.add_row(
            variant.name,
            f"{median(figures.prefill_tokens_s):.0f}",
            f"{median(prefill):.3f} ({min(prefill):.3f}-{max(prefill):.3f})",
            f"{median(figures.decode_s) * 1000:.2f}",
            f"{median(decode):.3f} ({min(decode):.3f}-{max(decode):.3f})",
            f"{variant.wanted}",
            f"{median(figures.settle_s):.1f} s",
        )
        line.append(
            {
                "variant": variant.name,
                "free_core": chosen.free_core,
                "prompt_tokens": chosen.prompt_tokens,
                "sets": chosen.sets,
                "rounds": chosen.rounds,
                "prefill_ratio": round(median(prefill), 4),
                "decode_ratio": round(median(decode), 4),
                "ratio_wanted": variant.wanted,
                "prefill_ratios": [round(value, 4) for value in prefill],
                "decode_ratios": [round(value, 4) for value in decode],
                "prefill_tokens_s": round(median(figures.prefill_tokens_s), 1),
                "decode_ms": round(median(figures.decode_s) * 1000, 3),
                "settle_s": round(median(figures.settle_s), 3),
            }
        )
    if console is not None:
        console.print(table)
    return "BENCH " + json.dumps(line), []


if __name__ == "__main__":
    sys.exit(main())
