"""What computing and fetching cost, learned from what they took: prefill, each tier, and loads into blocks.

A prediction is `None` if it cannot be made: before enough was observed, far beyond anything observed, and, for fetches,
when the last observation is too old.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import combinations
from math import ceil, sqrt

from kvstore.api import Staged

_KEEP = 0.95
"""Share of its weight that an observation keeps at each later one: about the last twenty count."""

_RIDGE = 1e-3
"""Splits evenly what the observations cannot separate, e.g. latency and bandwidth if all sizes were equal."""

_SECONDS_MIN = 1e-5

_PREFILL_TOKENS_MIN = 64
"""Smaller steps show only the engine's overhead."""

_OBSERVATIONS_MIN = 4
_PREFILL_FURTHER = 2.0
"""Predictions extend to contexts this many times as long as any observed: the quadratic part shows late."""

_FETCH_FURTHER = 4.0
_RECENT = 8
_FRESH_S = 4.0
"""A tier without a fetch for this long counts as unknown and is tried again. Otherwise a tier that was slow once would
be avoided for ever, since only a fetch measures it."""

_MEMORY = "memory"
"""The node's memory tier, as a stage names its sources."""


class Fit:
    """Coefficients, none negative, of seconds as a sum of features; by least squares of the *relative* error.

    Relative, since an error of half matters as much for a cost of 10 ms as for one of 10 s, and since a step that took
    twenty times as long as usual (compilation, a stalled machine) must not outweigh the others.
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
        """Learn from a step of nothing but prefill, with the (start, stop) tokens of each request in it."""
        tokens = sum(stop - start for start, stop in chunks)
        if tokens < _PREFILL_TOKENS_MIN:
            return
        self._fit.observe((1.0, tokens, sum(_attended(start, stop) for start, stop in chunks)), seconds)
        self._num_steps += 1
        self._step_tokens = max(self._step_tokens, tokens)
        self._context_tokens = max(self._context_tokens, *(stop for _, stop in chunks))

    def seconds(self, start: int, stop: int) -> float | None:
        """Seconds to compute the tokens from `start` to `stop` of a prompt."""
        if self._num_steps < _OBSERVATIONS_MIN or stop > _PREFILL_FURTHER * self._context_tokens:
            return None
        steps = ceil((stop - start) / self._step_tokens)
        return self._fit.predict((steps, stop - start, _attended(start, stop)))


def _attended(start: int, stop: int) -> float:
    """Pairs of a token and one that it attends to."""
    return (stop * stop - start * start) / 2


class FetchCosts:
    """One tier, or the copy from the node's memory into blocks: a cost per fetch and per byte."""

    def __init__(self) -> None:
        self._fit = Fit(2)
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RECENT)
        self._num_fetches = 0
        self._bytes_max = 0
        self._observed_s = 0.0

    def observe(self, num_bytes: int, seconds: float, *, now_s: float) -> None:
        if num_bytes <= 0:
            return
        self._fit.observe((1.0, num_bytes), seconds)
        self._recent.append((num_bytes, seconds))
        self._num_fetches += 1
        self._bytes_max = max(self._bytes_max, num_bytes)
        self._observed_s = now_s

    def seconds(self, num_bytes: int, *, now_s: float) -> float | None:
        """Seconds to fetch `num_bytes` at best, judged by recent fetches.

        At best, since a disturbance only makes a fetch longer, and giving up a hit for a disturbance is a needless
        loss. So this is the smaller of two values: the fit, and the fastest recent fetch scaled to the size.
        """
        if self._num_fetches < _OBSERVATIONS_MIN or now_s - self._observed_s > _FRESH_S:
            return None
        if num_bytes > _FETCH_FURTHER * self._bytes_max:
            return None
        quickest = min(seconds * max(1.0, num_bytes / seen) for seen, seconds in self._recent)
        return min(quickest, self._fit.predict((1.0, num_bytes)))


class Costs:
    """What an engine has measured of its prefill, of each tier, and of loads into blocks."""

    def __init__(self) -> None:
        self.prefill = PrefillCosts()
        self.loads = FetchCosts()
        self._tiers: dict[str, FetchCosts] = {}

    def fetch_s(self, tier_bytes: Mapping[str, int], *, now_s: float) -> float:
        """Seconds until these bytes of each tier are in blocks; an unknown part counts as zero."""
        seconds = self.loads.seconds(sum(tier_bytes.values()), now_s=now_s) or 0.0
        for tier, num_bytes in tier_bytes.items():
            if tier in self._tiers:
                seconds += self._tiers[tier].seconds(num_bytes, now_s=now_s) or 0.0
        return seconds

    def on_staged(self, staged: Staged, seconds: float, *, now_s: float) -> None:
        """Learn from a fetch that delivered everything, or used all of its time."""
        num_records = sum(staged.sources.values())
        if num_records == 0:
            return
        sizes = {tier: staged.num_bytes * count // num_records for tier, count in staged.sources.items()}
        costs = {tier: self._tiers.setdefault(tier, FetchCosts()) for tier in sizes}
        known = {tier: costs[tier].seconds(sizes[tier], now_s=now_s) for tier in sizes}
        # records in memory were there at once: the time belongs to the slower tiers, if there are any
        slower = [tier for tier in sizes if tier != _MEMORY] or [_MEMORY]
        learned = max(slower, key=lambda tier: (known[tier] is None, sizes[tier]))
        if all(known[tier] is not None for tier in slower if tier != learned):
            rest_s = sum(known[tier] or 0.0 for tier in sizes if tier != learned)
            costs[learned].observe(sizes[learned], max(0.0, seconds - rest_s), now_s=now_s)
