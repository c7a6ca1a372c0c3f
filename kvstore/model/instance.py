"""An engine as routers know it, and what decides how far a prompt can be resumed on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineInstance:
    """An engine that resumes prompts. It tells its service when it opens its namespace; an engine that only saves tells
    nothing.

    Attributes:
        name: By which routers know it. Data-parallel engines behind one address have one name.
        models: Names under which it serves its model.
        step_tokens: Its hits end on multiples of this: its scheduler's block.
        whole_prompts: Its hits may include the prompt's last token.
        address: Where it takes requests, as its operator wrote it; empty: not known here.
        dp_rank: Its number among the data-parallel engines of this name.
        names_blocks: It tells its service how its cache events name the blocks of its pages.
    """

    name: str
    models: tuple[str, ...]
    step_tokens: int
    whole_prompts: bool = False
    address: str = ""
    dp_rank: int = 0
    names_blocks: bool = False

    def cap_tokens(self, num_tokens: int) -> int:
        """The longest hit of a prompt. See `hit_cap`."""
        return hit_cap(num_tokens, self.step_tokens, whole_prompts=self.whole_prompts)


def hit_cap(num_tokens: int, step_tokens: int, *, whole_prompts: bool) -> int:
    """The longest hit of a prompt of `num_tokens`. An engine needs the last token's logits, so it computes that token
    again; with `whole_prompts` the hit includes it all the same.
    """
    tokens = num_tokens if whole_prompts else max(0, num_tokens - 1)
    return tokens // step_tokens * step_tokens
