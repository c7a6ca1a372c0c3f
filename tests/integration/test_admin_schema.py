"""The administration interface against its own description, with made-up requests, on a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from redis.asyncio import Redis
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from kvstore.runtime.deadline import Deadline
from kvstore.service.admin.app import make_routes
from kvstore.service.admin.data_loop import DataLoop
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.servers import RedisServer
from tests.unit.admin.service_harness import ServiceHarness, open_service

EXAMPLES = 5
"""Of each route, in a run whose requests are the same each time."""

CHECKS = [
    *(not_a_server_error, status_code_conformance, content_type_conformance),
    *(response_schema_conformance, response_headers_conformance, unsupported_method),
]
"""Not those of schemathesis that guess which requests are right: a description cannot say what a cursor is."""


def operations() -> Iterator[Any]:
    """Every route of the description, those of the framework's own answers included."""
    schema = schemathesis.openapi.from_dict(make_routes().openapi(), config=SchemathesisConfig())
    for found in schema.get_all_operations():
        yield found.ok()


@pytest.mark.servers
async def test_made_up_requests_are_answered_as_described(
    tmp_path: Path, shared_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right and wrong parameters and bodies for every route, with an operator's token and without one, over namespaces
    and prefixes that are there: no answer of the 500s, none that is not described.
    """
    monkeypatch.setattr(DataLoop, "soon", lambda self, within_s=0.0: Deadline.after(60))  # on a slow machine too
    for name in ("service", "tiers"):
        monkeypatch.setattr(f"kvstore.service.admin.resources.{name}._ANSWER_S", 60.0)
    monkeypatch.setattr("kvstore.service.admin.resources.events._FOLLOW_S", 0.5)
    hot = f"redis://{shared_redis.host}:{shared_redis.port}"
    async with Redis(host=shared_redis.host, port=shared_redis.port) as client:
        await client.flushdb()
    async with open_service(tmp_path, hot=hot) as made:
        prompts = [await made.save(Prompt(ATTENTION, "a", 64 * 6, model=f"m{i}", tenant="red")) for i in range(2)]
        asked = await asyncio.to_thread(ask_all, made, prompts)
    print(f"{sum(asked.values())} requests: {asked}")
    assert len(asked) == 41
    assert sum(asked.values()) > 3 * len(asked)


def ask_all(made: ServiceHarness, prompts: list[Prompt]) -> dict[str, int]:
    """How many requests each route has answered."""
    asked: dict[str, int] = {}
    known = {
        "namespace": [prompt.namespace.hex() for prompt in prompts],
        "prefix": [prompts[0].boundary(tokens).prefix.hex() for tokens in (64, 128, 192)],
    }
    for operation in operations():
        number = 0

        @settings(
            max_examples=EXAMPLES,
            derandomize=True,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            nonlocal number
            number += 1
            for place in (case.path_parameters, case.query, case.body):
                if isinstance(place, dict) and number % 2:  # every other request is about something that is there
                    place.update(
                        {name: values[number % len(values)] for name, values in known.items() if name in place}
                    )
            headers = {"Authorization": "Bearer operator token"} if number % 5 else {}
            case.call_and_validate(base_url=made.url, headers=headers, timeout=30, checks=CHECKS)

        ask()
        asked[operation.label] = number
    return asked
