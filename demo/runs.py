"""One engine's run: start, warm up, ask, count."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from kvstore.testing.checkpoints import VOCABULARY
from kvstore.testing.engine import Answer, EngineProcess, EngineSpec, Request, seeded_prompt, start_engine

__all__ = ["PROMPT_TOKENS_HELP", "Prompt", "Reference", "Run", "prompt_of", "run_connected", "run_reference"]

_PROMPT_TOKENS = 8192
_PROMPT_TOKENS_MIN = 2048
_COMPUTE_S = 60.0
"""A prompt whose length nobody chose is computed in about this time: without AVX-512 a processor needs minutes for
8,192 tokens in bfloat16."""

PROMPT_TOKENS_HELP = "length of the prompt (default: 8192, or fewer where these take over a minute to compute)"

_PROBE_TOKENS = 256
_WARM_UP_TOKENS = 300
_KV_CACHE_GIB = 1
_ANSWER_S = 240.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked, and of which model.

    Attributes:
        model: Kind of checkpoint.
        checkpoint: Its folder.
        tokens: The prompt.
        max_tokens: Tokens to generate.
        may_be_cut: A slow processor is asked for the beginning only.
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
    """What a run brought.

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
    """A prompt of so many tokens; `None`: of 8,192, or as many as this processor computes in a minute."""
    tokens = seeded_prompt(seed, num_tokens or _PROMPT_TOKENS, vocabulary=VOCABULARY)
    return Prompt(model, checkpoint, tokens, may_be_cut=num_tokens is None)


def run_reference(prompt: Prompt, work: Path, say: Say) -> Reference:
    """(a): no connector."""
    spec = EngineSpec(checkpoint=prompt.checkpoint, kv_cache_gib=_KV_CACHE_GIB)
    say(f"(a) {prompt.model}: starting vLLM without a store")
    with start_engine(spec, work=work, name=f"demo-a-{prompt.model}") as engine:
        engine.generate([_warm_up("a")], timeout_s=_ANSWER_S)
        prompt = _affordable(prompt, engine, say)
        say(f"(a) computing {len(prompt.tokens):,} tokens")
        (computed,) = engine.generate([prompt.request()], timeout_s=_ANSWER_S)
        say("(a) asking again: the engine's own cache answers")
        (resumed,) = engine.generate([prompt.request()], timeout_s=_ANSWER_S)
        say(f"(a) first token computed after {computed.ttft_s:.2f} s, from its own cache after {resumed.ttft_s:.2f} s")
    return Reference(prompt, computed, resumed)


def _affordable(prompt: Prompt, engine: EngineProcess, say: Say) -> Prompt:
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
        work: For logs and what vLLM compiles.
        say: Shows progress.
    """
    spec = EngineSpec(
        checkpoint=prompt.checkpoint, kv_cache_gib=_KV_CACHE_GIB, connector=connector, environment=environment
    )
    say(f"({name}) {prompt.model}: starting a fresh vLLM with the connector")
    with start_engine(spec, work=work, name=f"demo-{name}-{prompt.model}") as engine:
        engine.generate([_warm_up(name)], timeout_s=_ANSWER_S)
        before, raw_before = counters(), engine.connector_counters()
        say(f"({name}) asking for {len(prompt.tokens):,} tokens")
        (answer,) = engine.generate([prompt.request()], timeout_s=_ANSWER_S)
        after, raw_after = counters(), engine.connector_counters()
        say(f"({name}) first token after {answer.ttft_s:.2f} s; the engine ends")
    served = _grown(before, after, "served_records")
    return Run(
        answer=answer,
        counters={key: value - raw_before.get(key, 0) for key, value in raw_after.items()},
        tiers={tier: int(count) for tier, count in served.items()},
        stored_bytes=int(after.get("served_bytes", 0) - before.get("served_bytes", 0)),
    )


def _warm_up(run: str) -> Request:
    """A short prompt that no other run asks for, so that nothing of it is restored: vLLM compiles at its first one."""
    return Request(seeded_prompt(9000 + ord(run), _WARM_UP_TOKENS), max_tokens=2)


def _grown(before: Mapping[str, float], after: Mapping[str, float], name: str) -> dict[str, float]:
    """By tier, how much a counter has grown."""
    prefix = f'{name}{{tier="'
    grown = {
        key.removeprefix(prefix).removesuffix('"}'): value - before.get(key, 0)
        for key, value in after.items()
        if key.startswith(prefix)
    }
    return {tier: amount for tier, amount in grown.items() if amount > 0}
