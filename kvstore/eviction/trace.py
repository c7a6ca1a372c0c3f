"""Reads traces of prompts in Mooncake's format: one JSON object per line, plain or gzip."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import InvalidRequest

__all__ = ["TracedPrompt", "read_trace"]

_GZIP_MAGIC = b"\x1f\x8b"
_FIELDS = {"timestamp": "milliseconds", "input_length": "tokens"}


@dataclass(frozen=True, slots=True)
class TracedPrompt:
    """One request.

    Attributes:
        at_s: When it arrived, in seconds since the trace's start.
        num_tokens: Length of the prompt.
        blocks: Ids of its blocks; each identifies the whole prompt up to the block's end. The last may be short.
    """

    at_s: float
    num_tokens: int
    blocks: tuple[int, ...]


def read_trace(path: Path, *, block_tokens: int) -> list[TracedPrompt]:
    """Read a trace: `{"timestamp": ms, "input_length": tokens, "output_length": ..., "hash_ids": [...]}` per line.

    Args:
        path: The file.
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
                    prompts.append(_parse(line, path, number, block_tokens))
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidRequest("cannot read the trace", path=path, error=reason) from error
    if not prompts:
        raise InvalidRequest("the trace is empty: expected one JSON object with hash_ids per line", path=path)
    return sorted(prompts, key=lambda prompt: prompt.at_s)


def _parse(line: bytes, path: Path, number: int, block_tokens: int) -> TracedPrompt:
    where = f"line {number} of {path}"
    try:
        fields: Any = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{where}: expected a JSON object", seen=line[:60]) from error
    if not isinstance(fields, dict):
        raise InvalidRequest(f"{where}: expected a JSON object", seen=line[:60])
    for name, unit in _FIELDS.items():
        value = fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise InvalidRequest(f"{where}: {name}: expected {unit}, a number not below zero", seen=value)
    blocks = fields.get("hash_ids")
    if not isinstance(blocks, list) or any(type(block) is not int for block in blocks):
        raise InvalidRequest(f"{where}: hash_ids: expected a list of whole numbers", seen=str(blocks)[:60])
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
