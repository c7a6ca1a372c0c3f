"""Which token may use which route, over the routes' own list."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from kvstore.api import Outcome
from kvstore.model.keys import NamespaceId
from kvstore.service.admin.access import is_open
from kvstore.service.admin.app import make_routes
from kvstore.testing.prompts import Prompt
from kvstore.testing.waiting import until
from tests.unit.admin.service_harness import TOKENS, ServiceHarness, open_service, prompt_of, write_credentials

CHANGES = ("POST", "PUT", "PATCH", "DELETE")
OPERATORS_ONLY = ("/metrics",)
ASKS = ("/v1/lookup", "/v1/plan", "/v1/query", "/v1/query_by_hash")
BODIES: dict[str, dict[str, object]] = {
    "/v1/lookup": {"token_ids": [1] * 64},
    "/v1/plan": {"token_ids": [1] * 64, "system_tokens": 8, "document_tokens": [20, 20]},
    "/v1/query": {"model": "m", "token_ids": [1] * 64},
    "/v1/query_by_hash": {"model": "m", "block_hashes": [1] * 4},
    "/v1/pins": {"expires_in_s": 60},
    "/v1/hints": {"request": "asked by red", "release": True},
    "/v1/prefetch": {"request": "asked by red"},
    "/v1/deletions": {},
}
WITHOUT_NAMESPACE = ("/v1/query", "/v1/query_by_hash", "/v1/hints", "/v1/prefetch")
CONFIRMED = (
    *("/v1/namespaces/{namespace}", "/v1/prefixes/{namespace}/{prefix}", "/v1/deletions", "/v1/gc"),
    "/v1/weights/retired",
)
JOBS: dict[NamespaceId, str] = {}
"""A job of whom a namespace belongs to."""
OWN_ONLY = (
    *("/v1/namespaces", "/v1/requests", "/v1/tiers", "/v1/quotas", "/v1/weights", "/v1/jobs", "/v1/gc", "/v1/query"),
    *("/v1/history", "/v1/events", "/v1/openapi.json"),
)
"""Answered to every tenant, each about its own things; the last one is the same for all."""


def routes() -> Iterator[tuple[str, str]]:
    """Method and path of every route, including those of included routers."""
    found = [route for route in _leaves(make_routes().routes) if isinstance(route, APIRoute)]
    assert len(found) > 10
    for route in found:
        for method in sorted(route.methods):
            yield method, route.path_format


def _leaves(listed: Any) -> Iterator[Any]:
    for route in listed:
        yield from _leaves(route.routes) if getattr(route, "routes", None) else [route]


@pytest.fixture
async def tenants(tmp_path: Path) -> AsyncIterator[tuple[ServiceHarness, Prompt]]:
    """Red has a prompt with a pin, blue another prompt."""
    async with open_service(tmp_path) as made:
        red = await made.save(prompt_of("a", "red"))
        await made.save(prompt_of("b", "blue"))
        async with made.client("red") as client:
            pin = {"namespace": red.namespace.hex(), "prefix": red.boundary(128).prefix.hex(), "expires_in_s": 1000}
            assert (await client.post("/v1/pins", json=pin)).status_code == 201
            job = JOBS[red.namespace] = (await client.post("/v1/gc")).json()["job"]
            await until(lambda: client.get(f"/v1/jobs/{job}"), holds=lambda answer: answer.json()["ended_s"])
        made.store.report(Outcome("asked by red", red.namespace, 336, 320, 0, 0, "nothing_stored", tenant="red"))
        yield made, red


async def ask(client: httpx.AsyncClient, method: str, path: str, of: Prompt) -> httpx.Response:
    """A valid request about red's prompt, which deletes where the route can."""
    namespace, prefix = of.namespace.hex(), of.boundary(320).prefix.hex()
    filled = path.format(
        namespace=namespace, prefix=prefix, job=JOBS[of.namespace], tenant="red", level="cold", name="app.js"
    )
    query: dict[str, str] = {}
    body: dict[str, object] | None = None
    if path in CONFIRMED and method in ("DELETE", "POST"):
        query["confirm"] = "true"
    if path == "/v1/weights/retired":
        query["weights_id"] = "red weights"
    if method == "GET" and path in ("/v1/prefixes", "/v1/pins"):
        query["namespace"] = namespace
    if path == "/v1/events":
        query["follow"] = "false"
    if path == "/v1/requests/explain":
        query["request"] = "asked by red"
    if method == "PUT":
        body = {"guaranteed_bytes": 1}
    elif path in BODIES and method == "POST":
        body = {"namespace": namespace, **BODIES[path]} if path not in WITHOUT_NAMESPACE else BODIES[path]
        body = body | {"prefix": prefix} if path not in (*ASKS, *WITHOUT_NAMESPACE) else body
    return await client.request(method, filled, params=query, json=body)


async def everything(made: ServiceHarness, of: Prompt) -> list[object]:
    """What red's token sees."""
    async with made.client("red") as client:
        paths = (
            "/v1/namespaces",
            f"/v1/prefixes?namespace={of.namespace.hex()}",
            f"/v1/pins?namespace={of.namespace.hex()}",
            *("/v1/quotas", "/v1/weights"),
        )
        return [(await client.get(path)).json() for path in paths]


async def test_every_route_refuses_wrong_tokens(
    tenants: tuple[ServiceHarness, Prompt], tell: Callable[[str], None]
) -> None:
    """Every route refuses a request without a token, with an invalid one, with too small a scope and of another tenant,
    and changes nothing. Printed as one table.
    """
    made, red = tenants
    before = await everything(made, red)
    secrets = {red.namespace.hex(), *(red.boundary(tokens).prefix.hex() for tokens in range(64, 337, 16))}
    lines = [f"{'route':44} {'no token':>9} {'nobody':>7} {'scope':>6} {'tenant':>7}"]
    async with AsyncExitStack() as stack:
        names = (None, "red reader", "red", "blue")
        stranger, reader, tenant, blue = [await stack.enter_async_context(made.client(name)) for name in names]
        for number, (method, path) in enumerate(routes(), 1):
            refused = await ask(stranger, method, path, red)
            if is_open(path):
                assert refused.status_code == 200 and not any(secret in refused.text for secret in secrets)
                lines.append(f"{method + ' ' + path:44} {'open':>9}")
                continue
            assert refused.headers["www-authenticate"].startswith("Bearer")
            # from an address of its own, since ten wrong tokens are too many
            async with made.client("nobody", address=f"127.0.0.{1 + number}") as client:
                nobody = await ask(client, method, path, red)
            assert refused.status_code == nobody.status_code == 401
            assert all(a.headers["content-type"] == "application/problem+json" for a in (refused, nobody))
            is_change = method in CHANGES and path not in ASKS
            scope = "-"
            if is_change or path in OPERATORS_ONLY:
                small = await ask(reader if is_change else tenant, method, path, red)
                assert small.status_code == 403, path
                scope = "403"
            other = await ask(blue, method, path, red)
            is_told = other.is_success
            assert is_told == (path in OWN_ONLY), (path, other.text)
            # by hash nobody is told anything here, since this service publishes no cache events
            assert is_told or other.status_code in (403, 409 if path == "/v1/query_by_hash" else 404)
            assert not is_told or not any(secret in other.text for secret in secrets)
            seen = "own only" if is_told else other.status_code
            lines.append(f"{method + ' ' + path:44} {401:>9} {401:>7} {scope:>6} {seen:>8}")
    tell("\n".join(lines))
    assert await everything(made, red) == before


async def test_a_tenant_counts_its_own_only(tenants: tuple[ServiceHarness, Prompt]) -> None:
    """Lists, totals and tiers of red and blue add up to the operator's, and neither sees the other's. Another tenant's
    namespace and an unknown one get the same answer.
    """
    made, red = tenants
    seen: dict[str, Any] = {}
    for name in ("red", "blue", "operator"):
        async with made.client(name) as client:
            seen[name] = (await client.get("/v1/namespaces")).json(), (await client.get("/v1/tiers")).json()
    owners = {name: {one["tenant"] for one in listed["namespaces"]} for name, (listed, _) in seen.items()}
    assert owners == {"red": {"red"}, "blue": {"blue"}, "operator": {"red", "blue"}}
    own = {name: tiers["tiers"][1]["own"]["num_bytes"] for name, (_, tiers) in seen.items()}
    assert own["red"] + own["blue"] == own["operator"] > own["red"] > 0
    assert all(tier["usage"] is None and tier["reason"] is None for tier in seen["red"][1]["tiers"])
    async with made.client("blue") as client:
        answers = [await client.get(f"/v1/namespaces/{name}") for name in (red.namespace.hex(), "0" * 32)]
    assert [answer.json() | {"seen": ""} for answer in answers] == [answers[0].json() | {"seen": ""}] * 2


async def test_an_engines_token_may_read(tenants: tuple[ServiceHarness, Prompt]) -> None:
    """A token for the data port sees its tenant's data and changes nothing."""
    made, _ = tenants
    async with made.client("blue engine") as client:
        assert (await client.get("/v1/namespaces")).json()["namespaces"][0]["tenant"] == "blue"
        namespace = (await client.get("/v1/namespaces")).json()["namespaces"][0]["namespace"]
        assert (await client.delete(f"/v1/namespaces/{namespace}")).status_code == 403


async def test_wrong_tokens_are_limited(tenants: tuple[ServiceHarness, Prompt]) -> None:
    """After ten wrong tokens an address gets no other answer to a wrong one; valid tokens work, though never used."""
    made, _ = tenants
    async with made.client("wrong") as wrong, made.client("operator") as fresh:
        answers = [await wrong.get("/v1/tiers") for _ in range(12)]
        assert [answer.status_code for answer in answers] == [401] * 10 + [429] * 2
        assert 0 < int(answers[-1].headers["retry-after"]) <= 60
        assert (await fresh.get("/v1/tiers")).status_code == 200
        assert (await wrong.get("/v1/tiers")).status_code == 429
        assert (await wrong.get("/livez")).status_code == 200


async def test_a_token_is_revoked_without_a_restart(tenants: tuple[ServiceHarness, Prompt]) -> None:
    """The file loses red's token and gains green's; both take effect within seconds."""
    made, _ = tenants
    assert made.credentials is not None
    kept = {name: TOKENS[name] for name in ("operator", "blue")}
    write_credentials(made.credentials, {**kept, "green": ("red", "read")})
    async with made.client("red") as red, made.client("green") as green:
        await until(lambda: red.get("/v1/tiers"), holds=lambda answer: answer.status_code == 401)
        assert (await green.get("/v1/namespaces")).json()["namespaces"][0]["tenant"] == "red"


async def test_changes_are_audited(tenants: tuple[ServiceHarness, Prompt], caplog: pytest.LogCaptureFixture) -> None:
    """Each changing request, also a refused one, is one line with the token's name, the request and the status. Reads
    are not logged, and no token is.
    """
    made, red = tenants
    namespace, prefix = red.namespace.hex(), red.boundary(320).prefix.hex()
    caplog.clear()
    with caplog.at_level(logging.INFO, "kvstore.audit"):
        async with made.client("red") as client, made.client() as stranger:
            await client.get("/v1/tiers")
            await client.post("/v1/lookup", json={"namespace": namespace, "token_ids": []})
            await client.post("/v1/pins", json={"namespace": namespace, "prefix": prefix, "expires_in_s": 60})
            await client.delete(f"/v1/prefixes/{namespace}/{prefix}?confirm=true")
            await client.delete(f"/v1/pins/{namespace}/{prefix}")
            await client.delete(f"/v1/prefixes/{namespace}/{prefix}")
            await client.delete(f"/v1/prefixes/{namespace}/{prefix}?confirm=true")
            await stranger.delete(f"/v1/namespaces/{namespace}")

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "kvstore.audit"]

    await until(lambda: len(told()) >= 6)  # a line is written when its answer is on its way
    lines = told()
    parts = [[part for part in line.split() if part.startswith(("method", "status", "dry"))] for line in lines]
    assert parts == [
        ["method=POST", "status=201"],
        ["method=DELETE", "status=409"],
        ["method=DELETE", "status=204"],
        ["method=DELETE", "status=200", "dry_run=True"],
        ["method=DELETE", "status=200", "dry_run=False"],
        ["method=DELETE", "status=401"],
    ]
    assert all("who='red/" in line for line in lines[:5]) and "who=None" in lines[5]
    assert "token" not in caplog.text
