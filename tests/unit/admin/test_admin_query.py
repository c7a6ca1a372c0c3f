"""`/v1/query`: what it says of an engine is what that engine then gets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvstore.api import PrefixQuery
from kvstore.model.keys import NamespaceId
from kvstore.store.encryption.encrypted import EncryptedStore
from kvstore.testing.keys import write_keys
from kvstore.testing.prompts import ATTENTION, HYBRID, WINDOWED, Prompt
from kvstore.testing.waiting import soon, until
from kvstore.wire import convert
from tests.unit.admin.connected_engines import TOKENS, chain, engine, instance
from tests.unit.admin.service_harness import open_service
from tests.unit.admin.stored_prompts import ask_as_engine, stored_prompts


async def ask(client: httpx.AsyncClient, **fields: Any) -> Any:
    answer = await client.post("/v1/query", json={"model": "m", "token_ids": TOKENS, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("layout", [ATTENTION, WINDOWED, HYBRID], ids=["attention", "windowed", "hybrid"])
async def test_an_answer_is_the_hit_that_the_engine_gets(
    tmp_path: Path, layout: Any, request: pytest.FixtureRequest
) -> None:
    """Random prompts over records with holes, some in memory alone, some in the cold tier alone, for engines with small
    and large blocks: tokens and media are those of the engine's own lookup and stage.
    """
    prompt = Prompt(layout, "tokens", 64, model=request.node.name)
    small, large = instance("small"), instance("large", step_tokens=64, whole_prompts=layout is not HYBRID)
    seen = set()
    async with open_service(tmp_path, with_tokens=False) as made, AsyncExitStack() as stack:
        engines = {one: await stack.enter_async_context(engine(made, one, prompt)) for one in (small, large)}
        stored = await stored_prompts(made, prompt, seed=len(layout.groups))
        client = await stack.enter_async_context(made.client())
        for tokens, salt in stored.questions(100):
            found = (await ask(client, token_ids=tokens, cache_salt=salt))["default"]
            for one, store in engines.items():
                hit = await ask_as_engine(stored, store, one, tokens, salt)
                match = found[one.name]
                assert (match["longest_matched"], match["STORAGE"]) == (hit.tokens, hit.tokens)
                assert (match["CPU"], match["silent"]) == (hit.memory_tokens, [])
                assert hit.is_from_memory == (match["CPU"] == match["longest_matched"]) or not hit.tokens
                seen.add((match["CPU"] > 0, match["CPU"] < hit.tokens))
    assert seen == {(False, False), (False, True), (True, False), (True, True)}


async def test_engines_come_and_go(tmp_path: Path) -> None:
    """An engine is known by its model's name while it is connected. One that only saves, or whose description cannot be
    used, is not listed and loses nothing else. Of ranks each is shown, of two engines with one name the smaller hit.
    """
    prompt = Prompt(ATTENTION, "tokens", 64)
    async with open_service(tmp_path, with_tokens=False) as made, made.client() as client:
        assert await ask(client) == {}
        await made.save_pages(prompt, chain(TOKENS).boundaries)
        whole = {
            "longest_matched": 320,
            "CPU": 320,
            "STORAGE": 320,
            "DP": {"0": 320},
            "address": "http://10.0.0.7:8000",
            "namespaces": [prompt.namespace.hex()],
            "silent": [],
        }
        async with engine(made, instance(address="http://10.0.0.7:8000"), prompt) as store:
            assert await ask(client) == {"default": {"e": whole}}
            assert await ask(client, model="other") == {}
            assert await ask(client, instance_id="other") == {}
            assert await ask(client, instance_id="e", tenant_id="default") == {"default": {"e": whole}}
            assert await ask(client, tenant_id="other") == {}
            salted = await ask(client, cache_salt="x")
            assert salted["default"]["e"]["longest_matched"] == 0
            rounded = (await ask(client, block_size=128))["default"]["e"]
            assert (rounded["longest_matched"], rounded["CPU"], rounded["DP"]) == (256, 256, {"0": 256})
            other = Prompt(ATTENTION, "tokens", 64, model="new weights")
            async with (
                engine(made, instance("rank", dp_rank=0), prompt),
                engine(made, instance("rank", dp_rank=1), other),
            ):
                ranks = (await ask(client))["default"]["rank"]
                assert (ranks["longest_matched"], ranks["DP"]) == (320, {"0": 320, "1": 0})
                assert ranks["namespaces"] == sorted([prompt.namespace.hex(), other.namespace.hex()])
            async with engine(made, instance("e"), other):
                assert (await ask(client))["default"]["e"]["longest_matched"] == 0
            await store.open_namespace(other.description, deadline=soon())  # its weights have changed
            assert (await ask(client))["default"]["e"]["namespaces"] == [other.namespace.hex()]
        await until(lambda: not made.server.engines())
        assert await ask(client) == {}


@pytest.mark.parametrize(
    "changes",
    [
        *({"name": 5}, {"models": "m"}, {"models": [1]}, {"step_tokens": 0}, {"step_tokens": 24}, {"dp_rank": -1}),
        *({"whole_prompts": 1}, {"address": None}, {"step_tokens": True}),
    ],
    ids=str,
)
def test_a_description_that_cannot_be_used(changes: Mapping[str, object]) -> None:
    """It is ignored; a right one survives the wire, with fields of a later release."""
    fields = convert.instance_fields(instance(dp_rank=3, whole_prompts=True, address="a"))
    assert convert.parse_instance({**fields, "later": 1}) == instance(dp_rank=3, whole_prompts=True, address="a")
    assert convert.parse_instance({**fields, **changes}) is None


async def test_a_tenant_with_many_kinds_of_engines(tmp_path: Path) -> None:
    """Of 34 kinds 32 are in an answer, also an operator's, and each is found by its name. Another tenant's are all
    there.
    """
    red, blue = (Prompt(ATTENTION, "tokens", 64, tenant=tenant) for tenant in ("red", "blue"))
    steps = {f"steps of {step_tokens}": step_tokens for step_tokens in range(16, 35 * 16, 16)}
    async with open_service(tmp_path) as made, AsyncExitStack() as stack:
        await made.save_pages(red, chain(TOKENS).boundaries)
        for name, step_tokens in steps.items():
            one = instance(name, step_tokens=step_tokens)
            await stack.enter_async_context(engine(made, one, red, "red"))
        await stack.enter_async_context(engine(made, instance(), blue, "blue engine"))
        client = await stack.enter_async_context(made.client("watcher"))
        found = await ask(client)
        assert (len(found["red"]), set(found["blue"])) == (32, {"e"})
        for name, match in found["red"].items():
            assert match["longest_matched"] == resumed(steps[name])
        for name, step_tokens in steps.items():
            match = (await ask(client, instance_id=name))["red"][name]
            assert match["longest_matched"] == resumed(step_tokens)


def resumed(step_tokens: int) -> int:
    """Of five pages of 64 tokens, by an engine that has boundaries at multiples of its block."""
    return 320 // step_tokens * step_tokens if 64 % step_tokens == 0 else 0


async def test_lists_and_long_bodies(tmp_path: Path) -> None:
    """A list of prompts gets a list of answers in its order, whether its body is short or long."""
    prompt = Prompt(ATTENTION, "tokens", 64)
    async with open_service(tmp_path, with_tokens=False) as made, made.client() as client:
        await made.save_pages(prompt, chain(TOKENS).boundaries)
        async with engine(made, instance(), prompt):
            for extra in ([], list(range(5000, 25_000))):
                bodies = [
                    {"model": "m", "token_ids": TOKENS[:100] + extra},
                    {"token_ids": TOKENS + extra, "model": "m", "cache_salt": 'x"token_ids":[1],"'},
                    {"token_ids": TOKENS + extra, "model": "m"},
                    {"model": "none", "token_ids": []},
                ]
                answers = (await client.post("/v1/query", json=bodies)).json()
                found = [one.get("default", {}).get("e", {}).get("longest_matched") for one in answers]
                assert found == [64, 0, 320, None]
                assert (await client.post("/v1/query", json=bodies[2])).json() == answers[2]
            assert (await client.post("/v1/query", json=[])).json() == []


LONG = list(range(30_000))
WRONG: list[tuple[object, str]] = [
    ({"token_ids": [1]}, "body.model"),
    ({"model": "m"}, "body.token_ids"),
    ({"model": "m", "token_ids": ["1"]}, "body.token_ids.0"),
    ({"model": "m", "token_ids": [-1]}, "body.token_ids.0"),
    ({"model": "m", "token_ids": [1], "n": 1}, "body.n"),
    ({"model": "m", "token_ids": [1], "block_size": 0}, "body.block_size"),
    ({"model": "m", "token_ids": [1], "lora_name": "sql"}, "body.lora_name"),
    ([{"model": "m", "token_ids": [1]}, {"model": "m", "token_ids": [1], "lora_name": "sql"}], "body.1.lora_name"),
    ([{"model": "m", "token_ids": [1]}] * 65, "at most 64 prompts"),
    ([1], "JSON object"),
    ("[", "not JSON"),
    ("\ufeff[]", "not JSON"),
    ([{"model": "m", "token_ids": LONG}, {"model": "m"}], "body.1.token_ids"),
    ([{"model": "m", "token_ids": LONG, "x": {"token_ids": []}}], "given once"),
    (json.dumps({"model": "m", "token_ids": LONG}).replace("29999]", "29999,]"), "list of whole"),
    ('{"model": "m", "token_ids": [1], "token_ids": [2]}', "given once"),
    ('{"model": "m", "model": "n", "token_ids": [1]}', "body.model"),
    (f'[{{"model":"m","token_ids":{LONG},"token_ids":[1]}},{{"model":"m","token\\u005fids":[]}}]', "given once"),
    (f'[{{"model":"m","token_ids":{LONG}}},{{"model":"m","token\\u005fids":[],"token_ids":[1]}}]', "given once"),
    ([{"model": "m", "token_ids": LONG}] * 9, "at most 262144 token ids"),
    ([{"model": "m", "token_ids": LONG}, {"model": "m", "token_ids": [1], "n": 1}], "body.1.n"),
    ({"model": "m", "tokens": [1]}, '"unknown field","field":"body.tokens","expected":"one of model, block_size'),
]


async def test_wrong_bodies(tmp_path: Path) -> None:
    """Each is refused with what is wrong."""
    async with open_service(tmp_path, with_tokens=False) as made, made.client() as client:
        for body, why in WRONG:
            text = body if isinstance(body, str) else json.dumps(body)
            answer = await client.post("/v1/query", content=text, headers={"content-type": "application/json"})
            assert answer.status_code == 422, why
            assert why in answer.text
            utf_16 = text.encode("utf-16")
            answer = await client.post("/v1/query", content=utf_16, headers={"content-type": "application/json"})
            assert (answer.status_code, answer.json()["field"]) == (422, "body")
        assert (await client.post("/v1/query", content="{}")).json()["detail"] == "the body is not sent as JSON"


async def test_keyed_names(tmp_path: Path) -> None:
    """With encryption the pages are found under the names of earlier and current keys, as an engine's lookup does."""
    path = write_keys(tmp_path / "keys.toml", [("", 1, 1)])
    prompt, boundaries = Prompt(ATTENTION, "tokens", 64), chain(TOKENS).boundaries
    async with open_service(tmp_path, with_tokens=False, encryption_keys=str(path)) as made, made.client() as client:
        assert isinstance(made.store, EncryptedStore)
        await made.save_pages(prompt, boundaries[:8])
        write_keys(path, [("", 2, 2), ("", 1, 1)])
        assert not made.store.keys.poll() and made.store.keys.poll()
        await made.save_pages(prompt, boundaries[:12], skip=2)
        async with engine(made, instance(), prompt) as store:
            query = PrefixQuery(prompt.namespace, tuple(boundaries), 0, 320, 16)
            assert (await store.lookup(query, deadline=soon())).resume_tokens == 192
            assert (await ask(client))["default"]["e"]["longest_matched"] == 192


async def test_a_tenant_learns_nothing_of_another(tmp_path: Path) -> None:
    """Red has an engine and pages. Blue tries 20 questions, also with engines that describe themselves as red's: each
    answer is the one that blue got before red had anything.
    """
    red, blue = Prompt(ATTENTION, "tokens", 64, tenant="red"), Prompt(ATTENTION, "tokens", 64, tenant="blue")
    names = ("red", "default", "", "blue", "*", "nobody")
    attempts: list[dict[str, Any]] = [
        {},
        *({"tenant_id": name} for name in names),
        *({"instance_id": name} for name in ("red engine", "blue engine", "")),
        *({"tenant_id": name, "instance_id": "red engine"} for name in names),
        {"cache_salt": ""},
        {"model": red.namespace.hex()},
        {"token_ids": TOKENS[:64]},
        {"block_size": 64, "instance_id": "red engine"},
    ]
    assert len(attempts) == 20

    async def answers(client: httpx.AsyncClient) -> list[tuple[int, str]]:
        got = [await client.post("/v1/query", json={"model": "m", "token_ids": TOKENS, **one}) for one in attempts]
        batch = await client.post("/v1/query", json=[{"model": "m", "token_ids": TOKENS}] * 2)
        return [(one.status_code, one.text) for one in (*got, batch)]

    async with open_service(tmp_path) as made, AsyncExitStack() as stack:
        client, operator = [await stack.enter_async_context(made.client(name)) for name in ("blue", "watcher")]
        for one in (instance("blue engine"), instance("red engine")):
            await stack.enter_async_context(engine(made, one, blue, "blue engine"))
        before = await answers(client)
        await made.save_pages(red, chain(TOKENS).boundaries)
        await stack.enter_async_context(engine(made, instance("red engine"), red, "red"))
        assert await answers(client) == before
        assert all(red.namespace.hex() not in text for _, text in before)
        seen = await ask(operator)
        found = {
            (tenant, name): match["longest_matched"] for tenant, some in seen.items() for name, match in some.items()
        }
        assert found == {("red", "red engine"): 320, ("blue", "red engine"): 0, ("blue", "blue engine"): 0}
        assert NamespaceId(bytes.fromhex(seen["red"]["red engine"]["namespaces"][0])) == red.namespace
        assert set(await ask(operator, tenant_id="red")) == {"red"}
