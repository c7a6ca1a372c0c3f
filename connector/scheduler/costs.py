"""Predicts what computing and fetching cost from what they have cost. Pure: times are arguments.

Both learn from what happened and predict what something similar would take, or return `None` if they cannot know:
before enough was seen, far beyond anything seen, and, for fetches, when the last one is too long ago.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import combinations
from math import ceil, sqrt

__all__ = ["FetchCosts", "Fit", "PrefillCosts"]

_KEEP = 0.95
"""Share of its weight that an observation keeps at each later one: about the last twenty count."""

_RIDGE = 1e-3
"""Splits evenly what the observations cannot tell apart, e.g. latency and bandwidth when all sizes were equal."""

_SECONDS_MIN = 1e-5

_PREFILL_TOKENS_MIN = 64
"""Smaller steps show only the engine's overhead."""

_OBSERVATIONS_MIN = 4
_PREFILL_FURTHER = 2.0
"""Predictions extend to contexts this many times as long as any seen: the quadratic part shows late."""

_FETCH_FURTHER = 4.0
_RECENT = 8
_FRESH_S = 4.0
"""A tier from which nothing was fetched for this long is tried again: else one that was slow once would be avoided for
ever, since what is not fetched is not measured."""


class Fit:
    """Coefficients, none negative, of seconds as a sum of features; by least squares of the *relative* error.

    Relative, since an error of half matters as much for a cost of 10 ms as for one of 10 s, and since a step that took
    twenty times as long as usual (compilation, a stalled machine) must not drown the others.
    """

    def __init__(self, num_features: int) -> None:
        self._size = num_features
        self._products = [[0.0] * num_features for _ in range(num_features)]
        self._targets = [0.0] * num_features
        self._solved: tuple[float, ...] | None = None

    def observe(self, features: Sequence[float], seconds: float) -> None:
        seconds = max(seconds, _SECONDS_MIN)
        weight = 1 / seconds**2
        for i in range(self._size):
            for j in range(self._size):
                self._products[i][j] = _KEEP * self._products[i][j] + weight * features[i] * features[j]
            self._targets[i] = _KEEP * self._targets[i] + weight * features[i] * seconds
        self._solved = None

    def predict(self, features: Sequence[float]) -> float:
        """Seconds; zero before the first observation."""
        if self._solved is None:
            self._solved = self._solve()
        return sum(coefficient * feature for coefficient, feature in zip(self._solved, features, strict=True))

    def _solve(self) -> tuple[float, ...]:
        scale = [sqrt(self._products[i][i]) for i in range(self._size)]
        known = [i for i in range(self._size) if scale[i] > 0]
        best, best_loss = [0.0] * self._size, 0.0
        for count in range(1, len(known) + 1):  # at most three features: seven sets of them, all are tried
            for chosen in combinations(known, count):
                matrix = [[self._products[i][j] / scale[i] / scale[j] for j in chosen] for i in chosen]
                target = [self._targets[i] / scale[i] for i in chosen]
                for row in range(count):
                    matrix[row][row] += _RIDGE
                solution = _solve_linear(matrix, target)
                loss = -sum(value * wanted for value, wanted in zip(solution, target, strict=True))
                if min(solution) >= 0 and loss < best_loss:
                    best, best_loss = [0.0] * self._size, loss
                    for i, value in zip(chosen, solution, strict=True):
                        best[i] = value / scale[i]
        return tuple(best)


def _solve_linear(matrix: list[list[float]], target: Sequence[float]) -> list[float]:
    """Solve a small, positive definite system."""
    rows = [[*row, value] for row, value in zip(matrix, target, strict=True)]
    size = len(rows)
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [value - factor * above for value, above in zip(rows[j], rows[i], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution


class PrefillCosts:
    """The engine's own prefill: a cost per step, per token, and per pair of a token and one that it attends to."""

    def __init__(self) -> None:
        self._fit = Fit(3)
        self._num_steps = 0
        self._step_tokens = 0
        self._context_tokens = 0

    def observe(self, chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        """Learn from a step of nothing but prefill.

        Args:
            chunks: For each request its (start, stop) tokens.
            seconds: How long the step took.
        """
        tokens = sum(stop - start for start, stop in chunks)
        if tokens < _PREFILL_TOKENS_MIN:
            return
        self._fit.observe((1.0, tokens, sum(_attended(start, stop) for start, stop in chunks)), seconds)
        self._num_steps += 1
        self._step_tokens = max(self._step_tokens, tokens)
        self._context_tokens = max(self._context_tokens, *(stop for _, stop in chunks))

    def seconds(self, start: int, stop: int) -> float | None:
        """Seconds to compute the tokens from `start` to `stop` of a prompt, or `None` while that is not known."""
        if self._num_steps < _OBSERVATIONS_MIN or stop > _PREFILL_FURTHER * self._context_tokens:
            return None
        steps = ceil((stop - start) / self._step_tokens)
        return self._fit.predict((steps, stop - start, _attended(start, stop)))


def _attended(start: int, stop: int) -> float:
    """Pairs of a token and one that it attends to."""
    return (stop * stop - start * start) / 2


class FetchCosts:
    """One tier, or the way from the node's memory into blocks: a cost per fetch and per byte."""

    def __init__(self) -> None:
        self._fit = Fit(2)
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RECENT)
        self._num_fetches = 0
        self._bytes_max = 0
        self._seen_s = 0.0

    def observe(self, num_bytes: int, seconds: float, *, now_s: float) -> None:
        """Learn from a fetch that delivered `num_bytes`."""
        if num_bytes <= 0:
            return
        self._fit.observe((1.0, num_bytes), seconds)
        self._recent.append((num_bytes, seconds))
        self._num_fetches += 1
        self._bytes_max = max(self._bytes_max, num_bytes)
        self._seen_s = now_s

    def seconds(self, num_bytes: int, *, now_s: float) -> float | None:
        """Seconds to fetch `num_bytes` at best, judged by recent fetches, or `None` while that is not known.

        At best, since disturbances only make a fetch longer, and a hit given up for a disturbance is a needless loss:
        the fit, or the fastest of the recent fetches scaled to the size, whichever is less.
        """
        if self._num_fetches < _OBSERVATIONS_MIN or now_s - self._seen_s > _FRESH_S:
            return None
        if num_bytes > _FETCH_FURTHER * self._bytes_max:
            return None
        quickest = min(seconds * max(1.0, num_bytes / seen) for seen, seconds in self._recent)
        return min(quickest, self._fit.predict((1.0, num_bytes)))
