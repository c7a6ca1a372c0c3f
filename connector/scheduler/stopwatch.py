"""Measures how long the engine's steps and loads take, for `costs.py`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from connector.scheduler.costs import Costs
from kvstore.runtime.clock import Clock

_PREFILL_SHARE = 0.9
"""The share of a step's tokens that must belong to prompts for the step to count as prefill."""

_STEPS_MAX = 64


class Stopwatch:
    """Measures the engine's steps and loads for `Costs`, even if vLLM plans the next step before it has the last one's
    results. Belongs to the engine's thread.

    vLLM reports steps in the order in which it planned them, each once, empty ones too.

    Args:
        prompt_tokens_of: A request's prompt; 0 for an unknown request.
    """

    def __init__(self, costs: Costs, prompt_tokens_of: Callable[[str], int], clock: Clock) -> None:
        self._costs = costs
        self._prompt_tokens_of = prompt_tokens_of
        self._clock = clock
        self._steps: deque[_Step] = deque(maxlen=_STEPS_MAX)
        self._reported_s = 0.0
        self._loads: dict[str, tuple[int, float]] = {}  # bytes and start of loads that began in an idle engine

    @property
    def is_computing(self) -> bool:
        """Whether results of a step that computes are still to come."""
        return any(step.chunks for step in self._steps)

    def on_step_planned(
        self, computed_tokens: Mapping[str, int], final_tokens: Mapping[str, int], *, is_shared: bool
    ) -> None:
        """Note the start of a step that takes each request from its computed to its final tokens. A shared one may do
        other work too, and is not timed.
        """
        chunks, tokens, prefill_tokens = [], 0, 0
        for request_id, stop in final_tokens.items():
            start = computed_tokens.get(request_id, stop)
            tokens += stop - start
            if start < self._prompt_tokens_of(request_id):
                prefill_tokens += stop - start
            chunks.append((start, stop))
        if chunks or is_shared:
            self._loads.clear()
        is_prefill = not is_shared and tokens > 0 and prefill_tokens >= _PREFILL_SHARE * tokens
        self._steps.append(_Step(self._clock.monotonic_s(), tuple(chunks), is_prefill))

    def on_step_reported(self) -> None:
        """Note that vLLM has the results of the oldest step."""
        if not self._steps:
            return
        step, now_s = self._steps.popleft(), self._clock.monotonic_s()
        if step.is_prefill:
            self._costs.prefill.observe(step.chunks, now_s - max(step.planned_s, self._reported_s))
        self._reported_s = now_s

    def on_load_ordered(self, request_id: str, num_bytes: int) -> None:
        """Note the start of a load. Not timed while the engine computes, since vLLM reports it when that step ends."""
        if not self.is_computing:
            self._loads[request_id] = (num_bytes, self._clock.monotonic_s())

    def on_load_ended(self, request_id: str, *, failed: bool) -> None:
        """Note that all ranks have reported a load."""
        load = self._loads.pop(request_id, None)
        if load is not None and not failed:
            now_s = self._clock.monotonic_s()
            self._costs.loads.observe(load[0], now_s - load[1], now_s=now_s)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that vLLM has planned and not reported yet; without chunks it computes nothing."""

    planned_s: float
    chunks: tuple[tuple[int, int], ...]
    is_prefill: bool
