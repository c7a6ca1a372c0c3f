"""What became of requests in the last minutes, for whoever asks how it goes now: bounded, without a task of its own."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from kvstore.model.outcome import Outcome
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.store.explaining import result_of
from kvstore.store.reasons import REASONS

__all__ = ["WINDOW_S", "Recent"]

WINDOW_S = 300
_STEP_S = 10


class Recent:
    """Counts what engines tell of, and forgets it after `WINDOW_S`, to a step of ten seconds.

    Args:
        clock: Tells the steps apart.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._steps: deque[tuple[int, Counter[tuple[str, str]]]] = deque(maxlen=WINDOW_S // _STEP_S)

    def count(self, outcome: Outcome) -> None:
        """Add one request."""
        step = self._step()
        if not self._steps or self._steps[-1][0] != step:
            self._steps.append((step, Counter()))
        counts = self._steps[-1][1]
        local = min(outcome.local_tokens, outcome.resume_tokens)
        counts["requests", result_of(outcome)] += 1
        counts["tokens", "prompt"] += outcome.prompt_tokens
        counts["tokens", "resumed"] += outcome.resume_tokens - local
        counts["tokens", "local"] += local
        if outcome.reason:
            counts["reasons", outcome.reason if outcome.reason in REASONS else "other"] += 1

    def told(self) -> Mapping[str, object]:
        """`window_s`, and over it: `requests` by result, `tokens` by part, `reasons` why requests went no further. The
        words are those of the meters `requests` and `request_tokens`.
        """
        first = self._step() - WINDOW_S // _STEP_S + 1
        total: Counter[tuple[str, str]] = Counter()
        for step, counts in self._steps:
            if step >= first:
                total += counts
        told: dict[str, dict[str, int]] = {
            "requests": dict.fromkeys(("hit", "part", "miss", "local"), 0),
            "tokens": dict.fromkeys(("prompt", "resumed", "local"), 0),
            "reasons": {},
        }
        for (of, name), amount in sorted(total.items()):
            told[of][name] = amount
        return {"window_s": WINDOW_S, **told}

    def _step(self) -> int:
        return int(self._clock.monotonic_s() // _STEP_S)
