"""What each resource answers, from a real service over a directory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from connector.prefix_hash import PrefixChain
from kvstore.api import Outcome
from kvstore.catalog.base import Use
from kvstore.catalog.entry import Level
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.record import Record, seal
from kvstore.model.keys import PlainChain, RecordKey
from kvstore.model.layout import Span
from kvstore.testing.prompts import ATTENTION, HYBRID, Prompt
from tests.unit.admin.service_harness import ServiceHarness, open_service, prompt_of, soon


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[ServiceHarness]:
    async with open_service(tmp_path) as opened:
        yield opened


async def test_a_namespace_is_described_in_full(made: ServiceHarness) -> None:
    """Everything that makes it this one, and what it holds; the list has totals over all its pages."""
    prompts = [await made.save(Prompt(ATTENTION, "a", 128, model=f"m{i}", tenant="red")) for i in range(3)]
    async with made.client("red") as client:
        listed, cursor = [], ""
        while cursor is not None:
            page = (await client.get("/v1/namespaces", params={"limit": 2, "cursor": cursor})).json()
            assert page["total"]["filesystem"]["num_records"] == 12
            listed += [one["namespace"] for one in page["namespaces"]]
            cursor = page["next_cursor"]
        assert listed == sorted(prompt.namespace.hex() for prompt in prompts)
        detail = (await client.get(f"/v1/namespaces/{prompts[1].namespace.hex()}")).json()
        assert detail["description"] == prompts[1].description.fields
        assert (detail["tenant"], detail["num_boundaries"]) == ("red", 2)
        assert detail["held"] == {"filesystem": {"num_boundaries": 2, "num_records": 4, "num_bytes": 4768}}


async def test_prefixes_are_listed_in_pages(made: ServiceHarness) -> None:
    """Every boundary once, in the order that was asked for, also where many are equal."""
    prompt = await made.save(Prompt(ATTENTION, "a", 64 * 11, tenant="red"))
    assert made.store._recorder is not None
    catalog = made.store._recorder.catalog
    hits = {tokens: tokens // 64 // 3 for tokens in range(64, 64 * 12, 64)}
    uses = [Use(prompt.boundary(tokens).prefix, count) for tokens, count in hits.items() if count]
    await catalog.use(prompt.namespace, uses, deadline=soon())
    async with made.client("red") as client:
        for order in ("stored", "hits", "bytes", "age", "idle"):
            listed, cursor = [], ""
            while cursor is not None:
                query = {"namespace": prompt.namespace.hex(), "order": order, "limit": 4, "cursor": cursor}
                page = (await client.get("/v1/prefixes", params=query)).json()
                assert page["is_complete"] and len(page["prefixes"]) <= 4
                listed += page["prefixes"]
                cursor = page["next_cursor"]
            assert sorted(one["tokens"] for one in listed) == list(hits)
            assert [one["hits"] for one in listed] == [hits[one["tokens"]] for one in listed]
            if order == "hits":
                assert [one["hits"] for one in listed] == sorted(hits.values(), reverse=True)
            one = listed[0]
            assert one["num_bytes"] == {"filesystem": 2384} and one["first_use_s"] <= one["last_use_s"]
            assert one["prefix"] == prompt.boundary(one["tokens"]).prefix.hex()


async def test_one_prefix_with_its_family(made: ServiceHarness) -> None:
    """Groups, slices and tiers, this node's memory too; parents up to the start, and what goes on from it."""
    prompt = await made.save(Prompt(HYBRID, "a", 64 * 4 + 16, tenant="red"))
    async with made.client("red") as client:

        async def show(tokens: int, **query: int) -> dict[str, object]:
            path = f"/v1/prefixes/{prompt.namespace.hex()}/{prompt.boundary(tokens).prefix.hex()}"
            shown: dict[str, object] = (await client.get(path, params=query)).json()
            return shown

        found = await show(192)
        assert [one["tokens"] for one in found["parents"]] == [128, 64]  # type: ignore[attr-defined]
        assert [one["tokens"] for one in found["children"]] == [256]  # type: ignore[attr-defined]
        assert found["children_complete"] is True and found["leaving"] == []
        attention = {"slices": [0, 1], "num_bytes": 2384}
        states = {"slices": [0, 1, 2], "num_bytes": 3576}
        assert found["groups"] == [
            {
                "group": 0,
                "kind": "full_attention",
                "num_slices": 2,
                "record": "page",
                "held": {"memory": attention, "filesystem": attention},
            },
            {
                "group": 1,
                "kind": "recurrent",
                "num_slices": 3,
                "record": "state",
                "held": {"memory": states, "filesystem": states},
            },
        ]
        assert [one["record"] for one in (await show(272))["groups"]] == ["tail", "state"]  # type: ignore[attr-defined]
        spared = await show(192, children_limit=0)
        assert spared["children"] == [] and spared["children_complete"] is False
        unknown = await show(16)
        assert (unknown["status"], unknown["field"]) == (404, "prefix")


@pytest.mark.parametrize("salt", [None, "", "a tenant's user"])
def test_plain_tokens_are_hashed_as_engines_do(salt: str | None) -> None:
    """At every multiple of 16 tokens the hash is the one that the connector names records by."""
    tokens = [i * 7919 % (1 << 32) for i in range(1000)]
    engine = PrefixChain(16, salt)
    engine.extend(tokens)
    chain = PlainChain(salt)
    assert chain.extend(tokens[:512]) + chain.extend(tokens[512:]) == engine.boundaries


async def save_tokens(made: ServiceHarness, tokens: list[int], *, without: tuple[int, int] | None = None) -> Prompt:
    """Pages of a prompt under the hashes of its tokens, but for one slice at one boundary."""
    prompt = Prompt(HYBRID, "tokens", 64, tenant="red")
    await made.store.open_namespace(prompt.description, deadline=soon())
    for boundary in PlainChain().extend(tokens):
        if boundary.tokens % 64:
            continue
        for group, layout in enumerate(HYBRID.groups):
            for slice_ in range(layout.num_slices):
                if (boundary.tokens, slice_) == without and group == 0:
                    continue
                key = RecordKey(prompt.namespace, boundary.prefix, group, slice_)
                kind, span = layout.record_at(boundary.tokens, 64)
                await made.store.save(sealed(key, kind, span), deadline=soon())
    await made.settle()
    return prompt


def sealed(key: RecordKey, kind: object, span: Span) -> Record:
    data = bytearray(HEADER_BYTES) + bytearray(100)
    return seal(HeaderV1(key, kind, span, 0, 100, 0, bytes(16), created_ms=1_700_000_000_000), data)  # type: ignore[arg-type]


async def test_a_lookup_tells_where_it_stops(made: ServiceHarness) -> None:
    """A slice of the third page is nowhere: the prompt resumes behind the second, and the group, page and slice are
    named. A salt is another prompt; nothing counts as a use.
    """
    tokens = list(range(1000, 1000 + 64 * 5 + 20))
    prompt = await save_tokens(made, tokens, without=(192, 1))
    body = {"namespace": prompt.namespace.hex(), "token_ids": tokens}
    lookups = made.store.meters.get("lookups")
    async with made.client("red") as client:
        found = (await client.post("/v1/lookup", json=body)).json()
        salted = (await client.post("/v1/lookup", json={**body, "cache_salt": "x"})).json()
        empty = (await client.post("/v1/lookup", json={**body, "token_ids": [1] * 15})).json()
    assert (found["num_tokens"], found["resume_tokens"], found["is_certain"]) == (336, 128, True)
    attention, state = found["groups"]
    assert (attention["resume_tokens"], attention["next_tokens"], attention["missing_slices"]) == (128, 192, [1])
    assert (state["resume_tokens"], state["next_tokens"], state["missing_slices"]) == (320, None, [])
    assert [(one["tokens"], one["is_whole"]) for one in found["boundaries"]] == [
        (64, True),
        (128, True),
        (192, False),
        (256, True),
        (320, True),
    ]
    assert found["boundaries"][0]["tiers"] == ["memory", "filesystem"]
    assert (salted["resume_tokens"], salted["boundaries"]) == (0, [])
    assert salted["groups"][0]["missing_slices"] == [0, 1]
    assert (empty["num_tokens"], empty["resume_tokens"], empty["groups"][0]["next_tokens"]) == (0, 0, None)
    assert made.store.meters.get("lookups") == lookups


async def test_pins_protect_until_they_end(made: ServiceHarness) -> None:
    """A pin is listed and keeps its boundary and all before it from deletion; without it all goes."""
    prompt = await made.save(prompt_of("a"))
    namespace, prefixes = prompt.namespace.hex(), {t: prompt.boundary(t).prefix.hex() for t in (64, 128, 192, 320, 336)}
    async with made.client("red") as client:
        new = {"namespace": namespace, "prefix": prefixes[128], "expires_in_s": 100}
        pinned = (await client.post("/v1/pins", json=new)).json()
        again = (await client.post("/v1/pins", json={**new, "expires_in_s": 500})).json()
        assert 300 < again["pinned_until_s"] - pinned["pinned_until_s"] < 500
        assert (await client.get("/v1/pins", params={"namespace": namespace})).json()["pins"] == [again]
        detail = (await client.get(f"/v1/prefixes/{namespace}/{prefixes[128]}")).json()
        assert detail["pinned_until_s"] == again["pinned_until_s"]
        for tokens in (64, 128):
            answer = await client.delete(f"/v1/prefixes/{namespace}/{prefixes[tokens]}?confirm=true")
            assert answer.status_code == 409
        assert (await client.delete(f"/v1/prefixes/{namespace}/{prefixes[336]}?confirm=true")).status_code == 200
        deleted = (await client.delete(f"/v1/namespaces/{namespace}?confirm=true")).json()
        assert (deleted["num_pinned"], deleted["by_tier"]["filesystem"]["num_boundaries"]) == (2, 3)
        for _ in range(2):
            assert (await client.delete(f"/v1/pins/{namespace}/{prefixes[128]}")).status_code == 204
        assert (await client.get("/v1/pins", params={"namespace": namespace})).json()["pins"] == []
        deleted = (await client.delete(f"/v1/namespaces/{namespace}?confirm=true")).json()
        assert (deleted["num_pinned"], deleted["by_tier"]["filesystem"]["num_boundaries"]) == (0, 2)
        nothing = {"namespace": namespace, "prefix": prefixes[192], "expires_in_s": 100}
        assert (await client.post("/v1/pins", json=nothing)).status_code == 404
        assert (await client.delete(f"/v1/pins/{namespace}/{prefixes[192]}")).status_code == 404


async def test_deletion_asks_first(made: ServiceHarness) -> None:
    """Without `confirm` it tells what would go; with it the records are gone from every tier and the totals, for
    engines too, and a second time there is nothing. What is deleted can be saved again.
    """
    prompt = await made.save(prompt_of("a"))
    namespace, last = prompt.namespace.hex(), prompt.boundary(336).prefix.hex()
    one = {"num_boundaries": 1, "num_records": 2, "num_bytes": 2384}
    async with made.client("red") as client:
        path = f"/v1/prefixes/{namespace}/{last}"
        told = (await client.delete(path)).json()
        assert told == {
            "is_dry_run": True,
            "is_complete": True,
            "num_pinned": 0,
            "by_tier": {"memory": one, "filesystem": one},
        }
        assert (await made.store.lookup(prompt.query(), deadline=soon())).resume_tokens == 336
        assert (await client.delete(path, params={"confirm": "true"})).json() == told | {"is_dry_run": False}
        assert (await made.store.lookup(prompt.query(), deadline=soon())).resume_tokens == 320
        assert (await client.delete(path)).status_code == 404
        held = (await client.get(f"/v1/namespaces/{namespace}")).json()["held"]["filesystem"]
        assert held["num_boundaries"] == 5
        told = (await client.delete(f"/v1/namespaces/{namespace}")).json()
        assert (told["is_dry_run"], told["by_tier"]["filesystem"]) == (True, held)
        done = (await client.delete(f"/v1/namespaces/{namespace}?confirm=true")).json()
        assert (done["is_dry_run"], done["is_complete"], done["by_tier"]["filesystem"]) == (False, True, held)
    assert (await made.store.stage(prompt.query(), deadline=soon())).resume_tokens == 0
    await made.save(prompt)
    assert (await made.store.lookup(prompt.query(), deadline=soon())).resume_tokens == 336


async def test_a_deletion_that_failed_is_seen_again(made: ServiceHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier refuses: the answer says that it is the service's turn, and what was hidden is served as before."""
    from kvstore.errors import Unavailable

    prompt = await made.save(prompt_of("a"))

    async def refuse(*_: object, **__: object) -> None:
        raise Unavailable("the disk went away")

    monkeypatch.setattr(made.store.operations, "delete", refuse)
    async with made.client("red") as client:
        path = f"/v1/prefixes/{prompt.namespace.hex()}/{prompt.boundary(128).prefix.hex()}"
        answer = await client.delete(path, params={"confirm": "true"})
        assert (answer.status_code, answer.json()["detail"]) == (503, "the disk went away")
        assert answer.headers["retry-after"] == "1"
    assert made.store._recorder is not None
    entry = await made.store._recorder.catalog.get(prompt.namespace, prompt.boundary(128).prefix, deadline=soon())
    assert entry is not None and not entry.leaving and entry.num_records(Level.COLD) == 2
    assert (await made.store.stage(prompt.query(), deadline=soon())).resume_tokens == 336


BAD = [
    ("/v1/namespaces?limit=0", "query.limit", "0"),
    ("/v1/namespaces?limit=x", "query.limit", "x"),
    ("/v1/namespaces?limt=1", "query.limt", "limt"),
    ("/v1/namespaces?limit=1&limit=2", "query.limit", None),
    ("/v1/namespaces?cursor=x", "query.cursor", "x"),
    ("/v1/namespaces/xyz", "path.namespace", "xyz"),
    ("/v1/prefixes", "query.namespace", None),
    ("/v1/prefixes?namespace={}&order=size", "query.order", "size"),
    ("/v1/prefixes?namespace={}&cursor=x", "cursor", "x"),
    ("/v1/prefixes?namespace={}&cursor=~-1", "cursor", "~-1"),
    ("/v1/prefixes?namespace={}&order=hits&cursor=1.zz", "cursor", "1.zz"),
    ("/livez?verbose=1", "query.verbose", "verbose"),
]


async def test_bad_parameters_are_named(made: ServiceHarness) -> None:
    """Which field, what was expected and what was seen, as a problem."""
    prompt = await made.save(Prompt(ATTENTION, "a", 64, tenant="red"))
    async with made.client("red") as client:
        for path, field, seen in BAD:
            answer = await client.get(path.format(prompt.namespace.hex()))
            assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
            problem = answer.json()
            assert (problem["field"], problem.get("seen")) == (field, seen)
            assert problem["detail"] and problem["status"] == 422


JSON = {"content-type": "application/json"}
LONE_SURROGATE = b'{"namespace":"' + b"0" * 32 + b'","token_ids":[],"cache_salt":"\\ud800"}'


async def test_bad_bodies_are_named(made: ServiceHarness) -> None:
    """Not JSON, not sent as JSON, unknown fields, ids that are none, and more than a body may have."""
    async with made.client("red") as client:
        cases = [
            ({"content": b"{", "headers": JSON}, 422, "body"),
            ({"content": b"{}"}, 422, "body"),
            ({"json": {"namespace": "0" * 32, "token_ids": [1], "x": 1}}, 422, "body.x"),
            ({"json": {"namespace": "0" * 32, "token_ids": [1, -1]}}, 422, "body.token_ids.1"),
            ({"json": {"namespace": "0" * 32, "token_ids": [1 << 32]}}, 422, "body.token_ids.0"),
            ({"json": {"namespace": "0" * 32, "token_ids": ["1"]}}, 422, "body.token_ids.0"),
            ({"json": {"namespace": "0" * 32, "token_ids": [True]}}, 422, "body.token_ids.0"),
            ({"json": {"namespace": "0" * 32, "token_ids": [1.5]}}, 422, "body.token_ids.0"),
            ({"content": LONE_SURROGATE, "headers": JSON}, 422, "body.cache_salt"),
            ({"json": {"namespace": "0" * 32, "token_ids": [5.0]}}, 404, "namespace"),
            ({"json": {"namespace": "0" * 32, "token_ids": [1] * 40_000}}, 404, "namespace"),
            ({"json": {"namespace": "0" * 31, "token_ids": [1] * 40_000}}, 422, "body.namespace"),
            ({"json": {"namespace": "0" * 32, "token_ids": [1] * 40_000 + [-1]}}, 422, "body.token_ids"),
            ({"json": {"namespace": "0" * 32, "token_ids": [1] * 262_145}}, 422, "body.token_ids"),
            ({"json": [1] * 40_000}, 422, "body.token_ids"),
            ({"content": b" " * (4 << 20) + b" "}, 413, "body"),
        ]
        for given, status, field in cases:
            answer = await client.post("/v1/lookup", **given)  # type: ignore[arg-type]
            assert (answer.status_code, answer.json().get("field")) == (status, field)

        async def endless():  # type: ignore[no-untyped-def]
            for _ in range(80):
                yield b" " * (64 << 10)

        answer = await client.post("/v1/lookup", content=endless(), headers={"content-type": "application/json"})
        assert answer.status_code == 413


async def test_readiness_names_the_tier(tmp_path: Path) -> None:
    """Redis is not there: the service lives and is not ready, says which tier and nothing more to strangers; metrics
    and tiers tell the same, and listing is the service's turn.
    """
    from kvstore.testing.servers.ports import free_ports

    hot = f"redis://127.0.0.1:{free_ports(1)[0]}"
    async with open_service(tmp_path, hot=hot, drain_timeout_s=0) as made, made.client() as client:
        assert (await client.get("/livez")).status_code == 200
        answer = await client.get("/readyz")
        tiers = {tier["name"]: tier for tier in answer.json()["tiers"]}
        assert answer.status_code == 503 and not answer.json()["ready"]
        assert [name for name, tier in tiers.items() if not tier["ready"]] == ["redis"]
        assert "127.0.0.1" not in answer.text
        async with made.client("operator") as operator:
            assert 'kvstore_tier_healthy{tier="redis"} 0' in (await operator.get("/metrics")).text
            listed = (await operator.get("/v1/tiers")).json()["tiers"]
            assert [(tier["level"], tier["healthy"]) for tier in listed] == [
                ("memory", True),
                ("hot", False),
                ("cold", True),
            ]
            assert listed[1]["reason"]
            refused = await operator.get("/v1/namespaces")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


async def test_requests_are_explained_to_their_tenant(made: ServiceHarness) -> None:
    """Newest first, one's own alone; one in full; an operator sees all; what nobody told of is not there."""
    prompt = await made.save(Prompt(ATTENTION, "a", 128, tenant="red"))
    for tenant, request in (("red", "chatcmpl-1"), ("blue", "chatcmpl-2"), ("red", "chatcmpl-3")):
        told = Outcome(request, prompt.namespace, 300, 256, 0, 128, reason="deadline", detail={"tier": "s3"})
        made.store.report(replace(told, tenant=tenant))
    async with made.client("red") as client:
        listed = (await client.get("/v1/requests")).json()["requests"]
        assert [one["request"] for one in listed] == ["chatcmpl-3", "chatcmpl-1"]
        shown = (await client.get("/v1/requests/explain", params={"request": "chatcmpl-1"})).json()
        assert (shown["result"], shown["reason"], shown["detail"]) == ("part", "deadline", {"tier": "s3"})
        assert "deadline" in shown["why"] and "max_wait_ms" in shown["advice"]
        for unknown in ("chatcmpl-2", "chatcmpl-", "nobody"):
            answer = await client.get("/v1/requests/explain", params={"request": unknown})
            assert (answer.status_code, answer.json()["field"]) == (404, "query.request")
    async with made.client("operator") as client:
        listed = (await client.get("/v1/requests")).json()["requests"]
        assert [one["tenant"] for one in listed] == ["red", "blue", "red"]
