"""Times the engine's steps and loads, for `admission` to learn from."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from connector.scheduler.decide import Admission
from connector.scheduler.requests import Ledger
from kvstore.runtime.clock import Clock

__all__ = ["StepClock", "Timing"]

_PREFILL_SHARE = 0.9
"""The share of a step's tokens that must belong to prompts for the step to count as prefill."""

_STEPS_MAX = 64


class Timing:
    """Reports to an `Admission` how long prefill and loads took. Belongs to the engine's thread."""

    def __init__(self, admission: Admission, ledger: Ledger, clock: Clock) -> None:
        self._admission = admission
        self._ledger = ledger
        self._clock = clock
        self._steps = StepClock()
        self._undisturbed: dict[str, _Load] = {}

    @property
    def is_computing(self) -> bool:
        """Whether results of a step that computes are still to come."""
        return self._steps.is_computing

    @property
    def num_open_steps(self) -> int:
        return self._steps.num_open

    def on_planned(self, computed_tokens: Mapping[str, int], final_tokens: Mapping[str, int]) -> None:
        """Note the start of a step that takes each request from its computed to its final tokens."""
        chunks, prefill_tokens = [], 0
        for request_id, stop in final_tokens.items():
            start, state = computed_tokens.get(request_id, stop), self._ledger.find(request_id)
            if state is not None and start < len(state.prompt):
                prefill_tokens += stop - start
            chunks.append((start, stop))
        if chunks:
            self._undisturbed.clear()
        self._steps.planned(chunks, prefill_tokens, now_s=self._clock.monotonic_s())

    def on_reported(self) -> None:
        """vLLM has a step's results; called once for each step, in their order."""
        timed = self._steps.reported(now_s=self._clock.monotonic_s())
        if timed is not None:
            self._admission.prefill.observe(*timed)

    def on_load_ordered(self, request_id: str, num_bytes: int) -> None:
        """Note the start of a load. Not timed while the engine computes, since vLLM reports it when that step ends."""
        if not self._steps.is_computing:
            self._undisturbed[request_id] = _Load(num_bytes, self._clock.monotonic_s())

    def on_load_ended(self, request_id: str, *, failed: bool) -> None:
        """Note that all ranks have reported a load."""
        load = self._undisturbed.pop(request_id, None)
        if load is not None and not failed:
            now = self._clock.monotonic_s()
            self._admission.on_loaded(load.num_bytes, now - load.began_s, now_s=now)


@dataclass(frozen=True, slots=True)
class _Load:
    """A load that began while the engine had nothing to compute."""

    num_bytes: int
    began_s: float


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that vLLM has planned and not reported yet; without chunks it computes nothing."""

    planned_s: float
    chunks: tuple[tuple[int, int], ...]
    is_prefill: bool


class StepClock:
    """How long each step took, even when vLLM plans the next one before it has the last one's results.

    vLLM reports steps in the order in which it planned them, each once, the empty ones too.
    """

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=_STEPS_MAX)
        self._reported_s = 0.0

    def planned(self, chunks: Sequence[tuple[int, int]], prefill_tokens: int, *, now_s: float) -> None:
        """Note the start of a step.

        Args:
            chunks: For each request the (start, stop) tokens that it computes.
            prefill_tokens: How many of them belong to prompts.
            now_s: Monotonic time.
        """
        tokens = sum(stop - start for start, stop in chunks)
        self._steps.append(_Step(now_s, tuple(chunks), tokens > 0 and prefill_tokens >= _PREFILL_SHARE * tokens))

    def reported(self, *, now_s: float) -> tuple[tuple[tuple[int, int], ...], float] | None:
        """Note that the oldest step is done; returns its chunks and seconds if it was prefill, else `None`."""
        if not self._steps:
            return None
        step = self._steps.popleft()
        seconds = now_s - max(step.planned_s, self._reported_s)
        self._reported_s = now_s
        return (step.chunks, seconds) if step.is_prefill else None

    @property
    def is_computing(self) -> bool:
        """Whether results of a step that computes are still to come."""
        return any(step.chunks for step in self._steps)

    @property
    def num_open(self) -> int:
        return len(self._steps)
