"""The matrix of exactness: every way to run an engine, and a small set in which every pair of choices occurs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import combinations, product
from typing import Any, Literal

__all__ = ["EVERY", "MODELS", "PAIRWISE", "Combination", "pairs", "pairwise_cover"]

MODELS = ("llama", "gemma3", "gptoss", "qwen3next", "deepseek")


@dataclass(frozen=True, slots=True)
class Combination:
    """One way to run an engine; each field is an axis.

    Attributes:
        model: Checkpoint.
        multiprocess: EngineCore in a process of its own.
        store: `embedded`, or a service over Redis and S3.
        runner: vLLM's model runner.
        async_scheduling: vLLM's setting.
        ngram: Speculative decoding with drafts looked up in the prompt.
    """

    model: str
    multiprocess: bool
    store: Literal["embedded", "shared"]
    runner: Literal["v1", "v2"]
    async_scheduling: bool
    ngram: bool

    @property
    def possible(self) -> bool:
        """vLLM refuses n-gram drafts with async scheduling; Triton's interpreter fails on those of the V2 runner."""
        return not self.ngram or (self.runner == "v1" and not self.async_scheduling)

    def __str__(self) -> str:
        words = [self.model, "multi-process" if self.multiprocess else "in-process", self.store, self.runner]
        return "-".join([*words, *(["async"] if self.async_scheduling else []), *(["ngram"] if self.ngram else [])])


Pair = tuple[tuple[str, Any], tuple[str, Any]]
"""Two axes, each with a choice."""


def pairs(combination: Combination) -> set[Pair]:
    """Every two choices that a combination makes together."""
    names = [axis.name for axis in fields(combination)]
    return set(combinations(zip(names, astuple(combination), strict=True), 2))


def pairwise_cover(of: Sequence[Combination]) -> list[Combination]:
    """A few combinations in which every pair of choices occurs that occurs in any; the same at every call.

    Greedy from each combination as the first; of the shortest covers the one with the fewest engines of two processes,
    which take longest to start.
    """
    by_pairs = {combination: pairs(combination) for combination in of}
    covers = [_greedy(by_pairs, first) for first in of]
    return min(covers, key=lambda cover: (len(cover), sum(combination.multiprocess for combination in cover)))


def _greedy(by_pairs: Mapping[Combination, set[Pair]], first: Combination) -> list[Combination]:
    """Always the combination that adds most pairs, the first of equals."""
    chosen = [first]
    missing = set().union(*by_pairs.values()) - by_pairs[first]
    while missing:
        best = max(by_pairs, key=lambda combination: len(missing & by_pairs[combination]))
        chosen.append(best)
        missing -= by_pairs[best]
    return chosen


_FLAGS = (False, True)
EVERY: list[Combination] = [
    combination
    for choices in product(MODELS, _FLAGS, ("embedded", "shared"), ("v1", "v2"), _FLAGS, _FLAGS)
    if (combination := Combination(*choices)).possible  # type: ignore[arg-type]
]

PAIRWISE: list[Combination] = pairwise_cover(EVERY)
