"""Traffic of the soak: prompts that share and diverge, and how two runs of it compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.testing.engine import Answer, EngineSpec, seeded_prompt
from kvstore.testing.engine.spec import TrafficRequest

__all__ = ["SOAKS", "Difference", "Soak", "compare", "errors_in", "make_traffic"]

_SEED = 20_26
_ABORT_SHARE = 0.12
_ABORT_STATES = ("any", "any", "any", "asking", "staging", "loading", "prefilling", "decoding")


@dataclass(frozen=True, slots=True)
class Soak:
    """One model's soak.

    Attributes:
        model: Checkpoint.
        block_tokens: Tokens of a block.
        num_blocks: Blocks of the engine under pressure.
        prompt_tokens: Shortest and longest prompt.
        families: Documents that prompts start with.
        is_exact: Computed in float32: outputs do not depend on where a prompt is split.
        arguments: Further engine arguments.
        step_tokens: What the engine under pressure computes in a step at most.
    """

    model: str
    block_tokens: int
    num_blocks: int
    prompt_tokens: tuple[int, int]
    families: int
    is_exact: bool = True
    arguments: Mapping[str, Any] = field(default_factory=dict)
    step_tokens: int = 512

    def spec(self, checkpoint: Path, **changes: Any) -> EngineSpec:
        """The engine without a connector, as large as vLLM makes it."""
        spec = EngineSpec(
            checkpoint=checkpoint,
            block_size=128 if self.block_tokens > 128 else self.block_tokens,
            max_model_len=1600,
            max_num_batched_tokens=2048,
            arguments={"max_num_seqs": 32, **self.arguments},
        )
        return replace(spec, **changes)

    def pressed(self, checkpoint: Path, connector: Mapping[str, Any] | None) -> EngineSpec:
        """The engine with few blocks and chunked prefill."""
        arguments = {
            **self.spec(checkpoint).arguments,
            "num_gpu_blocks_override": self.num_blocks,
            "scheduler_reserve_full_isl": False,  # a prompt is begun before there is room for all of it
        }
        return self.spec(checkpoint, connector=connector, max_num_batched_tokens=self.step_tokens, arguments=arguments)


_STATES = {"prefix_cache_retention_interval": 640}
"""Every block's end has its state, as a hybrid needs it for prompts that part there."""

SOAKS = {  # pages of every model, more than fit by far
    "llama": Soak("llama", 32, 160, (200, 1500), 12),
    "gemma3": Soak("gemma3", 32, 400, (200, 1500), 12),
    # with steps shorter than a block it is split anywhere, and rounds so often that a comparison says little
    "qwen3next": Soak("qwen3next", 640, 36, (500, 1500), 12, is_exact=False, arguments=_STATES, step_tokens=1024),
}


def make_traffic(soak: Soak, num_requests: int) -> list[TrafficRequest]:
    """Requests that share documents up to a block's end or not, go on differently, or repeat; always the same ones."""
    numbers = np.random.default_rng(_SEED)
    low, high = soak.prompt_tokens
    documents = [seeded_prompt(7000 + family, high) for family in range(soak.families)]
    requests: list[TrafficRequest] = []
    for index in range(num_requests):
        if index >= 32 and numbers.random() < 0.25:  # one that was asked before, for another number of tokens
            prompt = requests[int(numbers.integers(0, index - 16))].prompt
        else:
            document = documents[int(numbers.integers(0, soak.families))]
            shared = int((high - 100) * numbers.random() ** 3)  # short ones more often
            if numbers.random() < 0.5:
                shared = shared // soak.block_tokens * soak.block_tokens
            own = seeded_prompt(100_000 + index, int(numbers.integers(40, 200)))
            prompt = (document[:shared] + own + document)[: max(low, min(high, shared + len(own)))]
            if numbers.random() < 0.8:  # ends shortly before a block's end, so that what it generates needs the next
                whole = len(prompt) // soak.block_tokens * soak.block_tokens
                prompt = prompt[: max(low, whole - int(numbers.integers(1, 8)))]
        request = TrafficRequest(prompt, int(numbers.integers(8, 41)))
        if numbers.random() < _ABORT_SHARE:
            state = _ABORT_STATES[int(numbers.integers(0, len(_ABORT_STATES)))]
            request = replace(request, abort_state=state, abort_after_steps=int(numbers.integers(0, 6)))
        requests.append(request)
    return requests


@dataclass(frozen=True, slots=True)
class Difference:
    """How two runs of one traffic differ.

    Attributes:
        answers: Requests that both runs finished.
        flips: Of these, how many have different tokens.
        largest: Largest difference of a log probability that both list, up to and at the first different token.
        typical: The 99th percentile of all of these.
        widest_gap: At a first different token, how much more likely one run's token was than the other's, in the run
            where that is larger.
        closest_call: The smallest distance between the two most likely tokens of any position of the first run.
    """

    answers: int
    flips: int
    largest: float
    typical: float
    widest_gap: float
    closest_call: float


def compare(ones: Sequence[Answer | None], others: Sequence[Answer | None]) -> Difference:
    """Compare answers position by position while both have generated the same tokens."""
    differences: list[float] = []
    gaps: list[float] = []
    closest, answers = float("inf"), 0
    for one, other in zip(ones, others, strict=True):
        if one is None or other is None:
            continue
        answers += 1
        for position, (mine, theirs) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
            differences += [abs(mine[token] - theirs[token]) for token in mine.keys() & theirs.keys()]
            best = sorted(mine.values())[-2:]
            closest = min(closest, best[1] - best[0])
            token, rival = one.tokens[position], other.tokens[position]
            if token != rival:
                gaps.append(max(_gap(mine, token, rival), _gap(theirs, rival, token)))
                break
    return Difference(
        answers,
        len(gaps),
        max(differences, default=0.0),
        float(np.quantile(differences, 0.99)) if differences else 0.0,
        max(gaps, default=0.0),
        closest,
    )


def errors_in(log: str) -> list[str]:
    """What we complained of in an engine's log."""
    return [line for line in log.splitlines() if " ERROR " in line and "kvstore" in line]


def _gap(logprobs: Mapping[int, float], token: int, rival: int) -> float:
    """How much more likely a token was than its rival, at least, where the rival is not listed."""
    return logprobs[token] - logprobs.get(rival, min(logprobs.values()))
