"""What blending costs in quality and gains in time, by ratio: `python -m benchmarks.blend`.

Documents are computed alone, and stand in prompts in another order. The prompt is then computed in full; with documents
reused as they are; with their keys rotated for their places; and blended. `trained` is a small model that answers
questions over several documents (`blend_task.py`), so its accuracy is a number. Of models with random weights there is
no right answer: what is shown as right is the share of prompts whose most likely token is that of a full computation.
Their tokens depend on the whole prompt by much more than a trained model's do.

No engine runs: the layers are transformers' modules, in the arithmetic that the engine's blending has.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.blend_model import FOLDER, TransformersLayers, blend, compute_document, load_layers
from benchmarks.blend_task import NO_LABEL, draw
from benchmarks.node import temporary_folder
from benchmarks.program import Column, count, run_rows
from connector.blend.recompute import LayerStates
from kvstore.model.layout import Span
from kvstore.testing.checkpoints import write_checkpoint

__all__ = ["main"]

_SEED = 2022
_DOCUMENTS, _QUESTION_TOKENS = 8, 32
_RATIOS = (0.05, 0.15, 0.3, 1.0)


@dataclass(frozen=True)
class Row:
    """One way to compute the prompts of one model.

    Attributes:
        model: `trained`, or a kind of checkpoint with random weights.
        way: `full`, `reused` (keys as they were rotated), `rotated` (nothing is computed again), or `blended`.
        ratio: Of blending.
        right: Share of prompts with the right next token.
        kl: Mean difference of the next token's distribution to that of a full computation, in nats.
        tokens: Of a prompt.
        computed: Mean share of them that was computed in all layers.
        seconds: Median, from the documents in memory to the next token.
        faster: The time of a full computation by this one's.
    """

    model: str
    way: str
    ratio: float | None
    prompts: int
    right: float
    kl: float
    tokens: int
    computed: float
    seconds: float
    faster: float


_COLUMNS: Sequence[Column[Row]] = (
    ("model", lambda row: row.model),
    ("way", lambda row: row.way if row.ratio is None else f"{row.way} {row.ratio:g}"),
    ("prompts", lambda row: str(row.prompts)),
    ("right", lambda row: f"{row.right:.2f}"),
    ("KL, nats", lambda row: f"{row.kl:.4f}"),
    ("tokens", lambda row: f"{row.tokens:,}"),
    ("computed", lambda row: f"{row.computed:.2f}"),
    ("ms", lambda row: f"{1000 * row.seconds:.1f}"),
    ("faster", lambda row: f"{row.faster:.2f}"),
)


@dataclass(frozen=True)
class _Prompt:
    """A prompt up to the token behind which the answer is wanted.

    Attributes:
        answer: The right one; `None`: that of a full computation.
    """

    tokens: torch.Tensor
    spans: tuple[Span, ...]
    answer: int | None


@dataclass
class _Way:
    """What one way found, prompt by prompt."""

    name: str
    arguments: dict[str, Any]
    ratio: float | None = None
    right: list[bool] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table and a last line `BENCH [...]`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.blend", description=__doc__)
    parser.add_argument("--prompts", type=count, default=100, help="of the trained model (default 100)")
    parser.add_argument("--random", default="llama,llama-demo", help="kinds with random weights (default %(default)s)")
    parser.add_argument("--tokens", type=count, default=2048, help="of a prompt of those (default 2048)")
    parser.add_argument("--repetitions", type=count, default=3, help="prompts of each of those (default 3)")
    parser.add_argument("--threads", type=count, default=1, help="of torch (default 1)")
    title = "documents reused in another order: what it costs, and what it gains"
    return run_rows(parser, arguments, _measure, title, _COLUMNS)


def _measure(chosen: argparse.Namespace, say: Callable[[str], None]) -> list[Row]:
    torch.set_num_threads(chosen.threads)
    with torch.inference_mode():
        return _measure_models(chosen, say)


def _measure_models(chosen: argparse.Namespace, say: Callable[[str], None]) -> list[Row]:
    say(f"trained: {chosen.prompts} prompts")
    rows = _rows("trained", load_layers(FOLDER), _questions(chosen.prompts))
    with temporary_folder() as folder:
        for kind in filter(None, chosen.random.split(",")):
            say(f"{kind}, random weights: {chosen.repetitions} prompts of {chosen.tokens} tokens")
            model = load_layers(write_checkpoint(kind, Path(folder)))
            rows += _rows(kind, model, _random_prompts(chosen.tokens, chosen.repetitions))
    return rows


def _questions(prompts: int) -> Iterator[_Prompt]:
    batch = draw(np.random.default_rng(_SEED), prompts, questions=1)
    size, number = batch.document_tokens, batch.num_documents
    spans = tuple(Span(1 + size * index, 1 + size * (index + 1)) for index in range(number))
    for tokens, labels in zip(batch.tokens, batch.labels, strict=True):
        last = int(np.flatnonzero(labels != NO_LABEL)[-1])  # the question's name
        yield _Prompt(torch.from_numpy(tokens[: last + 1]), spans, int(labels[last]))


def _random_prompts(num_tokens: int, prompts: int) -> Iterator[_Prompt]:
    random = np.random.default_rng(_SEED)
    size = (num_tokens - 1 - _QUESTION_TOKENS) // _DOCUMENTS
    spans = tuple(Span(1 + size * index, 1 + size * (index + 1)) for index in range(_DOCUMENTS))
    for _ in range(prompts):
        tokens = random.integers(3, 1024, num_tokens)
        tokens[0] = 1
        yield _Prompt(torch.from_numpy(tokens), spans, None)


def _rows(name: str, model: TransformersLayers, prompts: Iterator[_Prompt]) -> list[Row]:
    ways = [
        _Way("full", {"ratio": 1.0}),
        _Way("reused", {"ratio": None, "rotates": False}),
        _Way("rotated", {"ratio": None}),
        *(_Way("blended", {"ratio": ratio}, ratio) for ratio in _RATIOS),
    ]
    tokens = 0
    for prompt in prompts:
        tokens = len(prompt.tokens)
        first = int(prompt.tokens[0])
        documents = [(span, compute_document(model, first, _part(prompt, span))) for span in prompt.spans]
        exact: torch.Tensor | None = None
        for way in ways:
            exact = _run(way, model, prompt, () if way.name == "full" else documents, exact)
    full_s = statistics.median(ways[0].seconds)
    return [_row(name, way, tokens, full_s) for way in ways]


def _part(prompt: _Prompt, span: Span) -> torch.Tensor:
    return prompt.tokens[span.start : span.stop]


def _run(
    way: _Way,
    model: TransformersLayers,
    prompt: _Prompt,
    documents: Sequence[tuple[Span, LayerStates]],
    exact: torch.Tensor | None,
) -> torch.Tensor:
    """Compute a prompt in one way, and compare; returns the distribution of a full computation."""
    started_s = time.perf_counter()
    made = blend(model, prompt.tokens, documents, wants_hidden=True, **way.arguments)
    assert made.hidden is not None
    seen = model.logits(made.hidden[-1:])[0].to(torch.float32).log_softmax(-1)
    way.seconds.append(time.perf_counter() - started_s)
    exact = seen if exact is None else exact
    answer = int(exact.argmax()) if prompt.answer is None else prompt.answer
    way.right.append(int(seen.argmax()) == answer)
    way.kl.append(max(0.0, float((exact.exp() * (exact - seen)).sum())))
    way.computed.append(len(made.rows) / len(prompt.tokens))
    return exact


def _row(model: str, way: _Way, tokens: int, full_s: float) -> Row:
    seconds = statistics.median(way.seconds)
    return Row(
        model,
        way.name,
        way.ratio,
        len(way.right),
        round(statistics.mean(way.right), 3),
        round(statistics.mean(way.kl), 5),
        tokens,
        round(statistics.mean(way.computed), 3),
        seconds,
        round(full_s / seconds, 2),
    )


if __name__ == "__main__":
    sys.exit(main())
