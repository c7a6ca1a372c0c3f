"""`python -m benchmarks.repeat_ttft`: a long prompt's first token, computed and restored from Redis. See README.md."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import lmcache_peer
from benchmarks.ceilings import memcpy, tcp_peer
from benchmarks.node import WORK, Node, temporary_folder, timed
from benchmarks.pages import bf16_page
from benchmarks.program import run_benchmark
from benchmarks.timeline import Mark, parts_of, round_trip_s, timeline_table
from connector.prefix_hash import PrefixChain
from kvstore.codec import PLANES2, decode_into, encode, max_payload_bytes
from kvstore.testing.checkpoints import VOCABULARY, write_checkpoint
from kvstore.testing.engine import Answer, EngineProcess, EngineSpec, Request, seeded_prompt, start_engine
from kvstore.testing.servers import RedisServer, redis_server

__all__ = ["main"]

_PROMPT_SEED = 8192
_WARM_UP_TOKENS = 300
_ANSWER_S = 900.0
"""Without AVX-512 a processor computes bfloat16 prompts of this length for minutes."""

_MAX_TOKENS = 16
_PAGE_BYTES = 4 << 20

_WITHOUT_AMX = "benchmarks.without_amx"
_MARKS = "benchmarks.marks"
_LMCACHE = "benchmarks.lmcache_beside_vllm"
_TAKE_MARKS = f"__import__('sys').modules['{_MARKS}'].take()"
_WITHOUT_AMX_ENVIRONMENT = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Model:
    """A model and its prompt.

    Attributes:
        prompt_tokens: One token more than whole blocks, since hits end on a block: one is left to compute.
        wanted: The least ratio that counts as good. It is printed beside the measured one.
        block_tokens: Of a block.
        lmcache: Whether LMCache serves it on a CPU.
    """

    name: str
    prompt_tokens: int
    wanted: float
    block_tokens: int
    lmcache: bool = False


MODELS = {
    "llama-demo": Model("llama-demo", 64 * 128 + 1, 40.0, 128, lmcache=True),
    "qwen3next-demo": Model("qwen3next-demo", 14 * 640 + 1, 10.0, 640),
}


@dataclass(slots=True)
class Figures:
    """Of one model, each list with a value for each repetition, in seconds.

    Attributes:
        recompute_s: A fresh engine without a store computes the prompt.
        local_s: The same engine is asked again, and resumes from its own cache at the same token.
        restored_s: A fresh engine and a fresh service, the prompt's records in Redis.
        transfer_s: The same stored bytes between two processes, over one TCP connection.
        copy_s: The same pages' bytes from memory to memory.
        decode_s: As many bytes of such pages decoded, by all processors at once: what compression costs the machine.
        outputs_equal: Whether every restored run answered as the engine did from its own cache: all tokens, and all log
            probabilities bit for bit.
        difference: Of log probabilities, the largest between these two; infinite where tokens differ.
        recompute_difference: The same between an engine's computed answer and that from its own cache: a prompt that is
            computed in other pieces is rounded otherwise.
        amx: Whether engines compute with AMX, which makes a bfloat16 prompt several times as fast.
        timelines: The parts of each restored first token, see timeline.py.
        hash_s: Hashing the prompt, in a process that does nothing else.
        round_trip_s: A command to Redis and its answer.
        lmcache_s: As `restored_s`, by a fresh server of LMCache and an engine with its connector, from the same Redis.
        lmcache_tokens: That it restored.
    """

    recompute_s: list[float] = field(default_factory=list)
    local_s: list[float] = field(default_factory=list)
    restored_s: list[float] = field(default_factory=list)
    transfer_s: list[float] = field(default_factory=list)
    copy_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)
    external_tokens: int = 0
    stored_bytes: int = 0
    raw_bytes: int = 0
    tiers: set[str] = field(default_factory=set)
    outputs_equal: bool = True
    difference: float = 0.0
    recompute_difference: float = 0.0
    amx: bool = False
    timelines: list[dict[str, float]] = field(default_factory=list)
    hash_s: list[float] = field(default_factory=list)
    round_trip_s: list[float] = field(default_factory=list)
    lmcache_s: list[float] = field(default_factory=list)
    lmcache_tokens: int = 0

    def ratio(self) -> float:
        """Of the medians."""
        return statistics.median(self.recompute_s) / statistics.median(self.restored_s)

    def ceiling_s(self) -> float:
        """One transfer, one copy, a hit in the engine's own cache: on this machine it cannot take less.

        Decoding is reported beside it: it overlaps with the others as far as there are processors for both.
        """
        return sum(map(statistics.median, (self.transfer_s, self.copy_s, self.local_s)))

    def ceilings_of_parts(self) -> dict[str, float]:
        """The least that each part of a timeline can take; a part that is not named needs nothing."""
        median = statistics.median
        return {
            "hash": median(self.hash_s),
            "lookup": median(self.round_trip_s),
            "stage": median(self.transfer_s),
            "decode and scatter": max(median(self.decode_s), median(self.copy_s)),
            "first forward": median(self.local_s),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.repeat_ttft", description=__doc__)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS), metavar="NAMES")
    parser.add_argument("--repetitions", type=int, default=5, metavar="COUNT", help="fresh engines and services")
    parser.add_argument("--prompt-tokens", type=int, metavar="COUNT", help="instead of each model's own")
    parser.add_argument("--without-amx", action="store_true", help="engines compute as on a processor that has no AMX")
    parser.add_argument("--json", action="store_true", help="print the BENCH line alone")
    chosen = parser.parse_args(arguments)
    if unknown := sorted(set(chosen.models) - set(MODELS)):
        parser.error(f"there is no {', '.join(unknown)}: choose from {', '.join(MODELS)}")

    def measure(say: Say) -> list[tuple[Model, int, Figures]]:
        rows = []
        for name in chosen.models:
            tokens = chosen.prompt_tokens or MODELS[name].prompt_tokens
            figures = measure_model(MODELS[name], tokens, chosen.repetitions, say, without_amx=bool(chosen.without_amx))
            rows.append((MODELS[name], tokens, figures))
        return rows

    return run_benchmark(measure, report, quiet=chosen.json)


def measure_model(
    model: Model, prompt_tokens: int, repetitions: int, say: Say, *, without_amx: bool = False
) -> Figures:
    """Save once, then compute and restore in turn, so that other load of the machine meets both alike."""
    engine = EngineSpec(checkpoint=write_checkpoint(model.name, WORK / "checkpoints"), kv_cache_bytes=1 << 30)
    if without_amx:
        engine = replace(engine, environment=_WITHOUT_AMX_ENVIRONMENT, preload=(_WITHOUT_AMX,))
    prompt = seeded_prompt(_PROMPT_SEED, prompt_tokens, vocabulary=VOCABULARY)
    with temporary_folder() as folder, redis_server() as redis:
        figures = Figures(amx=_has_amx() and not without_amx)
        bench = _Bench(engine, prompt, model.block_tokens, redis, folder, figures)
        say(f"{model.name}: an engine computes and saves the prompt")
        bench.save()
        with_lmcache = model.lmcache and lmcache_peer.is_installed()
        if with_lmcache:
            say(f"{model.name}: an engine with LMCache computes and saves it too")
            try:
                bench.save_by_lmcache()
            except (OSError, RuntimeError) as error:  # ours is measured all the same
                with_lmcache = False
                say(f"{model.name}: without LMCache, which does not run here: {error}")
        for turn in range(1, repetitions + 1):
            where = f"{model.name} {turn}/{repetitions}"
            say(f"{where}: a fresh engine computes {prompt_tokens:,} tokens")
            resumed = bench.compute()
            say(f"{where}: {bench.figures.recompute_s[-1]:.2f} s; a fresh engine and a fresh service restore them")
            answer = bench.restore(turn)
            bench.compare(answer, resumed)
            say(f"{where}: {answer.ttft_s:.3f} s with {answer.num_cached_tokens:,} tokens restored")
            if with_lmcache:
                answer = bench.restore_by_lmcache(turn)
                say(f"{where}: {answer.ttft_s:.3f} s with {answer.num_cached_tokens:,} tokens restored by LMCache")
            bench.measure_ceilings()
    return bench.figures


@dataclass(frozen=True, slots=True)
class _Bench:
    engine: EngineSpec
    prompt: tuple[int, ...]
    block_tokens: int
    redis: RedisServer
    folder: Path
    figures: Figures

    @property
    def hot(self) -> str:
        return self.redis.url

    @property
    def request(self) -> Request:
        return Request(self.prompt, max_tokens=_MAX_TOKENS)

    def save(self) -> None:
        with Node(self.folder, "saves", hot=self.hot) as node:
            spec = replace(self.engine, connector={"url": node.url, "mode": "save"})
            with start_engine(spec, work=WORK, name="bench-save") as engine:
                engine.generate([_warm_up(0)], timeout_s=_ANSWER_S)
                engine.generate([self.request], timeout_s=_ANSWER_S)
                node.wait_idle()

    def compute(self) -> Answer:
        """Returns the answer from the engine's own cache."""
        with start_engine(self.engine, work=WORK, name="bench-compute") as engine:
            engine.generate([_warm_up(1)], timeout_s=_ANSWER_S)
            (computed,) = engine.generate([self.request], timeout_s=_ANSWER_S)
            (again,) = engine.generate([self.request], timeout_s=_ANSWER_S)
        self.figures.recompute_difference = max(self.figures.recompute_difference, _first_difference(again, computed))
        self.figures.recompute_s.append(computed.ttft_s)
        self.figures.local_s.append(again.ttft_s)
        return again

    def restore(self, turn: int) -> Answer:
        figures = self.figures
        with Node(self.folder, f"restores{turn}", hot=self.hot) as node:
            spec = replace(self.engine, connector={"url": node.url, "mode": "load"})
            spec = replace(spec, preload=(*spec.preload, _MARKS))
            with start_engine(spec, work=WORK, name="bench-restore") as engine:
                engine.generate([_warm_up(1 + turn)], timeout_s=_ANSWER_S)
                engine.evaluate(_TAKE_MARKS)
                (answer,) = engine.generate([self.request], timeout_s=_ANSWER_S)
                marks = [Mark(*values) for values in engine.evaluate(_TAKE_MARKS)]
                raw_bytes = engine.connector_counters().get("connector_loaded_bytes", 0)
            counters = node.counters()
        figures.restored_s.append(answer.ttft_s)
        figures.timelines.append(parts_of(marks, answer.ttft_s))
        figures.external_tokens = answer.num_cached_tokens
        figures.raw_bytes, figures.stored_bytes = int(raw_bytes), int(counters.get("served_bytes", 0))
        figures.tiers |= {name.split('"')[1] for name in counters if name.startswith("served_records{")}
        return answer

    def save_by_lmcache(self) -> None:
        with self._lmcache_engine("bench-lmcache-save") as (engine, server):
            engine.generate([_warm_up(0)], timeout_s=_ANSWER_S)
            engine.generate([self.request], timeout_s=_ANSWER_S)
            server.wait_stored()

    def restore_by_lmcache(self, turn: int) -> Answer:
        with self._lmcache_engine("bench-lmcache-restore") as (engine, _):
            engine.generate([_warm_up(1 + turn)], timeout_s=_ANSWER_S)
            (answer,) = engine.generate([self.request], timeout_s=_ANSWER_S)
        self.figures.lmcache_s.append(answer.ttft_s)
        self.figures.lmcache_tokens = answer.num_cached_tokens
        return answer

    @contextmanager
    def _lmcache_engine(self, name: str) -> Iterator[tuple[EngineProcess, lmcache_peer.LMCacheServer]]:
        """A fresh server of LMCache and a fresh engine that uses it."""
        with lmcache_peer.lmcache_server(self.redis, self.folder) as server:
            spec = replace(
                self.engine,
                kv_transfer=server.kv_transfer,
                preload=(*self.engine.preload, _LMCACHE),
                environment={**self.engine.environment, **lmcache_peer.ENVIRONMENT},
            )
            with start_engine(spec, work=WORK, name=name) as engine:
                yield engine, server

    def compare(self, restored: Answer, resumed: Answer) -> None:
        """A restored answer with that from an engine's own cache."""
        if restored.num_cached_tokens != resumed.num_cached_tokens:
            raise RuntimeError(
                f"{restored.num_cached_tokens} tokens were restored, {resumed.num_cached_tokens} are in an engine's own"
                " cache: see the engine's log"
            )
        difference = restored.difference(resumed)
        self.figures.outputs_equal &= difference == 0.0
        self.figures.difference = max(self.figures.difference, difference)

    def measure_ceilings(self) -> None:
        """The same bytes, moved once through a socket and once in memory; a first round of each is not timed."""
        figures, piece = self.figures, 4 << 20
        if not figures.stored_bytes:
            raise RuntimeError("nothing was restored: see the engine's log")
        stored = [memoryview(bytearray(b"\1") * piece) for _ in range(-(-figures.stored_bytes // piece))]
        with tcp_peer(self.folder) as peer:
            gets = peer.gets(stored)
            gets.run()
            seconds = timed([gets.run])
        figures.transfer_s.append(seconds * figures.stored_bytes / (piece * len(stored)))
        source, target = np.ones(figures.raw_bytes, np.uint8), np.ones(figures.raw_bytes, np.uint8)
        copy = memcpy([source.data], [target.data])
        copy.run()
        figures.copy_s.append(timed([copy.run]))
        figures.decode_s.append(_decoding_s(figures.raw_bytes))
        figures.hash_s.append(timed([lambda: PrefixChain(self.block_tokens).extend(self.prompt)]))
        figures.round_trip_s.append(round_trip_s(self.redis.port))


def _decoding_s(num_bytes: int) -> float:
    """Seconds until all processors together have decoded `num_bytes` of bf16 pages."""
    page = bf16_page(_PAGE_BYTES, seed=0)
    payload = memoryview(bytearray(max_payload_bytes(_PAGE_BYTES)))
    encoded = encode(PLANES2, page.data, payload)
    num_threads = os.cpu_count() or 1
    shares = [len(range(index, -(-num_bytes // _PAGE_BYTES), num_threads)) for index in range(num_threads)]

    def decode(num_pages: int) -> None:
        target = memoryview(bytearray(b"\1") * _PAGE_BYTES)
        for _ in range(num_pages):
            decode_into(encoded.chain, payload[: encoded.payload_bytes], target)

    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(decode, [1] * num_threads))  # not timed: threads start, their scratch becomes real
        return timed([lambda: list(threads.map(decode, shares))])


def _has_amx() -> bool:
    """Whether Linux lists it among the processor's flags. False on other systems."""
    try:
        return "amx_tile" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _first_difference(one: Answer, other: Answer) -> float:
    """Of the log probabilities that both list for the first token."""
    mine, theirs = one.logprobs[0], other.logprobs[0]
    return max(abs(mine[token] - theirs[token]) for token in mine.keys() & theirs.keys())


def _warm_up(number: int) -> Request:
    """A short prompt that no other run asks for: vLLM compiles at its first one."""
    return Request(seeded_prompt(9000 + number, _WARM_UP_TOKENS), max_tokens=2)


def report(rows: Sequence[tuple[Model, int, Figures]], console: Console | None) -> tuple[str, list[str]]:
    """Show a table; returns the BENCH line and what is wrong."""
    table = Table(title="time to first token, computed and restored from Redis by a fresh engine and a fresh service")
    for name in (
        "model",
        "AMX",
        "tokens",
        "restored",
        "computed",
        "restored in",
        "ratio",
        "LMCache",
        "own cache",
        "ceiling",
        "decoding",
        "stored",
    ):
        table.add_column(name, justify="left" if name == "model" else "right")
    line, failures = [], []
    for model, tokens, figures in rows:
        median = statistics.median
        table.add_row(
            model.name,
            "yes" if figures.amx else "no",
            f"{tokens:,}",
            f"{figures.external_tokens:,}",
            f"{median(figures.recompute_s):.2f} s",
            f"{median(figures.restored_s):.3f} s",
            f"{figures.ratio():.1f}",
            f"{median(figures.lmcache_s):.3f} s" if figures.lmcache_s else "-",
            f"{median(figures.local_s):.3f} s",
            f"{figures.ceiling_s():.3f} s",
            f"{median(figures.decode_s):.3f} s",
            f"{figures.stored_bytes / (1 << 20):.0f} MiB",
        )
        line.append(_as_json(model, tokens, figures))
        if not figures.outputs_equal:
            failures.append(f"{model.name}: a restored run's answer is not that from an engine's own cache")
    if console is not None:
        console.print(table)
        for model, _, figures in rows:
            if figures.timelines:
                console.print(timeline_table(model.name, figures.timelines, figures.ceilings_of_parts()))
    return "BENCH " + json.dumps(line), failures


def _as_json(model: Model, tokens: int, figures: Figures) -> dict[str, Any]:
    seconds = {
        name: [round(value, 4) for value in getattr(figures, name)]
        for name in ("recompute_s", "restored_s", "local_s", "transfer_s", "copy_s", "decode_s")
    }
    return {
        "model": model.name,
        "prompt_tokens": tokens,
        "external_tokens": figures.external_tokens,
        "ratio": round(figures.ratio(), 2),
        "ratio_wanted": model.wanted,
        **{name.replace("_s", "_median_s"): round(statistics.median(values), 4) for name, values in seconds.items()},
        "ceiling_s": round(figures.ceiling_s(), 4),
        "repetitions": seconds,
        "timelines": list(map(_rounded, figures.timelines)),
        "ceilings_of_parts": _rounded(figures.ceilings_of_parts()) if figures.hash_s else {},
        "raw_bytes": figures.raw_bytes,
        "stored_bytes": figures.stored_bytes,
        "tiers": sorted(figures.tiers),
        "outputs_equal": figures.outputs_equal,
        "logprob_difference": figures.difference if math.isfinite(figures.difference) else None,
        "recompute_logprob_difference": round(figures.recompute_difference, 6),
        "amx": figures.amx,
        **(
            {"lmcache_s": [round(value, 4) for value in figures.lmcache_s], "lmcache_tokens": figures.lmcache_tokens}
            if figures.lmcache_s
            else {}
        ),
    }


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 5) for name, value in values.items()}


if __name__ == "__main__":
    sys.exit(main())
