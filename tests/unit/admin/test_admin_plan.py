"""`/v1/plan`: the order of documents that restores most of a prompt, exact about where documents and pages end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvstore.model.keys import PlainChain
from kvstore.service.admin.resources.lookup import read_slices
from kvstore.testing.keys import write_keys
from kvstore.testing.prompts import ATTENTION, HYBRID, WINDOWED, Prompt
from tests.unit.admin.service_harness import ServiceHarness, open_service

SYSTEM = list(range(10, 10 + 37))
FOLLOWING = list(range(5000, 5000 + 21))
LENGTHS = (150, 90, 201, 64, 77)


def document(number: int, num_tokens: int | None = None) -> list[int]:
    """Its tokens depend on its number alone."""
    length = LENGTHS[number % len(LENGTHS)] if num_tokens is None else num_tokens
    return [random.Random(number).randrange(10_000) * 10 + at % 10 for at in range(length)]


def joined(pieces: Sequence[Sequence[int]]) -> list[int]:
    return [*SYSTEM, *(token for one in pieces for token in one), *FOLLOWING]


def body_of(prompt: Prompt, pieces: Sequence[Sequence[int]], **more: object) -> dict[str, object]:
    return {
        "namespace": prompt.namespace.hex(),
        "token_ids": joined(pieces),
        "system_tokens": len(SYSTEM),
        "document_tokens": [len(one) for one in pieces],
        "within_ms": 1000,  # a busy machine cuts no search short
        **more,
    }


async def save(made: ServiceHarness, prompt: Prompt, pieces: Sequence[Sequence[int]]) -> None:
    """The pages of a prompt with these documents, as an engine saves them."""
    await made.save_pages(prompt, PlainChain().extend(joined(pieces)))


async def plan(client: httpx.AsyncClient, body: dict[str, object]) -> dict[str, Any]:
    answer = await client.post("/v1/plan", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("layout", [ATTENTION, WINDOWED, HYBRID], ids=["attention", "window", "hybrid"])
async def test_a_plan_continues_the_longest_stored_beginning(layout: Any, tmp_path: Path) -> None:
    """Two orders are stored. Of a prompt that could continue either, the plan continues the longer one. The hit is
    that of a lookup of the planned prompt: up to the last page that ends in the documents that both have.
    """
    prompt = Prompt(layout, "plan", 64, tenant="red")
    async with open_service(tmp_path) as made, made.client("red") as client:
        await save(made, prompt, [document(1), document(7)])
        await save(made, prompt, [document(2), document(4), document(3), document(8)])
        asked = [document(number) for number in (3, 9, 1, 4, 2)]
        found = await plan(client, body_of(prompt, asked, compare=True))
        assert found["order"][:3] == [4, 3, 0]  # documents 2, 4, 3
        shared = len(SYSTEM) + sum(len(document(number)) for number in (2, 4, 3))
        assert shared % 64  # the page that the fourth document begins in is not restored
        assert found["hit_tokens"] == shared // 64 * 64
        assert found["hit_by_tier"] == {"memory": found["hit_tokens"]}
        assert found["given_hit_tokens"] == 0 and found["left_out"] == [] and found["is_certain"]
        planned = joined([asked[index] for index in found["order"]])
        assert found["num_tokens"] == len(planned) == len(joined(asked))
        looked = await client.post("/v1/lookup", json={"namespace": prompt.namespace.hex(), "token_ids": planned})
        assert looked.json()["resume_tokens"] == found["hit_tokens"]
        fixed = await plan(client, body_of(prompt, asked, order="fixed"))
        assert (fixed["order"], fixed["hit_tokens"], fixed["given_hit_tokens"]) == ([0, 1, 2, 3, 4], 0, None)


async def test_documents_that_are_fixed_stay(tmp_path: Path) -> None:
    """One stays first, another last; between them the order is free. Equal documents are sent once, those that are
    fixed stay, and all of them are sent if the caller wants that.
    """
    prompt = Prompt(ATTENTION, "plan", 64, tenant="red")
    async with open_service(tmp_path) as made, made.client("red") as client:
        await save(made, prompt, [document(5), document(1), document(2)])
        asked = [document(number) for number in (5, 2, 6, 1, 2, 6)]
        found = await plan(client, body_of(prompt, asked, fixed_first=1, fixed_last=1))
        assert found["order"] == [0, 3, 1, 5]
        assert found["left_out"] == [2, 4]
        assert found["hit_tokens"] == (len(SYSTEM) + sum(len(document(number)) for number in (5, 1, 2))) // 64 * 64
        kept = await plan(client, body_of(prompt, asked, fixed_first=1, fixed_last=1, keep_duplicates=True))
        assert kept["order"][0] == 0 and kept["order"][-1] == 5 and sorted(kept["order"]) == list(range(6))
        assert kept["left_out"] == []
        assert kept["hit_tokens"] == found["hit_tokens"]


async def test_documents_shorter_than_a_page(tmp_path: Path) -> None:
    """Pages hold pieces of several documents: an order is found although no single document ends a page."""
    prompt = Prompt(ATTENTION, "plan", 64, tenant="red")
    async with open_service(tmp_path) as made, made.client("red") as client:
        stored = [document(number, 21) for number in (1, 2, 3, 4, 5, 6)]
        await save(made, prompt, stored)
        asked = [stored[index] for index in (2, 0, 4, 1, 3)]
        found = await plan(client, body_of(prompt, asked))
        assert [asked[index] for index in found["order"]] == stored[:5]
        assert found["hit_tokens"] == (len(SYSTEM) + 5 * 21) // 64 * 64 == 128


async def test_what_is_asked_for_often_comes_first(tmp_path: Path) -> None:
    """Where nothing is stored, documents stand in the order of how often they were asked for. Beginnings that many
    requests share are named, with the hash that `POST /v1/pins` takes; a salt has counts of its own.
    """
    prompt = Prompt(ATTENTION, "plan", 64, tenant="red")
    async with open_service(tmp_path) as made, made.client("red") as client:
        await save(made, prompt, [document(99)])
        for number in range(30):
            await plan(client, body_of(prompt, [document(100 + number), document(1), *([document(2)] * (number % 2))]))
        asked = [document(number) for number in (500, 2, 1)]
        found = await plan(client, body_of(prompt, asked))
        assert found["order"] == [2, 1, 0]
        counts = [(one["num_documents"], one["is_stored"]) for one in found["retain"]]
        assert counts == [(1, False), (2, False)]
        first, second = found["retain"]
        assert 900 < first["uses_per_1000"] < 1000 and 400 < second["uses_per_1000"] < 500
        planned = joined([asked[index] for index in found["order"]])
        at = {boundary.tokens: boundary.prefix.hex() for boundary in PlainChain().extend(planned)}
        assert first["tokens"] == (len(SYSTEM) + len(document(1))) // 64 * 64
        assert [one["prefix"] for one in found["retain"]] == [at[one["tokens"]] for one in found["retain"]]
        salted = await plan(client, body_of(prompt, asked, cache_salt="other"))
        assert salted["retain"] == []
        await save(made, prompt, [asked[index] for index in found["order"]])
        pin = {"namespace": prompt.namespace.hex(), "prefix": second["prefix"], "expires_in_s": 60}
        assert (await client.post("/v1/pins", json=pin)).status_code == 201


async def test_a_tenant_learns_nothing_of_another(tmp_path: Path) -> None:
    """With the same tokens, another tenant's namespace does not exist; in its own nothing is stored, and the order is
    not that of the other's requests.
    """
    red, blue = (Prompt(ATTENTION, "plan", 64, tenant=tenant) for tenant in ("red", "blue"))
    async with open_service(tmp_path) as made, made.client("red") as client, made.client("blue") as other:
        await save(made, red, [document(1), document(2)])
        await made.save_pages(blue, PlainChain().extend(list(range(64))))
        asked = [document(number) for number in (3, 2, 1)]
        answer = await other.post("/v1/plan", json=body_of(red, asked))
        unknown = await other.post("/v1/plan", json={**body_of(red, asked), "namespace": "ab" * 16})
        assert (answer.status_code, unknown.status_code) == (404, 404)
        before = await plan(other, body_of(blue, asked))
        for _ in range(3):
            await plan(client, body_of(red, asked[2:]))
            await plan(client, body_of(red, asked[1:2]))
        after = await plan(other, body_of(blue, asked))
        assert before["hit_tokens"] == after["hit_tokens"] == 0
        assert before["order"] == after["order"]


async def test_keyed_names_are_found(tmp_path: Path) -> None:
    """Records under a tenant's key are found by it, and a beginning's name is the one that is stored."""
    path = write_keys(tmp_path / "keys.toml", [("", 1, 1)])
    prompt = Prompt(ATTENTION, "plan", 64)
    async with open_service(tmp_path, with_tokens=False, encryption_keys=str(path)) as made, made.client() as client:
        await save(made, prompt, [document(1), document(2)])
        asked = [document(number) for number in (3, 2, 1)]
        found = await plan(client, body_of(prompt, asked))
        found = await plan(client, body_of(prompt, asked))
        assert found["order"] == [2, 1, 0]
        assert found["hit_tokens"] == (len(SYSTEM) + len(document(1)) + len(document(2))) // 64 * 64
        stored = [one["prefix"] for one in found["retain"] if one["is_stored"]]
        assert stored
        for prefix in stored:
            assert (await client.get(f"/v1/prefixes/{prompt.namespace.hex()}/{prefix}")).status_code == 200


@pytest.mark.parametrize("layout", [ATTENTION, WINDOWED, HYBRID], ids=["attention", "window", "hybrid"])
async def test_a_plan_is_the_same_in_small_pieces(layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many boundaries one question is about, order, hits and beginnings are the same."""
    prompt, numbers = Prompt(layout, "plan", 64, tenant="red"), random.Random(7)
    async with open_service(tmp_path) as made, made.client("red") as client:
        for _ in range(3):
            await save(made, prompt, [document(number) for number in numbers.sample(range(8), 5)])
        for _ in range(4):
            bodies = body_of(prompt, [document(number) for number in numbers.sample(range(8), 6)], compare=True)
            await plan(client, bodies)
            whole = await plan(client, bodies)
            with monkeypatch.context() as small:
                small.setattr("kvstore.service.admin.resources.plan.READ_AT_ONCE", 3)
                small.setattr("kvstore.service.admin.documents.ASKED_AT_ONCE", 2)
                pieces = await plan(client, bodies)
            for field in ("order", "hit_tokens", "hit_by_tier", "given_hit_tokens"):
                assert pieces[field] == whole[field]
            assert [one["prefix"] for one in pieces["retain"]] == [one["prefix"] for one in whole["retain"]]
            assert whole["total_ms"] >= whole["search_ms"]


async def test_what_is_not_stored_is_not_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of the largest prompt reads the first boundaries of the orders, not all 16,384 of each."""
    prompt = Prompt(ATTENTION, "plan", 64, tenant="red")
    asked: list[int] = []

    async def counted(context: Any, namespace: Any, boundaries: Sequence[Any], *more: Any) -> Any:
        asked.append(len(boundaries))
        return await read_slices(context, namespace, boundaries, *more)

    monkeypatch.setattr("kvstore.service.admin.resources.plan.read_slices", counted)
    async with open_service(tmp_path) as made, made.client("red") as client:
        await save(made, prompt, [document(99)])
        body = body_of(prompt, [document(100 + number, 4090) for number in range(64)], compare=True)
        for _ in range(2):  # the second time the documents are known
            asked.clear()
            found = await plan(client, body)
            assert (found["hit_tokens"], found["given_hit_tokens"]) == (0, 0)
            assert sum(asked) <= 4 * 1024
        planned = joined([document(100 + index, 4090) for index in found["order"]])
        last = found["retain"][-1]  # named although nothing was looked up there
        assert last["tokens"] > 1024 * 16
        assert PlainChain().extend(planned)[last["tokens"] // 16 - 1].prefix.hex() == last["prefix"]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"document_tokens": [10] * 65}, "body.document_tokens"),
        ({"document_tokens": [0]}, "body.document_tokens.0"),
        ({"document_tokens": [1_000_000]}, "body.document_tokens"),
        ({"document_tokens": [10, 10], "fixed_first": 3}, "body.fixed_first"),
        ({"document_tokens": [10, 10], "fixed_last": 3}, "body.fixed_last"),
        ({"document_tokens": [10, 10], "fixed_first": 1, "fixed_last": 2}, "body.fixed_last"),
        ({"system_tokens": 1_000_000}, "body.system_tokens"),
        ({"order": "best"}, "body.order"),
        ({"within_ms": 1001}, "body.within_ms"),
        ({"system_tokens": -1}, "body.system_tokens"),
        ({"documents": []}, "body.documents"),
    ],
)
async def test_wrong_plans_are_refused(wrong: dict[str, object], field: str, tmp_path: Path) -> None:
    """The answer names the field."""
    prompt = Prompt(ATTENTION, "plan", 64, tenant="red")
    async with open_service(tmp_path) as made, made.client("red") as client:
        answer = await client.post("/v1/plan", json={**body_of(prompt, [document(1)]), **wrong})
        assert (answer.status_code, answer.json()["field"]) == (422, field), answer.text
