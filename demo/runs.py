"""One engine's run: start, warm up, ask, count."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.testing.engine import Answer, EngineSpec, Request, seeded_prompt, start_engine

__all__ = ["Prompt", "Run", "run_connected", "run_reference"]

_WARM_UP_TOKENS = 300
_KV_CACHE_GIB = 1
_ANSWER_S = 240.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked, and of which model."""

    model: str
    checkpoint: Path
    tokens: tuple[int, ...]
    max_tokens: int = 32

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


def run_reference(prompt: Prompt, work: Path, say: Say) -> tuple[Answer, Answer]:
    """(a): no connector. Returns the computed answer, and the one resumed from the engine's own cache."""
    spec = EngineSpec(checkpoint=prompt.checkpoint, kv_cache_gib=_KV_CACHE_GIB)
    say(f"(a) {prompt.model}: starting vLLM without a store")
    with start_engine(spec, work=work, name=f"demo-a-{prompt.model}") as engine:
        engine.generate([_warm_up("a")], timeout_s=_ANSWER_S)
        say(f"(a) computing {len(prompt.tokens):,} tokens")
        (computed,) = engine.generate([prompt.request()], timeout_s=_ANSWER_S)
        say("(a) asking again: the engine's own cache answers")
        (resumed,) = engine.generate([prompt.request()], timeout_s=_ANSWER_S)
        say(f"(a) first token computed after {computed.ttft_s:.2f} s, from its own cache after {resumed.ttft_s:.2f} s")
    return computed, resumed


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
