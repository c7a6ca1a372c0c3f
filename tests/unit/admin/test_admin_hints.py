"""`/v1/prefetch` and `/v1/hints`: a prompt by request, session or tokens, its tenant's alone."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvstore.client import RemoteStore
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.model.prompt_hint import EndedPrompt, Wishes, ends_of_pages
from kvstore.store.hints.prefetch import Prefetcher
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.waiting import soon, until
from tests.unit.admin.connected_engines import TOKENS, chain, engine, instance
from tests.unit.admin.service_harness import ServiceHarness, open_service


def ended(prompt: Prompt, request: str, **wishes: Any) -> EndedPrompt:
    ends = ends_of_pages(chain(TOKENS).boundaries, prompt.layout.page_tokens)
    return EndedPrompt(request, prompt.namespace, ends, 16, len(TOKENS), Wishes(**wishes))


async def tell(store: RemoteStore, prompt: EndedPrompt) -> None:
    """As an engine does, and wait until the service has it."""
    store.end_prompt(prompt)
    await store.status(deadline=soon())


def forget(made: ServiceHarness, namespace: NamespaceId) -> None:
    """Drop everything from memory: only the cold tier has it."""
    assert isinstance(made.store, TieredStore)
    memory = made.store.memory
    for prefix, groups in list(memory.boundaries(namespace).items()):
        for group, bits in list(groups.items()):
            for slice_ in range(bits.bit_length()):
                memory.remove(RecordKey(namespace, prefix, group, slice_))


async def wait_for_memory(client: httpx.AsyncClient, tokens: int) -> None:
    async with asyncio.timeout(30):
        while True:
            answer = (await client.post("/v1/query", json={"model": "m", "token_ids": TOKENS})).json()
            if answer["default"]["e"]["CPU"] >= tokens:
                return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "named",
    [{"request": "chatcmpl-1"}, {"session": "agent"}, {"model": "m", "token_ids": TOKENS}],
    ids=["request", "session", "tokens"],
)
async def test_an_agents_pause_ends_with_its_pages_in_memory(tmp_path: Path, named: dict[str, Any]) -> None:
    """The history left memory; a prefetch by any name brings it back, and the next turn reads memory alone."""
    prompt = Prompt(ATTENTION, "tokens", 64)
    async with (
        open_service(tmp_path, with_tokens=False) as made,
        made.client() as client,
        engine(made, instance(), prompt) as store,
    ):
        await made.save_pages(prompt, chain(TOKENS).boundaries)
        await tell(store, ended(prompt, "chatcmpl-1-abc", session="agent"))
        forget(made, prompt.namespace)
        answer = await client.post("/v1/prefetch", json=named)
        assert answer.status_code == 202, answer.text
        (taken,) = answer.json()["prompts"]
        assert (taken["namespace"], taken["tenant"]) == (prompt.namespace.hex(), "default")
        assert taken["tokens"] == len(TOKENS) // 16 * 16 and "prefetch" in taken["hints"]
        await wait_for_memory(client, 320)
        counters = (await store.status(deadline=soon()))["counters"]
        assert isinstance(counters, dict)
        assert counters['prefetched_bytes{outcome="fetched"}'] > 0


async def test_hints_after_the_request(tmp_path: Path) -> None:
    """Each is answered with what is done about it, and explained with the request that it is about."""
    prompt = Prompt(ATTENTION, "tokens", 64)
    async with (
        open_service(tmp_path, with_tokens=False) as made,
        made.client() as client,
        engine(made, instance(), prompt) as store,
    ):
        await made.save_pages(prompt, chain(TOKENS).boundaries)
        await tell(store, ended(prompt, "r-1", retain_s=60.0))
        answer = await client.post("/v1/hints", json={"request": "r-1", "release": True, "demote": True})
        assert answer.status_code == 202
        (taken,) = answer.json()["prompts"]
        assert taken["hints"]["eviction"] == "released up to token 336"
        told = made.store.hints.explain("", "r-1")
        assert told["retain_s"] == 60.0 and "not followed now" in str(told["eviction"])
        await until(lambda: "demote" in made.store.hints.explain("", "r-1"))


WRONG: list[tuple[str, dict[str, Any], int, str]] = [
    ("/v1/prefetch", {}, 422, "one of request, session, and token_ids"),
    ("/v1/prefetch", {"request": "a", "session": "b"}, 422, "one of request, session, and token_ids"),
    ("/v1/prefetch", {"token_ids": [1]}, 422, "model and token_ids go together"),
    ("/v1/prefetch", {"model": "m", "request": "a"}, 422, "model and token_ids go together"),
    ("/v1/prefetch", {"request": "unknown"}, 404, "no request that ended recently has this id"),
    ("/v1/prefetch", {"session": "unknown"}, 404, "no request that ended recently names this session"),
    ("/v1/prefetch", {"request": "r", "retain_s": 5}, 422, "retain_s"),
    ("/v1/hints", {"request": "r"}, 422, "no hint"),
    ("/v1/hints", {"request": "r", "retain_s": -1}, 422, "retain_s"),
    ("/v1/hints", {"request": "r", "priority": 101}, 422, "priority"),
    ("/v1/hints", {"request": "r", "release": "yes"}, 422, "release"),
    ("/v1/hints", {"request": "r", "release": None}, 422, "release"),
]


async def test_wrong_calls_are_named(tmp_path: Path) -> None:
    """With the field, what was expected, and what was seen."""
    async with open_service(tmp_path, with_tokens=False) as made, made.client() as client:
        for path, body, status, said in WRONG:
            answer = await client.post(path, json=body)
            assert answer.status_code == status and said in answer.text, (body, answer.text)
            told = answer.json()
            assert told["field"] and told["seen"] and (status == 404 or told["expected"]), (body, told)


async def test_another_tenants_prompts_do_not_exist(tmp_path: Path) -> None:
    """By request, session or tokens: the answer is that of a prompt that nobody has, and nothing is fetched."""
    prompt = Prompt(ATTENTION, "tokens", 64, tenant="blue")
    async with (
        open_service(tmp_path) as made,
        made.client("red") as red,
        made.client("blue") as blue,
        engine(made, instance(), prompt, "blue engine") as store,
    ):
        await made.save_pages(prompt, chain(TOKENS).boundaries)
        await tell(store, ended(prompt, "chatcmpl-1", session="agent"))
        for path in ("/v1/prefetch", "/v1/hints"):
            release = {"release": True} if path == "/v1/hints" else {}
            for name in ({"request": "chatcmpl-1"}, {"session": "agent"}):
                unknown = dict.fromkeys(name, "nobody's")
                seen, other = [(await red.post(path, json=one | release)) for one in (name, unknown)]
                assert seen.status_code == other.status_code == 404
                assert seen.json() | {"seen": ""} == other.json() | {"seen": ""}
            by_tokens = {"model": "m", "token_ids": TOKENS, **release}
            assert (await red.post(path, json=by_tokens)).json() == {"prompts": []}
            assert (await red.post(path, json={**by_tokens, "tenant_id": "blue"})).status_code == 403
        assert made.store.meters.get("hints", hint="prefetch", outcome="taken") == 0
        assert (await blue.post("/v1/prefetch", json={"request": "chatcmpl-1"})).status_code == 202


async def test_the_name_of_a_hint_does_not_count_those_of_other_tenants(tmp_path: Path) -> None:
    """A tenant that gives hints now and then would learn when others give some, and how many."""
    prompt = Prompt(ATTENTION, "tokens", 64)
    async with (
        open_service(tmp_path, with_tokens=False) as made,
        made.client() as client,
        engine(made, instance(), prompt),
    ):
        body = {"model": "m", "token_ids": TOKENS, "release": True}
        answers = [(await client.post("/v1/hints", json=body)).json()["prompts"] for _ in range(4)]
        names = [prompts[0]["request"] for prompts in answers]
        assert len(set(names)) == 4 and all(re.fullmatch("hint-[0-9a-f]{16}", name) for name in names), names


async def test_a_prompt_that_was_hinted_by_its_tokens_is_explained(tmp_path: Path) -> None:
    """By the name that the answer gave it, with what became of its hints; not for another tenant, and counted as no
    request."""
    prompt = Prompt(ATTENTION, "tokens", 64, tenant="blue")
    async with (
        open_service(tmp_path) as made,
        made.client("red") as red,
        made.client("blue") as blue,
        engine(made, instance(), prompt, "blue engine"),
    ):
        body = {"model": "m", "token_ids": TOKENS, "retain_s": 60}
        (taken,) = (await blue.post("/v1/hints", json=body)).json()["prompts"]
        asked = {"request": taken["request"]}
        told = (await blue.get("/v1/requests/explain", params=asked)).json()
        assert (told["request"], told["tenant"], told["reason"]) == (taken["request"], "blue", "hinted")
        assert told["namespace"] == taken["namespace"] and told["cap_tokens"] == taken["tokens"] > 0
        assert told["prompt_tokens"] == len(TOKENS) and told["hints"] and told["detail"] == {}
        await blue.post("/v1/hints", json=body)
        several = await blue.get("/v1/requests/explain", params={"request": "hint-"})
        assert several.status_code == 404 and "several requests start like that" in several.text
        other = await red.get("/v1/requests/explain", params=asked)
        assert other.status_code == 404 and "hinted" not in other.text
        assert (await blue.get("/v1/requests")).json() == {"requests": []}


async def test_a_prefetch_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone it is answered 429, so that the client comes again. With a hint that was taken it is not, since the client
    would give that hint twice."""
    prompt = Prompt(ATTENTION, "tokens", 64)
    async with (
        open_service(tmp_path, with_tokens=False) as made,
        made.client() as client,
        engine(made, instance(), prompt) as store,
    ):
        await tell(store, ended(prompt, "chatcmpl-1"))
        monkeypatch.setattr(Prefetcher, "request", lambda *_: False)
        alone = await client.post("/v1/prefetch", json={"request": "chatcmpl-1"})
        assert (alone.status_code, alone.headers["Retry-After"]) == (429, "1")
        assert "too many prefetches wait" in alone.text
        both = await client.post("/v1/hints", json={"request": "chatcmpl-1", "prefetch": True, "release": True})
        assert both.status_code == 202, both.text
        (taken,) = both.json()["prompts"]
        assert taken["hints"]["prefetch"].startswith("refused") and "eviction" in taken["hints"]
