"""The runs of the demo: one engine each (start, warm up, ask, count), and the rows that are made of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from kvstore.testing.checkpoints import VOCABULARY
from kvstore.testing.engine import Answer, EngineProcess, EngineSpec, Request, seeded_prompt, start_engine
from kvstore.testing.program import Say

__all__ = [
    "PROMPT_TOKENS_HELP",
    "Prompt",
    "Reference",
    "Row",
    "Run",
    "prompt_of",
    "report",
    "row_of",
    "run_connected",
    "run_reference",
]

_PROMPT_TOKENS = 8192
_PROMPT_TOKENS_MIN = 2048
_COMPUTE_S = 60.0
"""A prompt of the default length is cut until it is computed in about this time: without AVX-512 a processor needs
minutes for 8,192 tokens in bfloat16."""

PROMPT_TOKENS_HELP = "length of the prompt (default: 8192, or fewer where these take over a minute to compute)"

_PROBE_TOKENS = 256
_WARM_UP_TOKENS = 300
_KV_CACHE_BYTES = 1 << 30
_ANSWER_S = 900.0
"""Also a busy machine, which computes some tokens a second, answers in this time."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked, and of which model.

    Attributes:
        model: Kind of checkpoint.
        checkpoint: Its folder.
        tokens: The prompt.
        max_tokens: Tokens to generate.
        may_be_cut: A slow processor computes its beginning only.
    """

    model: str
    checkpoint: Path
    tokens: tuple[int, ...]
    max_tokens: int = 32
    may_be_cut: bool = False

    def request(self) -> Request:
        return Request(self.tokens, max_tokens=self.max_tokens)


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a run.

    Attributes:
        answer: To the prompt.
        counters: Of the connector.
        tiers: Records that the service read from each tier for the prompt.
        stored_bytes: Encoded bytes of these records.
    """

    answer: Answer
    counters: Mapping[str, float] = field(default_factory=dict)
    tiers: Mapping[str, int] = field(default_factory=dict)
    stored_bytes: int = 0


class Reference(NamedTuple):
    """What an engine without a store answered.

    Attributes:
        prompt: What was asked.
        computed: The answer that was computed.
        resumed: The answer that was resumed from the engine's own cache.
    """

    prompt: Prompt
    computed: Answer
    resumed: Answer


def prompt_of(model: str, checkpoint: Path, seed: int, num_tokens: int | None) -> Prompt:
    """A prompt of `num_tokens`; `None`: of 8,192, or what this processor computes in a minute if that is less."""
    tokens = seeded_prompt(seed, num_tokens or _PROMPT_TOKENS, vocabulary=VOCABULARY)
    return Prompt(model, checkpoint, tokens, may_be_cut=num_tokens is None)


def run_reference(prompt: Prompt, work: Path, say: Say) -> Reference:
    """(a): no connector."""
    spec = EngineSpec(checkpoint=prompt.checkpoint, kv_cache_bytes=_KV_CACHE_BYTES)
    say(f"(a) {prompt.model}: starting vLLM without a store")
    with start_engine(spec, work=work, name=f"demo-a-{prompt.model}") as engine:
        engine.generate([_warm_up("a")], timeout_s=_ANSWER_S)
        prompt = affordable(prompt, engine, say)
        say(f"(a) computing {len(prompt.tokens):,} tokens")
        (computed,) = engine.generate([prompt.request()], timeout_s=_ANSWER_S)
        say("(a) asking again: the engine's own cache answers")
        (resumed,) = engine.generate([prompt.request()], timeout_s=_ANSWER_S)
        say(f"(a) first token computed after {computed.ttft_s:.2f} s, from its own cache after {resumed.ttft_s:.2f} s")
    return Reference(prompt, computed, resumed)


def affordable(prompt: Prompt, engine: EngineProcess, say: Say) -> Prompt:
    """The prompt, halved until this processor computes it in `_COMPUTE_S`, to 2,048 tokens at the least."""
    if not prompt.may_be_cut:
        return prompt
    probe = Request(seeded_prompt(9000, _PROBE_TOKENS), max_tokens=1)
    (answer,) = engine.generate([probe], timeout_s=_ANSWER_S)
    tokens_per_s, num_tokens = _PROBE_TOKENS / answer.ttft_s, len(prompt.tokens)
    while num_tokens / tokens_per_s > _COMPUTE_S and num_tokens // 2 >= _PROMPT_TOKENS_MIN:
        num_tokens //= 2
    if num_tokens < len(prompt.tokens):
        say(f"(a) this processor computes {tokens_per_s:,.0f} tokens/s: the prompt is cut to {num_tokens:,} tokens")
    return replace(prompt, tokens=prompt.tokens[:num_tokens])


def run_connected(
    name: str,
    prompt: Prompt,
    *,
    connector: Mapping[str, object],
    environment: Mapping[str, str],
    counters: Callable[[], Mapping[str, float]],
    work: Path,
    say: Say,
) -> Run:
    """A fresh engine with the connector.

    Args:
        name: Letter of the run.
        prompt: What is asked.
        connector: Its extra config.
        environment: Added to the engine's.
        counters: Reads the service's counters.
        work: For logs and compiled code.
        say: Shows progress.
    """
    spec = EngineSpec(
        checkpoint=prompt.checkpoint, kv_cache_bytes=_KV_CACHE_BYTES, connector=connector, environment=environment
    )
    say(f"({name}) {prompt.model}: starting a fresh vLLM with the connector")
    with start_engine(spec, work=work, name=f"demo-{name}-{prompt.model}") as engine:
        engine.generate([_warm_up(name)], timeout_s=_ANSWER_S)
        before, raw_before = counters(), engine.connector_counters()
        say(f"({name}) asking for {len(prompt.tokens):,} tokens")
        (answer,) = engine.generate([prompt.request()], timeout_s=_ANSWER_S)
        after, raw_after = counters(), engine.connector_counters()
        say(f"({name}) first token after {answer.ttft_s:.2f} s; the engine ends")
    served = grown(before, after, "served_records")
    return Run(
        answer=answer,
        counters={key: value - raw_before.get(key, 0) for key, value in raw_after.items()},
        tiers={tier: int(count) for tier, count in served.items()},
        stored_bytes=int(after.get("served_bytes", 0) - before.get("served_bytes", 0)),
    )


def _warm_up(run: str) -> Request:
    """A short prompt of this run alone, so that none of it is restored: vLLM compiles at its first prompt."""
    return Request(seeded_prompt(9000 + ord(run), _WARM_UP_TOKENS), max_tokens=2)


def grown(before: Mapping[str, float], after: Mapping[str, float], name: str) -> dict[str, float]:
    """By tier, the growth of a counter."""
    prefix = f'{name}{{tier="'
    more = {
        key.removeprefix(prefix).removesuffix('"}'): value - before.get(key, 0)
        for key, value in after.items()
        if key.startswith(prefix)
    }
    return {tier: amount for tier, amount in more.items() if amount > 0}


# ---- rows


@dataclass(frozen=True, slots=True)
class Row:
    """One restored run beside its reference.

    Attributes:
        model: Kind of checkpoint.
        run: Letter of the run.
        prompt_tokens: Length of the prompt.
        external_tokens: Of these, not computed but restored.
        recompute_ttft_s: Time to the first token of an engine that computed the prompt.
        restored_ttft_s: Time to the first token of this run.
        raw_bytes: Of the restored pages, as they are in the engine.
        stored_bytes: Of the same pages, as they are stored.
        outputs_equal: Whether every generated token is the reference's.
        logprob_difference: Largest difference of any of the 20 most likely tokens' log probabilities.
        tiers: Records read from each tier.
    """

    model: str
    run: str
    prompt_tokens: int
    external_tokens: int
    recompute_ttft_s: float
    restored_ttft_s: float
    raw_bytes: int
    stored_bytes: int
    outputs_equal: bool
    logprob_difference: float
    tiers: Mapping[str, int]

    @property
    def speedup(self) -> float:
        return self.recompute_ttft_s / self.restored_ttft_s

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "run": self.run,
            "prompt_tokens": self.prompt_tokens,
            "external_tokens": self.external_tokens,
            "recompute_ttft_s": round(self.recompute_ttft_s, 4),
            "restored_ttft_s": round(self.restored_ttft_s, 4),
            "speedup": round(self.speedup, 2),
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.stored_bytes,
            "outputs_equal": self.outputs_equal,
            "tiers": dict(self.tiers),
        }


def row_of(name: str, reference: Reference, run: Run) -> Row:
    """A run beside its reference."""
    prompt, computed, resumed = reference
    return Row(
        model=prompt.model,
        run=name,
        prompt_tokens=len(prompt.tokens),
        external_tokens=run.answer.num_cached_tokens,
        recompute_ttft_s=computed.ttft_s,
        restored_ttft_s=run.answer.ttft_s,
        raw_bytes=int(run.counters.get("connector_loaded_bytes", 0)),
        stored_bytes=run.stored_bytes,
        outputs_equal=run.answer.tokens == resumed.tokens,
        logprob_difference=run.answer.difference(resumed),
        tiers=run.tiers,
    )


def report(rows: Sequence[Row], console: Console | None) -> tuple[str, list[str]]:
    """Show a table; returns the `DEMO` line and the failures. Slowness is none."""
    if console is not None:
        console.print(_table(rows))
    return "DEMO " + json.dumps({"rows": [row.as_json() for row in rows]}), _failures(rows)


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="a prompt computed, and resumed by fresh engines")
    for name in (
        "run",
        "model",
        "prompt",
        "restored",
        "first token, computed",
        "and restored",
        "speed-up",
        "raw",
        "stored",
    ):
        table.add_column(name, justify="left" if name in ("run", "model") else "right")
    table.add_column("outputs equal")
    table.add_column("records read from")
    for row in rows:
        table.add_row(
            f"({row.run})",
            row.model,
            f"{row.prompt_tokens:,} tokens",
            f"{row.external_tokens:,} tokens",
            f"{row.recompute_ttft_s:.2f} s",
            f"{row.restored_ttft_s:.3f} s",
            f"{row.speedup:.1f}x",
            f"{row.raw_bytes / (1 << 20):.0f} MiB",
            f"{row.stored_bytes / (1 << 20):.0f} MiB",
            f"yes, to {row.logprob_difference:.1g}" if row.outputs_equal else "NO",
            ", ".join(f"{name} {count}" for name, count in row.tiers.items()) or "-",
        )
    return table


def _failures(rows: Sequence[Row]) -> list[str]:
    found = [] if rows else ["no run restored anything"]
    for row in rows:
        if not row.outputs_equal:
            found.append(f"run ({row.run}) of {row.model} generated other tokens than the reference")
        if row.external_tokens <= 0:
            found.append(f"run ({row.run}) of {row.model} restored nothing")
        if row.run == "d" and set(row.tiers) != {"s3"}:
            found.append(f"run ({row.run}) of {row.model} was to read from S3 alone, and read from {dict(row.tiers)}")
    return found
