"""Engines that are connected to a service with its administration, and the prompt that it is asked about."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from connector.prefix_hash import PrefixChain
from kvstore.client import ClientOptions, RemoteStore, connect
from kvstore.model.instance import EngineInstance
from kvstore.testing.prompts import Prompt
from kvstore.testing.waiting import soon
from tests.unit.admin.service_harness import ServiceHarness

TOKENS = list(range(1000, 1000 + 64 * 5 + 20))


@asynccontextmanager
async def engine(
    made: ServiceHarness, instance: EngineInstance, prompt: Prompt, token: str = ""
) -> AsyncIterator[RemoteStore]:
    """A connected engine that has opened the prompt's namespace."""
    options = ClientOptions(name="vllm", instance=instance)
    store = connect(str(made.server.addresses[0]), token=token and f"{token} token", options=options)
    try:
        await store.open_namespace(prompt.description, deadline=soon())
        yield store
    finally:
        await store.aclose()


def instance(name: str = "e", **changes: Any) -> EngineInstance:
    return EngineInstance(**{"name": name, "models": ("m",), "step_tokens": 16, **changes})


def chain(tokens: Sequence[int], salt: str | None = None) -> PrefixChain:
    made = PrefixChain(16, salt)
    made.extend(tokens)
    return made
