"""A planned prompt is an ordinary one: what an engine restores of it is what its own cache would give, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import pytest

from kvstore.client import PlanClient
from kvstore.testing.engine import EngineProcess, EngineSpec, Request, seeded_prompt
from kvstore.testing.servers.ports import free_address
from tests.connector.support.runs import ask_each, forget_own_cache
from tests.connector.support.service import DirectoryService
from tests.connector.support.stores import PATIENT, wait_for_engine

pytestmark = pytest.mark.engine

SYSTEM = seeded_prompt(900, 100)
DOCUMENTS = [seeded_prompt(901 + number, length) for number, length in enumerate((600, 500, 900, 333))]
QUESTIONS = [seeded_prompt(911, 41), seeded_prompt(912, 57)]
SHARED = 2048
"""Tokens of whole pages, and of whole blocks, in the system prompt and the first three documents (2,100 tokens)."""


def test_a_planned_prompt_is_answered_as_from_the_own_cache(
    engine: Callable[..., EngineProcess], llama: Path, tmp_path: Path
) -> None:
    """One request has three documents. Of another request with these and a fourth, in another order, the plan promises
    a hit, and the engine has exactly this hit. Tokens and logprobs are those of an engine without a connector that
    resumes the same prompt from its own cache.
    """
    first = (*SYSTEM, *(token for one in DOCUMENTS[:3] for token in one), *QUESTIONS[0])
    address = free_address()
    with DirectoryService(tmp_path, {"admin_listen": address}) as service:
        running = engine(EngineSpec(checkpoint=llama, connector={"url": service.url, **PATIENT}))
        wait_for_engine(service.url)
        ask_each(running, [first])
        service.settle()
        with urlopen(f"http://{address}/v1/namespaces", timeout=60.0) as answer:
            (namespace,) = [one["namespace"] for one in json.load(answer)["namespaces"]]
        with PlanClient(f"http://{address}", namespace, timeout_s=60.0) as client:
            asked = [DOCUMENTS[index] for index in (3, 2, 0, 1)]
            plan = client.plan(asked, system=SYSTEM, following=QUESTIONS[1], within_ms=1000, compare=True)
        assert not plan.failure
        assert plan.order == [2, 3, 1, 0]
        assert (plan.hit_tokens, plan.given_hit_tokens) == (SHARED, 0)
        assert plan.token_ids == [*SYSTEM, *(token for one in DOCUMENTS for token in one), *QUESTIONS[1]]
        forget_own_cache(running)
        (restored,) = running.generate([Request(tuple(plan.token_ids))])
        running.stop()
    own = engine(EngineSpec(checkpoint=llama))
    _, reference = ask_each(own, [first, tuple(plan.token_ids)])
    assert restored.num_cached_tokens == reference.num_cached_tokens == SHARED
    assert restored.tokens == reference.tokens
    assert restored.difference(reference) == 0.0
