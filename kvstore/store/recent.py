"""What became of requests and saves in the last minutes: bounded, without a task of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.model.outcome import Outcome
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.store.reasons import REASONS, result_of

__all__ = ["WINDOW_S", "Recent"]

WINDOW_S = 300
_STEP_S = 10


@dataclass(slots=True)
class _Step:
    """Counts of one step, and for what can never be saved the `pinned_bytes` that would do and the one that is set."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    too_large: tuple[int, int] = (0, 0)


class Recent:
    """Counts what engines tell of, and forgets it after `WINDOW_S`, to a step of ten seconds.

    Args:
        clock: Tells the steps apart.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._steps: dict[int, _Step] = {}  # by number

    def count(self, outcome: Outcome, reason: str | None = None) -> None:
        """Add one request, or one loss, in the step in which it happened; `reason`: the one that was found, in place
        of the engine's own.
        """
        reason = outcome.reason if reason is None else reason
        first = self._first()
        number = self._step(outcome.age_ms / 1000)
        if number < first:
            return
        if number not in self._steps:
            self._steps = {old: step for old, step in self._steps.items() if old >= first}
            self._steps[number] = _Step()
        step = self._steps[number]
        counts = step.counts
        if outcome.is_loss:
            counts["losses", reason if reason in REASONS else "other"] += outcome.num_lost
            if outcome.reason == "save_too_large":
                sizes = (outcome.detail.get("needs_bytes"), outcome.detail.get("pinned_bytes"))
                step.too_large = max(step.too_large, (_whole(sizes[0]), _whole(sizes[1])))
            return
        local = min(outcome.local_tokens, outcome.resume_tokens)
        counts["requests", result_of(outcome)] += 1
        counts["tokens", "prompt"] += outcome.prompt_tokens
        counts["tokens", "resumed"] += outcome.resume_tokens - local
        counts["tokens", "local"] += local
        if reason:
            counts["reasons", reason if reason in REASONS else "other"] += 1

    def told(self) -> Mapping[str, object]:
        """`window_s`, and over it: `requests` by result, `tokens` by part, `reasons` why requests went no further,
        `losses`: records that engines computed and did not save, by the reason, `too_large`: of engines that can never
        save some records, the largest `needs_bytes`, with the `pinned_bytes` that they have. The words are those of the
        meters `requests`, `request_tokens` and `saves_lost`.
        """
        first = self._first()
        total: Counter[tuple[str, str]] = Counter()
        needs_bytes, pinned_bytes = 0, 0
        for number, step in self._steps.items():
            if number >= first:
                total += step.counts
                needs_bytes, pinned_bytes = max((needs_bytes, pinned_bytes), step.too_large)
        told: dict[str, dict[str, int]] = {
            "requests": dict.fromkeys(("hit", "part", "miss", "local"), 0),
            "tokens": dict.fromkeys(("prompt", "resumed", "local"), 0),
            "reasons": {},
            "losses": {},
            "too_large": {"needs_bytes": needs_bytes, "pinned_bytes": pinned_bytes} if needs_bytes else {},
        }
        for (of, name), amount in sorted(total.items()):
            told[of][name] = amount
        return {"window_s": WINDOW_S, **told}

    def _step(self, age_s: float = 0.0) -> int:
        """The number of the step `age_s` ago."""
        return int((self._clock.monotonic_s() - age_s) // _STEP_S)

    def _first(self) -> int:
        """The number of the oldest step that counts."""
        return self._step() - WINDOW_S // _STEP_S + 1


def _whole(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else 0
