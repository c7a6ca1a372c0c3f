"""Replays a trace against a budget with the store's own coverage, admission and eviction, in virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.eviction.auto import Auto, save_prompt
from kvstore.eviction.candidates import AUTO, CANDIDATES, Candidate, parse_candidate
from kvstore.eviction.hint_trial import HintTrial, Marks
from kvstore.eviction.hints import Hinted
from kvstore.eviction.holdings import Holdings
from kvstore.eviction.policies import Policy
from kvstore.eviction.prefixes import NORMAL, Key
from kvstore.eviction.trace import NONE, TracedPrompt, hints_of
from kvstore.model.coverage import longest_resumable
from kvstore.model.kinds import FullAttention
from kvstore.model.layout import GroupLayout, Layout

CLAIRVOYANT = "clairvoyant"
"""Not a policy but an upper bound: it knows the next use of every block from the trace."""

_STEP_TOKENS = 16
_SWEEP_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """The assumptions of one run.

    Attributes:
        policy: `auto`, `clairvoyant`, or a candidate like `lru` or `lru+second_sight`.
        block_tokens: Tokens of a block, and of a page.
        block_bytes: Stored bytes of a block.
        block_records: Records per block, and so requests to write, read or delete it.
        ttl_s: A block that was unused for longer is evicted; `None`: no limit.
        hints: Which hints come with the prompts: `none`, `trace` or `random`, as `hints_of`.
    """

    policy: str
    budget_blocks: int
    block_tokens: int = 512
    block_bytes: int = 64 << 20
    block_records: int = 16
    ttl_s: float | None = None
    hints: str = NONE


@dataclass(slots=True)
class ReplayResult:
    """The result of one run.

    Attributes:
        input_tokens: Tokens of all prompts.
        hit_tokens: Tokens of them that were restored.
        blocks_read: Blocks that were read for the hits.
        blocks_written: Blocks that were admitted.
        blocks_evicted: Blocks that were evicted or expired.
        hints_followed: Of the hints that came.
        num_hints: Hints that came.
        followed: For `auto`: pairs of a prompt's index and the candidate that was followed from it on.
    """

    input_tokens: int = 0
    hit_tokens: int = 0
    blocks_read: int = 0
    blocks_written: int = 0
    blocks_evicted: int = 0
    hints_followed: int = 0
    num_hints: int = 0
    followed: list[tuple[int, str]] = field(default_factory=list)

    @property
    def token_hit_rate(self) -> float:
        return self.hit_tokens / max(1, self.input_tokens)


def check_policy(name: str) -> str:
    """Return the name.

    Raises:
        InvalidRequest: There is no such policy.
    """
    others = (AUTO, CLAIRVOYANT)
    if name not in others:
        parse_candidate(name, others)
    return name


def replay(
    prompts: Sequence[TracedPrompt], plan: ReplayPlan, on_progress: Callable[[int], None] | None = None
) -> ReplayResult:
    """Look every prompt up, read the hits, save the rest.

    Args:
        prompts: In the order of their times.
        on_progress: Called from time to time with the number of prompts that were done since the last call.
    """
    run = _clairvoyant if plan.policy == CLAIRVOYANT else _play
    return run(prompts, plan, on_progress or (lambda _: None))


def _play(prompts: Sequence[TracedPrompt], plan: ReplayPlan, on_progress: Callable[[int], None]) -> ReplayResult:
    candidates: Sequence[Candidate] = CANDIDATES if plan.policy == AUTO else (parse_candidate(plan.policy),)
    current = candidates[0]
    budget_bytes = plan.budget_blocks * plan.block_bytes
    hints = _TraceHints(prompts, plan)
    holdings = Holdings(budget_bytes, hints.policy_of(current))
    marks = Marks(holdings)
    # every rule sees every prompt, so that its memory is filled when `auto` changes to it
    rules = {one.admission: one.make_admission(plan.budget_blocks) for one in candidates}
    auto = Auto(candidates, budget_bytes=budget_bytes, boundary_bytes=plan.block_bytes) if len(candidates) > 1 else None
    layout = Layout(plan.block_tokens, (GroupLayout(FullAttention(), 1),))
    result = ReplayResult(followed=[(0, current.name)] if auto else [])
    swept_s = 0.0
    for index, prompt in enumerate(prompts):
        if plan.ttl_s is not None and prompt.at_s >= swept_s + _SWEEP_S:
            result.blocks_evicted += len(holdings.expire(prompt.at_s - plan.ttl_s))
            swept_s = prompt.at_s
        tokens = _boundaries(prompt, plan.block_tokens)
        sizes = [plan.block_bytes] * len(tokens)
        marks.expire(prompt.at_s)
        _look_up(prompt, tokens, holdings, layout, result)
        if auto is not None and auto.observe(prompt.blocks, tokens, sizes, prompt.at_s):
            current = auto.current
            holdings.use_policy(hints.policy_of(current))
            result.followed.append((index, current.name))
        for name, rule in rules.items():
            if name != current.admission:
                rule.admit(prompt.blocks)
        admitted = rules[current.admission].admit(prompt.blocks)
        path = prompt.blocks[: hints.admitted(index, prompt, admitted)]
        num_written, num_evicted = save_prompt(holdings, path, tokens, sizes, now=prompt.at_s)
        hints.give(index, prompt, tokens, marks)
        result.blocks_written += num_written
        result.blocks_evicted += num_evicted
        if index % 64 == 63:
            on_progress(64)
    on_progress(len(prompts) % 64)
    result.hints_followed, result.num_hints = hints.num_followed, hints.num_hints
    return result


class _TraceHints:
    """The hints of a trace, each given with its prompt, and followed as the store follows them."""

    def __init__(self, prompts: Sequence[TracedPrompt], plan: ReplayPlan) -> None:
        self._hints = hints_of(prompts, plan.hints, block_tokens=plan.block_tokens)
        self._block_tokens = plan.block_tokens
        self._sizes = plan.block_bytes
        self._trial = HintTrial(budget_bytes=plan.budget_blocks * plan.block_bytes, boundary_bytes=plan.block_bytes)
        self.is_on = plan.hints != NONE
        self.num_hints = sum(hint is not None for hint in self._hints)
        self.num_followed = 0

    def policy_of(self, candidate: Candidate) -> Callable[[], Policy]:
        if not self.is_on:
            return candidate.make_policy
        return lambda: Hinted(candidate.make_policy(), self._trial.follows)

    def admitted(self, index: int, prompt: TracedPrompt, by_rule: int) -> int:
        """How many of a prompt's boundaries are written: all if it will be used again, none if not."""
        hint = self._hints[index]
        if hint is None or not self._trial.follows(""):
            return by_rule
        self.num_followed += 1
        return len(prompt.blocks) if hint.priority > NORMAL else 0

    def give(self, index: int, prompt: TracedPrompt, tokens: Sequence[int], marks: Marks) -> None:
        """A prompt was looked up and is saved: its last whole block and its end are marked."""
        if not self.is_on:
            return
        self._trial.observe(prompt.blocks, tokens, [self._sizes] * len(tokens), prompt.at_s)
        if (hint := self._hints[index]) is not None:
            for key in prompt.blocks[prompt.num_tokens // self._block_tokens - 1 :]:
                self._trial.hint(key, hint, prompt.at_s)
                marks.set(key, hint, prompt.at_s)


def _boundaries(prompt: TracedPrompt, block_tokens: int) -> list[int]:
    tokens = list(range(block_tokens, prompt.num_tokens + 1, block_tokens))
    return tokens if prompt.num_tokens % block_tokens == 0 else [*tokens, prompt.num_tokens]


def _look_up(
    prompt: TracedPrompt, tokens: Sequence[int], holdings: Holdings, layout: Layout, result: ReplayResult
) -> None:
    present = [int(block in holdings) for block in prompt.blocks]
    end = len(present)
    while end and not present[end - 1]:
        end -= 1
    resume = longest_resumable(
        layout,
        tokens[:end],
        present[:end],
        local_tokens=0,
        cap_tokens=prompt.num_tokens,
        step_tokens=_STEP_TOKENS,
    )
    num_read = -(-resume // layout.page_tokens)
    holdings.use(prompt.blocks[:num_read], prompt.at_s)
    result.input_tokens += prompt.num_tokens
    result.hit_tokens += resume
    result.blocks_read += num_read


def _clairvoyant(prompts: Sequence[TracedPrompt], plan: ReplayPlan, on_progress: Callable[[int], None]) -> ReplayResult:
    leading, num_written = clairvoyant_holds([prompt.blocks for prompt in prompts], plan.budget_blocks)
    result = ReplayResult(blocks_written=num_written, blocks_evicted=max(0, num_written - plan.budget_blocks))
    for prompt, held in zip(prompts, leading, strict=True):
        result.input_tokens += prompt.num_tokens
        result.hit_tokens += min(prompt.num_tokens, held * plan.block_tokens) // _STEP_TOKENS * _STEP_TOKENS
        result.blocks_read += held
    on_progress(len(prompts))
    return result


def clairvoyant_holds(paths: Sequence[Sequence[Key]], budget: int) -> tuple[list[int], int]:
    """Belady's algorithm with bypass: evicts the boundary that is used again latest, and does not write those that are
    never used again.

    A boundary's next use is never later than that of a longer prefix, so the longest prefixes are evicted first.

    Args:
        paths: All prompts' boundaries, in the order of arrival.
        budget: Boundaries that may be held, all of one size.

    Returns:
        For each prompt how many of its boundaries are held when it arrives, and how many boundaries were written.
    """
    never = len(paths)
    next_uses: list[list[int]] = [[] for _ in paths]
    upcoming: dict[Key, int] = {}
    for index in range(len(paths) - 1, -1, -1):
        next_uses[index] = [upcoming.get(key, never) for key in paths[index]]
        upcoming.update(dict.fromkeys(paths[index], index))
    held: dict[Key, int] = {}  # to the prompt of its next use
    furthest: list[tuple[int, int, Key]] = []  # next use and depth, both negated: the latest, then the deepest, first
    leading, num_written = [], 0
    for index, path in enumerate(paths):
        hits = 0
        while hits < len(path) and path[hits] in held:
            hits += 1
        leading.append(hits)
        added = []
        for depth, (key, use) in enumerate(zip(path, next_uses[index], strict=True)):
            if use == never:
                held.pop(key, None)
                continue
            if key not in held:
                added.append(key)
            held[key] = use
            heapq.heappush(furthest, (-use, -depth, key))
        while len(held) > budget:
            use, _, key = heapq.heappop(furthest)
            if held.get(key) == -use:
                del held[key]
        num_written += sum(key in held for key in added)
    return leading, num_written
