"""`/v1/query_by_hash`: what `/v1/query` says of a prompt, by the hashes of its blocks in engines' cache events."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvstore.model.keys import Boundary
from kvstore.model.page_blocks import BlockGroup, PageBlocks
from kvstore.store.encryption.encrypted import EncryptedStore
from kvstore.testing.keys import write_keys
from kvstore.testing.prompts import ATTENTION, HYBRID, WINDOWED, Prompt
from tests.unit.admin.connected_engines import TOKENS, chain, engine, instance
from tests.unit.admin.service_harness import ServiceHarness, open_service
from tests.unit.admin.stored_prompts import stored_prompts

BLOCK = 16


def naming(folder: Path) -> dict[str, object]:
    """Settings of a service to which engines name their pages."""
    return {"events_endpoint": f"ipc://{folder}/events"}


def hashes_of(boundaries: Sequence[Boundary], width: int = 8) -> list[bytes]:
    """How the test's engines name the blocks of a prompt."""
    return [boundary.prefix[:width] for boundary in boundaries]


def name_pages(
    made: ServiceHarness, prompt: Prompt, boundaries: Sequence[Boundary], width: int = 8, *, skip: int = 0
) -> None:
    """Name the page, tail or state of each group that ends at each of a prompt's boundaries, but for the first few."""
    hashes = hashes_of(boundaries, width)
    for index, boundary in list(enumerate(boundaries))[skip:]:
        for group, layout in enumerate(prompt.layout.groups):
            _, span = layout.record_at(boundary.tokens, prompt.layout.page_tokens)
            first = index if layout.is_state else span.start // BLOCK
            blocks = PageBlocks(
                namespace=prompt.namespace,
                boundary=boundary,
                group=group,
                model="m",
                hash_bytes=width,
                hashes=b"".join(hashes[first : index + 1]),
                parent=hashes[first - 1] if first else b"",
                block_tokens=BLOCK,
                groups=(BlockGroup(group, "full_attention"),),
            )
            made.store.name_blocks(blocks)


async def ask(client: httpx.AsyncClient, hashes: Sequence[object], **fields: Any) -> Any:
    told = [int.from_bytes(one, "big") if isinstance(one, bytes) else one for one in hashes]
    answer = await client.post("/v1/query_by_hash", json={"model": "m", "block_hashes": told, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("layout", [ATTENTION, WINDOWED, HYBRID], ids=["attention", "windowed", "hybrid"])
async def test_hashes_get_the_answer_of_their_tokens(
    tmp_path: Path, layout: Any, request: pytest.FixtureRequest
) -> None:
    """Random prompts over records with holes in memory and the cold tier, for engines with small and large blocks: each
    answer is that of `/v1/query` for the prompt's whole blocks and one more token.
    """
    prompt, seen = Prompt(layout, "tokens", 64, model=request.node.name), set()
    async with (
        open_service(tmp_path, with_tokens=False, **naming(tmp_path)) as made,
        made.client() as client,
        engine(made, instance("small", names_blocks=True), prompt),
        engine(made, instance("large", step_tokens=64), prompt),
    ):
        stored = await stored_prompts(made, prompt, seed=len(layout.groups))
        for salt, tokens in stored.sequences:
            name_pages(made, prompt, chain(tokens, salt).boundaries)
        for tokens, salt in stored.questions(100):
            boundaries = chain(tokens, salt).boundaries
            body = {"model": "m", "token_ids": [*tokens[: len(boundaries) * BLOCK], 1], "cache_salt": salt}
            expected = (await client.post("/v1/query", json=body)).json()
            assert await ask(client, hashes_of(boundaries)) == expected
            for match in expected["default"].values():
                seen.add((match["CPU"] > 0, match["CPU"] < match["longest_matched"]))
    assert seen == {(False, False), (False, True), (True, False), (True, True)}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


WAYS: dict[str, tuple[int, Callable[[bytes], object]]] = {
    "numbers": (8, lambda data: int.from_bytes(data, "big")),
    "signed numbers": (8, lambda data: int.from_bytes(data, "big", signed=True)),
    "numbers as hex": (8, bytes.hex),
    "hex": (32, bytes.hex),
    "large hex": (32, lambda data: data.hex().upper()),
    "base64": (32, _base64),
    "base64 without padding": (32, lambda data: _base64(data).rstrip("=")),
    "base64 for addresses": (32, lambda data: base64.urlsafe_b64encode(data).decode()),
}


@pytest.mark.parametrize("width", [8, 32])
async def test_hashes_can_be_written_in_many_ways(tmp_path: Path, width: int) -> None:
    """Numbers, signed ones too, and bytes as hex or base64, in short and in long bodies, and in lists of prompts."""
    prompt, boundaries = Prompt(ATTENTION, "tokens", 64), chain(TOKENS).boundaries
    async with open_service(tmp_path, with_tokens=False, **naming(tmp_path)) as made, made.client() as client:
        await made.save_pages(prompt, boundaries)
        name_pages(made, prompt, boundaries, width)
        async with engine(made, instance(names_blocks=True), prompt):
            for name, (_, write) in ((name, way) for name, way in WAYS.items() if way[0] == width):
                hashes = [write(one) for one in hashes_of(boundaries, width)]
                for extra in ([], [write(bytes(width))] * 5000):
                    bodies = [
                        {"block_hashes": hashes + extra, "model": "m", "lora_name": "any"},
                        {"model": "m", "block_hashes": hashes[:9], "block_size": 128},
                        {"model": "none", "block_hashes": []},
                    ]
                    answers = (await client.post("/v1/query_by_hash", json=bodies)).json()
                    found = [one.get("default", {}).get("e", {}).get("longest_matched") for one in answers]
                    assert found == [320, 128, None], name
                    assert (await client.post("/v1/query_by_hash", json=bodies[0])).json() == answers[0]


LONG = list(range(1, 10_000))
WRONG: list[tuple[object, str]] = [
    ({"block_hashes": [1]}, "body.model"),
    ({"model": "m"}, "body.block_hashes"),
    ({"model": "m", "block_hashes": 5}, "body.block_hashes"),
    ({"model": "m", "block_hashes": [1, 1.5]}, "list of hashes"),
    ({"model": "m", "block_hashes": [1, "hash!"]}, "list of hashes"),
    ({"model": "m", "block_hashes": [1, 1 << 64]}, "body.block_hashes.1"),
    ({"model": "m", "block_hashes": ["ab", ""]}, "body.block_hashes.1"),
    ({"model": "m", "block_hashes": ["a"]}, "body.block_hashes.0"),
    ({"model": "m", "block_hashes": ["ab" * 65]}, "body.block_hashes.0"),
    ({"model": "m", "block_hashes": [True]}, "body.block_hashes.0"),
    ({"model": "m", "block_hashes": [[1]]}, "not JSON"),
    ({"model": "m", "block_hashes": [1], "token_ids": [1]}, "body.token_ids"),
    ({"model": "m", "block_hashes": [*LONG, None]}, "body.block_hashes.9999"),
    ({"model": "m", "block_hashes": LONG * 2}, "at most 16384 hashes of blocks"),
    ([{"model": "m", "block_hashes": LONG}] * 2, "at most 16384 hashes of blocks"),
    ([{"model": "m", "block_hashes": [1]}] * 65, "at most 64 prompts"),
    ('{"model": "m", "block_hashes": [1,]}', "list of hashes"),
    ('{"model": "m", "block_hashes": [1], "block_hashes": [2]}', "given once"),
    ('[{"model":"m","block_hashes":[1],"block\\u005fhashes":[1]},{"model":"m"}]', "given once"),
    ('{"model": "m", "block\\u005fhashes": [1.5]}', "body.block_hashes.0"),
    ('{"model": "m", "block_hashes": [1', "not JSON"),
]


async def test_wrong_bodies(tmp_path: Path) -> None:
    """Each is refused with what is wrong."""
    async with open_service(tmp_path, with_tokens=False, **naming(tmp_path)) as made, made.client() as client:
        for body, why in WRONG:
            text = body if isinstance(body, str) else json.dumps(body)
            answer = await client.post("/v1/query_by_hash", content=text, headers={"content-type": "application/json"})
            assert (answer.status_code, why in answer.text) == (422, True), (answer.text, why)


async def test_services_and_engines_that_do_not_know_blocks(tmp_path: Path) -> None:
    """The answer names the setting. An engine that names nothing is answered once another one has named a page."""
    prompt, boundaries = Prompt(ATTENTION, "tokens", 64), chain(TOKENS).boundaries
    body = {"model": "m", "block_hashes": [1]}
    async with open_service(tmp_path, with_tokens=False) as made, made.client() as client:
        answer = await client.post("/v1/query_by_hash", json=body)
        assert (answer.status_code, answer.json()["field"]) == (409, "events_endpoint")
    async with open_service(tmp_path, with_tokens=False, **naming(tmp_path)) as made, made.client() as client:
        assert await ask(client, [1]) == {}  # no engine serves the model
        async with engine(made, instance("silent"), prompt):
            answer = await client.post("/v1/query_by_hash", json=body)
            assert (answer.status_code, answer.json()["field"]) == (409, "name_blocks")
            async with engine(made, instance("naming", names_blocks=True), prompt):
                found = (await ask(client, [1]))["default"]
                assert {name: match["longest_matched"] for name, match in found.items()} == {"naming": 0, "silent": 0}
            await made.save_pages(prompt, boundaries)
            name_pages(made, prompt, boundaries)
            found = (await ask(client, hashes_of(boundaries)))["default"]
            assert {name: match["longest_matched"] for name, match in found.items()} == {"silent": 320}


async def test_keyed_names(tmp_path: Path) -> None:
    """With encryption the pages are found under the names that they had when they were saved."""
    path = write_keys(tmp_path / "keys.toml", [("", 1, 1)])
    prompt, boundaries = Prompt(ATTENTION, "tokens", 64), chain(TOKENS).boundaries
    settings = naming(tmp_path) | {"encryption_keys": str(path)}
    async with open_service(tmp_path, with_tokens=False, **settings) as made, made.client() as client:
        assert isinstance(made.store, EncryptedStore)
        await made.save_pages(prompt, boundaries[:8])
        name_pages(made, prompt, boundaries[:8])
        write_keys(path, [("", 2, 2), ("", 1, 1)])
        assert not made.store.keys.poll() and made.store.keys.poll()
        await made.save_pages(prompt, boundaries[:12], skip=2)
        name_pages(made, prompt, boundaries[:12], skip=8)
        async with engine(made, instance(names_blocks=True), prompt):
            found = await ask(client, hashes_of(boundaries))
            assert found["default"]["e"]["longest_matched"] == 192


async def test_a_tenant_learns_nothing_of_another(tmp_path: Path) -> None:
    """Red's engine has saved and named a prompt. Blue asks for its hashes, with engines that describe themselves as
    red's: each answer is the one that blue got before red had anything.
    """
    red, blue = Prompt(ATTENTION, "tokens", 64, tenant="red"), Prompt(ATTENTION, "tokens", 64, tenant="blue")
    boundaries = chain(TOKENS).boundaries
    names = ("red", "default", "", "blue", "*", "nobody")
    attempts: list[dict[str, Any]] = [
        {},
        *({"tenant_id": name} for name in names),
        *({"instance_id": name} for name in ("red engine", "blue engine", "")),
        *({"tenant_id": name, "instance_id": "red engine"} for name in names),
    ]
    told = [int.from_bytes(one, "big") for one in hashes_of(boundaries)]

    async def answers(client: httpx.AsyncClient) -> list[tuple[int, str]]:
        bodies = [{"model": "m", "block_hashes": told, **one} for one in attempts]
        got = [await client.post("/v1/query_by_hash", json=body) for body in (*bodies, bodies[:1] * 2)]
        return [(one.status_code, one.text) for one in got]

    async with open_service(tmp_path, **naming(tmp_path)) as made, AsyncExitStack() as stack:
        client, operator = [await stack.enter_async_context(made.client(name)) for name in ("blue", "watcher")]
        for name in ("blue engine", "red engine"):
            one = instance(name, names_blocks=True)
            await stack.enter_async_context(engine(made, one, blue, "blue engine"))
        before = await answers(client)
        await made.save_pages(red, boundaries)
        await stack.enter_async_context(engine(made, instance("red engine", names_blocks=True), red, "red"))
        name_pages(made, red, boundaries)
        assert await answers(client) == before
        seen = await ask(operator, told)
        found = {
            (tenant, name): match["longest_matched"] for tenant, some in seen.items() for name, match in some.items()
        }
        assert found == {("red", "red engine"): 320, ("blue", "red engine"): 0, ("blue", "blue engine"): 0}
