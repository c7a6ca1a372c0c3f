"""What each resource returns, from a real service over a directory."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.api import Ack, Outcome
from kvstore.catalog.base import Leaving, Use
from kvstore.catalog.entry import Level
from kvstore.cli.main import main
from kvstore.errors import Unavailable
from kvstore.model.namespace import NamespaceDescription, describe_layout
from kvstore.service.admin.resources.pins import ALONE
from kvstore.testing.catalog_contract import mark_complete
from kvstore.testing.prompts import ATTENTION, HYBRID, Prompt
from kvstore.testing.servers.ports import free_address
from kvstore.testing.waiting import soon
from tests.unit.admin.service_harness import ServiceHarness, ended, open_service, prompt_of


async def test_a_namespace_is_described_in_full(made: ServiceHarness) -> None:
    """All fields that identify it, and what it holds; the list has totals over all its pages."""
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


async def test_the_largest_namespaces_come_first(made: ServiceHarness) -> None:
    """Over all pages, also where two are equally large: a reader of the first page knows the largest of all."""
    lengths = {f"m{tokens}": tokens for tokens in (64, 320, 128, 192)} | {"another": 192}
    for model, tokens in lengths.items():
        await made.save(Prompt(ATTENTION, "a", tokens, model=model, tenant="red"))
    async with made.client("red") as client:
        listed, cursor = [], ""
        while cursor is not None:
            query = {"order": "bytes", "limit": 2, "cursor": cursor}
            page = (await client.get("/v1/namespaces", params=query)).json()
            listed += [one["num_boundaries"] * 64 for one in page["namespaces"]]
            cursor = page["next_cursor"]
    assert listed == sorted(lengths.values(), reverse=True)


async def test_prefixes_are_listed_in_pages(made: ServiceHarness) -> None:
    """Every boundary once, in the requested order, also with equal sort keys."""
    prompt = await made.save(Prompt(ATTENTION, "a", 64 * 11, tenant="red"))
    hits = {tokens: tokens // 64 // 3 for tokens in range(64, 64 * 12, 64)}
    uses = [Use(prompt.boundary(tokens).prefix, count) for tokens, count in hits.items() if count]
    await made.catalog.use(prompt.namespace, uses, deadline=soon())
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
    """Groups, slices and tiers, including this node's memory; parents up to the start, and children."""
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


async def test_pins_protect_until_they_end(made: ServiceHarness) -> None:
    """A pin is listed and protects its boundary and all before it from deletion; without it all are deleted."""
    prompt = await made.save(prompt_of("a"))
    namespace, prefixes = prompt.namespace.hex(), {t: prompt.boundary(t).prefix.hex() for t in (64, 128, 192, 320, 336)}
    async with made.client("red") as client:
        new = {"namespace": namespace, "prefix": prefixes[128], "expires_in_s": 100}
        pinned = (await client.post("/v1/pins", json=new)).json()
        again = (await client.post("/v1/pins", json={**new, "expires_in_s": 500})).json()
        assert 300 < again["pinned_until_s"] - pinned["pinned_until_s"] < 500
        assert again.pop("notes") == []
        assert (await client.get("/v1/pins", params={"namespace": namespace})).json()["pins"] == [again]
        detail = (await client.get(f"/v1/prefixes/{namespace}/{prefixes[128]}")).json()
        assert detail["pinned_until_s"] == again["pinned_until_s"]
        for tokens in (64, 128):
            answer = await client.delete(f"/v1/prefixes/{namespace}/{prefixes[tokens]}?confirm=true")
            assert answer.status_code == 409 and "`kvstore unpin`" in answer.json()["detail"]
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


async def test_a_pin_says_that_what_is_before_it_is_not_kept(made: ServiceHarness) -> None:
    """Saved without a lookup, as after a reindex, a boundary's parent is not known to the catalog."""
    known, unknown, notes = await made.save(prompt_of("known")), prompt_of("unknown"), {}
    for record in unknown.records():
        await made.store.save(record, ack=Ack.COLD, deadline=soon())
    await made.settle()
    async with made.client("red") as client:
        for prompt in (known, unknown):
            prefix = prompt.boundary(128).prefix.hex()
            new = {"namespace": prompt.namespace.hex(), "prefix": prefix, "expires_in_s": 100}
            notes[prompt.name] = (await client.post("/v1/pins", json=new)).json()["notes"]
    assert notes == {"known": [], "unknown": [ALONE]}


async def test_what_is_being_deleted_takes_no_pin(made: ServiceHarness) -> None:
    """Else it would seem to be kept, and be gone a moment later."""
    prompt = await made.save(prompt_of("a"))
    leaving = Leaving(prompt.namespace, prompt.boundary(64).prefix)
    new = {"namespace": prompt.namespace.hex(), "prefix": leaving.prefix.hex(), "expires_in_s": 100}
    catalog = made.catalog
    async with made.client("red") as client:
        await catalog.start_leaving([leaving], Level.COLD, deadline=soon())
        answer = await client.post("/v1/pins", json=new)
        assert answer.status_code == 409 and "being deleted" in answer.json()["detail"]
        await catalog.stop_leaving(leaving.namespace, leaving.prefix, Level.COLD, deadline=soon())
        assert (await client.post("/v1/pins", json=new)).status_code == 201


async def test_deletion_asks_first(made: ServiceHarness) -> None:
    """Without `confirm` the answer says what would be deleted. With it the records are gone from every tier and the
    totals, for engines too, and a second deletion finds nothing. Deleted records can be saved again.
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
            "notes": [],
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


@pytest.mark.parametrize("is_complete", [True, False])
async def test_a_deletion_says_that_more_may_be_stored(made: ServiceHarness, is_complete: bool) -> None:
    """While the catalog is incomplete: what it lacks is not deleted, and a service adds it again."""
    prompt = await made.save(prompt_of("a"))
    namespace = prompt.namespace.hex()
    await made.catalog.mark_incomplete(deadline=soon())
    if is_complete:
        await mark_complete(made.catalog)
    async with made.client("red") as client:
        job = await ended(client, await client.post("/v1/deletions?confirm=true", json={"namespace": namespace}))
        whole = (await client.delete(f"/v1/namespaces/{namespace}?confirm=true")).json()
    for notes in (job["report"]["notes"], whole["notes"]):
        assert bool(notes) is not is_complete
        assert is_complete or "repeat this once a service has added them" in notes[0]


async def test_a_failed_deletion_is_undone(made: ServiceHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier fails: the answer is 503, and hidden boundaries are served again."""
    prompt = await made.save(prompt_of("a"))

    async def refuse(*_: object, **__: object) -> None:
        raise Unavailable("the disk went away")

    monkeypatch.setattr(made.store.operations, "delete", refuse)
    async with made.client("red") as client:
        path = f"/v1/prefixes/{prompt.namespace.hex()}/{prompt.boundary(128).prefix.hex()}"
        answer = await client.delete(path, params={"confirm": "true"})
        assert (answer.status_code, answer.json()["detail"]) == (503, "the disk went away")
        assert answer.headers["retry-after"] == "1"
    entry = await made.catalog.get(prompt.namespace, prompt.boundary(128).prefix, deadline=soon())
    assert entry is not None and not entry.leaving and entry.num_records(Level.COLD) == 2
    assert (await made.store.stage(prompt.query(), deadline=soon())).resume_tokens == 336


BAD = [
    ("/v1/namespaces?limit=0", "query.limit", "0"),
    ("/v1/namespaces?limit=x", "query.limit", "x"),
    ("/v1/namespaces?limt=1", "query.limt", "limt"),
    ("/v1/namespaces?limit=1&limit=2", "query.limit", None),
    ("/v1/namespaces?cursor=x", "cursor", "x"),
    ("/v1/namespaces/xyz", "path.namespace", "xyz"),
    ("/v1/prefixes", "query.namespace", None),
    ("/v1/prefixes?namespace={}&order=size", "query.order", "size"),
    ("/v1/prefixes?namespace={}&cursor=x", "cursor", "x"),
    ("/v1/prefixes?namespace={}&cursor=~-1", "cursor", "~-1"),
    ("/v1/prefixes?namespace={}&order=hits&cursor=1.zz", "cursor", "1.zz"),
    ("/livez?verbose=1", "query.verbose", "verbose"),
]


async def test_bad_parameters_are_named(made: ServiceHarness) -> None:
    """A problem names the field, what was expected and what was seen."""
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
    """Bodies that are not JSON or not sent as JSON, with unknown fields, invalid ids, or too large."""
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
            ({"json": {"namespace": "0" * 32, "token_ids": [1] * 40_000 + [-1]}}, 422, "body.token_ids.40000"),
            ({"json": {"namespace": "0" * 32, "token_ids": [1] * 262_145}}, 422, "body.token_ids"),
            ({"json": [1] * 40_000}, 422, "body"),
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
    """Without Redis the service is alive and not ready; it names the tier and the cause, but no place. Metrics and
    tiers agree, and a list is answered with 503.
    """
    hot = f"redis://{free_address()}"
    async with open_service(tmp_path, hot=hot, drain_timeout_s=0) as made, made.client() as client:
        assert (await client.get("/livez")).status_code == 200
        answer = await client.get("/readyz")
        tiers = {tier["name"]: tier for tier in answer.json()["tiers"]}
        assert answer.status_code == 503 and not answer.json()["ready"]
        assert [name for name, tier in tiers.items() if not tier["ready"]] == ["redis"]
        assert "127.0.0.1" not in answer.text
        assert "cannot connect to Redis: check that a server runs there" in tiers["redis"]["reason"]
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
    """A tenant sees its own requests, newest first, and an explanation of each; an operator sees all. An unknown
    request is 404.
    """
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


LAYOUT = describe_layout(ATTENTION)
LLAMA = {"architecture": "LlamaForCausalLM", "compute_dtype": "bfloat16", "cache_dtype": "auto", "layout": LAYOUT}
FP8 = {**LLAMA, "cache_dtype": "fp8_e4m3"}


async def saved(made: ServiceHarness, fields: dict[str, object]) -> Prompt:
    prompt = Prompt(ATTENTION, "a", 64 * 2)
    object.__setattr__(prompt, "description", NamespaceDescription.from_fields(fields))
    return await made.save(prompt)


async def test_every_list_names_the_model_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ls`, `top`, `show` and the routes show model and types; two namespaces of one model are told apart by what
    differs. `show --compare` has only the fields that differ, with both values. An emptied namespace is not listed.
    """
    async with open_service(tmp_path, with_tokens=False) as made, made.client() as admin:
        monkeypatch.setenv("KVSTORE_ADMIN_LISTEN", made.url.removeprefix("http://"))
        one, other = await saved(made, LLAMA), await saved(made, FP8)

        async def run(*arguments: str) -> str:
            capsys.readouterr()
            assert await asyncio.to_thread(main, arguments) == 0
            return capsys.readouterr().out

        for verb in (["ls"], ["top", "--once"]):
            out = await run(*verb)
            assert "LlamaForCausalLM bfloat16" in out and "LlamaForCausalLM bfloat16, cache fp8_e4m3" in out
        assert "LlamaForCausalLM bfloat16" in await run("show", one.namespace.hex())
        compared = await run("show", one.namespace.hex(), "--compare", other.namespace.hex()[:10])
        assert "cache_dtype" in compared and "auto" in compared and "fp8_e4m3" in compared
        assert "compute_dtype" not in compared and "1 fields differ" not in compared and "1 field differs" in compared
        asked = json.loads(await run("show", one.namespace.hex(), "--compare", other.namespace.hex(), "--json"))
        assert asked["differences"] == {"cache_dtype": ["auto", "fp8_e4m3"]}
        await run("rm", one.namespace.hex(), "--yes")
        listed = (await admin.get("/v1/namespaces")).json()["namespaces"]
        assert [(row["name"], row["namespace"]) for row in listed] == [
            ("LlamaForCausalLM bfloat16, cache fp8_e4m3", other.namespace.hex())
        ]
        assert one.namespace.hex() not in await run("ls")
