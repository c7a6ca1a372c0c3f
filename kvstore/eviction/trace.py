"""Traces of prompts, and the hints that go with them: from the trace's own conversations, or random ones."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.eviction.hints import RELEASED, RETAINED, Hint
from kvstore.eviction.prefixes import Key, spread
from kvstore.runtime.wrong_values import cut, not_json, shown

TRACE, RANDOM, NONE = "trace", "random", "none"

_RETAIN_S_MIN = 16.0
_RELEASE_S = 86_400.0
_RANDOM_S = (16.0, 64.0, 256.0, 1024.0)

_GZIP_MAGIC = b"\x1f\x8b"
_NUMBER_MAX = 1 << 62
_EXAMPLE = '{"timestamp": ..., "input_length": ..., "hash_ids": [...]}'
_FIELDS = {"timestamp": "milliseconds", "input_length": "tokens"}


@dataclass(frozen=True, slots=True)
class TracedPrompt:
    """One request of a trace.

    Attributes:
        at_s: When it arrived, in seconds since the trace's start.
        num_tokens: Length of the prompt.
        blocks: Ids of its blocks; each identifies the whole prompt up to the block's end. The last may be short.
    """

    at_s: float
    num_tokens: int
    blocks: tuple[int, ...]


def read_trace(path: Path, *, block_tokens: int) -> list[TracedPrompt]:
    """Read a trace in Mooncake's format, plain or gzip. Each line is a JSON object:
    `{"timestamp": ms, "input_length": tokens, "output_length": ..., "hash_ids": [...]}`.

    Args:
        block_tokens: Tokens of a block; Mooncake's traces have 512.

    Raises:
        InvalidRequest: The file cannot be read, or a line is malformed; the message names the line and the field.
    """
    prompts = []
    try:
        with path.open("rb") as file:
            is_gzip = file.read(2) == _GZIP_MAGIC
        with gzip.open(path, "rb") if is_gzip else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    prompts.append(_parse(line, f"line {number} of {path}", block_tokens))
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidRequest("cannot read the trace", path=path, error=reason) from error
    if not prompts:
        raise InvalidRequest("the trace is empty: expected one JSON object with hash_ids per line", path=path)
    return sorted(prompts, key=lambda prompt: prompt.at_s)


def _parse(line: bytes, where: str, block_tokens: int) -> TracedPrompt:
    try:
        fields: Any = json.loads(line.rstrip())
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where}: expected a JSON object like {_EXAMPLE}", seen=not_json(error)) from error
    if not isinstance(fields, dict):
        raise InvalidRequest(f"{where}: expected a JSON object like {_EXAMPLE}", seen=shown(fields))
    for name, unit in _FIELDS.items():
        value = fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _NUMBER_MAX:
            raise InvalidRequest(f"{where}: {name}: expected {unit}, a number not below zero", seen=shown(value))
    blocks = fields.get("hash_ids")
    if not isinstance(blocks, list) or any(type(block) is not int for block in blocks):
        raise InvalidRequest(f"{where}: hash_ids: expected a list of whole numbers", seen=cut(str(blocks), 60))
    num_tokens = int(fields["input_length"])
    expected = -(-num_tokens // block_tokens)
    if len(blocks) != expected:
        raise InvalidRequest(
            f"{where}: hash_ids: expected one for each {block_tokens} tokens of input_length; "
            "set --block-tokens to the trace's block size",
            input_length=num_tokens,
            expected=expected,
            seen=len(blocks),
        )
    return TracedPrompt(fields["timestamp"] / 1000, num_tokens, tuple(blocks))


def hints_of(prompts: Sequence[TracedPrompt], kind: str, *, block_tokens: int) -> list[Hint | None]:
    """A hint for each prompt.

    Args:
        kind: `trace`: what a client would say that knows its conversations, see `conversation_hints`; `random`: as
            many, at random, the same in every run; `none`.
    """
    if kind == NONE:
        return [None] * len(prompts)
    told = conversation_hints(prompts, block_tokens=block_tokens)
    return told if kind == TRACE else _random_hints(told)


def conversation_hints(prompts: Sequence[TracedPrompt], *, block_tokens: int) -> list[Hint | None]:
    """For the last prompt of a conversation a release; for others a retention until the next turn, rounded up to a
    power of two seconds, since a client knows its pause only roughly.

    A prompt is the next turn of another if it begins with all whole blocks of it, the last of which no earlier
    conversation has. One without such a block gets no hint: the trace does not show to which conversation it belongs.
    """
    first_user: dict[Key, int] = {}  # to the number of the conversation that has a block first
    last_turn: dict[Key, int] = {}  # from the last whole block of a conversation's latest prompt to that prompt
    conversation_of: list[int] = []
    hints: list[Hint | None] = []
    for index, prompt in enumerate(prompts):
        whole = prompt.blocks[: prompt.num_tokens // block_tokens]
        before = next((last_turn[key] for key in reversed(whole) if key in last_turn), None)
        conversation = index if before is None else conversation_of[before]
        conversation_of.append(conversation)
        hints.append(None)
        if before is not None:
            hints[before] = Hint(RETAINED, _rounded_up(prompt.at_s - prompts[before].at_s))
            del last_turn[prompts[before].blocks[prompts[before].num_tokens // block_tokens - 1]]
        for key in whole:
            first_user.setdefault(key, conversation)
        if whole and first_user[whole[-1]] == conversation:
            last_turn[whole[-1]] = index
            hints[index] = Hint(RELEASED, _RELEASE_S)
    return hints


def _rounded_up(seconds: float) -> float:
    rounded = _RETAIN_S_MIN
    while rounded < seconds:
        rounded *= 2
    return rounded


def _random_hints(told: Sequence[Hint | None]) -> list[Hint | None]:
    chances = [spread(index) >> 32 for index in range(len(told))]
    return [
        hint and (Hint(RELEASED, _RELEASE_S) if chance % 2 else Hint(RETAINED, _RANDOM_S[chance // 2 % len(_RANDOM_S)]))
        for hint, chance in zip(told, chances, strict=True)
    ]
