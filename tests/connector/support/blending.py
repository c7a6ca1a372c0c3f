"""Prompts of documents, with and without the wish to blend them, and what engines and the service say of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore.client import BlockingStore
from kvstore.runtime.deadline import Deadline
from kvstore.testing.engine import Answer, EngineSpec, Request, seeded_prompt
from tests.connector.support.service import DirectoryService

__all__ = ["RECORDS", "SALT", "blended", "computed", "difference", "explained", "spec_of"]

DOCUMENT = 200
RECORDS = 4
"""Of a document: a slice for each layer."""
SALT = "blend:team"


def prompt_of(order: Sequence[int], question: int = 0) -> tuple[tuple[int, ...], list[list[int]]]:
    """A prompt with these documents, and where they are in it."""
    prompt, spans = [1, *seeded_prompt(7000, 20)], []
    for document in order:
        spans.append([len(prompt), len(prompt) + DOCUMENT])
        prompt += seeded_prompt(7100 + document, DOCUMENT)
    return (*prompt, *seeded_prompt(7200 + question, 30)), spans


def blended(order: Sequence[int], question: int = 0, *, salt: str = SALT) -> Request:
    prompt, spans = prompt_of(order, question)
    wish = {"kvstore": {"blend": {"documents": spans}}}
    return Request(prompt, max_tokens=2, cache_salt=salt, kv_transfer_params=wish)


def computed(order: Sequence[int], question: int = 0, *, salt: str | None = None) -> Request:
    return Request(prompt_of(order, question)[0], max_tokens=2, cache_salt=salt)


def difference(one: Answer, other: Answer) -> float:
    """The largest difference of a log probability of the first token, of those that both list."""
    mine, theirs = one.logprobs[0], other.logprobs[0]
    shared = mine.keys() & theirs.keys()
    return max((abs(mine[token] - theirs[token]) for token in shared), default=float("inf"))


def spec_of(checkpoint: Path, service: DirectoryService, **settings: Any) -> EngineSpec:
    chosen = {"url": service.url, "blend": True, "blend_audit_rate": 0.0, **settings}
    return EngineSpec(checkpoint=checkpoint, connector=chosen, max_model_len=4096)


def explained(service: DirectoryService, reason: str) -> list[dict[str, Any]]:
    """The latest requests with a reason, newest first."""
    with BlockingStore(service.url) as store:
        listed: Any = store.explain("", deadline=Deadline.after(5.0))
        names = [one["request"] for one in listed["requests"] if one["reason"] == reason]
        return [dict(store.explain(name, deadline=Deadline.after(5.0))) for name in names]
