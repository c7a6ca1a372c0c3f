"""Requests that do not stop while a test breaks something: prompts that are stored, and new ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from kvstore.testing.engine import Answer, EngineProcess, Request, seeded_prompt

__all__ = ["OLD_TOKENS", "Prompts", "Sample", "Traffic"]

OLD_TOKENS, NEW_TOKENS = 2500, 1300
_OUTPUT_TOKENS = 8
_STEP_S = 0.02
_PAUSE_S = 0.5
"""Between two rounds: an engine that computes without end takes the processors of all that is tested beside it."""


class Prompts:
    """Prompts that are asked again and again, with their right outputs, and any number of new ones."""

    def __init__(self, engine: EngineProcess, num_old: int) -> None:
        self._engine = engine
        self._seeds = count(1000)
        self.old = [seeded_prompt(seed, OLD_TOKENS) for seed in range(1, num_old + 1)]
        self.outputs: dict[tuple[int, ...], tuple[int, ...]] = {}

    def new(self, num_tokens: int = NEW_TOKENS) -> tuple[int, ...]:
        """A prompt that nobody has asked before."""
        return seeded_prompt(next(self._seeds), num_tokens)

    def ask(self, prompts: Sequence[tuple[int, ...]]) -> list[Answer]:
        """Answer prompts together, without the engine's own cache."""
        while not self._engine.reset_prefix_cache():
            time.sleep(_STEP_S)  # something still holds blocks
        return self._engine.generate([Request(prompt, _OUTPUT_TOKENS, logprobs=None) for prompt in prompts])

    def is_right(self, prompt: tuple[int, ...], answer: Answer) -> bool:
        """Whether an output is what the prompt's first one was; a first one is taken for right."""
        return len(answer.tokens) == _OUTPUT_TOKENS and self.outputs.setdefault(prompt, answer.tokens) == answer.tokens

    def computing_s(self, rounds: int) -> list[float]:
        """Longest time to the first token, for each place of a round, when both of its prompts are new."""
        answers = [self.ask([self.new(OLD_TOKENS), self.new()]) for _ in range(rounds)]
        return [max(pair[place].ttft_s for pair in answers) for place in range(2)]


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered request.

    Attributes:
        sent_s, ended_s: On the monotonic clock.
        place: Which of its round's requests.
        is_old: One of the prompts that were stored before the fault.
        num_cached_tokens: As the engine tells.
        ttft_s: Time to the first token.
        is_right: The output is the right one.
    """

    sent_s: float
    ended_s: float
    place: int
    is_old: bool
    num_cached_tokens: int
    ttft_s: float
    is_right: bool


class Traffic:
    """Rounds of two requests at once, one shortly after the other, from a thread: a stored prompt beside a new one, or
    beside one that the last round brought. A context manager; the engine is its own meanwhile.

    Attributes:
        samples: What was answered so far.
        focus: Ask this stored prompt and no other.
        error: What ended it: the engine died or refused a request.
    """

    def __init__(self, prompts: Prompts) -> None:
        self.samples: list[Sample] = []
        self.focus: tuple[int, ...] | None = None
        self.error: BaseException | None = None
        self._prompts = prompts
        self._ending = threading.Event()
        self._may_ask = threading.Event()
        self._may_ask.set()
        self._asking = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)

    def go_on(self, seconds: float) -> None:
        """Let it run."""
        self._thread.join(seconds)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No request is under way in the block."""
        self._may_ask.clear()
        try:
            with self._asking:
                yield
        finally:
            self._may_ask.set()

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._may_ask.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            for number in count():
                if self._ending.is_set():
                    return
                if number % 2 == 0:
                    other = self._prompts.new()
                old = self.focus or self._prompts.old[number % len(self._prompts.old)]
                self._may_ask.wait()
                with self._asking:
                    self._round([old, other])
                self._ending.wait(_PAUSE_S)
        except BaseException as error:  # noqa: BLE001 - a thread's top: the test tells it
            self.error = error

    def _round(self, prompts: Sequence[tuple[int, ...]]) -> None:
        sent_s = time.monotonic()
        for place, (prompt, answer) in enumerate(zip(prompts, self._prompts.ask(prompts), strict=True)):
            self.samples.append(
                Sample(
                    sent_s,
                    sent_s + answer.total_s,
                    place,
                    place == 0,
                    answer.num_cached_tokens,
                    answer.ttft_s,
                    self._prompts.is_right(prompt, answer),
                )
            )
