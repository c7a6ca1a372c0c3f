"""`python -m benchmarks.agent_pause`: an agent's next turn after its history left memory, prefetched and not."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.node import WORK, Node, temporary_folder
from benchmarks.program import run_benchmark
from kvstore.testing.checkpoints import VOCABULARY, write_checkpoint
from kvstore.testing.engine import Answer, EngineProcess, EngineSpec, Request, seeded_prompt, start_engine
from kvstore.testing.program import Say
from kvstore.testing.servers import ceph_rgw
from kvstore.testing.servers.ports import free_address

__all__ = ["main"]

_PROMPT_TOKENS = 64 * 128
_TURN_TOKENS = 33
_WARM_UP_TOKENS = 300
_MAX_TOKENS = 4
_MEMORY_BYTES = 4 << 30
_ANSWER_S, _WAIT_S = 900.0, 120.0
_WAIT_MS = 60_000
"""The engine takes the hit in full, however slow the place is."""
_LOOK_S = 0.02
_SESSION, _MODEL = "agent", "chat"
_BUCKET = "agent"
_WANTED = 1.1
"""The largest ratio of prefetched to memory that counts as good. It is printed beside the measured one."""

MEMORY, PREFETCHED, COLD = "memory", "prefetched", "cold"


@dataclass(slots=True)
class Figures:
    """Of one place, each list with a value for each repetition, in seconds.

    Attributes:
        first_token_s: Of the next turn, by where its history was: in memory all the time, in the cold tier alone, or
            prefetched from there during the pause.
        prefetch_s: From the call of `POST /v1/prefetch` until all of the history is in memory.
        cached_tokens: Of the next turn, those that were not computed, by the same.
        outputs_equal: Whether all next turns of a repetition were answered alike.
    """

    place: str
    history_tokens: int
    first_token_s: dict[str, list[float]] = field(default_factory=lambda: {MEMORY: [], PREFETCHED: [], COLD: []})
    cached_tokens: dict[str, set[int]] = field(default_factory=lambda: {MEMORY: set(), PREFETCHED: set(), COLD: set()})
    prefetch_s: list[float] = field(default_factory=list)
    prefetched_bytes: int = 0
    wasted_bytes: int = 0
    outputs_equal: bool = True

    def ratio(self, kind: str) -> float:
        """Of the medians, to a hit in memory."""
        return statistics.median(self.first_token_s[kind]) / statistics.median(self.first_token_s[MEMORY])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; returns the exit status: 0, 1 after a failure, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agent_pause", description=__doc__)
    parser.add_argument("--place", choices=("s3", "directory"), default="s3", help="the cold tier")
    parser.add_argument("--model", default="llama-demo", help="a checkpoint of kvstore.testing")
    parser.add_argument("--prompt-tokens", type=int, default=_PROMPT_TOKENS, metavar="COUNT", help="of the history")
    parser.add_argument("--repetitions", type=int, default=5, metavar="COUNT")
    parser.add_argument("--json", action="store_true", help="print the BENCH line alone")
    chosen = parser.parse_args(arguments)

    def measure(say: Say) -> Figures:
        admin = free_address()
        checkpoint = write_checkpoint(chosen.model, WORK / "checkpoints")
        with (
            temporary_folder() as folder,
            _cold(chosen.place, folder, say) as (cold, environment),
            Node(
                folder,
                "node",
                cold=cold,
                memory_bytes=_MEMORY_BYTES,
                environment=environment,
                admin_listen=admin,
            ) as node,
        ):
            figures = Figures(chosen.place, chosen.prompt_tokens)
            connector = {"url": node.url, "load_always": True, "max_wait_ms": _WAIT_MS}
            spec = EngineSpec(
                checkpoint=checkpoint,
                connector=connector,
                kv_cache_bytes=1 << 30,
                arguments={"served_model_name": [_MODEL]},
            )
            say(f"starting an engine of {chosen.model}")
            with start_engine(spec, work=WORK, name="bench-agent") as engine:
                _Pause(node, f"http://{admin}", engine, figures, say).run(chosen.repetitions)
            return figures

    return run_benchmark(measure, report, quiet=chosen.json)


@contextmanager
def _cold(place: str, folder: Path, say: Say) -> Iterator[tuple[str, Mapping[str, str]]]:
    """The setting of a cold tier that is there, and the environment that its service needs."""
    if place == "directory":
        yield f"file://{folder}/cold", {}
        return
    say("starting an S3 server")
    with ceph_rgw() as server:
        server.create_bucket(_BUCKET)
        yield f"s3://{_BUCKET}/pause", server.environment


class _Pause:
    """One engine, one service, one session."""

    def __init__(self, node: Node, admin_url: str, engine: EngineProcess, figures: Figures, say: Say) -> None:
        self._node = node
        self._admin_url = admin_url
        self._engine = engine
        self._figures = figures
        self._say = say
        self._history = seeded_prompt(17, figures.history_tokens, vocabulary=VOCABULARY)

    def run(self, repetitions: int) -> None:
        figures = self._figures
        self._engine.generate([Request(seeded_prompt(9000, _WARM_UP_TOKENS), max_tokens=2)], timeout_s=_ANSWER_S)
        self._say(f"a turn of {figures.history_tokens:,} tokens is computed and saved")
        turn = Request(self._history, _MAX_TOKENS, kv_transfer_params={"kvstore": {"session": _SESSION}})
        self._engine.generate([turn], timeout_s=_ANSWER_S)
        self._node.wait_idle()
        reach = self._in_memory()
        self._next_turn(0)  # not counted: what is compiled or opened at the first hit
        for number in range(1, repetitions + 1):
            answers: dict[str, Answer] = {}
            for kind in (MEMORY, COLD, PREFETCHED)[:: 1 if number % 2 else -1]:
                self._bring_to(kind, reach)
                answers[kind] = self._next_turn(number)
                figures.first_token_s[kind].append(answers[kind].ttft_s)
                figures.cached_tokens[kind].add(answers[kind].num_cached_tokens)
            seen = ", ".join(f"{kind} {answer.ttft_s:.3f} s" for kind, answer in answers.items())
            self._say(f"{number}/{repetitions}: {seen}")
            figures.outputs_equal &= len({answer.tokens for answer in answers.values()}) == 1
        counters = self._node.counters()
        figures.prefetched_bytes = int(counters.get('prefetched_bytes{outcome="fetched"}', 0))
        figures.wasted_bytes = int(counters.get('prefetched_bytes{outcome="wasted"}', 0))

    def _next_turn(self, number: int) -> Answer:
        """The history and some tokens, which are not saved, so that every repetition finds the same."""
        prompt = (*self._history, *seeded_prompt(100 + number, _TURN_TOKENS, vocabulary=VOCABULARY))
        request = Request(prompt, _MAX_TOKENS, kv_transfer_params={"kvstore": {"save": False}})
        until_s = time.monotonic() + _WAIT_S
        while not self._engine.reset_prefix_cache():
            if time.monotonic() > until_s:
                raise TimeoutError("the engine did not forget its own cache: see its log")
            # blocks that are being saved are in use, and this engine learns only in its steps that they are saved
            self._engine.generate([Request(seeded_prompt(9001, _WARM_UP_TOKENS), max_tokens=2)], timeout_s=_ANSWER_S)
        (answer,) = self._engine.generate([request], timeout_s=_ANSWER_S)
        return answer

    def _bring_to(self, kind: str, reach: int) -> None:
        if kind == MEMORY:
            self._prefetch(reach)
            return
        self._ask("hints", session=_SESSION, demote=True)
        self._wait(lambda tokens: tokens == 0, "leave memory")
        if kind == PREFETCHED:
            started_s = time.perf_counter()
            self._prefetch(reach)
            self._figures.prefetch_s.append(time.perf_counter() - started_s)

    def _prefetch(self, reach: int) -> None:
        self._ask("prefetch", session=_SESSION)
        self._wait(lambda tokens: tokens >= reach, "be in memory")

    def _wait(self, is_there: Any, what: str) -> None:
        until_s = time.monotonic() + _WAIT_S
        while not is_there(self._in_memory()):
            if time.monotonic() > until_s:
                raise TimeoutError(f"the history did not {what}: see the service's log")
            time.sleep(_LOOK_S)

    def _in_memory(self) -> int:
        """Tokens of the history that the node's memory restores."""
        answer = self._ask("query", model=_MODEL, token_ids=list(self._history))
        return max((int(one["CPU"]) for one in answer.get("default", {}).values()), default=0)

    def _ask(self, route: str, **body: object) -> Any:
        request = urllib.request.Request(
            f"{self._admin_url}/v1/{route}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30.0) as answer:
            return json.load(answer)


def report(figures: Figures, console: Console | None) -> tuple[str, list[str]]:
    """Show a table; returns the BENCH line and what is wrong."""
    median = {kind: statistics.median(values) for kind, values in figures.first_token_s.items()}
    if console is not None:
        title = f"first token of a turn after {figures.history_tokens:,} tokens of history, by where that is"
        table = Table(title=title)
        for name in ("history is", "first token", "to memory", "restored"):
            table.add_column(name, justify="left" if name == "history is" else "right")
        where = {MEMORY: "in memory", PREFETCHED: f"prefetched from {figures.place}", COLD: f"in {figures.place}"}
        for kind, text in where.items():
            tokens = ", ".join(f"{number:,}" for number in sorted(figures.cached_tokens[kind]))
            table.add_row(text, f"{median[kind]:.3f} s", f"{figures.ratio(kind):.2f}", tokens)
        console.print(table)
    values = {
        "place": figures.place,
        "history_tokens": figures.history_tokens,
        **{f"{kind}_median_s": round(seconds, 4) for kind, seconds in median.items()},
        "prefetched_to_memory": round(figures.ratio(PREFETCHED), 3),
        "wanted": _WANTED,
        "cold_to_memory": round(figures.ratio(COLD), 3),
        "prefetch_median_s": round(statistics.median(figures.prefetch_s), 4),
        "prefetched_bytes": figures.prefetched_bytes,
        "wasted_bytes": figures.wasted_bytes,
        "cached_tokens": {kind: sorted(tokens) for kind, tokens in figures.cached_tokens.items()},
        "repetitions": {
            kind: [round(seconds, 4) for seconds in values] for kind, values in figures.first_token_s.items()
        },
        "outputs_equal": figures.outputs_equal,
    }
    failures = [] if figures.outputs_equal else ["next turns after the same history were answered differently"]
    return "BENCH " + json.dumps(values), failures


if __name__ == "__main__":
    sys.exit(main())
